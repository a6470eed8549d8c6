"""Looking at results: runs side by side, and the measurements of the literature on models."""

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
from .runs import EpochFigures, FinalFigures, RunError, RunFigures, read_run
from .table import Table, csv_text, latex, markdown, table

__all__ = [
    "BlockMatrix",
    "EpochFigures",
    "FinalFigures",
    "FunctionView",
    "Histogram",
    "RankPlan",
    "RankResult",
    "RunError",
    "RunFigures",
    "Table",
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
]
