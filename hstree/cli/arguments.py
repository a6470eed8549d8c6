"""Arguments that several commands share."""

from __future__ import annotations

import argparse

from hstree.runs.flags import add_config_arguments, add_run_argument, config_values

__all__ = ["add_config_arguments", "add_run_argument", "config_values", "count"]


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
