"""torch.ops.hstree.tree_log_softmax and its gradient."""

from __future__ import annotations

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

from hstree.heads.trees.layout import Layout
from hstree.ops import tree_log_softmax
from hstree.ops._composed_tree_log_softmax import composed_backward
from hstree.trees import Tree
from ops.apart import apart, every_instruction_set, outcomes, with_instruction_set
from ops.cases import slow, threads
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
)

OP = torch.ops.hstree.tree_log_softmax.default
BACKWARD = torch.ops.hstree.tree_log_softmax_backward.default


CASES = (
    Case("wide and binary nodes"),
    Case("binary nodes", widest=2),
    Case("one tree", shapes=("random",)),
    Case("wide roots", shapes=("flat", "flat"), widest=7),
    Case("wide root alone", shapes=("flat",), classes=200, widest=200),
    Case("roots of either kind", shapes=("flat", "chain", "random"), classes=7, widest=7),
    Case("deepest tree beside a shallow one", shapes=("chain", "random"), classes=65, widest=2),
    Case("more leaves than are mixed at once", shapes=("random", "flat"), classes=700, widest=3),
    Case("two classes", classes=2),
    Case("one class", classes=1),
    Case("zero rows", rows=0),
    Case("one row", rows=1),
    Case("one row of a large tree", shapes=("random", "random"), classes=400, widest=2, rows=1),
    Case("vectors full", rows=32),
    Case("a vector of float64 not full", rows=7),
    Case("scores of order 100", scale=100.0),
)
# Of classes, rows and threads on CUDA.
BLOCKS = (
    Case("a block of classes and one more", ("random", "flat"), classes=1025, widest=40, rows=1),
    Case("a block of rows and one more", ("random",) * 4, classes=40, widest=5, rows=33),
    Case("three blocks of rows", ("flat", "random"), classes=70, widest=30, rows=70),
    Case("two rows", ("chain", "flat"), classes=60, widest=2, rows=2),
    Case("more children than threads", ("flat",), classes=300, widest=300, rows=1),
)
USUAL, SMALL = CASES[0], Case("small", shapes=("random", "flat"), classes=7, widest=4, rows=3)
MANY = Case("rows for three threads", rows=130, classes=50)


FUNCTIONS = [mixed, composed]


def backward_arguments(batch: Batch) -> tuple[Any, ...]:
    return batch.grad, OP(*batch.arguments()), *batch.arguments()[:-1]


