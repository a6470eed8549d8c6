"""What the kernels of tree_log_prob are compared with, and corrupt tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ops.test_tree_log_prob import Batch, Case, draw
from torch import Tensor

from hstree.reference import tree_log_prob_reference
from kernels.emulation import call

CASES = (
    Case("a block of classes and one more", ("random", "flat"), classes=1025, widest=40, rows=1),
    Case("a block of rows and one more", ("random",) * 4, classes=40, widest=5, rows=33),
    Case("three blocks of rows", ("flat", "random"), classes=70, widest=30, rows=70),
    Case("two rows", ("chain", "flat"), classes=60, widest=2, rows=2),
    Case("more children than threads", ("flat",), classes=300, widest=300, rows=1),
)


def log_prob(batch: Batch) -> Tensor:
    result: Tensor = call("tree_log_prob", *batch.arguments())
    return result


def check_tree_log_prob(case: Case, dtype: torch.dtype) -> None:
    batch = draw(case, dtype)
    *tables, wide_begin, root_begin, classes = batch.to(torch.float64).arguments()
    expected = tree_log_prob_reference(*tables, classes, wide_begin, root_begin)
    tolerance = 1e-13 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(log_prob(batch).double(), expected, rtol=tolerance, atol=tolerance)


def check_corrupt_tables(seed: int) -> None:
    """Random numbers in the tables give a result, and no stray access."""
    random = np.random.default_rng(seed)
    shapes: Any = tuple(random.choice(["random", "flat", "chain"], 2))
    case = Case("corrupt", shapes, int(random.integers(1, 30)), rows=int(random.integers(1, 6)))
    batch = draw(case, torch.float32, seed)
    tables = {"node": batch.node.clone(), "edge": batch.edge.clone()}
    for table in tables.values():
        flat = table.view(-1).numpy()
        count = min(len(flat), int(random.integers(1, 6)))
        wild = random.integers(-(2**31), 2**31 - 1, count)
        near = random.integers(-30, 30, count)
        values = np.where(random.random(count) < 0.3, wild, near)
        flat[random.integers(0, max(len(flat), 1), count)] = values
    assert log_prob(replace(batch, **tables)).shape == (case.rows, case.classes)
