"""The measurements of the softmax-bottleneck literature; a folder for each."""

from .comparison.compute import Comparison, RunGroup, compare, mean_and_deviation
from .comparison.picture import validation_curves
from .comparison.report import to_csv, to_markdown
from .correlation.compute import Correlation, correlate
from .significance.compute import Significance, holm, model_perplexities, significance_tests, t_test

__all__ = [
    "Comparison",
    "Correlation",
    "RunGroup",
    "Significance",
    "compare",
    "correlate",
    "holm",
    "mean_and_deviation",
    "model_perplexities",
    "significance_tests",
    "t_test",
    "to_csv",
    "to_markdown",
    "validation_curves",
]
