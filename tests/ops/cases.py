"""Batches over small random binary trees for the path op.

Tables are built here from nested tuples, apart from hstree.trees, so that the two check each other.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from reference.path_log_prob import path_log_prob_reference
from torch import Tensor

from hstree.ops import path_log_prob

measures_memory = pytest.mark.skipif(
    "LD_PRELOAD" in os.environ, reason="a sanitizer needs and keeps memory of its own"
)

BACKEND = "inductor" if shutil.which("g++") or shutil.which("c++") else "aot_eager"

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def with_dtypes(cases: Iterable[Any], marks: Any = ()) -> list[Any]:
    """Each case in its dtypes, or in float32 and in one other, the others in turn. The slow tests
    of every instruction set run each case in every dtype."""
    return [
        pytest.param(case, dtype, marks=marks)
        for i, case in enumerate(cases)
        for dtype in getattr(case, "dtypes", ()) or (DTYPES[0], DTYPES[1 + i % (len(DTYPES) - 1)])
    ]


def same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.to_dense(), b.to_dense())


def replayed_alike(
    batch: Any, log_prob_of: Callable[[Any], Tensor], expected: list[Tensor]
) -> None:
    """A CUDA graph of a step gives the bits of the step: log P, gradients of hidden, weight and
    bias."""
    leaves = [x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
    static = replace(batch, hidden=leaves[0], weight=leaves[1], bias=leaves[2])

    def step() -> Tensor:
        log_prob = log_prob_of(static)
        log_prob.backward(batch.grad)
        return log_prob

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            for leaf in leaves:
                leaf.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        log_prob = step()
    for leaf in leaves:
        leaf.grad.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(
        [log_prob.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], expected
    )


def strided(tensor: Tensor, how: str) -> Tensor:
    """The same values, not contiguous."""
    if how == "transposed" and tensor.dim() > 1:
        other = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    else:  # every other element of a longer tensor, from the second on
        longer = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
        other = longer[..., 1::2]
        other.copy_(tensor)
    assert torch.equal(other, tensor)
    return other


def slow(cases: Iterable[Any]) -> list[Any]:
    """Cases for the slow tests alone."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def name_of(value: Any) -> str:
    """For the ids of parameters."""
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """A batch."""

    why: str
    rows: int = 29
    trees: int = 3
    classes: int = 23
    in_features: int = 19
    subset: int | None = None  # None: no feature_index
    shape: str = "random"  # of the trees: random, chain, balanced
    bias: bool = True
    ignored: float = 0.2  # share of the rows
    favourite: float = 0.0  # share of the rows that have class 0, in the middle of the trees
    scale: float = 1.0
    dtypes: tuple[torch.dtype, ...] = ()

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
    Case("deepest tree", classes=65, shape="chain"),
    Case("zero rows", rows=0),
    Case("one row", rows=1, ignored=0.0),
    Case("all rows ignored", ignored=1.0),
    Case("no row ignored, targets repeat", rows=100, classes=5, trees=1, ignored=0.0),
    Case("values of order 100", subset=7, scale=100.0, trees=1),
    Case("nested runs of few rows", rows=90, trees=2, classes=200, subset=17),
)

# On the CPU alone, whose kernels take runs of rows in tiles, and features in vectors of 2 to 16;
# finished gradients are streamed where aligned.
BLOCKS = (
    Case("nested runs of many rows", rows=150, trees=2, classes=40, shape="chain"),
    Case("rows of whole vectors", rows=70, classes=30, in_features=64),
    Case("a subset of whole vectors", rows=70, in_features=75, subset=48),
    Case("a subset of half a vector more", rows=70, in_features=75, subset=40),
)

HALF = (torch.bfloat16, torch.float16)
BOTH = (torch.float32, torch.bfloat16)


