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

__all__ = [
    "NoisePoint",
    "Reconstruction",
    "expected_press_rank",
    "noise_picture",
    "noise_ranks",
    "noise_rows",
    "noise_table",
    "reconstruction_table",
    "reconstructions",
]
