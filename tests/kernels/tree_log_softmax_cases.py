"""What the kernels of tree_log_softmax are compared with, and corrupt tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ops import test_leaf_tree_log_softmax as leaf_ops
from ops.test_tree_log_softmax import Batch, Case, draw
from reference import tree_log_softmax_reference
from torch import Tensor

from kernels.emulation import call

CASES = (
    Case("a block of classes and one more", ("random", "flat"), classes=1025, widest=40, rows=1),
    Case("a block of rows and one more", ("random",) * 4, classes=40, widest=5, rows=33),
    Case("three blocks of rows", ("flat", "random"), classes=70, widest=30, rows=70),
    Case("two rows", ("chain", "flat"), classes=60, widest=2, rows=2),
    Case("more children than threads", ("flat",), classes=300, widest=300, rows=1),
)

LEAF_CASES = (
    Case("a block of classes and one more", ("levels", "random"), classes=1025, widest=40, rows=1),
    Case("a block of rows and one more", ("levels",) * 4, classes=40, widest=5, rows=33),
    Case("deepest tree beside a shallow one", ("chain", "random"), classes=65, widest=2, rows=70),
    Case("groups of one tree", ("flat", "levels"), classes=40, widest=40, rows=2),
    Case("one class", ("levels",), classes=1, rows=3),
)


def log_prob(batch: Batch) -> Tensor:
    result: Tensor = call("tree_log_softmax", *batch.arguments())
    return result


def check_tree_log_softmax(case: Case, dtype: torch.dtype) -> None:
    batch = draw(case, dtype)
    *tables, wide_begin, root_begin, classes = batch.to(torch.float64).arguments()
    expected = tree_log_softmax_reference(*tables, classes, wide_begin, root_begin)
    tolerance = 1e-13 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(log_prob(batch).double(), expected, rtol=tolerance, atol=tolerance)


def corrupt(table: Tensor, random: np.random.Generator) -> None:
    """Writes random numbers at random places."""
    flat = table.view(-1).numpy()
    count = min(len(flat), int(random.integers(1, 6)))
    wild = random.integers(-(2**31), 2**31 - 1, count)
    near = random.integers(-30, 30, count)
    values = np.where(random.random(count) < 0.3, wild, near)
    flat[random.integers(0, max(len(flat), 1), count)] = values


def check_corrupt_tables(seed: int) -> None:
    """Random numbers in the tables give a result, and no stray access."""
    random = np.random.default_rng(seed)
    shapes: Any = tuple(random.choice(["random", "flat", "chain"], 2))
    case = Case("corrupt", shapes, int(random.integers(1, 30)), rows=int(random.integers(1, 6)))
    batch = draw(case, torch.float32, seed)
    tables = {"node": batch.node.clone(), "edge": batch.edge.clone()}
    for table in tables.values():
        corrupt(table, random)
    assert log_prob(replace(batch, **tables)).shape == (case.rows, case.classes)


def leaf_log_prob(batch: leaf_ops.Batch) -> Tensor:
    result: Tensor = call("leaf_tree_log_softmax", *batch.arguments())
    return result


def check_leaf_tree_log_softmax(case: Case, dtype: torch.dtype) -> None:
    """With scores by row and by class, that is, with and without a copy of them."""
    batch = leaf_ops.draw(case, dtype)
    expected = leaf_ops.reference(batch.to(torch.float64))
    tolerance = 1e-13 if dtype == torch.float64 else 3e-6
    by_class = replace(batch, leaf_score=batch.leaf_score.t().contiguous().t())
    got = leaf_log_prob(batch)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(leaf_log_prob(by_class), got)


def check_corrupt_leaf_tables(seed: int) -> None:
    """Random numbers in the tables give a result, and no stray access."""
    random = np.random.default_rng(seed)
    shapes: Any = tuple(random.choice(["random", "levels", "chain"], 2))
    case = Case("corrupt", shapes, int(random.integers(1, 30)), rows=int(random.integers(1, 6)))
    batch = leaf_ops.draw(case, torch.float32, seed)
    tables = {"node": batch.node.clone(), "edge": batch.edge.clone()}
    for table in tables.values():
        corrupt(table, random)
    assert leaf_log_prob(replace(batch, **tables)).shape == (case.rows, case.classes)
