"""The measurements of the softmax-bottleneck literature, one file each."""

from .comparison import Comparison, compare
from .correlation import Correlation, correlate
from .ensemble import TreeLoss, tree_loss
from .function import FunctionView, Histogram, view_function
from .jacobian import (
    jacobian_experiment,
    jacobian_singular_values,
    summarize_singular_values,
)
from .predictions import Prediction, log_prob_at, prediction, random_positions
from .rank import (
    RankResult,
    effective_rank,
    log_prob_blocks,
    log_prob_rank,
    matrix_rank,
    press_threshold,
    softmax_rank_bound,
)
from .robustness import noise_ranks, reconstructions
from .significance import Significance, holm, model_perplexities, significance_tests, t_test
from .study import read_study, run_study, study_runs
from .synthetic import (
    SyntheticResult,
    SyntheticSetting,
    choose_head,
    known_heads,
    synthetic_bottleneck,
)
from .words import (
    WordSimilarity,
    model_embeddings,
    read_similarity_sets,
    word_similarity,
)

__all__ = [
    "Comparison",
    "Correlation",
    "FunctionView",
    "Histogram",
    "Prediction",
    "RankResult",
    "Significance",
    "SyntheticResult",
    "SyntheticSetting",
    "TreeLoss",
    "WordSimilarity",
    "choose_head",
    "compare",
    "correlate",
    "effective_rank",
    "holm",
    "jacobian_experiment",
    "jacobian_singular_values",
    "known_heads",
    "log_prob_at",
    "log_prob_blocks",
    "log_prob_rank",
    "matrix_rank",
    "model_embeddings",
    "model_perplexities",
    "noise_ranks",
    "prediction",
    "press_threshold",
    "random_positions",
    "read_similarity_sets",
    "read_study",
    "reconstructions",
    "run_study",
    "significance_tests",
    "softmax_rank_bound",
    "study_runs",
    "summarize_singular_values",
    "synthetic_bottleneck",
    "t_test",
    "tree_loss",
    "view_function",
    "word_similarity",
]
