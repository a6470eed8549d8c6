"""torch.ops.hstree.group_topk."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from hstree.ops import group_topk
from ops.cases import threads
from ops.test_tree_log_softmax import GROUPS, MANY_GROUPS, SMALL_GROUPS, TWO_LEVELS
from ops.tree_softmax_cases import SUMS, Batch, Case, walked
from ops.tree_softmax_cases import draw as draw_with

OP = torch.ops.hstree.group_topk.default
draw = partial(draw_with, groups=True)


def ranked(batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    return group_topk(
        batch.score,
        batch.log_gate,
        batch.node,
        batch.edge,
        batch.classes,
        k,
        root_begin=batch.root_begin,
        class_score=batch.class_score,
        class_bias=batch.class_bias,
    )


@pytest.mark.parametrize("dtype", SUMS, ids=str)
@pytest.mark.parametrize("case", [case for case in GROUPS if case.scale < 100], ids=str)
def test_equals_the_walk(case: object, dtype: torch.dtype) -> None:
    """For several k, with every class once."""
    batch = draw(case, dtype)  # type: ignore[arg-type]
    true = walked(batch.to(torch.float64))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for k in sorted({1, 2, 7, 100, batch.classes - 1, batch.classes}):
        if not 1 <= k <= batch.classes:
            continue
        log_prob, classes = ranked(batch, k)
        assert log_prob.dtype == dtype
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(log_prob.double(), true.topk(k).values, **close)
        torch.testing.assert_close(log_prob.double(), true.gather(1, classes), **close)
        assert all(len(set(row)) == k for row in classes.tolist())


def test_ties_come_in_order_of_class() -> None:
    batch = draw(replace(TWO_LEVELS, shapes=("levels",)), torch.float32)
    zero = replace(batch, class_score=batch.class_score * 0, class_bias=batch.class_bias * 0)
    log_prob, classes = ranked(zero, 300)
    tied = log_prob[:, 1:] == log_prob[:, :-1]
    assert tied.sum() > 1000
    assert (classes[:, 1:] > classes[:, :-1])[tied].all()


@pytest.mark.parametrize("dtype", SUMS, ids=str)
def test_same_bits_for_every_number_of_threads_and_rows(dtype: torch.dtype) -> None:
    batch = draw(MANY_GROUPS, dtype)
    expected = ranked(batch, 20)
    for count in (1, 2, 3):
        with threads(count):
            for rows in (slice(None), slice(0, 1), slice(7, 9), slice(20, 32), slice(40, 77)):
                for got, wanted in zip(ranked(batch.rows(rows), 20), expected, strict=True):
                    assert torch.equal(got, wanted[rows])


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_shares_below_the_smallest_number(rows: int) -> None:
    """A class that scores 87 below the row's best may be more probable than others: the row is
    right, or it is left to another way."""
    case = Case("by hand", classes=4, rows=rows)
    batch = draw(case, torch.float32, nested=[((0, 1), (2, 3))])
    scores = torch.tensor([[0.0, -39.0, -57.4, -87.6]]).repeat(rows, 1)
    batch = replace(batch, class_score=scores, class_bias=0 * batch.class_bias)
    for seed in range(20):
        for some in (batch, draw(replace(TWO_LEVELS, rows=rows, scale=20.0), torch.float32, seed)):
            true = walked(some.to(torch.float64))
            for k in (3, 200):
                if k > some.classes:
                    continue
                log_prob, classes = ranked(some, k)
                known = classes[:, 0] >= 0
                best = true.topk(k)
                close = {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(log_prob[known].double(), best.values[known], **close)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_rows_that_could_lose_digits(rows: int) -> None:
    """NaN, a group of no probability, and a class too improbable: -1, in these rows alone."""
    batch = draw(replace(TWO_LEVELS, rows=rows), torch.float32)
    expected = ranked(batch, 5)
    bad = torch.arange(rows) % 2 == 0
    for value in (torch.nan, torch.inf, 1000.0):
        score = batch.class_score.clone()
        score[bad, 3] = value
        log_prob, classes = ranked(replace(batch, class_score=score), 5)
        assert (classes[bad] == -1).all()
        assert log_prob[bad].isnan().all()
        assert torch.equal(classes[~bad], expected[1][~bad])
        assert torch.equal(log_prob[~bad], expected[0][~bad])
    impossible = batch.class_score.clone()
    impossible[:, 3] = -torch.inf
    assert (ranked(replace(batch, class_score=impossible), 299)[1] >= 0).all()
    assert (ranked(replace(batch, class_score=impossible), 300)[1] == -1).any()
    bias = batch.class_bias.clone()
    bias[0, 3] = -1000.0
    assert (ranked(replace(batch, class_bias=bias), 5)[1] == -1).all()


def test_opcheck() -> None:
    batch = draw(SMALL_GROUPS, torch.float32)
    torch.library.opcheck(
        OP, (*batch.arguments(), 2), test_utils=("test_schema", "test_faketensor")
    )


def test_is_not_differentiable() -> None:
    batch = draw(SMALL_GROUPS, torch.float32)
    batch.class_score.requires_grad_()
    with pytest.raises(RuntimeError, match="hstree::group_topk: not differentiable"):
        ranked(batch, 2)[0].sum().backward()


def test_wrong_arguments() -> None:
    batch = draw(SMALL_GROUPS, torch.float32)
    for k in (0, 8):
        with pytest.raises(RuntimeError, match=f"group_topk: k: expected 1 to 7.*got {k}"):
            ranked(batch, k)
    with pytest.raises(RuntimeError, match=r"group_topk: class_score: expected size 3 \(rows"):
        ranked(replace(batch, class_score=batch.class_score[1:]), 1)
