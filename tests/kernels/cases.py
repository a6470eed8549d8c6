"""The batches of the tests, and what the ops must give on them: plain loops in float64.

`check` runs one batch and compares; it serves the tests and, in a process of its own under the
sanitizers, sanitized.py. Error bounds follow from the number of terms of a sum and the sum of
their magnitudes, so they hold at any scale of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kernels.batches import Batch, Case, make_batch
from kernels.emulation import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    ElementType,
    Kernels,
    TreeOp,
)

BOTH = (FLOAT32, BFLOAT16)
HALF = (BFLOAT16, FLOAT16)


def subset_case(features: int, block: int, widest: int = 0) -> Case:
    """Two tiles, the second of one row; in_features allows accesses of 16 bytes."""
    why = f"{features} features in blocks of {block}"
    return Case(why, rows=17, trees=1, classes=6, in_features=features + 64, features=features,
                block=block, widest=widest, kinds=HALF)  # fmt: skip


PATH_CASES = (
    Case("ragged paths, feature subset, 16-byte accesses", features=8),
    Case("no feature subset, no bias", bias=False, kinds=BOTH),
    Case("subset of odd size, single accesses", in_features=19, features=7),
    Case("several chunks of features", rows=17, trees=1, in_features=1056, kinds=BOTH),
    Case("chunks, single accesses", rows=17, trees=1, in_features=530, kinds=BOTH),
    Case("chunks of float64", rows=17, trees=1, in_features=258, kinds=(FLOAT64,)),
    Case("depth one", classes=2),
    Case("one class", classes=1, kinds=(FLOAT32,)),
    Case("deepest tree", classes=65, shape="chain", kinds=BOTH),
    Case("zero rows", rows=0, kinds=(FLOAT32,)),
    Case("all rows ignored", ignored=1.0, kinds=BOTH),
    Case("one row", rows=1, ignored=0.0, kinds=(FLOAT32,)),
    Case("runs over several segments", rows=300, classes=9, trees=2, favourite=0.5),
    Case("one class in all rows", rows=150, favourite=1.0, ignored=0.0, kinds=BOTH),
    Case("deep runs over several segments", rows=300, classes=65, shape="chain", trees=1,
         in_features=3, favourite=0.3, kinds=(FLOAT32,)),
    Case("balanced tree, no row ignored", classes=32, shape="balanced", ignored=0.0, kinds=BOTH),
    Case("values of order 100", features=8, scale=100.0),
    Case("several blocks of columns, part of a group of four", rows=70, trees=1, in_features=300,
         features=198, kinds=BOTH),
    Case("windows of features", rows=5, trees=2, in_features=10243, features=24, kinds=BOTH),
    Case("runs over many segments", rows=700, classes=5, trees=1, in_features=4, favourite=0.6,
         kinds=BOTH),
    Case("more trees than are sorted at a time", rows=21, classes=6, trees=11, features=8,
         kinds=(FLOAT64, BFLOAT16)),
    Case("more nodes in a tile than one group of items", rows=64, classes=900, trees=1,
         in_features=5, ignored=0.0),
    Case("more nodes in a tile than a batch, 16-byte accesses", rows=32, classes=300, trees=1,
         in_features=40, features=32, block=8, kinds=(FLOAT32, *HALF)),
    # One, two and four chunks where they go through shared memory.
    *(subset_case(features, block) for features in (64, 1024, 1152, 2048) for block in (1, 16)),
    Case("blocks of 16 in rows that are not aligned", rows=17, trees=1, in_features=197,
         features=96, block=16),
    Case("blocks of 4", in_features=64, features=32, block=4),
)  # fmt: skip
WIDE_CASES = (
    Case("nested wide nodes, feature subset", features=8, widest=6),
    Case("no feature subset, no bias", widest=6, bias=False, kinds=BOTH),
    Case("subset of odd size, single accesses", in_features=19, features=7, widest=5),
    Case("several chunks of features", rows=17, trees=1, in_features=1056, widest=6, kinds=BOTH),
    Case("chunks of float64", rows=17, trees=1, in_features=258, widest=4, kinds=(FLOAT64,)),
    Case("one node over all classes", classes=77, shape="flat", widest=77),
    Case("width beyond the limit of segments", rows=70, classes=4200, shape="flat", widest=4200,
         trees=1, in_features=4, kinds=(FLOAT32,)),
    Case("segments longer than the shortest", rows=600, classes=500, shape="flat", widest=500,
         trees=1, in_features=4, kinds=(FLOAT32,)),
    Case("one class", classes=1, widest=4, kinds=(FLOAT32,)),
    Case("zero rows", rows=0, widest=4, kinds=(FLOAT32,)),
    Case("all rows ignored", ignored=1.0, widest=4, kinds=BOTH),
    Case("runs over several segments", rows=300, classes=9, widest=3, favourite=0.5),
    Case("one class in all rows", rows=150, favourite=1.0, ignored=0.0, widest=3, kinds=BOTH),
    Case("values of order 100", features=8, widest=6, scale=100.0),
    *(subset_case(features, block, 6) for features in (64, 1152) for block in (1, 16)),
    Case("a node of more children than a batch, blocks", classes=77, shape="flat", widest=77,
         in_features=64, features=32, block=16, kinds=HALF),
)  # fmt: skip
LEAF_CASES = tuple(
    replace(case, leaves=True)
    for case in (
        Case("groups and classes without one", trees=3, widest=6),
        Case("no bias, single accesses", in_features=19, widest=5, bias=False),
        Case("groups of two", widest=2, kinds=BOTH),
        Case("nodes above groups", widest=4, shape="nested", kinds=BOTH),
        Case("several chunks of features", rows=17, in_features=1056, widest=6, kinds=BOTH),
        Case("chunks of float64", rows=17, in_features=258, widest=4, kinds=(FLOAT64,)),
        Case("a group of more classes than a batch", classes=77, shape="flat", widest=77,
             in_features=64),
        Case("width beyond the limit of segments", rows=70, classes=4200, shape="flat", widest=4200,
             trees=2, in_features=4, kinds=(FLOAT32,)),
        Case("one class", classes=1, widest=4, kinds=(FLOAT32,)),
        Case("zero rows", rows=0, widest=4, kinds=(FLOAT32,)),
        Case("all rows ignored", ignored=1.0, widest=4, kinds=BOTH),
        Case("runs over several segments", rows=300, classes=9, trees=3, widest=3, favourite=0.5),
        Case("one class in all rows", rows=150, favourite=1.0, ignored=0.0, widest=3, kinds=BOTH),
        Case("values of order 100", widest=6, scale=100.0),
    )
)  # fmt: skip


@dataclass
class Checked:
    """A true value and the magnitude of the terms that sum up to it."""

    value: Array
    terms: Array

    @classmethod
    def zeros(cls, *shape: int) -> Checked:
        return cls(np.zeros(shape), np.zeros(shape))

    def add(self, where: tuple[int | slice | Array, ...], value: Array | float) -> None:
        self.value[where] += value
        self.terms[where] += np.abs(value)


def close(name: str, got: Array, true: Checked, terms: int, unit: float, rounding: float,
          tiny: float, of_terms: float = 0.0) -> None:  # fmt: skip
    """|got - true| <= what summing in `unit` and rounding once to the output type can explain.
    of_terms: relative error of each term."""
    relative = 2 * (terms + 8) * unit + of_terms
    bound = relative * true.terms + rounding * np.abs(true.value) + 2 * tiny
    error = np.abs(got - true.value)
    excess = error - bound
    assert not np.isnan(got).any(), f"{name}: NaN"
    assert (excess <= 0).all(), (
        f"{name}: error {error.max():.3g}, bound exceeded by {excess.max():.3g}"
    )


def unit_of_sums(kind: ElementType) -> float:
    return 2.0**-53 if kind is FLOAT64 else 2.0**-24


def log_sigmoid(x: float) -> float:
    return float(-np.logaddexp(0.0, -x))


def sigmoid(x: float) -> float:
    return float(np.exp(-np.logaddexp(0.0, -x)))


def true_score(batch: Batch) -> Checked:
    """Node scores z of either op: dot products plus bias, before any softmax."""
    tables = batch.tables
    score = Checked.zeros(tables.rows, tables.trees, tables.stride)
    for row, tree, path in batch.targets():
        features = batch.hidden[row, batch.subset(tree)]
        column = 0
        for first, width, _ in path:
            products = features * batch.weight[batch.weight_rows(tree, first, width)]
            where = (row, tree, slice(column, column + width))
            score.value[where] = products.sum(1)
            score.terms[where] = np.abs(products).sum(1)
            if batch.bias is not None:
                score.add(where, batch.bias[batch.bias_rows(tree, first, width)])
            column += width
    return score


def true_forward(batch: Batch) -> tuple[Checked, Checked]:
    """log_prob and score, with the error of z carried into their terms."""
    tables = batch.tables
    score = true_score(batch)
    log_prob = Checked.zeros(tables.rows, tables.trees)
    for row, tree, path in batch.targets():
        column = 0
        for _, width, child in path:
            z = score.value[row, tree, column : column + width]
            terms = score.terms[row, tree, column : column + width]
            if tables.wide:
                z[:] -= z.max() + np.log(np.exp(z - z.max()).sum())
                terms[:] = 2 * terms.max() + np.abs(z)
                log_prob.value[row, tree] += z[child]
                log_prob.terms[row, tree] += terms[child]
            else:
                log_prob.add((row, tree), log_sigmoid(z[0] if child else -z[0]))
                log_prob.terms[row, tree] += terms[0]
            column += width
    return log_prob, score


def true_backward(batch: Batch, score: Array) -> tuple[Checked, Checked, Checked]:
    """Gradients of hidden, weight and bias from the given scores."""
    tables = batch.tables
    grad_hidden = Checked.zeros(tables.rows, tables.in_features)
    grad_weight = Checked.zeros(*batch.weight.shape)
    grad_bias = Checked.zeros(tables.trees, tables.weight_rows)
    for row, tree, path in batch.targets():
        subset = batch.subset(tree)
        column = 0
        for first, width, child in path:
            z = score[row, tree, column : column + width].astype(np.float64)
            # Magnitude of the terms of a slope: 1 - exp(z) may cancel.
            if tables.wide:
                slope = (np.arange(width) == child) - np.exp(z)
                slope_terms = (np.arange(width) == child) + np.exp(z)
            else:
                slope = np.array([sigmoid(-z[0]) if child else -sigmoid(z[0])])
                slope_terms = np.abs(slope)
            grad = float(batch.grad_log_prob[row, tree])
            rows, of_bias = (
                index(tree, first, width) for index in (batch.weight_rows, batch.bias_rows)
            )
            weight, features = batch.weight[rows], batch.hidden[row, subset]
            grad_hidden.value[row, subset] += grad * (slope @ weight)
            grad_hidden.terms[row, subset] += abs(grad) * (slope_terms @ np.abs(weight))
            grad_weight.value[rows] += grad * np.outer(slope, features)
            grad_weight.terms[rows] += abs(grad) * np.outer(slope_terms, np.abs(features))
            grad_bias.value[of_bias] += grad * slope
            grad_bias.terms[of_bias] += abs(grad) * slope_terms
            column += width
    return grad_hidden, grad_weight, grad_bias


@dataclass
class Results:
    """All outputs of an op on a batch, as stored."""

    log_prob: Array
    score: Array
    grad_hidden: Array
    grad_weight: Array
    grad_bias: Array
    index: Array
    sparse_weight: Array
    bias_index: Array
    sparse_bias: Array


def run_batch(
    kernels: Kernels, batch: Batch, kind: ElementType, score: Array | None = None
) -> Results:
    """All launchers on a batch; backward from the given scores, else from its own.

    The inputs of ignored rows are NaN: nothing of them may go anywhere.
    """
    ignored = batch.tables.target < 0
    values = kind.encode(np.where(ignored[:, None], np.nan, batch.hidden))
    weight = kind.encode(batch.weight)
    bias = None if batch.bias is None else kind.encode(batch.bias)
    op = TreeOp(kind, batch.tables)
    log_prob, own_score = op.forward(values, weight, bias)
    arguments = (batch.grad_log_prob, values, weight, own_score if score is None else score)
    grad_hidden, grad_weight, grad_bias = op.backward(False, *arguments)
    again, *sparse = op.backward(True, *arguments)
    assert again.tobytes() == grad_hidden.tobytes()
    return Results(log_prob, own_score, grad_hidden, grad_weight, grad_bias, *sparse)


def assert_sparse_is_dense(results: Results) -> None:
    """Bit for bit: the visited rows are the dense rows, all others are zero; sorted, no repeats."""
    pairs = (
        (results.index, results.sparse_weight, results.grad_weight),
        (results.bias_index, results.sparse_bias, results.grad_bias),
    )
    for index, sparse, dense in pairs:
        where = tuple(index)
        assert (sparse == dense[where]).all()
        rest = dense.copy()
        rest[where] = 0
        assert not rest.any()
        assert (np.diff(np.ravel_multi_index(where, dense.shape[: len(where)])) > 0).all()


def check(kernels: Kernels, case: Case, kind: ElementType) -> None:
    """Compares every output of the op with the reference, and row-sparse with dense gradients."""
    batch = make_batch(case, kind)
    tables = batch.tables
    log_prob, score = true_forward(batch)
    rounded_score = score.value.astype(kind.sums)
    results = run_batch(kernels, batch, kind, rounded_score)
    unit = unit_of_sums(kind)
    terms = tables.features
    close("score", results.score, score, terms, unit, 0.0, 0.0)
    close("log_prob", results.log_prob, log_prob, terms + tables.stride, unit, 0.0, 0.0)

    grads = true_backward(batch, rounded_score)
    got = (results.grad_hidden, results.grad_weight, results.grad_bias)
    # A row of the leaf op's weight belongs to every tree.
    terms = max(tables.trees * tables.stride, tables.rows * (tables.trees if case.leaves else 1))
    for name, stored, true in zip(("hidden", "weight", "bias"), got, grads, strict=True):
        # Of the factors of matrix products, which are sums of two elements.
        of_terms = 2.0**-16 if kind in HALF and name != "bias" else 0.0
        got_grad = kind.decode(stored)
        close(f"grad_{name}", got_grad, true, terms, unit, kind.unit, kind.tiny, of_terms)
    assert_sparse_is_dense(results)
    visited: set[tuple[int, int]] = set()
    for _, tree, path in batch.targets():
        for first, width, _ in path:
            rows = range(first, first + width)
            _, of_bias = batch.bias_rows(tree, first, width)
            visited |= {(tree, row) for row in (of_bias.tolist() if case.leaves else rows)}
    assert set(zip(*results.bias_index.tolist(), strict=True)) == visited
    if case.leaves:
        assert set(results.index[0].tolist()) == {row for _, row in visited}
    else:
        assert (results.index == results.bias_index).all()
