"""tree_log_softmax with leaf groups: torch.ops.hstree.leaf_tree_log_softmax and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops import tree_log_softmax
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
    is_group,
    mixed,
    reference,
    tables_of,
)
from ops.tree_softmax_cases import draw as draw_with

OP = torch.ops.hstree.leaf_tree_log_softmax.default

TWO_LEVELS = Case("two levels", ("levels", "levels"), classes=300)
CASES = (
    TWO_LEVELS,
    Case("wide and binary nodes"),
    Case("binary nodes above groups of two", widest=2),
    Case("one tree", shapes=("levels",), classes=100),
    Case("no groups", shapes=("flat", "flat"), widest=7, classes=7),
    Case("groups of one tree", shapes=("flat", "levels"), classes=40, widest=40),
    Case("deepest tree beside a shallow one", shapes=("chain", "random"), classes=65, widest=2),
    Case("several blocks of classes", ("levels", "levels"), classes=2100),
    Case("two classes", classes=2),
    Case("one class", classes=1),
    Case("zero rows", rows=0),
    Case("one row", rows=1),
    Case("rows one by one", rows=4),
    Case("most of a vector", rows=12),
    Case("vectors full", rows=32),
    Case("scores of order 100", scale=100.0),
)
# Of classes and rows on CUDA.
BLOCKS = (
    Case("a block of classes and one more", ("levels", "random"), classes=1025, widest=40, rows=1),
    Case("a block of rows and one more", ("levels",) * 4, classes=40, widest=5, rows=33),
    Case("a chain of many rows", ("chain", "random"), classes=65, widest=2, rows=70),
    Case("groups of one tree, two rows", ("flat", "levels"), classes=40, widest=40, rows=2),
)
SMALL = Case("small", shapes=("random", "levels"), classes=7, widest=3, rows=3)
MANY = Case("rows for three threads", ("levels", "random"), rows=130, classes=1500)


draw = partial(draw_with, groups=True)


def walked(batch: Batch) -> Tensor:
    """The log-probabilities by definition: each tree from its root, nested tuples at hand."""
    trees = []
    for t, nested in enumerate(batch.nested):
        found: dict[int, Tensor] = {}
        used = [0, batch.wide_begin, batch.root_begin]

        def visit(
            item: Any, above: Tensor, t: int, used: Any, found: Any, is_root: bool = False
        ) -> None:
            if not isinstance(item, tuple):
                found[item] = above
                return
            if is_group(item, is_root):
                classes = list(item)
                z = batch.leaf_score[:, classes] + batch.leaf_bias[t, classes]
                children = z.log_softmax(1).unbind(1)
            else:
                block = 0 if len(item) == 2 else 2 if is_root else 1
                rows = slice(used[block], used[block] + (1 if block == 0 else len(item)))
                used[block] = rows.stop
                z = batch.score[t, rows]
                both = F.logsigmoid(torch.cat([z, -z])) if block == 0 else z.log_softmax(0)
                children = both.unbind(0)
            for child, log_prob in zip(item, children, strict=True):
                visit(child, above + log_prob, t, used, found)

        visit(nested, batch.log_gate[:, t], t, used, found, True)
        trees.append(torch.stack([found[y] for y in range(batch.classes)], 1))
    return torch.logsumexp(torch.stack(trees), 0)


@pytest.mark.parametrize(
    "function", [mixed, composed, reference], ids=["op", "composed", "reference"]
)
@pytest.mark.parametrize("dtype", SUMS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("case", [*CASES, *slow(BLOCKS)], ids=str)
def test_equals_the_walk(
    case: Case, dtype: torch.dtype, function: Any, device: torch.device
) -> None:
    check_against(draw(case, dtype), walked, function, device)


def test_other_devices_have_rows_for_the_groups() -> None:
    """The shapes, on the meta device."""
    batch = draw(TWO_LEVELS, torch.float32)
    assert mixed(batch.to("meta")).shape == batch.leaf_score.shape


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_same_bits_for_every_number_of_threads_and_rows(dtype: torch.dtype) -> None:
    batch = draw(MANY, dtype)
    expected = mixed(batch)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(mixed(batch), expected)
            for rows in (slice(0, 1), slice(7, 9), slice(3, 8), slice(20, 32), slice(40, 77)):
                assert torch.equal(mixed(batch.rows(rows)), expected[rows])


def every_log_prob() -> list[Tensor]:
    """Those of a row have the same bits in a batch of its own."""
    batches = [draw(case, dtype) for case in (MANY, *CASES) for dtype in SUMS]
    results = [mixed(batch) for batch in batches]
    for batch, result in zip(batches, results, strict=True):
        for r in range(len(result)):
            assert torch.equal(mixed(batch.rows(slice(r, r + 1))), result[r : r + 1])
    return results


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    module = "ops.test_leaf_tree_log_softmax"
    results = with_instruction_set(capability, module, "every_log_prob()", tmp_path)
    for got, expected in zip(results, every_log_prob(), strict=True):
        tolerance = 1e-4 if got.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_gradcheck() -> None:
    batch = draw(SMALL)
    leaves = tuple(x.requires_grad_() for x in batch.leaves)
    assert torch.autograd.gradcheck(lambda *x: mixed(batch.with_leaves(x)), leaves)


def test_opcheck() -> None:
    batch = draw(SMALL, torch.float32)
    for x in batch.leaves:
        x.requires_grad_()
    torch.library.opcheck(OP, batch.arguments())


def test_noncontiguous() -> None:
    batch = draw(TWO_LEVELS, torch.float32)
    results = batch.transposed().gradients(mixed)
    for got, expected in zip(results, batch.gradients(mixed), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_large_scores_cost_no_digits_of_large_probabilities() -> None:
    """Errors of roundings of 1, not of the scores."""
    nested = ((0, 1, 2), 3, 4)
    nodes, edges, _ = tables_of(nested, groups=True)
    leaf_score = torch.tensor([[100.0, 84.0, 80.0, 0.0, 0.0]])
    log_prob = tree_log_softmax(
        torch.tensor([[[200.0], [0.0], [0.0]]]),
        torch.zeros(1, 1),
        torch.tensor([[(1, 0, *n[2:]) if n[0] == 3 else n for n in nodes]], dtype=torch.int32),
        torch.tensor([edges], dtype=torch.int32),
        5,
        wide_begin=0,
        root_begin=0,
        leaf_score=leaf_score,
        leaf_bias=torch.zeros(1, 5),
    )
    expected = leaf_score[:, :3].double().log_softmax(1)
    torch.testing.assert_close(log_prob[:, :3].double(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_shares_below_the_smallest_number(rows: int, device: torch.device) -> None:
    """Class 3 stands alone in one tree, improbable there, and scores 88 below the row's best in the
    other, in a group of which it is a large part."""
    case = Case("by hand", classes=4, rows=rows)
    batch = draw(case, torch.float32, nested=[(3, (0, 1, 2)), ((0, 1), (2, 3))])
    scores = torch.tensor([0.0, -1.0, -57.0, -88.0]) + 0.01 * batch.leaf_score
    batch = replace(batch, leaf_score=scores, leaf_bias=0 * batch.leaf_bias)
    for of_alone in (-40.0, -20.0, -80.0):
        batch.score[0] = of_alone
        expected = walked(batch.to(torch.float64))
        log_prob = mixed(batch.to(device))
        torch.testing.assert_close(log_prob.double().cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_node_of_a_million_classes(rows: int) -> None:
    """As a wide root and as a group, with a class of 3/4: probabilities add up to 1."""
    classes = 2**20
    case = Case("by hand", classes=classes, rows=rows)
    batch = draw(case, torch.float32, nested=[tuple(range(classes)), (0, tuple(range(1, classes)))])
    batch.leaf_score.zero_().index_fill_(1, torch.tensor([7]), math.log(3 * classes))
    batch.leaf_bias.zero_()
    batch.score.zero_()[0, 1 + 7] = math.log(3 * classes)
    batch.log_gate.fill_(math.log(0.5))
    total = mixed(batch).double().exp().sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 17])
def test_impossible_classes(rows: int) -> None:
    """-inf in one tree or in all: no NaN, and no gradient from there."""
    batch = draw(replace(TWO_LEVELS, rows=rows), torch.float32)
    bias, score = batch.leaf_bias.clone(), batch.leaf_score.clone()
    bias[0, :5] = -torch.inf
    score[:, 7] = -torch.inf
    gate = batch.log_gate.clone()
    gate[:, 1] = -torch.inf
    for changed in ({"leaf_bias": bias}, {"leaf_score": score}, {"log_gate": gate}):
        bad = replace(batch, **changed)
        log_prob, *grads = bad.gradients(mixed)
        torch.testing.assert_close(
            log_prob.double(), walked(bad.to(torch.float64)), rtol=1e-5, atol=1e-5
        )
        assert not any(x.isnan().any() for x in grads)


@pytest.mark.parametrize("rows", [3, 17])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_bad_scores_stay_in_their_row(value: float, rows: int) -> None:
    batch = draw(replace(TWO_LEVELS, rows=rows), torch.float32)
    score = batch.leaf_score.clone()
    score[1] = value
    score[2, 5] = value
    bad = replace(batch, leaf_score=score)
    got, expected = mixed(bad), mixed(batch)
    others = torch.arange(rows).sub(1.5).abs() > 1
    assert torch.equal(got[others], expected[others])
    torch.testing.assert_close(got, walked(bad), rtol=1e-4, atol=1e-5, equal_nan=True)


def refused(batch: Batch, match: str) -> None:
    with pytest.raises(RuntimeError, match=f"^hstree::leaf_tree_log_softmax: {match}"):
        OP(*batch.arguments())


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("leaf_score", lambda x: x[0], r"leaf_score: expected shape \[N, V\], got \[300\]"),
        ("leaf_score", Tensor.double, "leaf_score: expected dtype Float, got Double"),
        ("leaf_score", lambda x: x[1:], r"leaf_score: expected size 17 \(rows"),
        ("leaf_score", lambda x: x[:, 1:], r"leaf_score: expected size 300 \(classes\)"),
        ("leaf_bias", lambda x: x[0], r"leaf_bias: expected shape \[T, V\]"),
        ("leaf_bias", Tensor.double, "leaf_bias: expected dtype Float, got Double"),
        ("leaf_bias", lambda x: x[1:], r"leaf_bias: expected size 2 \(trees"),
        ("leaf_bias", lambda x: x[:, 1:], r"leaf_bias: expected size 300 \(classes\)"),
        ("score", Tensor.half, "score: expected dtype float32 or float64, got Half"),
        ("log_gate", lambda x: x[1:], r"log_gate: expected size 17 \(rows"),
        ("wide_begin", lambda _: -1, "wide_begin, root_begin: expected increasing places"),
        ("classes", lambda _: 10**6, "n_classes: expected 1, or at most as many as edges"),
    ],
)
def test_bad_argument(name: str, change: Any, match: str) -> None:
    batch = draw(TWO_LEVELS, torch.float32)
    refused(replace(batch, **{name: change(getattr(batch, name))}), match)


@pytest.mark.parametrize("missing", ["leaf_score", "leaf_bias"])
def test_one_of_score_and_bias(missing: str) -> None:
    with pytest.raises(ValueError, match=f"^{missing}: expected a tensor with leaf_"):
        mixed(replace(draw(SMALL), **{missing: None}))


# The tree ((0, 1), (2, 3, 4), 5) of a wide root and two leaf groups.
@pytest.mark.parametrize(
    ("table", "place", "value", "match"),
    [
        ("node", (2, 1), 4, r"node\[0, 2\]: expected a block, its first row"),  # beyond V
        ("node", (2, 1), -1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 1), 2**31 - 1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 2), 6, r"node\[0, 2\]: expected a block"),
        ("node", (2, 3), 2**31 - 1, r"node\[0, 2\]: expected a block"),
        ("node", (2, 4), 0, r"node\[0, 2\]: expected .* the edge above it, 1, got 1, 2, 5, 3, 0"),
        ("node", (1, 0), 0, r"node\[0, 1\]: expected a block"),  # binary, without a row
        ("edge", (1, 1), 0, r"edge\[0, 1\]: expected node 0 above.* not met before, got 0, 0"),
        ("edge", (5, 1), 1, r"edge\[0, 5\]: expected node 2 above.* got 2, 1"),  # a node
        ("edge", (5, 1), ~6, r"edge\[0, 5\]: expected node 2 above.* one of 6 classes"),
        ("edge", (5, 1), -(2**31), r"edge\[0, 5\]: expected node 2 above"),
        ("edge", (5, 1), ~0, r"edge\[0, [35]\]: expected .* not met before"),
        ("edge", (4, 0), 2, r"edge\[0, 4\]: expected node 1 above.* got 2, -2"),
    ],
)
def test_bad_table(table: str, place: tuple[int, int], value: int, match: str) -> None:
    nodes = [(2, 0, 0, 3, -1), (1, 0, 3, 2, 0), (1, 2, 5, 3, 1)]
    edges = [(0, 1), (0, 2), (0, ~5), (1, ~0), (1, ~1), (2, ~2), (2, ~3), (2, ~4)]
    batch = replace(
        by_hand(nodes, edges, [0, 0, 3], 6),
        leaf_score=torch.zeros(3, 6),
        leaf_bias=torch.zeros(1, 6),
    )
    OP(*batch.arguments())
    getattr(batch, table)[0][place] = value
    refused(batch, match)


def corrupt_tables() -> tuple[int, int]:
    def attempt(seed: int) -> None:
        OP(*corrupted(seed, groups=True).arguments())

    return outcomes(partial(attempt, seed) for seed in range(500))


def test_corrupt_tables_never_crash(tmp_path: Path) -> None:
    """Random numbers in the tables, in a process of its own: an error or a result."""
    refused, accepted = apart("ops.test_leaf_tree_log_softmax", "corrupt_tables()", tmp_path)
    assert refused > 300
    assert accepted > 10
