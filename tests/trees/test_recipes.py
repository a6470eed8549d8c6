"""Recipes: optimal, balanced, clustered; valid for hostile input; the same everywhere."""

from __future__ import annotations

import heapq
import re
import time
from collections import Counter
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hstree.heads.trees import TreeShape
from hstree.trees import (
    MAX_DEPTH,
    Tree,
    build_ensemble,
    build_tree,
    cluster_tree,
    huffman_tree,
    random_tree,
    recipe_names,
    tree_seed,
)
from trees import support

hostile_frequency = st.one_of(
    st.just(0.0),
    st.integers(0, 3).map(float),
    st.floats(0, 1e300),
    st.integers(-1074, 990).map(lambda e: 2.0**e),
)


def arithmetic_vectors(n_classes, n_features):
    """Vectors from integer arithmetic, the same everywhere."""
    i = np.arange(n_classes * n_features, dtype=np.int64).reshape(n_classes, n_features)
    return ((i * 7919 + i * i % 104729 * 31) % 2003 - 1001).astype(np.float32) / 64


def zipf(n_classes):
    return 10**9 // np.arange(1, n_classes + 1)


def huffman_cost(frequencies):
    """Sum of f times depth of an optimal binary tree."""
    heap = list(frequencies)
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost


def nodes(tree):
    """(begin, middle, end) of every node of a binary tree."""
    assert tree.is_binary
    return tree.boundary.reshape(-1, 3).tolist()


# Random


@pytest.mark.parametrize("n_classes", [1, 2, 3, 7, 64, 1000])
def test_random_is_balanced(n_classes):
    tree = random_tree(n_classes, seed=3)
    assert sorted(tree.order.tolist()) == list(range(n_classes))
    assert tree.is_binary
    for begin, middle, end in nodes(tree):
        assert middle - begin - (end - middle) in (0, 1)
    assert tree.height == (n_classes - 1).bit_length()


def test_random_permutations_are_uniform():
    counts = Counter(tuple(random_tree(4, seed).order.tolist()) for seed in range(2400))
    assert len(counts) == 24
    chi_square = sum((n - 100) ** 2 / 100 for n in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: exceeded once in 1000


# Huffman


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(0, 2**64 - 1))
def test_huffman_is_optimal(frequencies, seed):
    tree = huffman_tree(frequencies, seed)
    cost = sum(f * d for f, d in zip(frequencies, tree.depth.tolist(), strict=True))
    assert cost == huffman_cost(frequencies)


def test_huffman_of_equal_frequencies_is_balanced():
    assert set(huffman_tree(np.ones(64)).depth.tolist()) == {6}
    assert set(huffman_tree(np.zeros(64)).depth.tolist()) == {6}


def test_huffman_depth_is_bounded():
    fibonacci = [1, 1]
    while len(fibonacci) < 45:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    for frequencies in (
        fibonacci,  # the deepest tree that keeps above the floor
        [float(f**3) for f in fibonacci],
        [2.0**i for i in range(-1000, 900)],
        [2.0**-1074] * 5 + [1e300],
    ):
        tree = huffman_tree(frequencies)
        assert tree.height <= 46 < MAX_DEPTH
    assert huffman_tree(fibonacci).height == 44


def test_huffman_floor_changes_nothing_above_it():
    """Down to 2^-32 of the sum the tree is optimal for the frequencies as they are."""
    frequencies = [1, 1, 2, 3, 5, 8, 13, 2**30]
    depth = huffman_tree(frequencies).depth.tolist()
    assert sum(f * d for f, d in zip(frequencies, depth, strict=True)) == huffman_cost(frequencies)


def test_huffman_breaks_ties_by_seed():
    trees = {huffman_tree(np.ones(5), seed).to_nested() for seed in range(50)}
    assert len(trees) > 40
    assert len({huffman_tree(np.ones(5), seed).average_depth() for seed in range(50)}) == 1


# Cluster


def test_cluster_finds_clusters():
    """Four well separated groups of classes are the four subtrees at depth two."""
    random = np.random.default_rng(0)
    centers = np.array([[9, 0, 0], [-9, 0, 0], [9, 5, 0], [-9, 5, 0]])
    group = random.permutation(np.repeat(np.arange(4), 25))
    vectors = centers[group] + random.standard_normal((100, 3)) / 4
    for seed in range(5):
        tree = cluster_tree(vectors, seed=seed)
        subtree = tree.collapse(4).tables(groups=True).root_child
        assert sorted(Counter(zip(group, subtree, strict=True)).values()) == [25] * 4