# The CUDA kernels take the features in chunks, rows in tiles and segments.
TILES = (
    Case("16-byte accesses", rows=41, trees=2, in_features=16, subset=8),
    Case("several chunks of features", rows=17, trees=1, in_features=1056, dtypes=BOTH),
    Case("chunks, single accesses", rows=17, trees=1, in_features=530, dtypes=BOTH),
    Case("chunks of float64", rows=17, trees=1, in_features=258, dtypes=(torch.float64,)),
    Case("runs over several segments", rows=300, trees=2, classes=9, in_features=16,
         favourite=0.5, dtypes=DTYPES),
    Case("one class in all rows", rows=150, trees=2, in_features=16, favourite=1.0,
         ignored=0.0, dtypes=BOTH),
    Case("deep runs over several segments", rows=300, trees=1, classes=65, shape="chain",
         in_features=3, favourite=0.3, dtypes=(torch.float32,)),
    Case("runs over many segments", rows=700, trees=1, classes=5, in_features=4, favourite=0.6,
         dtypes=BOTH),
    Case("balanced tree, no row ignored", trees=2, classes=32, shape="balanced", in_features=16,
         ignored=0.0, dtypes=BOTH),
    Case("several blocks of columns, part of a group of four", rows=70, trees=1, in_features=300,
         subset=198, dtypes=BOTH),
    Case("windows of features", rows=5, trees=2, in_features=10243, subset=24, dtypes=BOTH),
    Case("more trees than are sorted at a time", rows=21, trees=11, classes=6, in_features=16,
         subset=8, dtypes=(torch.float64, torch.bfloat16)),
    Case("more nodes in a tile than one group of items", rows=64, trees=1, classes=900,
         in_features=5, ignored=0.0, dtypes=DTYPES),
    Case("more nodes in a tile than a batch, 16-byte accesses", rows=32, trees=1, classes=300,
         in_features=40, subset=32, dtypes=(torch.float32, *HALF)),
    # One, two and four chunks where they go through shared memory. Two tiles, one of a single row.
    *(
        Case(f"{features} features", rows=17, trees=1, classes=6, in_features=features + 64,
             subset=features, dtypes=HALF)
        for features in (64, 1024, 1152, 2048)
    ),
    Case("rows that are not aligned", rows=17, trees=1, in_features=197, subset=96, dtypes=HALF),
)  # fmt: skip


@dataclass
class Batch:
    """Arguments of the op, in its order."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    path_offset: Tensor
    path: Tensor
    leaf_position: Tensor
    feature_index: Tensor | None
    max_depth: int
    grad: Tensor  # of log_prob
    rows_of: list[list[list[int]]] = field(default_factory=list)  # nodes by tree and class

    def arguments(self) -> tuple[Any, ...]:
        return (self.hidden, self.weight, self.bias, *self.tables(), self.max_depth)

    def tables(self) -> tuple[Any, ...]:
        tables = self.target, self.path_offset, self.path, self.leaf_position
        return *tables, self.feature_index

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
        """(tree, node) on the path of any target."""
        return {
            (t, row)
            for t, rows_of in enumerate(self.rows_of)
            for y in self.target.tolist()
            if y >= 0
            for row in rows_of[y]
        }


def broken(batch: Batch, name: str, value: Any) -> Batch:
    """The batch with an argument replaced, or one of its elements: name = "target[3]"."""
    if "[" not in name:
        change = value(getattr(batch, name)) if callable(value) else value
        return replace(batch, **{name: change})
    name, place = name.rstrip("]").split("[")
    tensor = getattr(batch, name).clone()
    tensor[tuple(int(i) for i in place.split(","))] = value
    return replace(batch, **{name: tensor})


def random_nested(
    classes: int, widest: int, shape: str, random: np.random.Generator, middle: bool = False
) -> Any:
    """Nested tuples over classes in random order, each node with 2 to `widest` children. middle:
    class 0 is in the middle, so that others come before it and after it."""

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

    order = random.permutation(classes)
    if middle:
        order = np.roll(order, classes // 2 - int(np.flatnonzero(order == 0)[0]))
    return build(order.tolist())


def draw_target(case: Case, random: np.random.Generator) -> Tensor:
    target = random.integers(0, case.classes, case.rows)
    if case.favourite:
        target[random.random(case.rows) < case.favourite] = 0
    target[random.random(case.rows) < case.ignored] = -1
    return torch.from_numpy(target)


def walk(nested: Any) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """(class, [(node, child), ...]) from left to right, nodes in preorder."""
    numbers = itertools.count()

    def visit(item: Any, above: list[tuple[int, int]]) -> Iterator[Any]:
        if not isinstance(item, tuple):
            yield item, above
            return
        node = next(numbers)
        for child, below in enumerate(item):
            yield from visit(below, [*above, (node, child)])

    yield from visit(nested, [])


def upstream(case: Case, random: np.random.Generator) -> Tensor:
    """Gradients [N, T] of either sign, over three orders of magnitude, float32."""
    size = (case.rows, case.trees)
    values = random.standard_normal(size) * 10.0 ** random.uniform(-2, 1, size)
    return torch.from_numpy(values).to(torch.float32)


@contextmanager
def filled_memory() -> Iterator[None]:
    """What the operators allocate is NaN, or the largest integer, until it is written."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Saved: TypeAlias = tuple[Tensor, ...]
