"""Decoding with two heads: speculative decoding."""

from .speculative import SpeculativeOutput, speculative

__all__ = ["SpeculativeOutput", "speculative"]