@pytest.mark.parametrize("function", FUNCTIONS, ids=["op", "composed"])
@pytest.mark.parametrize("dtype", SUMS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", [*CASES, *slow(BLOCKS)], ids=str)
def test_equals_reference(
    case: Case, dtype: torch.dtype, function: Any, device: torch.device
) -> None:
    check_against(draw(case, dtype), reference, function, device)


def test_tables_are_those_of_the_layout() -> None:
    batch = draw(USUAL)
    for t, nested in enumerate(batch.nested):
        tables = Layout([Tree.from_nested(nested)])
        for own, filled in ((tables.node[0], batch.node[t]), (tables.edge[0], batch.edge[t])):
            assert torch.equal(own, filled[: len(own)])
            assert not filled[len(own) :].any()


def test_relative_accuracy_of_one_node(device: torch.device) -> None:
    """Log-probabilities near 0 keep their digits, from scores of -200 to 200."""
    z = torch.linspace(-200, 200, 4001, device=device).requires_grad_()
    node = torch.tensor([[[0, 0, 0, 2, -1]]], dtype=torch.int32, device=device)
    edge = torch.tensor([[[0, ~0], [0, ~1]]], dtype=torch.int32, device=device)
    gate = torch.zeros(len(z), 1, device=device)
    log_prob = tree_log_softmax(z[None, None], gate, node, edge, 2, wide_begin=1, root_begin=1)
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
    log_prob = tree_log_softmax(
        score, torch.zeros(1, 1), node, edge, classes, wide_begin=0, root_begin=0
    )
    torch.testing.assert_close(log_prob, torch.full_like(log_prob, -np.log(classes)), rtol=3e-7,
                               atol=0)  # fmt: skip


def test_impossible_classes(device: torch.device) -> None:
    """-inf in one tree or in all: no NaN, and no gradient from there."""
    batch = draw(replace(USUAL, widest=2), torch.float32)
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


@pytest.mark.parametrize("case", [USUAL, Case("wide roots", ("flat", "flat"), widest=7)], ids=str)
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
    nested = ((0, 1), (2, (3, 4)))
    nodes, edges, _ = tables_of(nested)
    score = torch.tensor([1.0, 2.0, 3.0, torch.nan])[None, :, None]
    log_prob = OP(
        score,
        torch.zeros(1, 1),
        torch.tensor([nodes], dtype=torch.int32),
        torch.tensor([edges], dtype=torch.int32),
        4,
        4,
        5,
    )
    assert log_prob.isnan().tolist() == [[False, False, False, True, True]]


def test_rows_of_no_node_have_no_gradient() -> None:
    """Where a tree has fewer nodes than the largest; whatever their scores are."""
    batch = draw(USUAL, torch.float32)
    used = torch.zeros(batch.score.shape[:2], dtype=torch.bool)
    for t, nested in enumerate(batch.nested):
        for begin, rows in zip(
            (0, batch.wide_begin, batch.root_begin), tables_of(nested)[2][:3], strict=True
        ):
            used[t, begin : begin + rows] = True
    assert not used.all()
    batch.score[~used] = torch.nan
    log_prob, grad_score, _ = batch.gradients(mixed)
    assert log_prob.isfinite().all()
    assert grad_score[used].all()
    assert not grad_score[~used].any()


def test_noncontiguous() -> None:
    batch = draw(USUAL, torch.float32)
    results = batch.transposed().gradients(mixed)
    for got, expected in zip(results, batch.gradients(mixed), strict=True):
        assert torch.equal(got, expected)


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


def every_gradient() -> list[list[Tensor]]:
    return [draw(case, dtype).gradients(mixed) for dtype in SUMS for case in CASES]


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    call = "every_gradient()"
    results = with_instruction_set(capability, "ops.test_tree_log_softmax", call, tmp_path)
    for got, expected in zip(results, every_gradient(), strict=True):
        tolerance = 1e-4 if got[0].dtype == torch.float32 else 1e-12
        assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", FUNCTIONS, ids=["op", "composed"])
def test_gradcheck(function: Any, device: torch.device) -> None:
    batch = draw(SMALL).to(device)

    def log_prob(score: Tensor, log_gate: Tensor) -> Tensor:
        return function(replace(batch, score=score, log_gate=log_gate))

    leaves = [x.requires_grad_() for x in (batch.score, batch.log_gate)]
    assert torch.autograd.gradcheck(log_prob, leaves)


def test_second_derivative_raises() -> None:
    batch = draw(SMALL)
    score = batch.score.requires_grad_()
    (grad,) = torch.autograd.grad(mixed(batch).sum(), score, create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        grad.square().sum().backward()


def test_opcheck() -> None:
    batch = draw(SMALL, torch.float32)
    torch.library.opcheck(BACKWARD, backward_arguments(batch))
    batch.score.requires_grad_()
    batch.log_gate.requires_grad_()
    torch.library.opcheck(OP, batch.arguments())


def refused(batch: Batch, match: str) -> None:
    with pytest.raises(RuntimeError, match=f"^hstree::tree_log_softmax: {match}"):
        OP(*batch.arguments())
    log_prob = batch.score.new_zeros(len(batch.grad), batch.classes)
    with pytest.raises(RuntimeError, match=f"^hstree::tree_log_softmax_backward: {match}"):
        BACKWARD(torch.zeros_like(log_prob), log_prob, *batch.arguments()[:-1])


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("score", lambda x: x[0], r"score: expected shape \[T, R, N\]"),
        ("score", Tensor.half, "score: expected dtype float32 or float64, got Half"),
        ("score", lambda x: x[:0], "score: expected at least one tree"),
        ("log_gate", lambda x: x[0], r"log_gate: expected shape \[N, T\], got \[3\]"),
        ("log_gate", lambda x: x[1:], r"log_gate: expected size 17 \(rows"),
        ("log_gate", lambda x: x[:, 1:], r"log_gate: expected size 3 \(trees"),
        ("log_gate", Tensor.double, "log_gate: expected dtype Float, got Double"),
        ("node", lambda x: x[0], r"node: expected shape \[T, M, 5\]"),
        ("node", lambda x: x[1:], r"node: expected size 3 \(trees"),
        ("node", lambda x: x[..., 1:], r"node: expected size 5 \(block, row"),
        ("node", Tensor.long, "node: expected dtype Int, got Long"),
        ("node", lambda x: x[:, :0], "n_classes: expected 1, or at most as many"),
        ("edge", lambda x: x[0], r"edge: expected shape \[T, E, 2\]"),
        ("edge", lambda x: x[..., :1], r"edge: expected size 2 \(node above"),
        ("edge", lambda x: x[:, :9], "n_classes: expected 1, or at most as many"),
        ("wide_begin", lambda _: -1, "wide_begin, root_begin: expected increasing places"),
        ("wide_begin", lambda _: 10**6, "wide_begin, root_begin: expected increasing places"),
        ("root_begin", lambda _: 10**6, "wide_begin, root_begin: expected increasing places"),
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


# The tree ((0, 1), (2, 3, 4), 5) of a wide root, a binary and a wide node.
@pytest.mark.parametrize(
    ("table", "place", "value", "match"),
    [
        ("node", (1, 0), 3, r"node\[0, 1\]: expected a block, its first row"),
        ("node", (1, 0), -1, r"node\[0, 1\]: expected a block"),
        ("node", (2, 0), 0, r"node\[0, 2\]: expected a block"),  # binary, of three children
        ("node", (2, 1), 1, r"node\[0, 2\]: expected a block"),  # rows beyond the block
        ("node", (2, 1), -1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 2), 6, r"node\[0, 2\]: expected a block"),  # edges beyond the table
        ("node", (2, 2), -1, r"node\[0, 2\]: expected a block"),
        ("node", (1, 3), 1, r"node\[0, 1\]: expected a block"),
        ("node", (2, 3), 2**31 - 1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 4), 0, r"node\[0, 2\]: expected .* the edge above it, 1, got 1, 0, 5, 3, 0"),
        ("node", (0, 4), 0, r"node\[0, 0\]: expected .* the edge above it, -1, got 2, 0, 0, 3, 0"),
        ("edge", (1, 1), 3, r"edge\[0, 1\]: expected node 0 above, and below it one of 3 nodes"),
        ("edge", (1, 1), 0, r"edge\[0, 1\]: expected node 0 above.* not met before, got 0, 0"),
        ("edge", (0, 1), 2, r"edge\[0, 0\]: expected node 0 above.* not met before, got 0, 2"),
        ("edge", (4, 1), ~6, r"edge\[0, 4\]: expected node 1 above.* one of 6 classes"),
        ("edge", (4, 1), -(2**31), r"edge\[0, 4\]: expected node 1 above"),
        ("edge", (4, 1), ~0, r"edge\[0, 4\]: .*|edge\[0, 3\]: expected .* not met before"),
        ("edge", (4, 0), 2, r"edge\[0, 4\]: expected node 1 above.* got 2, -2"),
    ],
)
def test_bad_table(table: str, place: tuple[int, int], value: int, match: str) -> None:
    nodes, edges, used = tables_of(((0, 1), (2, 3, 4), 5))
    assert nodes[2] == (1, 0, 5, 3, 1)
    batch = by_hand(nodes, edges, used[:3], 6)
    OP(*batch.arguments())
    getattr(batch, table)[0][place] = value
    refused(batch, match)


