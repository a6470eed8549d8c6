"""Ensembles of trees by one call: from counts, from a text, from class vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hstree
from hstree import TreeEnsemble
from hstree.heads.trees import TreeShape
from hstree.trees import Tree, build_ensemble, random_tree, word_vectors

D = 6


def counts_of(n_classes: int) -> np.ndarray:
    return (1000 / np.arange(1, n_classes + 1)).astype(np.int64)


def text_of(n_classes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, n_classes, 2000) ** 2 // n_classes


def from_counts(n_classes: int, **options: Any) -> TreeEnsemble:
    return TreeEnsemble.from_counts(D, counts_of(n_classes), **options)


def from_tokens(n_classes: int, **options: Any) -> TreeEnsemble:
    return TreeEnsemble.from_tokens(D, n_classes, text_of(n_classes), **options)


def from_vectors(n_classes: int, **options: Any) -> TreeEnsemble:
    vectors = np.random.default_rng(0).standard_normal((n_classes, 3))
    counts = counts_of(n_classes)
    return TreeEnsemble.from_vectors(D, vectors, frequencies=counts, **options)


CONSTRUCTORS: list[Callable[..., TreeEnsemble]] = [from_counts, from_tokens, from_vectors]
every_way = pytest.mark.parametrize("build", CONSTRUCTORS)


def test_every_head_at_top_level() -> None:
    heads = {
        head_class.__name__
        for head_class in map(hstree.heads.head_class, hstree.heads.head_names())
    }
    assert heads <= set(hstree.__all__)
    assert all(getattr(hstree, name) is getattr(hstree.heads, name) for name in heads)
    assert hstree.load_head is hstree.heads.load_head


@every_way
@pytest.mark.parametrize("n_classes", [1, 2, 3, 4, 5, 7, 100, 1023, 1024, 1025])
def test_defaults_for_every_size(build: Callable[..., TreeEnsemble], n_classes: int) -> None:
    """A step, probabilities of one, the most probable classes, a draw."""
    head = build(n_classes)
    assert (head.in_features, head.n_classes) == (D, n_classes)
    flat = n_classes <= 1024
    assert head.n_trees == (1 if flat else 4)
    assert (head.trees[0].root_width == n_classes) == (flat and n_classes > 1)
    check_use(head)


def check_use(head: TreeEnsemble) -> None:
    hidden, target = torch.randn(12, D), torch.randint(head.n_classes, (12,))
    loss = head(hidden, target).loss
    if head.n_classes > 1:  # one class has no parameter
        loss.backward()
    torch.testing.assert_close(head.log_prob(hidden).exp().sum(1), torch.ones(12))
    assert torch.equal(head.topk(hidden, 1)[1][:, 0], head.predict(hidden))
    assert ((head.sample(hidden) >= 0) & (head.sample(hidden) < head.n_classes)).all()


@every_way
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("n_classes", [2, 3, 4, 5, 9, 200])
def test_several_trees(build: Callable[..., TreeEnsemble], binary: bool, n_classes: int) -> None:
    """They are not all one root, which would keep them alike for ever."""
    head = build(n_classes, n_trees=3, binary=binary, seed=4, gate="context", reduction="sum")
    assert (head.n_trees, head.gate.name, head.reduction) == (3, "context", "sum")
    assert n_classes < 9 or head.trees[0].root_width < n_classes
    assert n_classes < 9 or len(set(head.trees)) == 3
    assert n_classes < 5 or head.groups is not binary
    check_use(head)


@every_way
def test_shapes_that_are_asked_for(build: Callable[..., TreeEnsemble]) -> None:
    """Also roots of two groups, and binary trees of two levels."""
    for n_classes, clusters in ((200, 20), (200, 2), (9, 5)):
        groups = build(n_classes, n_trees=2, clusters=clusters)
        binary = build(n_classes, n_trees=2, clusters=clusters, binary=True)
        assert groups.groups
        assert not binary.groups
        for head in (groups, binary):
            assert [tree.root_width for tree in head.trees] == [clusters] * 2
        assert {tree.height for tree in groups.trees} == {2}
    assert build(200, clusters=2, binary=True).trees[0].is_binary


@pytest.mark.parametrize(
    ("nested", "groups"),
    [
        ([((0, 1), (2, 3)), ((0, 2), (1, 3))], False),
        ([((0, 1), (2, 3)), (0, (1, 2, 3))], True),
        ([(0, (1, 2), 3), (0, (1, 3), 2)], True),
        ([(0, (1, (2, 3)))], False),
        ([(0, 1, 2, 3)], False),
        ([0], False),
    ],
)
def test_how_given_trees_are_read(nested: Any, groups: bool) -> None:
    """As groups if they have two levels, unless all are binary or single softmaxes."""
    trees = [Tree.from_nested(item) for item in nested]
    head = TreeEnsemble(D, trees[0].n_classes, trees)
    assert head.groups is groups
    check_use(head)


@pytest.mark.parametrize(
    ("n_classes", "n_trees", "clusters", "expected"),
    [
        (1024, None, None, (1, 1024)),
        (1025, None, None, (4, 256)),
        (65_536, None, None, (4, 256)),
        (65_537, None, None, (4, 512)),
        (262_144, None, None, (4, 512)),
        (1_000_000, None, None, (4, 1024)),
        (37, 4, None, (4, 9)),
        (3, 2, None, (2, 2)),
        (2000, 1, None, (1, 256)),
        (2000, 2, 7, (2, 7)),
    ],
)
def test_default_shape(
    n_classes: int, n_trees: int | None, clusters: int | None, expected: tuple[int, int]
) -> None:
    shape = TreeShape.for_classes(n_classes, n_trees=n_trees, clusters=clusters)
    assert shape == (*expected, False)


def test_one_binary_tree_is_no_single_softmax() -> None:
    assert TreeShape.for_classes(1000, binary=True) == (1, 250, True)
    assert TreeShape.for_classes(1000, binary=True, clusters=2) == (1, 2, True)


@pytest.mark.parametrize(
    ("n_classes", "sparse", "tied", "binary"),
    [
        (12_000, True, False, False),
        (12_001, True, False, True),
        (12_001, False, False, False),
        (12_001, True, True, False),
    ],
)
def test_default_below_the_roots(n_classes: int, sparse: bool, tied: bool, binary: bool) -> None:
    """Row-sparse gradients of groups would have almost all rows. Binary nodes read no embedding."""
    embedding = torch.nn.Embedding(n_classes, D) if tied else None
    head = from_counts(n_classes, n_trees=1, sparse=sparse, embedding=embedding)
    assert head.groups is not binary
    assert head.trees == build_ensemble(
        "huffman", n_classes, 1, counts_of(n_classes), clusters=256, binary=binary
    )


@every_way
@pytest.mark.parametrize("options", [{}, {"clusters": 2}, {"clusters": 1500, "n_trees": 1}])
def test_tied(build: Callable[..., TreeEnsemble], options: Any) -> None:
    embedding = torch.nn.Embedding(1500, D)
    head = build(1500, embedding=embedding, **options)
    assert head.groups
    assert head.output_embedding is embedding.weight
    check_use(head)
    with pytest.raises(ValueError, match="embedding: expected None for trees with binary nodes"):
        build(1500, embedding=embedding, binary=True)


def test_from_counts_is_their_distribution() -> None:
    """Of whatever holds the counts; trees as build_ensemble builds them."""
    counts = counts_of(1500)
    hidden = torch.randn(2, D)
    expected = np.where(counts, counts, 0.5)
    expected = torch.from_numpy(expected / expected.sum()).log().float()
    for some in (counts, counts.tolist(), torch.from_numpy(counts), counts.astype(np.float32)):
        head = TreeEnsemble.from_counts(D, some, seed=3)
        assert head.trees == build_ensemble("huffman", 1500, 4, counts, seed=3, clusters=256)
        torch.testing.assert_close(
            head.log_prob(hidden), expected.expand(2, -1), atol=1e-5, rtol=1e-5
        )


def test_from_tokens_clusters_word_vectors() -> None:
    """Of whatever holds the tokens."""
    text = text_of(200)
    counts = np.bincount(text, minlength=200)
    vectors = [word_vectors(text, 200, context=context) for context in ("left", "both")]
    built = build_ensemble("cluster", 200, 2, counts, vectors, clusters=50)
    other = TreeEnsemble(D, 200, built, frequencies=counts)
    assert other.trees[0] != other.trees[1]
    for some in (text, text.tolist(), torch.from_numpy(text).view(2, -1), text.astype(np.uint16)):
        head = TreeEnsemble.from_tokens(D, 200, some, n_trees=2, sparse=True)
        assert head.trees == other.trees
        assert torch.equal(head.log_prob(torch.ones(1, D)), other.log_prob(torch.ones(1, D)))
        assert head.sparse
    options = {"noise": 0.1, "iterations": 1}
    head = TreeEnsemble.from_tokens(D, 200, text, n_trees=2, tree_options=options)
    assert head.trees == build_ensemble("cluster", 200, 2, counts, vectors, clusters=50, **options)


@pytest.mark.parametrize(
    ("trees", "match"),
    [
        ([3, 2, 1], r"trees: expected a list of hstree.trees.Tree, got a list with a int; "
                    r"to build trees from class counts call TreeEnsemble.from_counts"),
        (np.ones(3), r"trees: .* got a ndarray; .*from_counts\(in_features, counts\)"),
        (random_tree(3), r"trees: expected a list of trees, got one Tree; pass \[tree\]"),
        ([random_tree(3), None], "trees: .* got a list with a NoneType"),
        ("huffman", "trees: .* got a str"),
    ],
    ids=["counts", "array", "one tree", "none", "name"],
)  # fmt: skip
def test_what_is_no_list_of_trees(trees: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        TreeEnsemble(D, 3, trees)


def test_bad_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"counts\[1\]: expected a finite number of at least 0, got -1"
    ):
        TreeEnsemble.from_counts(D, [1, -1])
    with pytest.raises(TypeError, match="counts: expected real numbers, got dtype <U1"):
        TreeEnsemble.from_counts(D, ["a"])
    with pytest.raises(ValueError, match="counts: expected a 1-D array of at least one class"):
        TreeEnsemble.from_counts(D, [])
    with pytest.raises(ValueError, match="vectors: expected an array for the recipe 'cluster'"):
        TreeEnsemble.from_counts(D, [2, 1], recipe="cluster")
    with pytest.raises(TypeError, match="tokens: expected integers, got dtype float64"):
        TreeEnsemble.from_tokens(D, 3, [0.5, 1.0])
    with pytest.raises(ValueError, match=r"tokens: expected ids in \[0, 3\), got \[0, 4294"):
        TreeEnsemble.from_tokens(D, 3, [0, 2**32 + 1])
    with pytest.raises(ValueError, match="tokens: expected at least one token, got none"):
        TreeEnsemble.from_tokens(D, 3, [])
    with pytest.raises(ValueError, match="n_trees: expected a whole number of at least 1, got 0"):
        TreeEnsemble.from_counts(D, [2, 1], n_trees=0)
    for clusters in (0, 1):
        with pytest.raises(ValueError, match=f"clusters: expected .* at least 2, got {clusters}"):
            TreeEnsemble.from_tokens(D, 3, [0, 1], clusters=clusters)
