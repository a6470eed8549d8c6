"""Trees as nested tuples: what hstree.trees must agree with, in plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from fuzz.forests import classes_of

SMALLEST_SHARE = Fraction(1, 2**32)


def inner(item: Any) -> list[Any]:
    """The inner nodes in preorder."""
    if not isinstance(item, tuple):
        return []
    return [item] + [node for child in item for node in inner(child)]


def depths(item: Any, depth: int = 0) -> dict[int, int]:
    """Number of inner nodes above each class."""
    if not isinstance(item, tuple):
        return {item: depth}
    return {c: d for child in item for c, d in depths(child, depth + 1).items()}


def mass(item: Any, frequencies: Sequence[float] | None) -> Fraction:
    classes = classes_of(item)
    if frequencies is None:
        return Fraction(len(classes))
    return sum((Fraction(frequencies[c]) for c in classes), Fraction(0))


def check_tree(item: Any, n_classes: int) -> None:
    """Each class once, and at least two children of every node."""
    assert sorted(classes_of(item)) == list(range(n_classes))
    assert all(len(node) >= 2 for node in inner(item))


def check_collapsed(
    before: Any, after: Any, clusters: int, binary: bool, frequencies: Sequence[float] | None
) -> None:
    """What the docstring of Tree.collapse promises."""
    n_classes = len(classes_of(before))
    assert classes_of(after) == classes_of(before)
    check_tree(after, n_classes)
    if n_classes == 1:
        return
    clusters = min(clusters, n_classes)
    bound = n_classes
    if not binary:
        bound = next(b for b in range(9 * n_classes) if b * b >= 16 * n_classes <= 4 * b * clusters)
        assert all(len(classes_of(child)) <= bound for child in after)
        assert max(depths(after).values()) <= 2

    def parts(item: Any) -> int:
        return -(-len(classes_of(item)) // bound)

    assert len(after) <= max(clusters, sum(map(parts, before)))
    # Every cluster is a node or class of the tree before, and no inner node that could be
    # replaced by its children is heavier than one that was.
    spans = {tuple(classes_of(node)): node for node in inner(before)}
    whole = undivided([tuple(classes_of(child)) for child in after], list(spans), bound)
    assert all(len(c) == 1 or c in spans for c in whole)
    if binary:
        assert all(child == spans[tuple(classes_of(child))] for child in after if inner(child))
    opened = [span for span in spans if not any(set(span) <= set(c) for c in whole)]
    room = clusters - len(after)
    wide = [spans[c] for c in whole if len(c) > 1]
    assert all(sum(map(parts, node)) - parts(node) > max(room, 0) for node in wide)
    only_binary = all(len(node) == 2 for node in inner(before))
    if frequencies is None and only_binary and len(opened) > 1 and max(map(parts, before)) == 1:
        lightest = min(len(span) for span in opened)
        assert all(len(classes_of(node)) <= lightest for node in wide)


def undivided(
    clusters: list[tuple[int, ...]], spans: list[tuple[int, ...]], bound: int
) -> list[tuple[int, ...]]:
    """Clusters, where the equal parts of a node above the bound are one again."""
    found: list[tuple[int, ...]] = []
    while clusters:
        taken = 1
        for span in spans:
            n = -(-len(span) // bound)
            ends = [len(span) * i // n for i in range(n + 1)]
            equal = [span[a:b] for a, b in pairwise(ends)]
            whole = all(len(part) == 1 or part in spans for part in equal)
            if n > 1 and not whole and clusters[:n] == equal:
                taken = n
        found.append(tuple(c for part in clusters[:taken] for c in part))
        clusters = clusters[taken:]
    return found


def huffman_cost(frequencies: Sequence[float]) -> Fraction:
    """The smallest sum of f times depth of a binary tree, where a frequency counts as at least
    2^-32 of the sum, and all zero as all equal."""
    total = sum(map(Fraction, frequencies))
    masses = [max(Fraction(f), total * SMALLEST_SHARE) for f in frequencies]
    masses = masses if total else [Fraction(1)] * len(masses)
    cost, heap = Fraction(0), list(masses)
    heapq.heapify(heap)
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        cost += both
        heapq.heappush(heap, both)
    return cost


def weighted_depth(item: Any, frequencies: Sequence[float]) -> Fraction:
    """Sum of f times depth, with the masses of :func:`huffman_cost`."""
    total = sum(map(Fraction, frequencies))
    masses = [max(Fraction(f), total * SMALLEST_SHARE) if total else 1 for f in frequencies]
    return sum((Fraction(masses[c]) * d for c, d in depths(item).items()), Fraction(0))
