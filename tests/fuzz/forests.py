"""Random trees as nested tuples: with groups below a wide root, or with binary nodes below a wide
root or a binary one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np

PATHS = ("balanced", "random", "chain")
DEEPEST = 60
SIZES = st.one_of(st.integers(1, 12), st.integers(13, 80), st.integers(81, 400))


def nested_tree(shape: str, n_classes: int, root: int, random: np.random.Generator) -> Any:
    """Nested tuples over the classes 0 .. V - 1 in random order; 0 for V = 1. The root has ``root``
    children, or for 0 as many as other nodes of the shape, one of PATHS or "groups"."""

    def cuts(n: int, depth: int) -> list[int]:
        if depth == 0 and root:
            inner = 1 + random.choice(n - 1, min(root, n) - 1, replace=False)
            return [0, *sorted(inner.tolist()), n]
        if shape == "groups" or depth >= DEEPEST:
            return list(range(n + 1))
        if shape == "balanced" or depth > DEEPEST - 20:
            return [0, n // 2, n]
        return [0, int(random.choice([1, n - 1]) if shape == "chain" else random.integers(1, n)), n]

    def build(classes: list[int], depth: int) -> Any:
        if len(classes) == 1:
            return classes[0]
        places = cuts(len(classes), depth)
        return tuple(build(classes[begin:end], depth + 1) for begin, end in pairwise(places))

    return build(random.permutation(n_classes).tolist(), 0)
