"""Layers that are not output layers: mixtures of experts and the non-local block."""

from .mixture_of_experts import (
    ACTIVATIONS,
    GATES,
    MoEConv1d,
    MoEConv2d,
    MoEConv3d,
    MoEDense,
    mixture,
)
from .non_local import NonLocalBlock

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "MoEConv1d",
    "MoEConv2d",
    "MoEConv3d",
    "MoEDense",
    "NonLocalBlock",
    "mixture",
]