def test_nodes_out_of_order_and_shared_rows() -> None:
    nodes, edges, used = tables_of(((0, 1), (2, 3)))
    batch = by_hand(nodes, edges, used[:3], 4)
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
    batch = by_hand(nodes, edges, used[:3], 66)
    refused(batch, r"node\[0, 64\]: expected at most 64 nodes on a path")


def corrupt_tables() -> tuple[int, int]:
    def attempt(seed: int) -> None:
        batch = corrupted(seed, groups=False)
        BACKWARD(batch.grad, OP(*batch.arguments()), *batch.arguments()[:-1])

    return outcomes(partial(attempt, seed) for seed in range(500))


def test_corrupt_tables_never_crash(tmp_path: Path) -> None:
    """Random numbers in the tables, in a process of its own: an error or a result."""
    refused, accepted = apart("ops.test_tree_log_softmax", "corrupt_tables()", tmp_path)
    assert refused > 300
    assert accepted > 10


def test_the_kernel_of_every_device() -> None:
    """composed_backward, called by the dispatcher, equals the kernel of the CPU."""
    batch, log_prob = draw(USUAL), mixed(draw(USUAL))
    tables = (batch.node, batch.edge, batch.wide_begin, batch.root_begin)
    arguments = (batch.grad, log_prob, batch.score, batch.log_gate, *tables)
    expected = BACKWARD(*arguments)
    schema = torch.library.infer_schema(composed_backward, mutates_args=())
    name = "hstree_test::tree_log_softmax_backward"
    torch.library.define(name, schema)
    torch.library.impl(name, "default", composed_backward)
    composed = torch.ops.hstree_test.tree_log_softmax_backward
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert_close(composed(*arguments), expected)
