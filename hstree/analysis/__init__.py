"""Looking at results: runs side by side, and the measurements of the literature on models."""

<<<<<<< HEAD
from .frequency_loss import ClassLoss, FrequencyBin, class_losses, frequency_bins
from .predictions import (
    ContextPredictions,
    Prediction,
    log_prob_at,
    prediction,
    prediction_rows,
    prediction_tables,
    random_positions,
)
=======
from .function import FunctionView, Histogram, check_function_head, view_function
from .function_plot import function_data, function_notes, function_picture, function_tables
from .log_prob import BlockMatrix, model_log_prob, stored_matrix
from .rank import (
    RankPlan,
    RankResult,
    effective_rank,
    log_prob_rank,
    matrix_rank,
    plan_rank,
    press_threshold,
    softmax_rank_bound,
)
from .rank_plot import energy_picture, rank_rows, rank_table, spectrum_picture
>>>>>>> lab2
from .runs import EpochFigures, FinalFigures, RunError, RunFigures, read_run
from .table import Table, csv_text, latex, markdown, table

__all__ = [
<<<<<<< HEAD
    "Agreement",
    "ClassLoss",
    "Cluster",
    "ContextPredictions",
    "Embeddings",
    "EpochFigures",
    "FinalFigures",
    "FrequencyBin",
    "Prediction",
    "RankCorrelation",
=======
    "BlockMatrix",
    "EpochFigures",
    "FinalFigures",
    "FunctionView",
    "Histogram",
    "RankPlan",
    "RankResult",
>>>>>>> lab2
    "RunError",
    "RunFigures",
    "Table",
<<<<<<< HEAD
    "TreeLoss",
    "WordSimilarity",
    "adjusted_rand_index",
    "agreement_picture",
    "agreement_table",
    "check_tree_head",
    "class_losses",
    "cluster_table",
    "confidence_interval",
    "csv_text",
    "frequency_bins",
    "frequency_picture",
    "frequency_table",
    "heaviest_clusters",
    "latex",
    "level_names",
    "level_picture",
    "level_table",
    "log_prob_at",
    "markdown",
    "mixture_table",
    "model_embeddings",
    "nearest_classes",
    "prediction",
    "prediction_rows",
    "prediction_tables",
    "random_positions",
    "read_embeddings",
    "read_run",
    "read_similarity_set",
    "read_similarity_sets",
    "root_partition",
    "sibling_table",
    "spearman",
    "table",
    "tree_agreement",
    "tree_loss",
    "tree_table",
    "word_similarity",
    "word_similarity_plot",
    "word_similarity_rows",
    "word_similarity_table",
=======
    "check_function_head",
    "csv_text",
    "effective_rank",
    "energy_picture",
    "function_data",
    "function_notes",
    "function_picture",
    "function_tables",
    "latex",
    "log_prob_rank",
    "markdown",
    "matrix_rank",
    "model_log_prob",
    "plan_rank",
    "press_threshold",
    "rank_rows",
    "rank_table",
    "read_run",
    "softmax_rank_bound",
    "spectrum_picture",
    "stored_matrix",
    "table",
    "view_function",
>>>>>>> lab2
]
