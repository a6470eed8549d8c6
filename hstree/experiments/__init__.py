"""Experiments of the literature: what trains or computes something of its own to measure it."""

from .robustness import (
    NoisePoint,
    Reconstruction,
    expected_press_rank,
    noise_picture,
    noise_ranks,
    noise_rows,
    noise_table,
    reconstruction_table,
    reconstructions,
)
from .study import Ranks, StudyInterrupted, StudyRun, run_study, seconds_left, study_runs
from .study_file import RankSettings, Study, StudyError, StudyModel, parse_study, read_study
from .study_table import study_notes, study_rows, study_table

__all__ = [
    "NoisePoint",
    "RankSettings",
    "Ranks",
    "Reconstruction",
    "Study",
    "StudyError",
    "StudyInterrupted",
    "StudyModel",
    "StudyRun",
    "expected_press_rank",
    "noise_picture",
    "noise_ranks",
    "noise_rows",
    "noise_table",
    "parse_study",
    "read_study",
    "reconstruction_table",
    "reconstructions",
    "run_study",
    "seconds_left",
    "study_notes",
    "study_rows",
    "study_runs",
    "study_table",
]
