"""The measurements of the softmax-bottleneck literature, one file each."""

from .comparison import compare
from .correlation import correlate
from .ensemble import tree_loss
from .function import view_function
from .jacobian import jacobian_experiment, jacobian_singular_values
from .predictions import prediction
from .rank import log_prob_rank, matrix_rank
from .robustness import noise_ranks, reconstructions
from .significance import holm, significance_tests, t_test
from .study import read_study, run_study
from .synthetic import synthetic_bottleneck
from .words import model_embeddings, read_similarity_sets, word_similarity

__all__ = [
    "compare",
    "correlate",
    "holm",
    "jacobian_experiment",
    "jacobian_singular_values",
    "log_prob_rank",
    "matrix_rank",
    "model_embeddings",
    "noise_ranks",
    "prediction",
    "read_similarity_sets",
    "read_study",
    "reconstructions",
    "run_study",
    "significance_tests",
    "synthetic_bottleneck",
    "t_test",
    "tree_loss",
    "view_function",
    "word_similarity",
]
