"""Experiments of the literature: what trains or computes something of its own to measure it."""

from .jacobian import (
    JacobianExperiment,
    LayerSpectrum,
    Spectrum,
    jacobian_experiment,
    jacobian_notes,
    jacobian_rows,
    jacobian_singular_values,
    jacobian_table,
    summarize_singular_values,
)
from .jacobian_plot import jacobian_picture
from .study import Ranks, StudyInterrupted, StudyRun, run_study, seconds_left, study_runs
from .study_file import RankSettings, Study, StudyError, StudyModel, parse_study, read_study
from .study_table import study_notes, study_rows, study_table
from .synthetic import (
    HeadChoice,
    SyntheticBaseline,
    SyntheticCell,
    SyntheticFit,
    SyntheticResult,
    SyntheticSetting,
    choose_head,
    choose_heads,
    known_heads,
    synthetic_bottleneck,
)
from .synthetic_report import synthetic_data, synthetic_notes, synthetic_picture, synthetic_tables

__all__ = [
    "HeadChoice",
    "JacobianExperiment",
    "LayerSpectrum",
    "RankSettings",
    "Ranks",
    "Spectrum",
    "Study",
    "StudyError",
    "StudyInterrupted",
    "StudyModel",
    "StudyRun",
    "SyntheticBaseline",
    "SyntheticCell",
    "SyntheticFit",
    "SyntheticResult",
    "SyntheticSetting",
    "choose_head",
    "choose_heads",
    "jacobian_experiment",
    "jacobian_notes",
    "jacobian_picture",
    "jacobian_rows",
    "jacobian_singular_values",
    "jacobian_table",
    "known_heads",
    "parse_study",
    "read_study",
    "run_study",
    "seconds_left",
    "study_notes",
    "study_rows",
    "study_runs",
    "study_table",
    "summarize_singular_values",
    "synthetic_bottleneck",
    "synthetic_data",
    "synthetic_notes",
    "synthetic_picture",
    "synthetic_tables",
]
