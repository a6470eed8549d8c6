"""Looking at results: runs side by side, and the measurements of the literature on models."""

from .compare import (
    Comparison,
    GroupTest,
    RunGroup,
    Statistic,
    TResult,
    compare,
    differing_settings,
    group_runs,
    mean_and_deviation,
    student_t_test,
    tables,
    to_csv,
    to_markdown,
    welch_t_test,
)
from .curves import validation_curves
from .runs import EpochFigures, FinalFigures, RunError, RunFigures, read_run
from .table import Table, csv_text, latex, markdown, table

__all__ = [
    "Comparison",
    "EpochFigures",
    "FinalFigures",
    "GroupTest",
    "RunError",
    "RunFigures",
    "RunGroup",
    "Statistic",
    "TResult",
    "Table",
    "compare",
    "csv_text",
    "differing_settings",
    "group_runs",
    "latex",
    "markdown",
    "mean_and_deviation",
    "read_run",
    "student_t_test",
    "table",
    "tables",
    "to_csv",
    "to_markdown",
    "validation_curves",
    "welch_t_test",
]
