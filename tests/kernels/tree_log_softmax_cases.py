"""Corrupt tables for the kernels of tree_log_softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ops import test_leaf_tree_log_softmax as leaf_ops
from ops.test_tree_log_softmax import Batch, Case, draw
from torch import Tensor

from kernels.emulation import call


def log_prob(batch: Batch) -> Tensor:
    result: Tensor = call("tree_log_softmax", *batch.arguments())
    return result


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
