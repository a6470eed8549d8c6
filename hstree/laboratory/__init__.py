"""The measurements of the softmax-bottleneck literature; a folder for each."""

from .comparison.compute import Comparison, RunGroup, compare, mean_and_deviation
from .comparison.picture import validation_curves
from .comparison.report import to_csv, to_markdown
from .correlation.compute import Correlation, correlate
from .jacobian.compute import (
    jacobian_experiment,
    jacobian_singular_values,
    summarize_singular_values,
)
from .significance.compute import Significance, holm, model_perplexities, significance_tests, t_test
from .study.file import read_study
from .study.runs import run_study, study_runs
from .synthetic.compute import SyntheticResult, SyntheticSetting, synthetic_bottleneck
from .synthetic.heads import choose_head, known_heads

__all__ = [
    "Comparison",
    "Correlation",
    "RunGroup",
    "Significance",
    "SyntheticResult",
    "SyntheticSetting",
    "choose_head",
    "compare",
    "correlate",
    "holm",
    "jacobian_experiment",
    "jacobian_singular_values",
    "known_heads",
    "mean_and_deviation",
    "model_perplexities",
    "read_study",
    "run_study",
    "significance_tests",
    "study_runs",
    "summarize_singular_values",
    "synthetic_bottleneck",
    "t_test",
    "to_csv",
    "to_markdown",
    "validation_curves",
]
