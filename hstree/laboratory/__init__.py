"""The measurements of the softmax-bottleneck literature; a folder for each."""

from .correlation.compute import correlate

__all__ = ["correlate"]
