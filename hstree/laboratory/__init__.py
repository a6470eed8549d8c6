"""The measurements of the softmax-bottleneck literature; a folder for each."""

from .correlation.compute import correlate
from .jacobian.compute import (
    jacobian_experiment,
    jacobian_singular_values,
    summarize_singular_values,
)

__all__ = [
    "correlate",
    "jacobian_experiment",
    "jacobian_singular_values",
    "summarize_singular_values",
]
