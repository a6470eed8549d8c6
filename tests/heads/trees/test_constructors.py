"""Ensembles by one call: from counts, from a text, from a trained softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hstree
from hstree import TreeEnsemble
from hstree.heads.trees import TreeShape
from hstree.trees import build_ensemble, random_tree, word_vectors

D = 6


def counts_of(n_classes: int) -> np.ndarray:
    return (1000 / np.arange(1, n_classes + 1)).astype(np.int64)


def text_of(n_classes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, n_classes, 2000) ** 2 // n_classes


def from_counts(n_classes: int, **options: Any) -> TreeEnsemble:
    return TreeEnsemble.from_counts(D, counts_of(n_classes), **options)


def from_tokens(n_classes: int, **options: Any) -> TreeEnsemble:
    return TreeEnsemble.from_tokens(D, n_classes, text_of(n_classes), **options)


def from_features(n_classes: int, **options: Any) -> TreeEnsemble:
    features = np.random.default_rng(0).standard_normal((2000, 3))
    return TreeEnsemble.from_features(D, n_classes, features, text_of(n_classes), **options)


CONSTRUCTORS: list[Callable[..., TreeEnsemble]] = [
    from_counts,
    from_tokens,
    from_features,
]
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
    hidden, target = torch.randn(5, D), torch.randint(n_classes, (5,))
    loss = head(hidden, target).loss
    if n_classes > 1:  # one class has no parameter
        loss.backward()
    torch.testing.assert_close(head.log_prob(hidden).exp().sum(1), torch.ones(5))
    assert torch.equal(head.topk(hidden, 1)[1][:, 0], head.predict(hidden))
    assert ((head.sample(hidden) >= 0) & (head.sample(hidden) < n_classes)).all()


@every_way
@pytest.mark.parametrize("n_classes", [2, 3, 9, 200])
def test_shapes_that_are_asked_for(build: Callable[..., TreeEnsemble], n_classes: int) -> None:
    """Several trees are not all one root, which would keep them alike for ever."""
    head = build(n_classes, n_trees=3, leaf=2, seed=4, gate="context", reduction="sum")
    assert (head.n_trees, head.gate.name, head.reduction) == (3, "context", "sum")
    assert n_classes < 9 or head.trees[0].root_width < n_classes
    assert n_classes < 9 or len(set(head.trees)) == 3
    assert build(n_classes, root=2, leaf=1).trees[0].is_binary


@every_way
@pytest.mark.parametrize(("levels", "leaf"), [(2, None), (3, 8)])
def test_levels(build: Callable[..., TreeEnsemble], levels: int, leaf: int | None) -> None:
    shape = {"n_trees": 2, "root": 20, "levels": levels} | ({} if leaf is None else {"leaf": leaf})
    trees = build(200, **shape).trees
    assert [(tree.root_width, tree.height) for tree in trees] == [(20, levels)] * 2
    with pytest.raises(ValueError, match=r"leaf: expected 1 with levels=2, .*, got 3"):
        build(200, root=20, leaf=3, levels=2)


@pytest.mark.parametrize(
    ("n_classes", "n_trees", "root", "expected"),
    [
        (1024, None, None, (1, 1024)),
        (1025, None, None, (4, 256)),
        (65_536, None, None, (4, 256)),
        (65_537, None, None, (4, 512)),
        (100_000, None, None, (4, 512)),
        (262_144, None, None, (4, 512)),
        (1_000_000, None, None, (4, 1024)),
        (37, 4, None, (4, 9)),
        (3, 2, None, (2, 1)),
        (2000, 1, None, (1, 256)),
        (2000, 2, 7, (2, 7)),
    ],
)
def test_shape(
    n_classes: int, n_trees: int | None, root: int | None, expected: tuple[int, int]
) -> None:
    shape = TreeShape.for_classes(n_classes, n_trees=n_trees, root=root)
    assert (shape.n_trees, shape.root) == expected


@pytest.mark.parametrize("build", [from_counts, from_tokens])
@pytest.mark.parametrize(
    ("options", "height", "node_vectors"),
    [
        ({}, 2, "leaves"),
        ({"n_trees": 1}, 2, "leaves"),
        ({"levels": 3, "leaf": 5}, 3, "leaves"),
        ({"levels": 3}, 3, "leaves"),
        ({"levels": 2, "node_vectors": "free"}, 2, "free"),
        ({"leaf": 8}, None, "leaves"),
        ({"leaf": 8, "node_vectors": "free"}, None, "free"),
        ({"leaf": 1}, None, "free"),
        ({"root": 1}, None, "free"),
        ({"root": 1500, "n_trees": 1}, 1, "free"),
    ],
)
def test_default_below_the_root(
    build: Callable[..., TreeEnsemble], options: Any, height: int | None, node_vectors: str
) -> None:
    head = build(1500, **options)
    assert head.node_vectors == node_vectors
    if height is None:
        assert min(tree.height for tree in head.trees) > 3
    else:
        assert {tree.height for tree in head.trees} == {height}


@pytest.mark.parametrize(
    ("n_classes", "sparse", "two_levels"),
    [(12_000, True, True), (12_001, True, False), (12_001, False, True)],
)
def test_default_shape_of_many_classes(n_classes: int, sparse: bool, two_levels: bool) -> None:
    """Row-sparse gradients of two levels would have almost all rows."""
    head = from_counts(n_classes, n_trees=1, sparse=sparse)
    assert head.node_vectors == "leaves"
    assert (head.trees[0].height == 2) == two_levels
    shape = {"levels": 2} if two_levels else {"leaf": 16}
    assert head.trees == build_ensemble(
        "huffman", n_classes, 1, counts_of(n_classes), root=256, **shape
    )


@pytest.mark.parametrize("options", [{}, {"leaf": 8}, {"leaf": 1}, {"root": 1500, "n_trees": 1}])
def test_default_vectors_if_tied(options: Any) -> None:
    embedding = torch.nn.Embedding(1500, D)
    text = text_of(1500)
    for head in (
        TreeEnsemble.from_tokens(D, 1500, text, embedding=embedding, **options),
        TreeEnsemble.from_counts(
            D, np.bincount(text, minlength=1500), embedding=embedding, **options
        ),
    ):
        assert head.node_vectors == "leaves"
        assert head.output_embedding is embedding.weight


def test_from_counts_is_their_distribution() -> None:
    """Of whatever holds the counts; trees as build_ensemble builds them."""
    counts = counts_of(1500)
    hidden = torch.randn(2, D)
    expected = np.where(counts, counts, 0.5)
    expected = torch.from_numpy(expected / expected.sum()).log().float()
    for some in (counts, counts.tolist(), torch.from_numpy(counts), counts.astype(np.float32)):
        head = TreeEnsemble.from_counts(D, some, seed=3)
        assert head.trees == build_ensemble("huffman", 1500, 4, counts, seed=3, root=256, levels=2)
        torch.testing.assert_close(
            head.log_prob(hidden), expected.expand(2, -1), atol=1e-5, rtol=1e-5
        )


def test_from_tokens_clusters_word_vectors() -> None:
    """Of whatever holds the tokens."""
    text = text_of(200)
    counts = np.bincount(text, minlength=200)
    vectors = [word_vectors(text, 200, context=context) for context in ("left", "both")]
    built = build_ensemble("cluster", 200, 2, counts, vectors, root=50, levels=2, noise=0.3)
    other = TreeEnsemble(D, 200, built, frequencies=counts, node_vectors="leaves")
    assert other.trees[0] != other.trees[1]
    for some in (text, text.tolist(), torch.from_numpy(text).view(2, -1), text.astype(np.uint16)):
        head = TreeEnsemble.from_tokens(D, 200, some, n_trees=2, sparse=True)
        assert head.trees == other.trees
        assert torch.equal(head.log_prob(torch.ones(1, D)), other.log_prob(torch.ones(1, D)))
        assert head.sparse


@pytest.mark.parametrize(
    ("trees", "match"),
    [
        ([3, 2, 1], r"trees: expected a list of hstree.trees.Tree, got a list with a int; "
                    r"to build trees from class counts call TreeEnsemble.from_counts"),
        (np.ones(3), r"trees: .* got a ndarray; .*from_counts\(in_features, counts\)"),
        (torch.ones(3), "trees: .* got a Tensor; .*from_counts"),
        (random_tree(3), r"trees: expected a list of trees, got one Tree; pass \[tree\]"),
        ([random_tree(3), None], "trees: .* got a list with a NoneType"),
        ("huffman", "trees: .* got a str"),
    ],
    ids=["counts", "array", "tensor", "one tree", "none", "name"],
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
    with pytest.raises(ValueError, match="root: expected a whole number of at least 1, got 0"):
        TreeEnsemble.from_tokens(D, 3, [0, 1], root=0)
