"""torch.ops.hstree.tree_log_softmax and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hstree.ops import tree_log_softmax
from hstree.ops._composed_tree_log_softmax import composed_backward
from hstree.trees import Tree
from hstree.trees.ensemble_tables import ensemble_tables
from hstree.trees.tables import table_sizes
from ops.apart import apart, every_instruction_set, outcomes, with_instruction_set
from ops.cases import threads
from ops.tree_softmax_cases import (
    SUMS,
    Batch,
    Case,
    by_hand,
    check_against,
    composed,
    corrupted,
    draw,
    mixed,
    reference,
    tables_of,
    walked,
)

OP = torch.ops.hstree.tree_log_softmax.default
BACKWARD = torch.ops.hstree.tree_log_softmax_backward.default


CASES = (
    Case("binary nodes"),
    Case("one tree", shapes=("random",)),
    Case("wide roots", shapes=("random", "random"), root=5),
    Case("wide roots alone", shapes=("flat", "flat"), classes=7),
    Case("wide root alone", shapes=("flat",), classes=200),
    Case("roots of either kind", shapes=("flat", "chain", "random"), classes=7),
    Case("deepest tree beside a shallow one", shapes=("chain", "random"), classes=65),
    Case("more leaves than are mixed at once", shapes=("random", "flat"), classes=700),
    Case("two classes", classes=2),
    Case("one class", classes=1),
    Case("zero rows", rows=0),
    Case("one row", rows=1),
    Case("one row of a large tree", shapes=("random", "random"), classes=400, rows=1),
    Case("vectors full", rows=32),
    Case("a vector of float64 not full", rows=7),
    Case("scores of order 100", root=4, scale=100.0),
)
# Of classes, rows and threads on CUDA.
BLOCKS = (
    Case("a block of classes and one more", ("random", "flat"), classes=1025, root=40, rows=1),
    Case("a block of rows and one more", ("random",) * 4, classes=40, root=5, rows=33),
    Case("three blocks of rows", ("flat", "random"), classes=70, root=30, rows=70),
    Case("two rows", ("chain", "flat"), classes=60, rows=2),
    Case("more children than threads", ("flat",), classes=300, rows=1),
)
TWO_LEVELS = Case("two levels", ("levels", "levels"), classes=300)
GROUPS = (
    TWO_LEVELS,
    Case("one tree of groups", shapes=("levels",), classes=100),
    Case("no groups", shapes=("flat", "flat"), classes=7),
    Case("groups of one tree", shapes=("flat", "levels"), classes=40),
    Case("several blocks of classes", ("levels", "levels"), classes=2100),
    Case("groups, two classes", classes=2),
    Case("groups, one class", classes=1),
    Case("groups, zero rows", rows=0),
    Case("groups, one row", rows=1),
    Case("rows one by one", rows=4),
    Case("most of a vector", rows=12),
    Case("groups, vectors full", rows=32),
    Case("groups, scores of order 100", scale=100.0),
)
GROUP_BLOCKS = (
    Case("a block of classes in groups and one more", ("levels",) * 2, classes=1025, rows=1),
    Case("a block of rows of groups and one more", ("levels",) * 4, classes=40, rows=33),
    Case("groups of one tree, two rows", ("flat", "levels"), classes=40, rows=2),
)
USUAL, SMALL = CASES[2], Case("small", shapes=("random", "flat"), classes=7, rows=3)
MANY = Case("rows for three threads", root=5, rows=130, classes=50)
SMALL_GROUPS = Case("small groups", shapes=("levels", "levels"), classes=7, rows=3)
MANY_GROUPS = Case("rows for three threads", ("levels", "levels"), rows=130, classes=1500)
EVERY = [
    *((case, False) for case in CASES),
    *((case, True) for case in GROUPS),
    *(pytest.param(case, False, marks=pytest.mark.slow) for case in BLOCKS),
    *(pytest.param(case, True, marks=pytest.mark.slow) for case in GROUP_BLOCKS),
]


FUNCTIONS = {"op": mixed, "composed": composed, "reference": reference}


def backward_arguments(batch: Batch) -> tuple[Any, ...]:
    """Of trees without groups."""
    tables = batch.score, batch.log_gate, batch.node, batch.edge
    return batch.grad, mixed(batch), *tables, batch.root_begin, batch.root_begin


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", SUMS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("case", "groups"), EVERY, ids=str)
def test_equals_the_walk(
    case: Case, groups: bool, dtype: torch.dtype, function: str, device: torch.device
) -> None:
    batch = draw(case, dtype, groups=groups)
    check_against(batch, walked, FUNCTIONS[function], device)


@pytest.mark.parametrize(("case", "groups"), [(USUAL, False), (TWO_LEVELS, True)], ids=str)
def test_tables_are_those_of_hstree(case: Case, groups: bool) -> None:
    batch = draw(case, groups=groups)
    for t, nested in enumerate(batch.nested):
        tree = Tree.from_nested(nested)
        sizes = table_sizes((tree.order, tree.node_offset, tree.boundary), groups)
        tables = ensemble_tables([tree], [sizes], groups)
        for name, filled in (("node", batch.node[t]), ("edge", batch.edge[t])):
            own = torch.from_numpy(tables[name][0])
            assert torch.equal(own, filled[: len(own)])
            assert not filled[len(own) :].any()


def test_other_devices_have_rows_for_the_classes() -> None:
    """The shapes, on the meta device."""
    batch = draw(TWO_LEVELS, torch.float32, groups=True)
    assert mixed(batch.to("meta")).shape == batch.class_score.shape


def test_relative_accuracy_of_one_node(device: torch.device) -> None:
    """Log-probabilities near 0 keep their digits, from scores of -200 to 200."""
    z = torch.linspace(-200, 200, 4001, device=device).requires_grad_()
    node = torch.tensor([[[0, 0, 0, 2, -1]]], dtype=torch.int32, device=device)
    edge = torch.tensor([[[0, ~0], [0, ~1]]], dtype=torch.int32, device=device)
    gate = torch.zeros(len(z), 1, device=device)
    log_prob = tree_log_softmax(z[None, None], gate, node, edge, 2, root_begin=1)
    log_prob[:, 0].sum().backward()
    true = z.detach().double()
    expected = F.logsigmoid(torch.stack([true, -true], 1))
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(z.grad.double(), torch.sigmoid(-true), rtol=1e-6, atol=1e-37)


def test_many_children_are_summed_accurately() -> None:
    """Of 50,000 equal scores, where a plain sum in float32 would be off by 1e-4."""
    classes = 50_000
    score = torch.full((1, classes, 1), -3.7)
    node = torch.tensor([[[2, 0, 0, classes, -1]]], dtype=torch.int32)
    edge = torch.stack([torch.zeros(classes), -1 - torch.arange(classes)], 1).int()[None]
    log_prob = tree_log_softmax(score, torch.zeros(1, 1), node, edge, classes, root_begin=0)
    torch.testing.assert_close(log_prob, torch.full_like(log_prob, -np.log(classes)), rtol=3e-7,
                               atol=0)  # fmt: skip


def test_impossible_classes(device: torch.device) -> None:
    """-inf in one tree or in all: no NaN, and no gradient from there."""
    batch = draw(CASES[0], torch.float32)
    first, second = batch.score.clone(), batch.score.clone()
    first[0, 0] = second[:, 0] = -torch.inf  # the root's left edge
    for score, reached in ((first, True), (second, False)):
        results = replace(batch, score=score).to(device).gradients(mixed)
        log_prob, *grads = (x.cpu() for x in results)
        expected = replace(batch, score=score).to(torch.float64)
        torch.testing.assert_close(log_prob.double(), reference(expected), rtol=1e-5, atol=1e-5)
        assert log_prob.isfinite().all() == reached
        assert all(grad.isfinite().all() for grad in grads)
    gate = batch.log_gate.clone()
    gate[:, 1] = -torch.inf
    got = replace(batch, log_gate=gate).to(device).gradients(mixed)
    assert all(x.isfinite().all() for x in got)
    assert not got[1][1].any()
    assert not got[2][:, 1].any()


@pytest.mark.parametrize("case", [CASES[0], USUAL], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_bad_scores_stay_in_their_row(value: float, case: Case) -> None:
    batch = draw(case, torch.float32)
    score = batch.score.clone()
    score[0, :, 3] = value
    got, expected = replace(batch, score=score).gradients(mixed), batch.gradients(mixed)
    others = torch.arange(len(batch.grad)) != 3
    assert torch.equal(got[0][others], expected[0][others])
    assert torch.equal(got[1][..., others], expected[1][..., others])
    assert torch.equal(got[2][others], expected[2][others])
    if value != value:
        assert got[0][3].isnan().all()
        assert got[2][3, 0].isnan()
    torch.testing.assert_close(
        got[0], reference(replace(batch, score=score)), rtol=1e-4, atol=1e-5, equal_nan=True
    )


def test_nan_at_one_node_is_below_it() -> None:
    """((0, 1), (2, (3, 4))): NaN at the node of 3 and 4."""
    batch = draw(Case("by hand", classes=5, rows=1), nested=[((0, 1), (2, (3, 4)))])
    batch.score[0, 3] = torch.nan
    log_prob = mixed(batch)
    assert log_prob.isnan().tolist() == [[False, False, False, True, True]]


def test_rows_of_no_node_have_no_gradient() -> None:
    """Where a tree has fewer nodes than the largest; whatever their scores are."""
    batch = draw(Case("roots of either kind", ("flat", "chain"), classes=7), torch.float32)
    used = torch.zeros(batch.score.shape[:2], dtype=torch.bool)
    for t, nested in enumerate(batch.nested):
        for begin, rows in zip((0, batch.root_begin), tables_of(nested)[2], strict=True):
            used[t, begin : begin + rows] = True
    assert not used.all()
    batch.score[~used] = torch.nan
    log_prob, grad_score, _ = batch.gradients(mixed)
    assert log_prob.isfinite().all()
    assert grad_score[used].all()
    assert not grad_score[~used].any()


@pytest.mark.parametrize(("case", "groups"), [(USUAL, False), (TWO_LEVELS, True)], ids=str)
def test_noncontiguous(case: Case, groups: bool) -> None:
    batch = draw(case, torch.float32, groups=groups)
    results = batch.transposed().gradients(mixed)
    for got, expected in zip(results, batch.gradients(mixed), strict=True):
        assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_same_bits_for_every_number_of_threads_and_rows(dtype: torch.dtype) -> None:
    batch = draw(MANY, dtype)
    expected = batch.gradients(mixed)
    for count in (2, 3):
        with threads(count):
            for got, wanted in zip(batch.gradients(mixed), expected, strict=True):
                assert torch.equal(got, wanted)
    for rows in (slice(0, 1), slice(40, 77)):
        log_prob, grad_score, grad_gate = batch.rows(rows).gradients(mixed)
        assert torch.equal(log_prob, expected[0][rows])
        assert torch.equal(grad_score, expected[1][..., rows])
        assert torch.equal(grad_gate, expected[2][rows])


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_groups_have_the_same_bits_for_every_number_of_threads_and_rows(dtype: torch.dtype) -> None:
    batch = draw(MANY_GROUPS, dtype, groups=True)
    expected = mixed(batch)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(mixed(batch), expected)
            for rows in (slice(0, 1), slice(7, 9), slice(3, 8), slice(20, 32), slice(40, 77)):
                assert torch.equal(mixed(batch.rows(rows)), expected[rows])


def every_result() -> list[list[Tensor]]:
    """Gradients without groups; with them log-probabilities, of which those of a row have the same
    bits in a batch of its own."""
    results = [draw(case, dtype).gradients(mixed) for dtype in SUMS for case in CASES]
    for case in (MANY_GROUPS, *GROUPS):
        for dtype in SUMS:
            batch = draw(case, dtype, groups=True)
            log_prob = mixed(batch)
            for r in range(len(log_prob)):
                assert torch.equal(mixed(batch.rows(slice(r, r + 1))), log_prob[r : r + 1])
            results.append([log_prob])
    return results


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    call = "every_result()"
    results = with_instruction_set(capability, "ops.test_tree_log_softmax", call, tmp_path)
    for got, expected in zip(results, every_result(), strict=True):
        tolerance = 1e-4 if got[0].dtype == torch.float32 else 1e-12
        assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("case", "groups"), [(SMALL, False), (SMALL_GROUPS, True)], ids=str)
def test_gradcheck_of_the_composed(case: Case, groups: bool, device: torch.device) -> None:
    batch = draw(case, groups=groups).to(device)
    leaves = tuple(x.requires_grad_() for x in batch.leaves)
    assert torch.autograd.gradcheck(lambda *x: composed(batch.with_leaves(x)), leaves)


def refused(batch: Batch, match: str) -> None:
    with pytest.raises(RuntimeError, match=f"^hstree::tree_log_softmax: {match}"):
        OP(*batch.arguments())
    if batch.class_score is not None:
        return
    log_prob = batch.score.new_zeros(len(batch.grad), batch.classes)
    tables = batch.score, batch.log_gate, batch.node, batch.edge
    begins = batch.root_begin, batch.root_begin
    with pytest.raises(RuntimeError, match=f"^hstree::tree_log_softmax_backward: {match}"):
        BACKWARD(torch.zeros_like(log_prob), log_prob, *tables, *begins)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("score", lambda x: x[0], r"score: expected shape \[T, R, N\]"),
        ("score", Tensor.half, "score: expected dtype float32 or float64, got Half"),
        ("score", lambda x: x[:0], "score: expected at least one tree"),
        ("log_gate", lambda x: x[0], r"log_gate: expected shape \[N, T\], got \[2\]"),
        ("log_gate", lambda x: x[1:], r"log_gate: expected size 17 \(rows"),
        ("log_gate", lambda x: x[:, 1:], r"log_gate: expected size 2 \(trees"),
        ("log_gate", Tensor.double, "log_gate: expected dtype Float, got Double"),
        ("node", lambda x: x[0], r"node: expected shape \[T, M, 5\]"),
        ("node", lambda x: x[1:], r"node: expected size 2 \(trees"),
        ("node", lambda x: x[..., 1:], r"node: expected size 5 \(block, row"),
        ("node", Tensor.long, "node: expected dtype Int, got Long"),
        ("node", lambda x: x[:, :0], "n_classes: expected 1, or at most as many"),
        ("edge", lambda x: x[0], r"edge: expected shape \[T, E, 2\]"),
        ("edge", lambda x: x[..., :1], r"edge: expected size 2 \(node above"),
        ("edge", lambda x: x[:, :9], "n_classes: expected 1, or at most as many"),
        (
            "root_begin",
            lambda _: -1,
            r"root_begin: expected 0 to \d+ \(the rows of score\), got -1",
        ),
        ("root_begin", lambda _: 10**6, "root_begin: expected 0 to"),
    ],
)
def test_bad_argument(name: str, change: Any, match: str) -> None:
    batch = draw(USUAL, torch.float32)
    refused(replace(batch, **{name: change(getattr(batch, name))}), match)


def test_bad_number_of_classes() -> None:
    batch = draw(USUAL, torch.float32)
    refused(
        replace(batch, classes=24), r"edge: expected every class below the root of tree 0, foun"
    )
    refused(replace(batch, classes=22), r"edge\[.*~class of one of 22 classes")
    for classes in (0, -1, 2**60):
        with pytest.raises(RuntimeError, match="n_classes: expected 1, or at most as many"):
            OP(*replace(batch, classes=classes).arguments())


def test_bad_gradient() -> None:
    batch = draw(USUAL, torch.float32)
    grad, log_prob, *rest = backward_arguments(batch)
    for bad, match in (
        ((grad[1:], log_prob), r"grad: expected size 17 \(rows"),
        ((grad[:, 1:], log_prob), r"grad: expected size 23 \(classes of log_prob\)"),
        ((grad[0], log_prob), r"grad: expected shape \[N, V\]"),
        ((grad.double(), log_prob), "grad: expected dtype Float, got Double"),
        ((grad, log_prob[1:]), r"log_prob: expected size 17 \(rows"),
        ((grad, log_prob[0]), r"log_prob: expected shape \[N, V\]"),
        ((grad, log_prob.double()), "log_prob: expected dtype Float, got Double"),
    ):
        with pytest.raises(RuntimeError, match=f"^hstree::tree_log_softmax_backward: {match}"):
            BACKWARD(*bad, *rest)
    *tables, _class_begin, root_begin = rest
    with pytest.raises(RuntimeError, match=rf"class_begin: expected 0 to {root_begin} "):
        BACKWARD(grad, log_prob, *tables, root_begin + 1, root_begin)


# The tree ((0, 1), (2, (3, 4)), 5) of a wide root and three binary nodes.
@pytest.mark.parametrize(
    ("table", "place", "value", "match"),
    [
        ("node", (1, 0), 3, r"node\[0, 1\]: expected a block, its first row"),
        ("node", (1, 0), -1, r"node\[0, 1\]: expected a block"),
        ("node", (1, 0), 1, r"node\[0, 1\]: expected a block"),  # a group, without class_score
        ("node", (0, 0), 0, r"node\[0, 0\]: expected a block"),  # binary, of three children
        ("node", (3, 1), 3, r"node\[0, 3\]: expected a block"),  # rows beyond the block
        ("node", (3, 1), -1, r"node\[0, 3\]: expected a block"),
        ("node", (3, 2), 8, r"node\[0, 3\]: expected a block"),  # edges beyond the table
        ("node", (3, 2), -1, r"node\[0, 3\]: expected a block"),
        ("node", (1, 3), 1, r"node\[0, 1\]: expected a block"),
        ("node", (0, 3), 2**31 - 1, r"node\[0, 0\]: expected a block"),
        ("node", (2, 4), 0, r"node\[0, 2\]: expected .* the edge above it, 1, got 0, 1, 5, 2, 0"),
        ("node", (0, 4), 0, r"node\[0, 0\]: expected .* the edge above it, -1, got 2, 0, 0, 3, 0"),
        ("edge", (1, 1), 4, r"edge\[0, 1\]: expected node 0 above, and below it one of 4 nodes"),
        ("edge", (1, 1), 0, r"edge\[0, 1\]: expected node 0 above.* not met before, got 0, 0"),
        ("edge", (0, 1), 2, r"edge\[0, 0\]: expected node 0 above.* not met before, got 0, 2"),
        ("edge", (4, 1), ~6, r"edge\[0, 4\]: expected node 1 above.* one of 6 classes"),
        ("edge", (4, 1), -(2**31), r"edge\[0, 4\]: expected node 1 above"),
        ("edge", (4, 1), ~0, r"edge\[0, 4\]: .*|edge\[0, 3\]: expected .* not met before"),
        ("edge", (4, 0), 2, r"edge\[0, 4\]: expected node 1 above.* got 2, -2"),
    ],
)
def test_bad_table(table: str, place: tuple[int, int], value: int, match: str) -> None:
    nodes, edges, used = tables_of(((0, 1), (2, (3, 4)), 5))
    assert nodes[2] == (0, 1, 5, 2, 1)
    batch = by_hand(nodes, edges, used, 6)
    OP(*batch.arguments())
    getattr(batch, table)[0][place] = value
    refused(batch, match)


def test_nodes_out_of_order_and_shared_rows() -> None:
    nodes, edges, used = tables_of(((0, 1), (2, 3)))
    batch = by_hand(nodes, edges, used, 4)
    shared = batch.node.clone()
    shared[0, 2, 1] = 1
    refused(replace(batch, node=shared), r"node\[0, 2\]: expected rows of its own, got row 1")
    swapped = batch.edge.clone()
    swapped[0, :2, 1] = torch.tensor([2, 1])
    refused(
        replace(batch, edge=swapped), r"edge\[0, 0\]: expected node 1, the next in preorder, got 2"
    )


def test_too_deep() -> None:
    nested: Any = 65
    for c in range(64, -1, -1):
        nested = (c, nested)
    nodes, edges, used = tables_of(nested)
    batch = by_hand(nodes, edges, used, 66)
    refused(batch, r"node\[0, 64\]: expected at most 64 nodes on a path")


# Groups


def test_large_scores_cost_no_digits_of_large_probabilities() -> None:
    """Errors of roundings of 1, not of the scores."""
    case = Case("by hand", classes=5, rows=1)
    batch = draw(case, torch.float32, groups=True, nested=[((0, 1, 2), 3, 4)])
    class_score = torch.tensor([[100.0, 84.0, 80.0, 0.0, 0.0]])
    score = torch.tensor([[[200.0], [0.0], [0.0]]])
    batch = replace(batch, score=score, class_score=class_score, class_bias=0 * batch.class_bias)
    expected = class_score[:, :3].double().log_softmax(1)
    log_prob = mixed(replace(batch, log_gate=torch.zeros(1, 1)))
    torch.testing.assert_close(log_prob[:, :3].double(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_shares_below_the_smallest_number(rows: int, device: torch.device) -> None:
    """Class 3 stands alone in one tree, improbable there, and scores 88 below the row's best in the
    other, in a group of which it is a large part."""
    case = Case("by hand", classes=4, rows=rows)
    batch = draw(case, torch.float32, groups=True, nested=[(3, (0, 1, 2)), ((0, 1), (2, 3))])
    scores = torch.tensor([0.0, -1.0, -57.0, -88.0]) + 0.01 * batch.class_score
    batch = replace(batch, class_score=scores, class_bias=0 * batch.class_bias)
    for of_alone in (-40.0, -20.0, -80.0):
        batch.score[0] = torch.tensor([[of_alone], [0.0]])
        expected = walked(batch.to(torch.float64))
        log_prob = mixed(batch.to(device))
        torch.testing.assert_close(log_prob.double().cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_node_of_a_million_classes(rows: int) -> None:
    """As a wide root and as a group, with a class of 3/4: probabilities add up to 1."""
    classes = 2**20
    case = Case("by hand", classes=classes, rows=rows)
    batch = draw(
        case,
        torch.float32,
        groups=True,
        nested=[tuple(range(classes)), (0, tuple(range(1, classes)))],
    )
    batch.class_score.zero_().index_fill_(1, torch.tensor([7]), math.log(3 * classes))
    batch.class_bias.zero_()
    batch.score.zero_()[0, 7] = math.log(3 * classes)
    batch.log_gate.fill_(math.log(0.5))
    total = mixed(batch).double().exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 17])
def test_impossible_classes_of_groups(rows: int) -> None:
    """-inf in one tree or in all: no NaN, and no gradient from there."""
    batch = draw(replace(TWO_LEVELS, rows=rows), torch.float32, groups=True)
    bias, score = batch.class_bias.clone(), batch.class_score.clone()
    bias[0, :5] = -torch.inf
    score[:, 7] = -torch.inf
    gate = batch.log_gate.clone()
    gate[:, 1] = -torch.inf
    for changed in ({"class_bias": bias}, {"class_score": score}, {"log_gate": gate}):
        bad = replace(batch, **changed)
        log_prob, *grads = bad.gradients(mixed)
        torch.testing.assert_close(
            log_prob.double(), walked(bad.to(torch.float64)), rtol=1e-5, atol=1e-5
        )
        assert not any(x.isnan().any() for x in grads)


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_bad_class_scores_stay_in_their_row(value: float, rows: int) -> None:
    batch = draw(replace(TWO_LEVELS, rows=rows), torch.float32, groups=True)
    score = batch.class_score.clone()
    score[1] = value
    score[2, 5] = value
    bad = replace(batch, class_score=score)
    got, expected = mixed(bad), mixed(batch)
    others = torch.arange(rows).sub(1.5).abs() > 1
    assert torch.equal(got[others], expected[others])
    torch.testing.assert_close(got, walked(bad), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("class_score", lambda x: x[0], r"class_score: expected shape \[N, V\], got \[300\]"),
        ("class_score", Tensor.double, "class_score: expected dtype Float, got Double"),
        ("class_score", lambda x: x[1:], r"class_score: expected size 17 \(rows"),
        ("class_score", lambda x: x[:, 1:], r"class_score: expected size 300 \(classes\)"),
        ("class_bias", lambda x: x[0], r"class_bias: expected shape \[T, V\]"),
        ("class_bias", Tensor.double, "class_bias: expected dtype Float, got Double"),
        ("class_bias", lambda x: x[1:], r"class_bias: expected size 2 \(trees"),
        ("class_bias", lambda x: x[:, 1:], r"class_bias: expected size 300 \(classes\)"),
        ("score", Tensor.half, "score: expected dtype float32 or float64, got Half"),
        ("log_gate", lambda x: x[1:], r"log_gate: expected size 17 \(rows"),
        ("root_begin", lambda _: -1, "root_begin: expected 0 to"),
        ("classes", lambda _: 10**6, "n_classes: expected 1, or at most as many as edges"),
    ],
)
def test_bad_argument_of_groups(name: str, change: Any, match: str) -> None:
    batch = draw(TWO_LEVELS, torch.float32, groups=True)
    refused(replace(batch, **{name: change(getattr(batch, name))}), match)


@pytest.mark.parametrize("missing", ["class_score", "class_bias"])
def test_one_of_score_and_bias(missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{missing}: expected a tensor with class_"):
        mixed(replace(draw(SMALL_GROUPS, groups=True), **{missing: None}))


# The tree ((0, 1), (2, 3, 4), 5) of a wide root and two groups.
@pytest.mark.parametrize(
    ("table", "place", "value", "match"),
    [
        ("node", (2, 1), 4, r"node\[0, 2\]: expected a block, its first row"),  # beyond V
        ("node", (2, 1), -1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 1), 2**31 - 1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 2), 6, r"node\[0, 2\]: expected a block"),
        ("node", (2, 3), 2**31 - 1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 4), 0, r"node\[0, 2\]: expected .* the edge above it, 1, got 1, 2, 5, 3, 0"),
        ("node", (0, 0), 1, r"node\[0, 0\]: expected a block"),
        ("node", (1, 0), 2, r"node\[0, 1\]: expected a block"),
        ("node", (1, 0), 0, r"node\[0, 1\]: expected a block"),  # binary
        ("edge", (1, 1), 0, r"edge\[0, 1\]: expected node 0 above.* not met before, got 0, 0"),
        ("edge", (5, 1), 1, r"edge\[0, 5\]: expected node 2 above.* got 2, 1"),  # a node
        ("edge", (5, 1), ~6, r"edge\[0, 5\]: expected node 2 above.* one of 6 classes"),
        ("edge", (5, 1), -(2**31), r"edge\[0, 5\]: expected node 2 above"),
        ("edge", (5, 1), ~0, r"edge\[0, [35]\]: expected .* not met before"),
        ("edge", (4, 0), 2, r"edge\[0, 4\]: expected node 1 above.* got 2, -2"),
    ],
)
def test_bad_table_of_groups(table: str, place: tuple[int, int], value: int, match: str) -> None:
    nodes = [(2, 0, 0, 3, -1), (1, 0, 3, 2, 0), (1, 2, 5, 3, 1)]
    edges = [(0, 1), (0, 2), (0, ~5), (1, ~0), (1, ~1), (2, ~2), (2, ~3), (2, ~4)]
    batch = replace(
        by_hand(nodes, edges, (1, 3), 6),  # and the score of a binary node
        class_score=torch.zeros(3, 6),
        class_bias=torch.zeros(1, 6),
    )
    OP(*batch.arguments())
    getattr(batch, table)[0][place] = value
    refused(batch, match)


def corrupt_tables(groups: bool) -> tuple[int, int]:
    def attempt(seed: int) -> None:
        batch = corrupted(seed, groups)
        if groups:
            OP(*batch.arguments())
        else:
            BACKWARD(*backward_arguments(batch))

    return outcomes(partial(attempt, seed) for seed in range(500))


@pytest.mark.parametrize("groups", [False, True])
def test_corrupt_tables_never_crash(groups: bool, tmp_path: Path) -> None:
    """Random numbers in the tables, in a process of its own: an error or a result."""
    call = f"corrupt_tables({groups})"
    refused, accepted = apart("ops.test_tree_log_softmax", call, tmp_path)
    assert refused > 300
    assert accepted > 10


def test_the_kernel_of_every_device() -> None:
    """composed_backward, called by the dispatcher, equals the kernel of the CPU."""
    arguments = backward_arguments(draw(USUAL))
    expected = BACKWARD(*arguments)
    schema = torch.library.infer_schema(composed_backward, mutates_args=())
    name = "hstree_test::tree_log_softmax_backward"
    torch.library.define(name, schema)
    torch.library.impl(name, "default", composed_backward)
    composed = torch.ops.hstree_test.tree_log_softmax_backward
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert_close(composed(*arguments), expected)
