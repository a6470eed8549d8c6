"""Paths of many classes, and depths at which they part, against walks over nested tuples."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given

from hstree.trees import Tree
from hstree.trees.paths import common_depth, edge_paths

from .support import leaves, nested_trees, paths


@given(nested_trees())
def test_paths_and_common_depths(nested):
    tree, wanted = Tree.from_nested(nested), paths(nested)
    classes = sorted(leaves(nested), reverse=True)
    found = edge_paths(tree, classes)
    assert found.shape == (len(classes), tree.height)
    for row, c in zip(found.tolist(), classes, strict=True):
        edges = [int(tree.node_offset[node]) - node + child for node, child in wanted[c]]
        assert row == edges + [-1] * (tree.height - len(edges))
    pairs = list(itertools.product(classes, repeat=2))
    first, second = zip(*pairs, strict=True)
    expected = [
        sum(1 for _ in itertools.takewhile(lambda e: e[0] == e[1], zip(wanted[a], wanted[b])))  # noqa: B905
        for a, b in pairs
    ]
    np.testing.assert_array_equal(common_depth(tree, first, second), expected)


def test_no_class_asked_for():
    assert edge_paths(Tree.from_nested((0, (1, 2))), []).shape == (0, 2)
