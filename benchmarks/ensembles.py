"""Steps of whole tree ensembles, of their kernels, and of their baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contest import Build, Contestant, Size, batch, step
from benchmarks.heads import FLAT_LOSSES
from hstree.heads import TreeEnsemble
from hstree.trees import build_ensemble

ADAPTIVE = "AdaptiveLogSoftmaxWithLoss"
MODULE = "TreeEnsemble"
KERNELS = "its kernels"
WIKITEXT_CLASSES = 33_278
BINARY = {"n_trees": 8}
WIDE = {"n_trees": 4, "root": 256, "leaf": 32}
"""T, C and G."""


def _head(
    size: Size, n_trees: int, root: int = 1, leaf: int = 1
) -> tuple[TreeEnsemble, Tensor, Tensor]:
    """Huffman trees and a batch. Binary trees read half of the features each; wide nodes are
    reduced if there are too few classes."""
    hidden, target, frequencies = batch(size.rows, size.features, size.classes)
    trees = build_ensemble(
        "huffman", size.classes, n_trees, frequencies, root=min(root, size.classes // 4), leaf=leaf
    )
    head = TreeEnsemble(
        size.features,
        size.classes,
        trees,
        subset_size=size.features // 2 if root == 1 else None,
        gate="context",
        frequencies=frequencies,
        sparse=True,
    )
    for weight in (head.nodes.binary_weight, head.nodes.wide_weight, head.nodes.root_weight):
        if weight is not None:
            nn.init.uniform_(weight, -0.1, 0.1)
    return head, hidden, target


def _contestant(head: nn.Module, hidden: Tensor, target: Tensor) -> Contestant:
    leaves = [hidden, *head.parameters()]
    return Contestant(
        step(lambda: head(hidden, target).loss, leaves),
        parameters=sum(leaf.numel() for leaf in leaves[1:]),
    )


def _module(size: Size, device: str, **shape: int) -> Contestant:
    return _contestant(*_head(size, **shape))


def _path(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> Callable[[], object]:
    """The path op, forward and backward, without autograd."""
    nodes = head.nodes
    names, weights = ("path_offset", "path"), (nodes.binary_weight, nodes.binary_bias)
    return _op("path_log_prob", head, hidden, target, names, weights, head.layout.max_depth)


def _leaf_groups(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> Callable[[], object]:
    """The wide op, forward and backward, without autograd."""
    nodes = head.nodes
    names, weights = ("wide_offset", "wide_path"), (nodes.wide_weight, nodes.wide_bias)
    return _op("wide_log_prob", head, hidden, target, names, weights, head.layout.max_width)


def _op(
    name: str,
    head: TreeEnsemble,
    hidden: Tensor,
    target: Tensor,
    table_names: tuple[str, str],
    weights: tuple[Tensor | None, Tensor | None],
    most: int,
) -> Callable[[], object]:
    """The op on the nodes of one kind; nothing if the trees have none."""
    weight, bias = weights
    if weight is None:
        return lambda: None
    layout = head.layout
    forward, backward = (getattr(torch.ops.hstree, name + end) for end in ("", "_backward"))
    paths = [getattr(layout, name) for name in table_names]
    tables = (target, *paths, layout.leaf_position, layout.feature_index)
    grad = torch.randn(len(hidden), head.n_trees)
    rest = None, [True] * 3, True  # no plan, all gradients, row-sparse

    @torch.no_grad()
    def run() -> None:
        _, score, order, _ = forward(hidden, weight, bias, *tables, most)
        backward(grad, hidden, weight, *tables, score, order, *rest)

    return run


def _root_products(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> Callable[[], object]:
    """The three products of the root: scores, and the gradients of features and weight, with the
    scores in place of their gradient."""
    weight, bias = head.nodes.root_weight, head.nodes.root_bias
    assert weight is not None
    assert bias is not None

    @torch.no_grad()
    def run() -> None:
        rows = weight.flatten(0, 1)
        scores = F.linear(hidden, rows, bias.flatten())
        torch.mm(scores, rows)
        torch.mm(scores.t(), hidden)

    return run


def _root(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> Callable[[], object]:
    """The root by torch's own ops, forward and backward, including log-softmax."""
    weight, bias = head.nodes.root_weight, head.nodes.root_bias
    assert weight is not None
    assert bias is not None
    child = head.layout.root_child.long()[:, target].t().flatten()

    def loss() -> Tensor:
        scores = F.linear(hidden, weight.flatten(0, 1), bias.flatten())
        return F.cross_entropy(scores.view(len(child), -1), child)

    return step(loss, [hidden, weight, bias])


Part = Callable[[TreeEnsemble, Tensor, Tensor], Callable[[], object]]


def _parts(size: Size, device: str, parts: Sequence[Part], **shape: int) -> Contestant:
    """Runs the parts of a module one after another."""
    head, hidden, target = _head(size, **shape)
    steps = [part(head, hidden, target) for part in parts]

    def run() -> None:
        for part in steps:
            part()

    return Contestant(run)


def _adaptive(size: Size, device: str) -> Contestant:
    """Adaptive softmax, with the cutoffs of its documentation."""
    hidden, target, _ = batch(size.rows, size.features, size.classes)
    cutoffs = [round(size.classes / 15), 3 * round(size.classes / 15)]
    head = nn.AdaptiveLogSoftmaxWithLoss(size.features, size.classes, cutoffs, div_value=4.0)
    return _contestant(head, hidden, target)


def _two_levels(size: Size, device: str, root: int, sparse: bool) -> Contestant:
    """Four trees of two levels whose leaves share one output embedding."""
    hidden, target, frequencies = batch(size.rows, size.features, size.classes)
    root = min(root, size.classes // 4)
    trees = build_ensemble("huffman", size.classes, 4, frequencies, root=root, levels=2)
    options = {"node_vectors": "leaves", "gate": "context", "sparse": sparse}
    head = TreeEnsemble(size.features, size.classes, trees, frequencies=frequencies, **options)
    assert head.nodes.root_weight is not None
    nn.init.uniform_(head.nodes.root_weight, -0.1, 0.1)
    return _contestant(head, hidden, target)


SHARED_SIZES = {classes: Size(700, 200, classes, 200) for classes in (10_000, WIKITEXT_CLASSES)}
"""A batch of 20 streams of 35 steps."""
SHARED_LEAVES = {
    f"C = {root}, {kind}": partial(_two_levels, root=root, sparse=kind == "row-sparse")
    for root in (256, 512)
    for kind in ("dense", "row-sparse")
}

ENSEMBLE_CONTESTS: dict[str, dict[str, Build]] = {
    "wide": {MODULE: partial(_module, **WIDE), ADAPTIVE: _adaptive, **FLAT_LOSSES},
    "wide parts": {
        MODULE: partial(_module, **WIDE),
        KERNELS: partial(_parts, parts=[_path, _leaf_groups, _root_products], **WIDE),
        "path": partial(_parts, parts=[_path], **WIDE),
        "leaf groups": partial(_parts, parts=[_leaf_groups], **WIDE),
        "root": partial(_parts, parts=[_root], **WIDE),
    },
    "binary parts": {
        MODULE: partial(_module, **BINARY),
        KERNELS: partial(_parts, parts=[_path], **BINARY),
    },
    **{f"shared leaves, V = {classes}": SHARED_LEAVES | FLAT_LOSSES for classes in SHARED_SIZES},
}
