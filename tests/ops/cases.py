"""Batches over small random trees for the ops on the paths of targets.

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
from reference.leaf_log_prob import leaf_log_prob_reference
from reference.path_log_prob import path_log_prob_reference
from reference.wide_log_prob import wide_log_prob_reference
from torch import Tensor

from hstree.ops import leaf_log_prob, path_log_prob, wide_log_prob

measures_memory = pytest.mark.skipif(
    "LD_PRELOAD" in os.environ, reason="a sanitizer needs and keeps memory of its own"
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def with_dtypes(cases: Iterable[Any], marks: Any = ()) -> list[Any]:
    """Each case in its dtypes, or in float32 and in one other, the others in turn. The slow tests
    of every instruction set run each case in every dtype."""
    return [
        pytest.param(case, dtype, marks=marks)
        for i, case in enumerate(cases)
        for dtype in getattr(case, "dtypes", ()) or (DTYPES[0], DTYPES[1 + i % (len(DTYPES) - 1)])
    ]


def slow(cases: Iterable[Any]) -> list[Any]:
    """Cases for the slow tests alone."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


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
    shape: str = "random"  # of the tree: random, chain, balanced, flat; of the leaf op also nested
    widest: int = 6
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
    Case("one node", classes=5, shape="flat", widest=5),
    Case("wide node", classes=150, shape="flat", widest=150),
    Case("deepest tree", classes=65, shape="chain"),
    Case("zero rows", rows=0),
    Case("one row", rows=1, ignored=0.0),
    Case("all rows ignored", ignored=1.0),
    Case("no row ignored, targets repeat", rows=100, classes=5, trees=1, ignored=0.0),
    Case("values of order 100", subset=7, scale=100.0, trees=1),
    Case("nested runs of few rows", rows=90, trees=2, classes=200, subset=17, widest=4),
)


# The gradients of the leaf op on the CPU take the classes in panels of at least 2048.
PANELS = Case("panels of classes", rows=40, trees=2, classes=2100, shape="flat", widest=2100)

# On the CPU alone, whose kernels take 4 or 2 rows with 4 children at a time, a run of rows in
# blocks of 32 rows and 64 children, and features in vectors of 2 to 16; finished gradients are
# streamed where aligned.
BLOCKS = (
    *(
        Case(f"{rows} rows, {width} children", rows=rows, trees=1, classes=width, in_features=33,
             shape="flat", widest=width, ignored=0.0, scale=0.5)
        for rows, width in [(1, 2), (2, 3), (3, 5), (4, 8), (5, 63), (31, 64), (33, 65), (65, 130)]
    ),
    Case("nested runs of many rows", rows=150, trees=2, classes=40, shape="chain", widest=5),
    PANELS,
    Case("rows of whole vectors", rows=70, classes=30, in_features=64, shape="flat", widest=30),
    Case("a subset of whole vectors", rows=70, in_features=75, subset=48, widest=9),
    Case("a subset of half a vector more", rows=70, in_features=75, subset=40, widest=9),
)  # fmt: skip

HALF = (torch.bfloat16, torch.float16)
BOTH = (torch.float32, torch.bfloat16)


