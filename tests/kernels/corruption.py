"""Tables that no tree has. On CUDA nobody waits for what a check of them says, so the kernels
defend themselves: NaN as log-probability for a row whose target is out of range and for all rows in
a tree whose tables are, no gradient, no access outside the arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernels.batches import Batch, Case, make_batch
from kernels.cases import (
    assert_sparse_is_dense,
    close,
    run_batch,
    true_backward,
    true_forward,
    unit_of_sums,
)
from kernels.emulation import BFLOAT16, FLOAT32, Kernels

CLASS = 5  # the class whose tables are spoilt, in tree 1


@dataclass(frozen=True)
class Corruption:
    """How to spoil tables of tree 1, which cannot answer for any class then."""

    name: str
    spoil: Callable[[Batch], None]
    ops: tuple[str, ...] = ("path", "wide", "leaf")

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def offset(shift: int, value: Callable[[Batch], int]) -> Callable[[Batch], None]:
    def spoil(batch: Batch) -> None:
        batch.tables.offset[1, CLASS + shift] = value(batch)

    return spoil


def entry(value: Callable[[Batch], int], column: int | None = None) -> Callable[[Batch], None]:
    """Replaces the last entry on the path of CLASS in tree 1."""

    def spoil(batch: Batch) -> None:
        last = batch.tables.offset[1, CLASS + 1] - 1
        assert last >= batch.tables.offset[1, CLASS]
        batch.tables.path[last if column is None else (last, column)] = value(batch)

    return spoil


def features(*values: int) -> Callable[[Batch], None]:
    """Replaces the last entries of feature_index in tree 1."""

    def spoil(batch: Batch) -> None:
        assert batch.tables.feature_index is not None
        batch.tables.feature_index[1, -len(values) :] = values

    return spoil


def classes(value: int) -> Callable[[Batch], None]:
    """Replaces an entry of leaf_class in tree 1."""

    def spoil(batch: Batch) -> None:
        assert batch.tables.leaf_class is not None
        batch.tables.leaf_class[1, 7] = value

    return spoil


OWN = ("path", "wide")  # the ops on weights of each tree
CHILDREN = ("wide", "leaf")
CORRUPTIONS = (
    Corruption("offset past the end", offset(1, lambda b: len(b.tables.path) + 1)),
    Corruption("offset far past the end", offset(1, lambda _: 2**62)),
    Corruption("offset negative", offset(0, lambda _: -1)),
    Corruption("offset very negative", offset(0, lambda _: -(2**63))),
    Corruption("path too long", offset(0, lambda _: 0)),
    Corruption("node past the end", entry(lambda b: b.tables.weight_rows << 1), ("path",)),
    Corruption("node far past the end", entry(lambda _: 2**31 - 1), ("path",)),
    Corruption("node negative", entry(lambda _: -2), ("path",)),
    Corruption("row negative", entry(lambda _: -1, 0), CHILDREN),
    Corruption("row far past the end", entry(lambda _: 2**31 - 1, 0), CHILDREN),
    Corruption("width zero", entry(lambda _: 0, 1), CHILDREN),
    Corruption("width negative", entry(lambda _: -(2**31), 1), CHILDREN),
    Corruption("width far past the end", entry(lambda _: 2**31 - 1, 1), CHILDREN),
    Corruption("width over max_width", entry(lambda b: b.tables.stride + 1, 1), CHILDREN),
    Corruption("child negative", entry(lambda _: -1, 2), CHILDREN),
    Corruption("child past the end", entry(lambda _: 2**31 - 1, 2), CHILDREN),
    Corruption("feature past the end", features(16), OWN),
    Corruption("feature far past the end", features(2**31 - 1), OWN),
    Corruption("feature negative", features(-1), OWN),
    Corruption("features unsorted", features(15, 14), OWN),
    Corruption("feature repeated", features(15, 15), OWN),
    Corruption("class past the end", classes(12), ("leaf",)),
    Corruption("class far past the end", classes(2**31 - 1), ("leaf",)),
    Corruption("class negative", classes(-1), ("leaf",)),
)
BAD_TARGETS = (12, 13, 2**31, 2**62, 2**63 - 1)


CASES = {
    "path": Case("corrupt", rows=90, classes=12, features=8),
    "wide": Case("corrupt", rows=90, classes=12, features=8, widest=4),
    "leaf": Case("corrupt", rows=90, classes=12, widest=4, leaves=True),
}


def corruptions(op: str) -> list[Corruption]:
    return [corruption for corruption in CORRUPTIONS if op in corruption.ops]


def check_batch(
    kernels: Kernels, batch: Batch, unusable: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
) -> None:
    """unusable [N, T]: NaN there and no gradient; elsewhere as the reference says.

    `batch.paths` must be empty where tables are spoilt, and targets in range."""
    tables = batch.tables
    targets = tables.target.copy()
    results = run_batch(kernels, batch, FLOAT32)
    assert (np.isnan(results.log_prob) == unusable).all()
    tables.target[tables.target >= tables.leaf_position.shape[1]] = -1
    log_prob, score = true_forward(batch)
    got = np.where(unusable, 0, results.log_prob)
    unit = unit_of_sums(FLOAT32)
    close("log_prob", got, log_prob, tables.features + tables.stride, unit, 0.0, 0.0)
    close("score", results.score, score, tables.features, unit, 0.0, 0.0)
    grads = true_backward(batch, results.score)
    stored = (results.grad_hidden, results.grad_weight, results.grad_bias)
    terms = max(tables.trees * tables.stride, tables.rows)
    for name, array, true in zip(("hidden", "weight", "bias"), stored, grads, strict=True):
        close(f"grad_{name}", array, true, terms, unit, unit, 0.0)
    assert_sparse_is_dense(results)
    tables.target[:] = targets


def check_corruption(kernels: Kernels, corruption: Corruption, op: str) -> None:
    batch = make_batch(CASES[op], FLOAT32, seed=3)
    batch.tables.target[:12] = np.arange(12)  # every class is asked for
    corruption.spoil(batch)
    batch.paths[1] = [[] for _ in batch.paths[1]]
    unusable = np.zeros((batch.tables.rows, 2), np.bool_)
    unusable[:, 1] = batch.tables.target >= 0
    check_batch(kernels, batch, unusable)
    half = run_batch(kernels, batch, BFLOAT16)
    assert (np.isnan(half.log_prob) == unusable).all()


def check_bad_targets(kernels: Kernels, op: str) -> None:
    batch = make_batch(CASES[op], FLOAT32, seed=4)
    batch.tables.target[3 : 3 + len(BAD_TARGETS)] = BAD_TARGETS
    batch.tables.target[60:62] = (-100, -(2**63))  # ignored
    unusable = np.repeat((batch.tables.target >= 12)[:, None], 2, axis=1)
    check_batch(kernels, batch, unusable)


def check_bad_ranks(kernels: Kernels, op: str) -> None:
    """Ranks that do not belong to the paths: gradients of weights may be wrong, nothing else."""
    batch = make_batch(CASES[op], FLOAT32, seed=5)
    ranks = np.array([2**31 - 1, -1, 7, 7, -(2**31), 10**6])
    batch.tables.leaf_position[:] = np.resize(ranks, batch.tables.leaf_position.shape)
    log_prob, _ = true_forward(batch)
    results = run_batch(kernels, batch, FLOAT32)
    unit = unit_of_sums(FLOAT32)
    terms = batch.tables.features + batch.tables.stride
    close("log_prob", results.log_prob, log_prob, terms, unit, 0.0, 0.0)
    grad_hidden, _, _ = true_backward(batch, results.score)
    close("grad_hidden", results.grad_hidden, grad_hidden, 2 * batch.tables.stride, unit, unit, 0.0)
