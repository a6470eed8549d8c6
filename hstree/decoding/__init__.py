"""Drafts for speculative decoding."""

from hstree.decoding.acceptance import Agreement, agreement, expected_acceptance

__all__ = ["Agreement", "agreement", "expected_acceptance"]