"""What the forward pass keeps: score, order and plan."""


class PathOp:
    """The path op on a batch."""

    operator = torch.ops.hstree.path_log_prob.default
    reference = staticmethod(path_log_prob_reference)

    def forward(self, *arguments: Any) -> Any:
        """log_prob and score."""
        return self.operator(*arguments)[:2]

    def saved(self, batch: Batch) -> Saved:
        return tuple(self.operator(*batch.arguments())[1:])

    def backward(
        self,
        batch: Batch,
        saved: Saved,
        mask: tuple[bool, ...] = (True, True, True),
        sparse: bool = False,
    ) -> tuple[Tensor, ...]:
        """Gradients of hidden, weight and bias, and index."""
        backward = torch.ops.hstree.path_log_prob_backward.default
        given = (*batch.tables(), *saved, mask, sparse)
        gradients: tuple[Tensor, ...] = backward(batch.grad, batch.hidden, batch.weight, *given)
        return gradients

    def log_prob(self, batch: Batch, sparse: bool = False) -> Tensor:
        *arguments, max_depth = batch.arguments()
        return path_log_prob(*arguments, max_depth=max_depth, sparse=sparse)

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

    def batch(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
        random = np.random.default_rng(seed)
        path_offset = np.zeros((case.trees, case.classes + 1), np.int64)
        leaf_position = np.zeros((case.trees, case.classes), np.int32)
        path: list[int] = []
        rows_of: list[list[list[int]]] = []
        for t in range(case.trees):
            nested = random_nested(case.classes, 2, case.shape, random, case.favourite > 0)
            leaves = dict(walk(nested))
            for place, c in enumerate(leaves):
                leaf_position[t, c] = place
            for c in range(case.classes):
                path_offset[t, c] = len(path)
                path += [node << 1 | (child == 0) for node, child in leaves[c]]
            path_offset[t, -1] = len(path)
            rows_of.append([[node for node, _ in leaves[c]] for c in range(case.classes)])
        features = case.in_features if case.subset is None else case.subset
        index = None
        if case.subset is not None:
            drawn = [
                np.sort(random.choice(case.in_features, features, replace=False))
                for _ in range(case.trees)
            ]
            index = torch.tensor(np.stack(drawn), dtype=torch.int32)
        target = draw_target(case, random)

        def draw(*size: int) -> Tensor:
            return torch.from_numpy(case.scale * random.standard_normal(size)).to(dtype)

        nodes = case.classes - 1
        return Batch(
            hidden=draw(case.rows, case.in_features),
            weight=draw(case.trees, nodes, features),
            bias=draw(case.trees, nodes) if case.bias else None,
            target=target,
            path_offset=torch.from_numpy(path_offset),
            path=torch.tensor(path, dtype=torch.int32),
            leaf_position=torch.from_numpy(leaf_position),
            feature_index=index,
            max_depth=max(len(rows) for tree in rows_of for rows in tree),
            grad=upstream(case, random).to(dtype),
            rows_of=rows_of,
        )


PATH = PathOp()
