"""Batches over small random trees for the ops on the paths of targets, and how results are judged.

Tables are built here from nested tuples, apart from hstree.trees, so that the two check each other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import (
    leaf_log_prob_reference,
    path_log_prob_reference,
    wide_log_prob_reference,
)
from torch import Tensor

from hstree.ops import leaf_log_prob, path_log_prob, wide_log_prob

measures_memory = pytest.mark.skipif(
    "LD_PRELOAD" in os.environ, reason="a sanitizer needs and keeps memory of its own"
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def with_dtypes(cases: Iterable[Any]) -> list[tuple[Any, torch.dtype]]:
    """Each case in float32 and in one other dtype, the others in turn. The slow tests of every
    instruction set run each case in every dtype."""
    return [
        (case, dtype)
        for i, case in enumerate(cases)
        for dtype in (DTYPES[0], DTYPES[1 + i % (len(DTYPES) - 1)])
    ]


def name_of(value: Any) -> str:
    """For the ids of parameters."""
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """A batch. `widest`: most children of a node, if the op takes wide nodes."""

    why: str
    rows: int = 29
    trees: int = 3
    classes: int = 23
    in_features: int = 19
    subset: int | None = None  # None: no feature_index
    shape: str = "random"  # of the tree: random, chain, flat
    widest: int = 6
    bias: bool = True
    ignored: float = 0.2  # share of the rows
    scale: float = 1.0

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


CASES = (
    Case("ragged paths, odd subset", subset=7),
    Case("no subset, no bias, one tree", trees=1, bias=False),
    Case("blocks of vectors, one vector and a rest", rows=9, trees=1, in_features=83),
    Case("threads share the features", rows=70, trees=1, in_features=219, subset=170),
    Case("seven trees gathered at once", trees=7, in_features=83, subset=41),
    Case("one feature", in_features=1),
    Case("no features", in_features=0),
    Case("one class", classes=1),
    Case("two classes", classes=2),
    Case("one node", classes=5, shape="flat", widest=5),
    Case("wide node", classes=150, shape="flat", widest=150),
    Case("deepest tree", classes=65, shape="chain"),
    Case("zero rows", rows=0),
    Case("one row", rows=1, ignored=0.0),
    Case("all rows ignored", ignored=1.0),
    Case("no row ignored, targets repeat", rows=100, classes=5, trees=1, ignored=0.0),
    Case("values of order 100", subset=7, scale=100.0, trees=1),
)


@dataclass
class Batch:
    """Arguments of an op, in its order; `longest` is max_depth or max_width. `feature_index` is the
    leaf op's leaf_class."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    offset: Tensor
    path: Tensor
    leaf_position: Tensor
    feature_index: Tensor | None
    longest: int
    grad: Tensor  # of log_prob
    rows_of: list[list[list[int]]] = field(default_factory=list)  # weight rows by tree and class

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.hidden,
            self.weight,
            self.bias,
            self.target,
            self.offset,
            self.path,
            self.leaf_position,
            self.feature_index,
            self.longest,
        )

    def tables(self) -> tuple[Any, ...]:
        return self.arguments()[3:8]

    def map(self, convert: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with a function applied to the floating-point tensors."""
        return replace(
            self,
            hidden=convert(self.hidden),
            weight=convert(self.weight),
            bias=None if self.bias is None else convert(self.bias),
            grad=convert(self.grad),
        )

    def to(self, device: torch.device) -> Batch:
        tensors = {
            name: value.to(device) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **tensors)

    def visited(self) -> set[tuple[int, int]]:
        """(tree, weight row) on the path of any target."""
        return {
            (t, row)
            for t, rows_of in enumerate(self.rows_of)
            for y in self.target.tolist()
            if y >= 0
            for row in rows_of[y]
        }


def random_nested(classes: int, widest: int, shape: str, random: np.random.Generator) -> Any:
    """Nested tuples over classes in random order, each node with 2 to `widest` children."""

    def build(labels: list[int]) -> Any:
        n = len(labels)
        if n == 1:
            return labels[0]
        width = min(n, widest)
        if shape == "chain":
            return (*labels[: width - 1], build(labels[width - 1 :]))
        if shape == "random":
            width = int(random.integers(2, width + 1))
            cuts = np.sort(random.choice(np.arange(1, n), width - 1, replace=False)).tolist()
        else:
            cuts = [n * k // width for k in range(1, width)]
        return tuple(build(labels[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True))

    return build(random.permutation(classes).tolist())


def walk(nested: Any, wide: bool) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """(class, [(first weight row, children, child), ...]) from left to right, nodes in preorder: a
    row for each node, or, if they are wide, for each child."""
    used = 0

    def visit(item: Any, above: list[tuple[int, int, int]]) -> Iterator[Any]:
        nonlocal used
        if not isinstance(item, tuple):
            yield item, above
            return
        first = used
        used += len(item) if wide else 1
        for child, below in enumerate(item):
            yield from visit(below, [*above, (first, len(item), child)])

    yield from visit(nested, [])


def leaf_groups(nested: Any) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """(class, (first leaf, width, child) of its node if its children are all classes, else zeros)
    from left to right."""
    places = itertools.count()

    def visit(item: tuple[Any, ...]) -> Iterator[Any]:
        is_group = not any(isinstance(below, tuple) for below in item)
        first = None
        for child, below in enumerate(item):
            if isinstance(below, tuple):
                yield from visit(below)
                continue
            place = next(places)
            first = place if first is None else first
            yield below, (first, len(item), child) if is_group else (0, 0, 0)

    if not isinstance(nested, tuple):
        return iter([(nested, (0, 0, 0))])
    return visit(nested)


def upstream(case: Case, random: np.random.Generator) -> Tensor:
    """Gradients [N, T] of either sign, over three orders of magnitude, float32."""
    size = (case.rows, case.trees)
    values = random.standard_normal(size) * 10.0 ** random.uniform(-2, 1, size)
    return torch.from_numpy(values).to(torch.float32)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class TreeOpUnderTest:
    """The path op, or the wide op, whose tables have every node as a wide one."""

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., tuple[Tensor, Tensor]]
    longest_name: str
    wide: bool
    shared = False

    @property
    def operator(self) -> Any:
        return getattr(torch.ops.hstree, self.name).default

    def forward(self, *arguments: Any) -> Any:
        """log_prob and score."""
        return self.operator(*arguments)[:2]

    def backward(
        self,
        batch: Batch,
        score: Tensor,
        order: Tensor | None = None,
        plan: Tensor | None = None,
        mask: tuple[bool, bool, bool] = (True, True, True),
        sparse: bool = False,
    ) -> tuple[Tensor, ...]:
        """Gradients of hidden, weight and bias, index and bias_index."""
        given = (*batch.tables(), score, order, plan, mask, sparse)
        backward = getattr(torch.ops.hstree, f"{self.name}_backward").default
        gradients: tuple[Tensor, ...] = backward(batch.grad, batch.hidden, batch.weight, *given)
        return gradients

    def log_prob(self, batch: Batch, sparse: bool = False) -> Tensor:
        *arguments, longest = batch.arguments()
        return self.function(*arguments, **{self.longest_name: longest}, sparse=sparse)

    def gradients(self, batch: Batch, sparse: bool = False) -> list[Tensor]:
        """log_prob, and the gradients of hidden, weight and bias where there is one."""
        leaves = [
            x.detach().requires_grad_()
            for x in (batch.hidden, batch.weight, batch.bias)
            if x is not None
        ]
        bias = leaves[2] if len(leaves) == 3 else None
        log_prob = self.log_prob(
            replace(batch, hidden=leaves[0], weight=leaves[1], bias=bias), sparse
        )
        log_prob.backward(batch.grad.to(log_prob.dtype))
        return [log_prob.detach(), *(x.grad for x in leaves)]

    def reference_gradients(self, batch: Batch, dtype: torch.dtype) -> list[Tensor]:
        """The same, and score, from the reference in a dtype."""
        batch = batch.map(lambda x: x.detach().to("cpu", dtype)).to(torch.device("cpu"))
        leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)
                  if x is not None]  # fmt: skip
        log_prob, score = self.reference(*batch.arguments())
        if log_prob.requires_grad:
            log_prob.backward(batch.grad)
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return [log_prob.detach(), *grads, score.detach()]

    def batch(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
        random = np.random.default_rng(seed)
        widest = case.widest if self.wide else 2
        shape = "random" if case.shape == "flat" and not self.wide else case.shape
        offset = np.zeros((case.trees, case.classes + 1), np.int64)
        leaf_position = np.zeros((case.trees, case.classes), np.int32)
        path: list[Any] = []
        rows_of, lengths = [], [0]
        for t in range(case.trees):
            nested = random_nested(case.classes, widest, shape, random)
            leaves = dict(walk(nested, self.wide))
            for place, c in enumerate(leaves):
                leaf_position[t, c] = place
            rows_of.append([])
            for c in range(case.classes):
                offset[t, c] = len(path)
                nodes = leaves[c]
                if self.wide:
                    path += nodes
                    rows_of[t].append([f + k for f, width, _ in nodes for k in range(width)])
                else:
                    path += [first << 1 | (child == 0) for first, _, child in nodes]
                    rows_of[t].append([first for first, _, _ in nodes])
                lengths.append(len(rows_of[t][c]))
            offset[t, -1] = len(path)
        weight_rows = 1 + max((r for tree in rows_of for rows in tree for r in rows), default=-1)
        features = case.in_features if case.subset is None else case.subset
        index = None
        if case.subset is not None:
            drawn = [
                np.sort(random.choice(case.in_features, features, replace=False))
                for _ in range(case.trees)
            ]
            index = torch.tensor(np.stack(drawn), dtype=torch.int32)
        target = random.integers(0, case.classes, case.rows)
        target[random.random(case.rows) < case.ignored] = -1

        def draw(*size: int) -> Tensor:
            return torch.from_numpy(case.scale * random.standard_normal(size)).to(dtype)

        width = (-1, 3) if self.wide else (-1,)
        return Batch(
            hidden=draw(case.rows, case.in_features),
            weight=draw(case.trees, weight_rows, features),
            bias=draw(case.trees, weight_rows) if case.bias else None,
            target=torch.from_numpy(target),
            offset=torch.from_numpy(offset),
            path=torch.tensor(path, dtype=torch.int32).reshape(width),
            leaf_position=torch.from_numpy(leaf_position),
            feature_index=index,
            longest=max(lengths),
            grad=upstream(case, random).to(dtype),
            rows_of=rows_of,
        )


@dataclass(frozen=True)
class LeafOpUnderTest(TreeOpUnderTest):
    """The leaf op: its groups are the nodes whose children are all classes. No feature subsets."""

    shared = True

    def batch(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
        random = np.random.default_rng(seed)
        offset = np.zeros((case.trees, case.classes + 1), np.int64)
        leaf_class = np.zeros((case.trees, case.classes), np.int32)
        group, rows_of = [], []
        for t in range(case.trees):
            nested = random_nested(case.classes, case.widest, case.shape, random)
            of_class = {}
            for place, (c, node) in enumerate(leaf_groups(nested)):
                leaf_class[t, place] = c
                of_class[c] = node
            rows_of.append([])
            for c in range(case.classes):
                offset[t, c] = len(group)
                first, width, _ = node = of_class[c]
                group += [node] if width else []
                rows_of[t].append(leaf_class[t, first : first + width].tolist())
            offset[t, -1] = len(group)
        target = random.integers(0, case.classes, case.rows)
        target[random.random(case.rows) < case.ignored] = -1

        def draw(*size: int) -> Tensor:
            return torch.from_numpy(case.scale * random.standard_normal(size)).to(dtype)

        return Batch(
            hidden=draw(case.rows, case.in_features),
            weight=draw(case.classes, case.in_features),
            bias=draw(case.trees, case.classes) if case.bias else None,
            target=torch.from_numpy(target),
            offset=torch.from_numpy(offset),
            path=torch.tensor(group, dtype=torch.int32).reshape(-1, 3),
            leaf_position=torch.from_numpy(np.argsort(leaf_class).astype(np.int32)),
            feature_index=torch.from_numpy(leaf_class),
            longest=max(len(rows) for tree in rows_of for rows in tree),
            grad=upstream(case, random).to(dtype),
            rows_of=rows_of,
        )


LEAF = LeafOpUnderTest(
    "leaf_log_prob",
    leaf_log_prob,
    leaf_log_prob_reference,
    "max_width",
    wide=True,
)
PATH = TreeOpUnderTest(
    "path_log_prob",
    path_log_prob,
    path_log_prob_reference,
    "max_depth",
    wide=False,
)
WIDE = TreeOpUnderTest(
    "wide_log_prob",
    wide_log_prob,
    wide_log_prob_reference,
    "max_width",
    wide=True,
)


def judge(name: str, got: Tensor, true: Tensor, eager: Tensor) -> None:
    """The error of `got` is at most that of the eager computation in the precision of the inputs,
    and a few roundings to that precision of the largest value."""
    assert got.shape == true.shape, name
    if not got.numel():
        return
    error = (got.detach().cpu().double() - true).abs().max()
    eager_error = (eager.double() - true).abs().max()
    if not eager_error.isfinite():  # float16 overflows where float32 sums do not
        eager_error = torch.zeros(())
    # In float32 sums of hundreds of products have another order than torch's.
    roundings = {torch.float64: 64, torch.float32: 8}.get(eager.dtype, 4)
    margin = roundings * torch.finfo(eager.dtype).eps * true.abs().max()
    assert error <= eager_error + margin, (
        f"{name}: error {error:.3g}, eager {eager_error:.3g}, margin {margin:.3g}"
    )


def check(op: TreeOpUnderTest, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """log_prob, score and every gradient against the float64 reference of the same inputs."""
    batch = op.batch(case, dtype)
    true = op.reference_gradients(batch, torch.float64)
    eager = true if dtype == torch.float64 else op.reference_gradients(batch, dtype)
    on_device = batch.to(device)
    log_prob, score = op.forward(*on_device.arguments())
    got = [*op.gradients(on_device), score]
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    assert log_prob.dtype == score.dtype == sums
    assert torch.equal(log_prob, got[0])
    names = ["log_prob", "grad_hidden", "grad_weight", "grad_bias"]
    for name, *values in zip([*names[: len(got) - 1], "score"], got, true, eager, strict=True):
        judge(name, *values)
    assert all(g.dtype == dtype for g in got[1:-1])
    ignored = on_device.target < 0
    assert not log_prob[ignored].any()
    assert not score[ignored].any()
    assert not got[1][ignored].any()