@given(
    st.lists(hostile_frequency, min_size=1, max_size=60).filter(lambda f: np.isfinite(sum(f))),
    st.integers(0, 2**64 - 1),
)
def test_cluster_halves_the_mass(frequencies, seed):
    """The halves of a node differ by no more than its heaviest class weighs."""
    n = len(frequencies)
    tree = cluster_tree(arithmetic_vectors(n, 3), frequencies, seed)
    assert tree.height < MAX_DEPTH
    total = sum(frequencies)
    weight = np.array([f / total if total else 0.0 for f in frequencies])[tree.order]
    for begin, middle, end in nodes(tree):
        difference = abs(weight[begin:middle].sum() - weight[middle:end].sum())
        assert difference <= weight[begin:end].max() + 1e-12


def test_cluster_without_mass_halves_the_count():
    a = cluster_tree(arithmetic_vectors(100, 5), np.zeros(100))
    assert (
        a
        == cluster_tree(arithmetic_vectors(100, 5))
        == cluster_tree(arithmetic_vectors(100, 5), np.ones(100))
    )


@pytest.mark.parametrize("max_depth", [10, 11, 15, 30, 64])
def test_cluster_depth_is_bounded(max_depth):
    """Masses that fall from class to class make a chain as long as the limit lets them."""
    frequencies = 0.4 ** np.arange(1000)
    vectors = arithmetic_vectors(1000, 3)
    tree = cluster_tree(vectors, frequencies, max_depth=max_depth)
    assert tree.height == min(max_depth, 40)  # masses below 2^-48 count as equal
    assert max_depth == 10 or tree.depth[0] == 1
    with pytest.raises(ValueError, match="max_depth: expected a whole number from 10 to 64, got 9"):
        cluster_tree(vectors, max_depth=9)


@pytest.mark.parametrize("n_classes", [1, 2, 3, 50])
def test_cluster_of_equal_vectors(n_classes):
    tree = cluster_tree(np.ones((n_classes, 4)))
    assert sorted(tree.order.tolist()) == list(range(n_classes))
    assert tree.height == (n_classes - 1).bit_length()


def test_cluster_does_not_depend_on_scale():
    vectors = arithmetic_vectors(300, 10)
    tree = cluster_tree(vectors, zipf(300), seed=5, noise=0.1)
    for factor in (2.0**-100, 2.0**115):
        assert cluster_tree(vectors * factor, zipf(300) * factor, seed=5, noise=0.1) == tree


@pytest.mark.parametrize(
    "options",
    [
        {"noise": 0.3},
        {"iterations": 1},
        {"iterations": 2, "noise": 0.1},
    ],
)
def test_cluster_options_change_the_tree_but_not_the_clusters(options):
    random = np.random.default_rng(1)
    group = np.arange(400) % 2
    vectors = random.standard_normal((400, 10)) + 8 * (2 * group - 1)[:, None]
    tree = cluster_tree(vectors, seed=1, **options)
    assert tree == cluster_tree(vectors, seed=1, **options)
    assert tree != cluster_tree(vectors, seed=1)
    top = tree.tables().leaf_position < 200
    assert max(np.mean(top == group), np.mean(top != group)) > 0.97


def test_noise_has_its_size():
    """With noise far above the signal the clusters are lost."""
    group = np.arange(400) % 2
    vectors = np.repeat((2.0 * group - 1)[:, None], 4, axis=1)

    def agreement(noise):
        top = cluster_tree(vectors, noise=noise).tables().leaf_position < 200
        return max(np.mean(top == group), np.mean(top != group))

    assert agreement(0.2) == 1
    assert agreement(50) < 0.7


# All recipes


def build(recipe, frequencies, seed=0, **options):
    n = len(frequencies)
    vectors = arithmetic_vectors(n, 4) if recipe == "cluster" else None
    return build_tree(recipe, n, frequencies, vectors, seed, **options)


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
@given(
    frequencies=st.lists(hostile_frequency, min_size=1, max_size=80).filter(
        lambda f: np.isfinite(sum(f))
    ),
    seed=st.integers(0, 2**64 - 1),
    clusters=st.integers(2, 100),
    binary=st.booleans(),
)
def test_any_frequencies_give_a_valid_tree(recipe, frequencies, seed, clusters, binary):
    plain = build(recipe, frequencies, seed)
    assert plain.is_binary
    assert plain.height <= MAX_DEPTH
    assert Tree(**plain.arrays()) == plain  # validates again
    tree = build(recipe, frequencies, seed, clusters=clusters, binary=binary)
    assert tree == plain.collapse(clusters, binary=binary, frequencies=frequencies)
    if len(frequencies) <= 2:
        assert tree.to_nested() in (0, (0, 1), (1, 0))


