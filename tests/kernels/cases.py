"""Batches over small random trees, and what the ops must give on them: plain loops in float64.

`check` runs one batch and compares; it serves the tests and, in a process of its own under the
sanitizers, sanitized.py. Error bounds follow from the number of terms of a sum and the sum of
their magnitudes, so they hold at any scale of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernels.emulation import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    ElementType,
    Kernels,
    Tables,
    TreeOp,
)


@dataclass(frozen=True)
class Case:
    """A batch. `widest` children at most for each node; 0 for the op on binary nodes. `leaves`: for
    the leaf op, whose trees are groups of classes, or, if nested, wide trees over half of them."""

    why: str
    rows: int = 41
    trees: int = 2
    classes: int = 23
    in_features: int = 16
    features: int | None = None  # of a subset; None: no feature_index
    block: int = 1  # of features of which the subset is made
    shape: str = "random"  # of the tree: random, chain, balanced, flat, nested
    widest: int = 0
    leaves: bool = False
    scale: float = 1.0
    ignored: float = 0.15  # share of the rows
    favourite: float = 0.0  # share of the rows that have class 0
    bias: bool = True
    kinds: tuple[ElementType, ...] = field(default=(FLOAT32, FLOAT64, BFLOAT16, FLOAT16))

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


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
class Batch:
    """Tables and exact values of the tensors of a case; `paths` by tree and class."""

    tables: Tables
    hidden: Array
    weight: Array
    bias: Array | None
    grad_log_prob: Array
    paths: list[list[list[tuple[int, int, int]]]]  # (first row, width, child); binary: width 1

    def subset(self, tree: int) -> Array:
        index = self.tables.feature_index
        return np.arange(self.tables.in_features) if index is None else index[tree]

    def weight_rows(self, tree: int, first: int, width: int) -> tuple[Any, ...]:
        """Index of the rows of a node in weight."""
        tree_index, rows = self.bias_rows(tree, first, width)
        return (tree_index, rows) if self.tables.leaf_class is None else (rows,)

    def bias_rows(self, tree: int, first: int, width: int) -> tuple[Any, ...]:
        rows = slice(first, first + width)
        leaf_class = self.tables.leaf_class
        return tree, rows if leaf_class is None else leaf_class[tree, rows]

    def targets(self) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
        for row, target in enumerate(self.tables.target):
            for tree in range(self.tables.trees):
                if target >= 0 and self.paths[tree][target]:
                    yield row, tree, self.paths[tree][target]


def random_tree(
    case: Case, random: np.random.Generator
) -> tuple[Array, list[list[tuple[int, int, int]]], int]:
    """Leaf positions, paths by class, and weight rows; nodes are numbered in preorder."""
    order = random.permutation(case.classes)
    if case.favourite:  # class 0 in the middle, so that runs start before and go on after it
        order = np.roll(order, case.classes // 2 - int(np.flatnonzero(order == 0)[0]))
    paths: list[list[tuple[int, int, int]]] = [[] for _ in range(case.classes)]
    weight_rows = 0
    stack: list[tuple[int, int, list[tuple[int, int, int]]]] = [(0, case.classes, [])]
    while stack:
        begin, end, above = stack.pop()
        size = end - begin
        if size == 1:
            paths[order[begin]] = above
            continue
        if case.shape == "chain":
            cuts = [begin + 1]
        elif case.shape == "balanced":
            cuts = [begin + size // 2]
        elif case.shape == "flat":
            cuts = list(range(begin + 1, end))
        else:
            width = 2 if case.widest == 0 else int(random.integers(2, min(size, case.widest) + 1))
            cuts = sorted(
                int(c) for c in random.choice(np.arange(begin + 1, end), width - 1, replace=False)
            )
        bounds = [begin, *cuts, end]
        width = len(bounds) - 1
        first = weight_rows
        weight_rows += width if case.widest else 1
        for child in reversed(range(width)):
            entry = (first, width, child) if case.widest else (first, 1, 1 - child)
            stack.append((bounds[child], bounds[child + 1], [*above, entry]))
    position = np.empty(case.classes, np.int32)
    position[order] = np.arange(case.classes)
    return position, paths, weight_rows


def random_groups(
    case: Case, random: np.random.Generator
) -> tuple[Array, list[list[tuple[int, int, int]]], Array]:
    """Leaf positions, paths by class, and the classes of the rows of a tree of the leaf op."""
    if case.shape == "nested":
        half = replace(case, classes=case.classes // 2, shape="random")
        position, paths, _ = random_tree(half, random)
        rest = np.arange(len(position), case.classes, dtype=np.int32)
        paths += [[] for _ in rest]
        return np.append(position, rest), paths, random.permutation(case.classes)
    order = random.permutation(case.classes)
    paths = [[] for _ in range(case.classes)]
    begin = 0
    while begin < case.classes:
        width = case.classes if case.shape == "flat" else int(random.integers(1, case.widest + 1))
        members = order[begin : begin + width]
        for child, member in enumerate(members):
            paths[member] = [(begin, len(members), child)] if len(members) > 1 else []
        begin += width
    return np.argsort(order).astype(np.int32), paths, order


def make_batch(case: Case, kind: ElementType, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    leaf_class = None
    if case.leaves:
        grouped = [random_groups(case, random) for _ in range(case.trees)]
        leaf_class = np.stack([classes for _, _, classes in grouped]).astype(np.int32)
        trees = [(position, paths, case.classes) for position, paths, _ in grouped]
    else:
        trees = [random_tree(case, random) for _ in range(case.trees)]
    weight_rows = max(rows for _, _, rows in trees)
    paths = [paths for _, paths, _ in trees]
    lengths = np.array([[len(path) for path in tree] for tree in paths])
    offset = np.zeros((case.trees, case.classes + 1), np.int64)
    flat = np.cumsum(lengths.reshape(-1)).reshape(lengths.shape)
    offset[:, 1:] = flat
    offset[1:, 0] = flat[:-1, -1]
    entries = [entry for tree in paths for path in tree for entry in path]
    if case.widest:
        path = np.array(entries, np.int32).reshape(-1, 3)
        stride = max(sum(width for _, width, _ in path) for tree in paths for path in tree)
    else:
        path = np.array([node << 1 | left for node, _, left in entries], np.int32)
        stride = int(lengths.max())
    feature_index = None
    if case.features is not None:
        blocks, taken = case.in_features // case.block, case.features // case.block
        first = case.block * np.stack(
            [np.sort(random.choice(blocks, taken, replace=False)) for _ in range(case.trees)]
        )
        feature_index = (first[:, :, None] + np.arange(case.block)).reshape(case.trees, -1)
        feature_index = feature_index.astype(np.int32)
    target = random.integers(0, case.classes, case.rows)
    target[random.random(case.rows) < case.favourite] = 0
    target[random.random(case.rows) < case.ignored] = -1
    tables = Tables(
        target=target,
        offset=offset,
        path=path,
        leaf_position=np.stack([position for position, _, _ in trees]),
        feature_index=feature_index,
        weight_rows=weight_rows,
        in_features=case.in_features,
        stride=stride,
        leaf_class=leaf_class,
    )

    def exact(values: Array) -> Array:
        return kind.decode(kind.encode(values))

    shape = (case.trees, weight_rows)
    scale = case.scale
    return Batch(
        tables=tables,
        hidden=exact(scale * random.standard_normal((case.rows, case.in_features))),
        weight=exact(scale * random.standard_normal((*shape[case.leaves :], tables.features))),
        bias=exact(scale * random.standard_normal(shape)) if case.bias else None,
        # Upstream gradients of either sign, over three orders of magnitude.
        grad_log_prob=(
            random.standard_normal((case.rows, case.trees))
            * 10.0 ** random.uniform(-2, 1, (case.rows, case.trees))
        ).astype(kind.sums),
        paths=paths,
    )


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
