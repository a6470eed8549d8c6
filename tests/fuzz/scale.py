"""How many cases each test runs."""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("HSTREE_FUZZ", "0.5"))


def cases(n: int) -> int:
    """n times the environment variable HSTREE_FUZZ, by default half of n."""
    return max(1, round(n * FACTOR))