def intervals(tree):
    """(begin, end, begin of the parent, end of the parent) of every inner node except the root."""
    edges = tree.edges()
    inner = edges.child_node >= 0
    parent = edges.node[inner]
    first, last = tree.node_offset[parent], tree.node_offset[parent + 1] - 1
    bounds = edges.begin[inner], edges.end[inner], tree.boundary[first], tree.boundary[last]
    return {tuple(map(int, interval)) for interval in zip(*bounds, strict=True)}


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
@given(
    n_classes=st.integers(2, 300),
    clusters=st.integers(2, 310),
    seed=st.integers(0, 2**32),
)
def test_both_shapes_have_the_same_clusters(recipe, n_classes, clusters, seed):
    """Unless a group would be above the bound. Binary nodes below them are those of the plain
    tree."""
    frequencies = zipf(n_classes)
    plain = build(recipe, frequencies, seed)
    binary = build(recipe, frequencies, seed, clusters=clusters, binary=True)
    grouped = build(recipe, frequencies, seed, clusters=clusters)
    unbounded = plain.collapse(clusters, frequencies=frequencies, max_group=n_classes)
    width = min(clusters, n_classes)
    ends = binary.boundary[: width + 1]
    for tree in (binary, grouped, unbounded):
        assert (tree.order == plain.order).all()
        assert tree.root_width == width
    assert intervals(binary) <= intervals(plain) | {
        (begin, end, 0, n_classes) for begin, end in pairwise(ends.tolist())
    }
    assert grouped.height <= 2
    assert (unbounded.boundary[: width + 1] == ends).all()
    if np.diff(ends).max() <= support.group_bound(n_classes, width):
        assert grouped == unbounded


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
@pytest.mark.parametrize("heavy", [0, 17, 499])
def test_one_class_holds_nearly_all_mass(recipe, heavy):
    frequencies = np.zeros(500)
    frequencies[heavy] = 1e6
    frequencies[(heavy + 100) % 500] = 1
    tree = build(recipe, frequencies, seed=1)
    if recipe != "random":
        assert tree.depth[heavy] == 1
        assert tree.depth[(heavy + 100) % 500] == 2
        assert tree.height <= 12
    wide = build(recipe, frequencies, seed=1, clusters=20, binary=True)
    assert wide.root_width == 20
    assert wide.depth[heavy] == 1


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
def test_seeds(recipe):
    frequencies = np.arange(300) % 7
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    tree = build(recipe, frequencies, seed=9)
    assert build(recipe, frequencies, seed=9) == tree
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    others = [build(recipe, frequencies, seed=seed) for seed in (0, 10, 2**63, 2**64 - 1)]
    assert len({*others, tree}) == 5


