"""How many cases each test runs."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("HSTREE_FUZZ", "1"))


def cases(n: int) -> int:
    """n times the environment variable HSTREE_FUZZ."""
    return n * FACTOR
