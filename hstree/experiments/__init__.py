"""Experiments of the literature: what trains or computes something of its own to measure it."""

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
from .synthetic_report import (
    synthetic_data,
    synthetic_notes,
    synthetic_picture,
    synthetic_tables,
)

__all__ = [
    "HeadChoice",
    "SyntheticBaseline",
    "SyntheticCell",
    "SyntheticFit",
    "SyntheticResult",
    "SyntheticSetting",
    "choose_head",
    "choose_heads",
    "known_heads",
    "synthetic_bottleneck",
    "synthetic_data",
    "synthetic_notes",
    "synthetic_picture",
    "synthetic_tables",
]