COUNTS = {
    "zipf": zipf,
    "half unseen": lambda n: zipf(n) * (np.arange(n) % 2),
    "four classes": lambda n: np.where(np.arange(n) < 4, 7, 0),
    "one class": lambda n: np.where(np.arange(n) == n // 2, 10**6, 0),
    "none": lambda n: np.zeros(n, np.int64),
    "powers": lambda n: 2.0 ** -np.minimum(np.arange(n), 900),
}


def groups(tree):
    """The number of classes of each child of the root."""
    return np.diff(tree.boundary[: tree.root_width + 1])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
@pytest.mark.parametrize("n_classes", [1, 2, 3, 16, 17, 700, 1025, 5000, 49_152])
def test_groups_are_bounded(recipe, counts, n_classes):
    """For the default root and others: every class once, no group above the bound, and the root not
    wider than without it."""
    frequencies = COUNTS[counts](n_classes)
    usual = TreeShape.for_classes(n_classes, n_trees=4).clusters
    for clusters in dict.fromkeys([usual, 2, 3, 16, 1000]):
        tree = build(recipe, frequencies, seed=5, clusters=clusters)
        assert sorted(tree.order.tolist()) == list(range(n_classes))
        assert tree.height <= 2
        if n_classes == 1:
            continue
        width = min(clusters, n_classes)
        assert tree.root_width == width == len(groups(tree))
        assert groups(tree).sum() == n_classes
        assert groups(tree).max() <= support.group_bound(n_classes, width)
        assert build(recipe, frequencies, seed=5, clusters=clusters) == tree


@pytest.mark.parametrize("recipe", ["huffman", "cluster"])
def test_only_rare_classes_are_divided(recipe):
    """Half of the classes never occur. Frequent classes keep their neighbours: nearly all of the
    mass is in clusters that are subtrees. A token meets a smaller group than without a bound."""
    n = 49_152
    frequencies = np.where(np.arange(n) % 2, zipf(n) // 1000, 0)
    vectors = arithmetic_vectors(n, 4) * (frequencies > 0)[:, None]  # as word_vectors has them
    plain = build_tree(recipe, n, frequencies, vectors, 3)
    tree = plain.collapse(256, frequencies=frequencies)
    unbounded = plain.collapse(256, frequencies=frequencies, max_group=n)
    assert groups(tree).max() <= 887 < 8000 < groups(unbounded).max()
    subtrees = {(begin, end) for begin, end, *_ in intervals(plain)}
    ends = tree.boundary[: tree.root_width + 1].tolist()
    divided = [tree.order[a:b] for a, b in pairwise(ends) if b - a > 1 and (a, b) not in subtrees]
    assert 20 < len(divided) < 64
    share = sum(frequencies[classes].sum() for classes in divided) / frequencies.sum()
    assert share < 0.05
    mean = {t: frequencies[t.order] @ np.repeat(groups(t), groups(t)) for t in (tree, unbounded)}
    assert mean[tree] < 0.8 * mean[unbounded]


GOLDEN = {
    "random": "d16207de46a9ab9f862d932a0c1a3a48",
    "huffman": "e353fbc76f4a2c862cb4d264cec31b4c",
    "cluster": "b24c200f170a058f0d8ac679b336e6ea",
    "cluster, every option": "766ee7f998383f65700d77ed8ecc2f8b",
    "huffman, collapsed": "2038d06f970156e8f418bc81d5f93439",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_trees_are_the_same_everywhere(name):
    recipe = re.match("[a-z]+", name)[0]
    options = {
        "cluster, every option": {
            "noise": 0.25,
            "iterations": 3,
            "clusters": 20,
            "binary": True,
        },
        "huffman, collapsed": {"clusters": 64},
    }.get(name, {})
    vectors = arithmetic_vectors(3000, 21) if recipe == "cluster" else None
    tree = build_tree(recipe, 3000, zipf(3000) % 4001, vectors, 12345, **options)
    assert tree.fingerprint == GOLDEN[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "n_classes", "limit"),
    [("random", 1_000_000, 2), ("huffman", 1_000_000, 2), ("cluster", 33_278, 10)],
)
def test_large_trees_within_the_promised_time(recipe, n_classes, limit):
    """Measured at 0.05, 0.2 and 0.3 s of one core."""
    vectors = arithmetic_vectors(n_classes, 100) if recipe == "cluster" else None
    frequencies = zipf(n_classes)
    start = time.process_time()
    tree = build_tree(recipe, n_classes, frequencies, vectors)
    assert time.process_time() - start < limit
    tables = tree.tables()
    assert tables.n_binary == n_classes - 1
    some = np.arange(0, n_classes, n_classes // 50)
    for c in some.tolist():
        path = [node << 1 | (child == 0) for node, child in tree.path(c)]
        assert tables.path[tables.path_offset[c] : tables.path_offset[c + 1]].tolist() == path


# Registry and ensembles


def test_build_tree_by_name():
    assert recipe_names() == ["random", "huffman", "cluster"]
    frequencies, vectors = zipf(50), arithmetic_vectors(50, 3)
    assert build_tree("random", 50, seed=4) == random_tree(50, 4)
    assert build_tree("huffman", 50, frequencies, seed=4) == huffman_tree(frequencies, 4)
    assert build_tree(
        "cluster", 50, frequencies, vectors, 4, 8, True, noise=0.1, iterations=2
    ) == cluster_tree(vectors, frequencies, 4, clusters=8, binary=True, noise=0.1, iterations=2)


def test_ensembles():
    frequencies, vectors = zipf(50), arithmetic_vectors(50, 3)
    options = {"clusters": 5, "noise": 0.2}
    trees = build_ensemble("cluster", 50, 4, frequencies, vectors, seed=3, **options)
    assert len(set(trees)) == 4
    assert all(tree.root_width == 5 for tree in trees)
    assert trees == [
        build_tree("cluster", 50, frequencies, vectors, seed=tree_seed(3, t), **options)
        for t in range(4)
    ]
    longer = build_ensemble("cluster", 50, 6, frequencies, vectors, seed=3, **options)
    assert longer[:4] == trees
    other = arithmetic_vectors(50, 7) ** 2
    turns = build_ensemble("cluster", 50, 3, frequencies, [vectors, other], noise=0)
    assert turns[1] == cluster_tree(other, frequencies, tree_seed(0, 1))
    assert turns[2] == cluster_tree(vectors, frequencies, tree_seed(0, 2))


def test_several_clustered_trees_have_noise():
    """One has none, unless it is given."""
    frequencies, vectors = zipf(50), arithmetic_vectors(50, 3)
    seeds = [tree_seed(3, t) for t in range(2)]
    expected = [cluster_tree(vectors, frequencies, seed, noise=0.3) for seed in seeds]
    assert build_ensemble("cluster", 50, 2, frequencies, vectors, seed=3) == expected
    (one,) = build_ensemble("cluster", 50, 1, frequencies, vectors, seed=3)
    assert one == cluster_tree(vectors, frequencies, seeds[0])


def test_tree_seeds_differ():
    assert len({tree_seed(seed, t) for seed in (0, 1, 2**64 - 1) for t in range(100)}) == 300
    # SplitMix64 from 0, as published.
    assert [tree_seed(0, t) for t in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("oak", 3), ValueError, r"recipe: expected one of \['random', 'huffman', 'cluster'\]"),
        (
            ("random", 0),
            ValueError,
            "n_classes: expected a whole number from 1 to 1073741824, got 0",
        ),
        (("random", 2.5), ValueError, r"n_classes: expected a whole number from 1 to .*, got 2\.5"),
        (("random", 3, [1, 2]), ValueError, r"frequencies: .* shape \(3,\), got shape \(2,\)"),
        (
            ("random", 3, None, None, -1),
            ValueError,
            "seed: expected a whole number from 0 to .*, got -1",
        ),
        (("random", 3, None, None, 2**64), ValueError, "seed: expected a whole number"),
        (
            ("random", 3, None, None, 0, 1),
            ValueError,
            "clusters: expected a whole number of at least 2, got 1",
        ),
        (("huffman", 3), ValueError, "frequencies: expected an array for the recipe 'huffman'"),
        (("huffman", 3, [1, -1, 0]), ValueError, r"frequencies\[1\]: .* got -1"),
        (("huffman", 3, [1, 1, float("nan")]), ValueError, r"frequencies\[2\]: .* got nan"),
        (("huffman", 3, [float("inf"), 1, 0]), ValueError, r"frequencies\[0\]: .* got inf"),
        (("huffman", 3, [1j, 1, 0]), TypeError, "frequencies: expected real numbers"),
        (("cluster", 3), ValueError, "vectors: expected an array for the recipe 'cluster'"),
        (("cluster", 3, None, np.ones((2, 4))), ValueError, r"vectors: expected shape \(3, F\)"),
        (("cluster", 3, None, np.ones(3)), ValueError, r"vectors: .* got \(3,\)"),
        (("cluster", 3, None, np.ones((3, 0))), ValueError, "vectors: .* F >= 1"),
        (("cluster", 2, None, [[1], [np.nan]]), ValueError, r"vectors\[1\]: expected finite"),
        (("cluster", 2, None, [[1e39], [1]]), ValueError, r"vectors\[0\]: expected finite"),
        (("cluster", 2, None, [["a"], ["b"]]), TypeError, "vectors: expected real numbers"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        build_tree(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"iterations": 0}, ValueError, "iterations: expected"),
        ({"noise": -0.5}, ValueError, "noise: expected a finite number of at least 0"),
        ({"noise": float("inf")}, ValueError, "noise: expected a finite number"),
        ({"colour": 1}, TypeError, "colour: the recipe 'cluster' has no such option"),
    ],
)
def test_option_errors(options, error, message):
    with pytest.raises(error, match=message):
        build_tree("cluster", 5, vectors=np.ones((5, 4)), **options)


def test_options_of_another_recipe():
    with pytest.raises(
        TypeError, match=r"noise: the recipe 'random' has no such option \(it has: none\)"
    ):
        build_tree("random", 5, noise=0.5)
    with pytest.raises(ValueError, match="n_trees: expected a whole number of at least 1, got 0"):
        build_ensemble("random", 5, 0)
