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
    "NoisePoint",
    "Reconstruction",
    "SyntheticBaseline",
    "SyntheticCell",
    "SyntheticFit",
    "SyntheticResult",
    "SyntheticSetting",
    "choose_head",
    "choose_heads",
    "expected_press_rank",
    "known_heads",
    "noise_picture",
    "noise_ranks",
    "noise_rows",
    "noise_table",
    "reconstruction_table",
    "reconstructions",
    "synthetic_bottleneck",
    "synthetic_data",
    "synthetic_notes",
    "synthetic_picture",
    "synthetic_tables",
]