# The CUDA kernels take the features in chunks, rows in tiles and segments, and children in batches.
TILES = (
    Case("16-byte accesses", rows=41, trees=2, in_features=16, subset=8),
    Case("several chunks of features", rows=17, trees=1, in_features=1056, dtypes=BOTH),
    Case("chunks, single accesses", rows=17, trees=1, in_features=530, dtypes=BOTH),
    Case("chunks of float64", rows=17, trees=1, in_features=258, dtypes=(torch.float64,)),
    Case("groups of two", classes=40, in_features=16, widest=2, dtypes=BOTH),
    Case("nodes above groups", classes=40, in_features=16, widest=4, shape="nested", dtypes=BOTH),
    Case("runs over several segments", rows=300, trees=2, classes=9, in_features=16, widest=3,
         favourite=0.5, dtypes=DTYPES),
    Case("one class in all rows", rows=150, trees=2, in_features=16, widest=3, favourite=1.0,
         ignored=0.0, dtypes=BOTH),
    Case("deep runs over several segments", rows=300, trees=1, classes=65, shape="chain",
         in_features=3, widest=2, favourite=0.3, dtypes=(torch.float32,)),
    Case("runs over many segments", rows=700, trees=1, classes=5, in_features=4, favourite=0.6,
         dtypes=BOTH),
    Case("segments longer than the shortest", rows=600, trees=1, classes=500, shape="flat",
         in_features=4, widest=500, dtypes=(torch.float32,)),
    Case("width beyond the limit of segments", rows=70, trees=2, classes=4200, shape="flat",
         in_features=4, widest=4200, dtypes=(torch.float32,)),
    Case("a node of more children than a batch", classes=77, shape="flat", widest=77,
         in_features=64, subset=32, dtypes=DTYPES),
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


@dataclass(frozen=True)
class TreeOpUnderTest:
    """The path op, or the wide op, whose tables have every node as a wide one."""

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., tuple[Tensor, Tensor]]
    longest_name: str
    wide: bool
    shared = False

    def __str__(self) -> str:
        return self.name

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

    def batch(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
        random = np.random.default_rng(seed)
        widest = case.widest if self.wide else 2
        shape = "random" if case.shape == "flat" and not self.wide else case.shape
        shape = "random" if shape == "nested" else shape
        offset = np.zeros((case.trees, case.classes + 1), np.int64)
        leaf_position = np.zeros((case.trees, case.classes), np.int32)
        path: list[Any] = []
        rows_of, lengths = [], [0]
        for t in range(case.trees):
            nested = random_nested(case.classes, widest, shape, random, case.favourite > 0)
            leaves = dict(walk(nested, self.wide))
            for place, c in enumerate(leaves):
                leaf_position[t, c] = place
            rows_of.append([])
            rows: dict[Any, list[int]] = {}  # classes below the same nodes share a list
            for c in range(case.classes):
                offset[t, c] = len(path)
                nodes = leaves[c]
                if self.wide:
                    path += nodes
                else:
                    path += [first << 1 | (child == 0) for first, _, child in nodes]
                spans = tuple((first, width if self.wide else 1) for first, width, _ in nodes)
                if spans not in rows:
                    rows[spans] = [f + k for f, width in spans for k in range(width)]
                rows_of[t].append(rows[spans])
                lengths.append(len(rows[spans]))
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
        target = draw_target(case, random)

        def draw(*size: int) -> Tensor:
            return torch.from_numpy(case.scale * random.standard_normal(size)).to(dtype)

        width = (-1, 3) if self.wide else (-1,)
        return Batch(
            hidden=draw(case.rows, case.in_features),
            weight=draw(case.trees, weight_rows, features),
            bias=draw(case.trees, weight_rows) if case.bias else None,
            target=target,
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
        leaf_position = np.zeros((case.trees, case.classes), np.int32)
        group: list[tuple[int, int, int]] = []
        rows_of = []
        for t in range(case.trees):
            of_class: dict[int, list[tuple[int, int, int]]] = {}
            if case.shape == "nested":  # groups of the rows of wide nodes, over half of the classes
                half = random_nested(case.classes // 2, case.widest, "random", random)
                of_class = dict(walk(half, wide=True))
                order = [*of_class, *range(case.classes // 2, case.classes)]
                leaf_class[t] = random.permutation(case.classes)
            else:
                shape, middle = case.shape, case.favourite > 0
                nested = random_nested(case.classes, case.widest, shape, random, middle)
                of_class = {c: [node] if node[1] else [] for c, node in leaf_groups(nested)}
                leaf_class[t] = order = [*of_class]
            leaf_position[t, order] = np.arange(case.classes)
            rows_of.append([])
            rows: dict[Any, list[int]] = {}
            for c in range(case.classes):
                offset[t, c] = len(group)
                nodes = of_class.get(c, [])
                group += nodes
                spans = tuple(range(first, first + width) for first, width, _ in nodes)
                if spans not in rows:
                    rows[spans] = leaf_class[t, [*itertools.chain(*spans)]].tolist()
                rows_of[t].append(rows[spans])
            offset[t, -1] = len(group)
        target = draw_target(case, random)

        def draw(*size: int) -> Tensor:
            return torch.from_numpy(case.scale * random.standard_normal(size)).to(dtype)

        return Batch(
            hidden=draw(case.rows, case.in_features),
            weight=draw(case.classes, case.in_features),
            bias=draw(case.trees, case.classes) if case.bias else None,
            target=target,
            offset=torch.from_numpy(offset),
            path=torch.tensor(group, dtype=torch.int32).reshape(-1, 3),
            leaf_position=torch.from_numpy(leaf_position),
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
OPS = {op.name: op for op in (PATH, WIDE, LEAF)}
