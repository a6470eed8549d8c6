"""torch.ops.hstree.tree_topk."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.tree_topk import tree_topk_reference
from torch import Tensor

from hstree.ops import tree_topk
from hstree.trees import build_ensemble
from ops.apart import apart, every_instruction_set, outcomes, with_instruction_set
from ops.cases import DTYPES, threads
from ops.mixtures import (
    MIXTURES,
    Mixture,
    corrupted,
    draw,
    every_mixture,
    huffman,
    two_levels,
    walked,
)


def topk(mixture: Mixture, k: int) -> tuple[Tensor, Tensor]:
    return tree_topk(*mixture.arguments(), k)


@every_mixture
def test_equals_walk(name: str) -> None:
    """In float64, with every k."""
    mixture = MIXTURES[name]()
    V = mixture.trees[0].n_classes
    true = [walked(mixture, row) for row in range(len(mixture.hidden))]
    for k in sorted({1, 2, 7, V - 1, V} & set(range(1, V + 1))):
        log_prob, classes = topk(mixture, k)
        assert log_prob.shape == classes.shape == (len(true), k)
        assert classes.dtype == torch.int64
        for row, of in enumerate(true):
            best = sorted(of, reverse=True)[:k]
            np.testing.assert_allclose(log_prob[row], best, rtol=1e-12, atol=1e-12)
            found = classes[row].tolist()
            assert len(set(found)) == k
            np.testing.assert_allclose([of[y] for y in found], best, rtol=1e-12, atol=1e-12)


@every_mixture
def test_equals_reference(name: str) -> None:
    true = MIXTURES[name]()
    V = true.trees[0].n_classes
    everything, order = tree_topk_reference(*true.arguments(), k=V)
    every = torch.empty_like(everything).scatter(1, order, everything)
    k = min(5, V)
    for dtype in DTYPES:
        tolerance = 5e-13 if dtype == torch.float64 else 1e-5
        log_prob, classes = topk(true.to(dtype), k)
        assert log_prob.dtype == torch.promote_types(dtype, torch.float32)
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(log_prob.double(), everything[:, :k], **close)
        torch.testing.assert_close(log_prob.double(), every.gather(1, classes), **close)


def test_large_scores() -> None:
    """Of order 1000: probabilities that no float holds are still in order."""
    mixture = draw(huffman(40, 2), scale=300.0)
    wanted = tree_topk_reference(*mixture.arguments(), k=40)
    assert wanted[0].min() < -2000
    for got in (topk(mixture, 40), topk(mixture.to(torch.float32), 40)):
        torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-4, atol=1e-3)


def test_ties_come_in_order_of_class() -> None:
    """A balanced tree without weights: all classes are equally probable."""
    trees = build_ensemble("random", 16, 2, seed=1)
    log_prob, classes = topk(draw(trees, scale=0.0, bias=False, rows=2), 16)
    torch.testing.assert_close(log_prob, torch.full((2, 16), -math.log(16), dtype=torch.float64))
    assert classes.tolist() == [list(range(16))] * 2


def test_opens_what_may_be_among_the_best_alone() -> None:
    """Nodes less probable than the k-th class may hold NaN; those above its path may not."""
    mixture = draw(huffman(200), rows=1, scale=0.7)
    k = 5
    log_prob, classes = topk(mixture, k)
    values, order = tree_topk_reference(*mixture.arguments(), k=200)
    every = torch.empty_like(values).scatter(1, order, values)[0].exp()
    edges = mixture.trees[0].edges()
    inner = np.flatnonzero(edges.child_node >= 0)
    order_of_leaves = torch.from_numpy(mixture.trees[0].order.astype(np.int64))
    mass = np.array([float(every[order_of_leaves[edges.begin[e] : edges.end[e]]].sum())
                     for e in inner])  # fmt: skip
    node = mixture.node[0].numpy()
    rows = node[edges.child_node[inner], 1]
    worst = float(log_prob[0, -1].exp())
    unlikely = rows[mass < worst * (1 - 1e-9)]
    assert len(unlikely) > 100
    assert mixture.weight is not None
    mixture.weight[0, torch.from_numpy(unlikely).long()] = torch.nan
    got = topk(mixture, k)
    assert torch.equal(got[0], log_prob)
    assert torch.equal(got[1], classes)
    mixture.weight[0, int(node[0, 1])] = torch.nan
    assert topk(mixture, k)[0].isnan().all()


def test_nan_and_infinity() -> None:
    """NaN counts as the largest value, as in torch.topk; a class without probability comes last."""
    mixture = draw(huffman(12, 2), rows=3)
    mixture.hidden[1] = torch.nan
    log_prob, classes = topk(mixture, 12)
    clean = topk(draw(huffman(12, 2), rows=3), 12)
    assert log_prob[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(log_prob[row], clean[0][row])
        assert torch.equal(classes[row], clean[1][row])
    assert classes[1].sort().values.tolist() == list(range(12))
    mixture = draw(huffman(12, root=4), rows=1)
    assert mixture.root_log_prob is not None
    mixture.root_log_prob[0, 0, 1] = -torch.inf
    log_prob = topk(mixture, 12)[0]
    assert log_prob.isinf().any()
    assert torch.equal(log_prob, log_prob.sort(dim=1, descending=True).values)


def results(dtype: torch.dtype) -> list[Tensor]:
    return [part for make in MIXTURES.values() for part in topk(make().to(dtype), 1)] + list(
        topk(draw(huffman(300, 4), rows=40, subset=9).to(dtype), 20)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(results(dtype))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def every_value() -> list[Tensor]:
    return [x for dtype in DTYPES for x in results(dtype)[::2]]


@pytest.mark.slow
@every_instruction_set
def test_instruction_sets_agree(capability: str, tmp_path: Path) -> None:
    of_other = with_instruction_set(capability, "ops.test_tree_topk", "every_value()", tmp_path)
    torch.testing.assert_close(of_other, every_value(), rtol=3e-6, atol=3e-6)


@every_mixture
def test_opcheck(name: str) -> None:
    mixture = MIXTURES[name]()
    torch.library.opcheck(
        torch.ops.hstree.tree_topk,
        (*mixture.arguments(), 1),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_is_not_differentiable() -> None:
    mixture = draw(huffman(9))
    hidden = mixture.hidden.requires_grad_()
    log_prob, _ = topk(replace(mixture, hidden=hidden), 2)
    with pytest.raises(
        RuntimeError, match=r"hstree::tree_topk: not differentiable; .*TreeEnsemble\.topk"
    ):
        log_prob.sum().backward()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({}, "k: expected 1 to 37 .the number of classes., got 38"),
    "hidden": ({"hidden": torch.zeros(3)}, r"hidden: expected shape \[N, D\], got \[3\]"),
    "integers": ({"hidden": torch.zeros(6, 19).long()}, "hidden: expected dtype float32"),
    "weight": ({"weight": torch.zeros(3, 5, 17)}, "weight: expected dtype Double, got Float"),
    "trees": (
        {"weight": torch.zeros(2, 5, 17).double()},
        r"weight: expected size 3 \(trees of log_gate\) in dimension 0",
    ),
    "features": (
        {"weight": torch.zeros(3, 36, 16).double()},
        r"weight: expected size 17 \(features of feature_index\) in dimension 2",
    ),
    "bias": (
        {"bias": torch.zeros(3, 35).double()},
        r"bias: expected size 36 \(rows of weight\) in dimension 1",
    ),
    "class weight": (
        {"class_weight": torch.zeros(37, 17).double()},
        r"class_weight: expected size 19 \(features of hidden\) in dimension 1",
    ),
    "class bias": (
        {"class_bias": torch.zeros(3, 37).double()},
        "class_bias: expected None, as there is no class_weight",
    ),
    "no weight": ({"weight": None}, "bias: expected None, as there is no weight"),
    "gate": (
        {"log_gate": torch.zeros(5, 3).double()},
        r"log_gate: expected size 6 \(rows of hidden\) in dimension 0",
    ),
    "root": (
        {"root_log_prob": torch.zeros(3, 5, 4).double()},
        r"root_log_prob: expected size 6 \(rows of hidden\) in dimension 1",
    ),
    "subset": (
        {"feature_index": torch.zeros(3, 17).int()},
        r"feature_index\[0, 1\]: expected a value in \[1, 19\)",
    ),
    "two shapes": (
        {"class_weight": torch.zeros(37, 19).double()},
        "class_weight: expected None with weight: below the roots are binary nodes or groups",
    ),
    "node": ({"node": torch.zeros(3, 36, 4).int()}, "node: expected size 5"),
    "edge": ({"edge": torch.zeros(3, 72, 2)}, "edge: expected dtype Int, got Float"),
    "no nodes": ({"node": torch.zeros(3, 0, 5).int()}, "node: expected at least one node"),
    "leaf_edge": (
        {"leaf_edge": torch.zeros(2, 37).int()},
        r"leaf_edge: expected size 3 \(trees of log_gate\) in dimension 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    mixture = replace(draw(huffman(37, 3), subset=17), **changes)
    with pytest.raises(RuntimeError, match=f"hstree::tree_topk: {message}"):
        topk(mixture, 38 if name == "k" else 5)


def test_binary_node_beside_groups() -> None:
    mixture = draw(two_levels(20, 2, 2), groups=True)
    node = mixture.node.clone()
    node[0, 1, 0] = 0
    with pytest.raises(RuntimeError, match=r"hstree::tree_topk: node\[0, 1\]: expected a block"):
        topk(replace(mixture, node=node), 20)


def corrupt_tables() -> tuple[int, int]:
    """Each is refused, or what it gives is classes."""
    random = np.random.default_rng(0)

    def attempt(mixture: Mixture) -> None:
        V = mixture.trees[0].n_classes
        classes = topk(mixture, min(3, V))[1]
        assert int(classes.min()) >= 0
        assert int(classes.max()) < V

    mixtures = (corrupted(seed, random) for seed in range(600))
    return outcomes(partial(attempt, mixture) for mixture in mixtures if mixture is not None)


def test_corrupt_tables_never_crash(tmp_path: Path) -> None:
    refused, accepted = apart("ops.test_tree_topk", "corrupt_tables()", tmp_path)
    assert refused > 100
    assert accepted > 100


def test_a_table_with_a_cycle_is_refused() -> None:
    """It would be searched without end."""
    mixture = draw(huffman(20))
    edge = mixture.edge.clone()
    below = int((edge[0, :, 1] > 0).nonzero()[-1])
    for node in (0, int(edge[0, below, 0])):
        edge[0, below, 1] = node
        with pytest.raises(RuntimeError, match=r"hstree::tree_topk: (edge|node)"):
            topk(replace(mixture, edge=edge), 20)


@pytest.mark.parametrize("name", ["wide root", "groups"])
def test_a_search_over_its_budget_is_given_up(name: str) -> None:
    """Row by row: the others are those of an unlimited search."""
    mixture = MIXTURES[name]()
    wanted = topk(mixture, 3)
    given_up: list[int] = []
    for most in (0, 10, 25, 10_000):
        log_prob, classes = tree_topk(*mixture.arguments(), 3, most_scored=most)
        lost = classes[:, 0] < 0
        assert log_prob[lost].isnan().all()
        assert (classes[lost] == -1).all()
        assert torch.equal(log_prob[~lost], wanted[0][~lost])
        assert torch.equal(classes[~lost], wanted[1][~lost])
        given_up.append(int(lost.sum()))
    assert given_up == sorted(given_up, reverse=True)
    assert given_up[0] == len(mixture.hidden)
    assert given_up[-1] == 0
    with pytest.raises(ValueError, match="most_scored: expected a whole number of at least 0"):
        tree_topk(*mixture.arguments(), 3, most_scored=-1)
