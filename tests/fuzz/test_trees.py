"""Trees: representations, recipes, collapse and files against plain Python."""

from __future__ import annotations

import copy
import pickle
import tempfile
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import hstree
from fuzz.forests import SHAPES, classes_of, nested_tree
from fuzz.nests import (
    check_collapsed,
    check_tree,
    depths,
    huffman_cost,
    inner,
    mass,
    weighted_depth,
)
from fuzz.scale import cases
from hstree.trees import (
    MAX_DEPTH,
    Tree,
    build_ensemble,
    build_tree,
    cluster_tree,
    huffman_tree,
    random_tree,
)

SEEDS = st.integers(0, 2**64 - 1)
SIZES = st.one_of(st.integers(1, 12), st.integers(13, 200))
FREQUENCY = st.one_of(
    st.just(0.0),
    st.integers(0, 5).map(float),
    st.floats(0, 1e300),
    st.integers(-1074, 990).map(lambda e: 2.0**e),
)


@st.composite
def nested(draw: Any) -> Any:
    """A nested tuple of any shape."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_classes = draw(SIZES)
    root = draw(st.sampled_from([0, int(random.integers(min(n_classes, 2), n_classes + 1))]))
    return nested_tree(draw(st.sampled_from(SHAPES)), n_classes, root, random)


@given(item=nested())
@settings(max_examples=cases(50))
def test_representations(item: Any) -> None:
    tree, order, nodes = Tree.from_nested(item), classes_of(item), inner(item)
    assert tree.to_nested() == item
    assert tree.order.tolist() == order
    assert (tree.n_classes, tree.n_nodes) == (len(order), len(nodes))
    assert tree.n_children.tolist() == [len(node) for node in nodes]
    assert tree.n_binary == sum(len(node) == 2 for node in nodes)
    depth = depths(item)
    assert tree.depth.tolist() == [depth[c] for c in range(len(order))]
    assert tree.height == max(depth.values())
    for c in order[:: max(1, len(order) // 5)]:
        here, path = item, []
        while isinstance(here, tuple):
            k = next(k for k, child in enumerate(here) if c in classes_of(child))
            path.append((next(i for i, node in enumerate(nodes) if node is here), k))
            here = here[k]
        assert tree.path(c) == path
        assert tree.code(c) == tuple(k for _, k in path)
    again = [
        Tree(**tree.arrays()),
        Tree.from_parents(*tree.to_parents()),
        copy.deepcopy(tree),
        pickle.loads(pickle.dumps(tree)),
        eval(repr(tree)) if len(order) <= 16 else tree,
    ]
    for other in again:
        assert other == tree
        assert hash(other) == hash(tree)
    frequencies = np.random.default_rng(len(order)).integers(0, 99, len(order))
    masses = tree.edge_masses(frequencies)
    expected = [mass(child, frequencies.tolist()) for node in nodes for child in node]
    assert masses.tolist() == [float(m) for m in expected]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tree"
        tree.save(file)
        assert Tree.load(file) == tree


@given(
    item=nested(),
    clusters=st.one_of(st.integers(2, 12), st.integers(2, 200)),
    binary=st.booleans(),
    seed=st.one_of(st.none(), st.integers(0, 2**32 - 1)),
)
@settings(max_examples=cases(60))
def test_collapse(item: Any, clusters: int, binary: bool, seed: int | None) -> None:
    frequencies = None
    if seed is not None:
        frequencies = np.random.default_rng(seed).integers(0, 50, len(classes_of(item))).tolist()
    tree = Tree.from_nested(item)
    collapsed = tree.collapse(clusters, binary=binary, frequencies=frequencies)
    check_collapsed(item, collapsed.to_nested(), clusters, binary, frequencies)


@given(n_classes=SIZES, seed=SEEDS)
@settings(max_examples=cases(30))
def test_random_trees(n_classes: int, seed: int) -> None:
    tree = random_tree(n_classes, seed)
    item = tree.to_nested()
    check_tree(item, n_classes)
    for node in inner(item):
        sizes = [len(classes_of(child)) for child in node]
        assert sizes == [-(-sum(sizes) // 2), sum(sizes) // 2]
    assert random_tree(n_classes, seed) == tree


@given(frequencies=st.lists(FREQUENCY, min_size=1, max_size=120), seed=SEEDS)
@settings(max_examples=cases(50))
def test_huffman_trees(frequencies: list[float], seed: int) -> None:
    tree = huffman_tree(frequencies, seed)
    item = tree.to_nested()
    check_tree(item, len(frequencies))
    assert tree.is_binary
    assert tree.height <= 46
    cost, best = weighted_depth(item, frequencies), huffman_cost(frequencies)
    assert best <= cost <= best * (1 + Fraction(1, 2**20))  # frequencies are rounded to integers
    assert huffman_tree(frequencies, seed) == tree


@given(
    data_seed=st.integers(0, 2**32 - 1),
    n_classes=SIZES,
    features=st.integers(1, 6),
    kind=st.sampled_from(["normal", "equal", "integers", "huge", "tiny"]),
    frequencies=st.sampled_from([None, "counts", "zipf", "zero", "one"]),
    seed=SEEDS,
    slack=st.one_of(st.integers(0, 4), st.just(MAX_DEPTH)),
    options=st.fixed_dictionaries(
        {},
        optional={
            "iterations": st.integers(1, 20),
            "noise": st.sampled_from([0.0, 0.3, 100.0, 1e-30]),
        },
    ),
)
@settings(max_examples=cases(60))
def test_clustered_trees(
    data_seed: int,
    n_classes: int,
    features: int,
    kind: str,
    frequencies: str | None,
    seed: int,
    slack: int,
    options: dict[str, Any],
) -> None:
    random = np.random.default_rng(data_seed)
    vectors = random.standard_normal((n_classes, features))
    vectors *= {"huge": 1e30, "tiny": 1e-40, "equal": 0.0}.get(kind, 1.0)
    vectors = np.round(vectors) if kind == "integers" else vectors
    counts = {
        None: None,
        "counts": random.integers(0, 9, n_classes),
        "zipf": 10**6 // np.arange(1, n_classes + 1),
        "zero": np.zeros(n_classes),
        "one": np.eye(n_classes)[0],
    }[frequencies]
    max_depth = min(MAX_DEPTH, (n_classes - 1).bit_length() + slack)
    options |= {"max_depth": max_depth}
    tree = cluster_tree(vectors, counts, seed, **options)
    item = tree.to_nested()
    check_tree(item, n_classes)
    assert tree.is_binary
    assert tree.height <= max_depth
    if counts is None:
        for node in inner(item):
            left, right = (len(classes_of(child)) for child in node)
            assert abs(left - right) <= 1
    assert cluster_tree(vectors, counts, seed, **options) == tree


@given(
    recipe=st.sampled_from(["random", "huffman", "cluster"]),
    n_classes=SIZES,
    n_trees=st.integers(1, 4),
    clusters=st.integers(2, 40),
    binary=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=cases(30))
def test_ensembles(
    recipe: str, n_classes: int, n_trees: int, clusters: int, binary: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    counts, vectors = random.integers(0, 9, n_classes), random.standard_normal((n_classes, 3))
    options = {"noise": 0.2} if recipe == "cluster" else {}
    given_ = (recipe, n_classes, n_trees, counts, vectors, seed, clusters, binary)
    trees = build_ensemble(*given_, **options)
    assert len(trees) == n_trees
    for t, tree in enumerate(trees):
        tree_seed = hstree.trees.tree_seed(seed, t)
        plain = build_tree(recipe, n_classes, counts, vectors, tree_seed, **options)
        check_collapsed(plain.to_nested(), tree.to_nested(), clusters, binary, counts.tolist())


@given(item=nested(), data=st.data())
@settings(max_examples=cases(60))
def test_spoilt_arrays_are_refused_or_are_trees(item: Any, data: st.DataObject) -> None:
    """The three arrays with one number changed, against a tree built from them step by step."""
    arrays = {name: array.tolist() for name, array in Tree.from_nested(item).arrays().items()}
    name = data.draw(st.sampled_from([name for name, values in arrays.items() if values]))
    values = arrays[name]
    place = data.draw(st.integers(0, len(values) - 1))
    wild = st.sampled_from([-1, 2**31 - 1, -(2**31), len(values)])
    way = data.draw(st.sampled_from(["set", "drop", "repeat"]))
    if way == "set":
        values[place] = data.draw(st.one_of(st.integers(-2, len(classes_of(item)) + 2), wild))
    else:
        values[place : place + 1] = [values[place]] * (0 if way == "drop" else 2)
    if rebuilt(**arrays):
        check_tree(Tree(**arrays).to_nested(), len(classes_of(item)))
    else:
        with pytest.raises(ValueError, match=r"^(order|node_offset|boundary|nodes?|a path)\b"):
            Tree(**arrays)


def rebuilt(order: list[int], node_offset: list[int], boundary: list[int]) -> bool:
    """Whether the arrays are those of a tree."""
    n = len(order)
    if not n or sorted(order) != list(range(n)) or not node_offset or node_offset[0] != 0:
        return False
    if node_offset[-1] != len(boundary) or any(b - a < 3 for a, b in pairwise(node_offset)):
        return False
    nodes = [boundary[a:b] for a, b in pairwise(node_offset)]

    def build(begin: int, end: int, depth: int) -> bool:
        if end - begin == 1:
            return True
        if not nodes or depth == MAX_DEPTH:
            return False
        node = nodes.pop(0)
        if (node[0], node[-1]) != (begin, end) or any(a >= b for a, b in pairwise(node)):
            return False
        return all(build(a, b, depth + 1) for a, b in pairwise(node))

    return build(0, n, 0) and not nodes
