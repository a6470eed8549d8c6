"""Speculative decoding: drafts of a head, and how often its model accepts them."""

from hstree.decoding.acceptance import Agreement, agreement, expected_acceptance
from hstree.decoding.speculative import SpeculativeOutput, speculative

__all__ = ["Agreement", "SpeculativeOutput", "agreement", "expected_acceptance", "speculative"]
