"""Speculative decoding: which words of a draft are accepted, and how often."""

from hstree.decoding.acceptance import Agreement, agreement, expected_acceptance
from hstree.decoding.verification import verify

__all__ = ["Agreement", "agreement", "expected_acceptance", "verify"]
