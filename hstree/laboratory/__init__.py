"""The measurements of the softmax-bottleneck literature; a folder for each."""

from .comparison.compute import Comparison, RunGroup, compare, mean_and_deviation
from .comparison.picture import validation_curves
from .comparison.report import to_csv, to_markdown
from .correlation.compute import Correlation, correlate
from .predictions.compute import Prediction, log_prob_at, prediction, random_positions
from .significance.compute import Significance, holm, model_perplexities, significance_tests, t_test
from .trees.clusters import Agreement, tree_agreement
from .trees.losses import FrequencyBin, TreeLoss, frequency_loss, tree_loss
from .words.compute import WordSimilarity, model_embeddings, word_similarity
from .words.files import read_embeddings, read_similarity_sets

__all__ = [
    "Agreement",
    "Comparison",
    "Correlation",
    "FrequencyBin",
    "Prediction",
    "RunGroup",
    "Significance",
    "TreeLoss",
    "WordSimilarity",
    "compare",
    "correlate",
    "frequency_loss",
    "holm",
    "log_prob_at",
    "mean_and_deviation",
    "model_embeddings",
    "model_perplexities",
    "prediction",
    "random_positions",
    "read_embeddings",
    "read_similarity_sets",
    "significance_tests",
    "t_test",
    "to_csv",
    "to_markdown",
    "tree_agreement",
    "tree_loss",
    "validation_curves",
    "word_similarity",
]
