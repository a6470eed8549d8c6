"""Benchmarks. ``pytest --benchmark-only`` runs them, ``python -m benchmarks.table`` makes their
tables."""

import sys
from pathlib import Path

# `python -m` puts the checkout first, whose hstree has no compiled modules unless it is installed
# in place.
_checkout = Path(__file__).resolve().parents[1]
if Path(sys.path[0] or ".").resolve() == _checkout:
    sys.path.append(sys.path.pop(0) or str(_checkout))
