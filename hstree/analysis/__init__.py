"""Looking at results: runs side by side."""

from .compare import (
    Comparison,
    GroupTest,
    RunGroup,
    Statistic,
    Table,
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
    "differing_settings",
    "group_runs",
    "mean_and_deviation",
    "read_run",
    "student_t_test",
    "tables",
    "to_csv",
    "to_markdown",
    "validation_curves",
    "welch_t_test",
]
