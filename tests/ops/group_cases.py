"""Batches over random partitions of the classes for the group op, and its check against the
reference in float64, element by element."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from reference.group_log_prob import group_log_prob_reference
from torch import Tensor

from hstree.ops import group_log_prob
from ops.bounds import Checked, close
from ops.cases import filled_memory

CPU = torch.device("cpu")
FORWARD = torch.ops.hstree.group_log_prob.default
BACKWARD = torch.ops.hstree.group_log_prob_backward.default


@dataclass(frozen=True)
class Case:
    """A batch. `clusters` of at least one class; with as many as classes all stand alone."""

    why: str
    rows: int = 29
    trees: int = 3
    classes: int = 23
    clusters: int = 6
    features: int = 19
    bias: bool = True
    ignored: float = 0.2  # share of the rows
    favourite: float = 0.0  # share of the rows that have class 0
    scale: float = 1.0
    dtypes: tuple[torch.dtype, ...] = ()

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


CASES = (
    Case("groups of several sizes"),
    Case("no bias, one tree", trees=1, bias=False),
    Case("groups of one class and others", classes=30, clusters=22),
    Case("every class alone", classes=9, clusters=9),
    Case("one group", clusters=1),
    Case("two classes", classes=2, clusters=1),
    Case("one class", classes=1, clusters=1),
    Case("one feature", features=1),
    Case("no features", features=0),
    Case("zero rows", rows=0),
    Case("one row", rows=1, ignored=0.0),
    Case("all rows ignored", ignored=1.0),
    Case("no row ignored, targets repeat", rows=100, classes=5, clusters=2, trees=1, ignored=0.0),
    Case("one class in all rows", rows=70, favourite=1.0, ignored=0.0),
    Case("many trees", trees=11, classes=40, clusters=9),
    Case("values of order 100", trees=1, scale=30.0),
)

# On the CPU, whose kernels take 4 or 2 rows with 4 classes at a time, a run of rows in blocks of 32
# rows and 64 classes, features in vectors of 2 to 16, and in the backward pass panels of classes.
BLOCKS = (
    *(
        Case(f"{rows} rows, {width} classes", rows=rows, trees=1, classes=width, clusters=1,
             features=33, ignored=0.0, scale=0.5)
        for rows, width in [(1, 2), (2, 3), (3, 5), (4, 8), (5, 63), (31, 64), (33, 65), (65, 130)]
    ),
    Case("panels of classes", rows=40, trees=2, classes=2100, clusters=2),
    Case("rows of whole vectors", rows=70, classes=30, features=64, clusters=3),
    Case("many groups", rows=150, trees=2, classes=300, clusters=70),
)  # fmt: skip

HALF = (torch.bfloat16, torch.float16)
BOTH = (torch.float32, torch.bfloat16)

# On CUDA, whose kernels take 64 rows of a group with 128 classes, the features in chunks, and list
# up to 512 rows or classes at a time.
TILES = (
    Case("a tile of rows and one more", rows=65, trees=1, clusters=1, features=16, ignored=0.0,
         dtypes=BOTH),
    Case("several tiles of rows", rows=200, trees=2, classes=9, clusters=2, features=16,
         favourite=0.5, dtypes=BOTH),
    Case("a tile of classes and one more", rows=9, trees=1, classes=129, clusters=1, features=24,
         dtypes=BOTH),
    Case("several tiles of classes", rows=20, trees=2, classes=300, clusters=2, features=40,
         dtypes=HALF),
    Case("several chunks of features", rows=17, trees=2, classes=40, clusters=3, features=200,
         dtypes=BOTH),
    Case("a chunk of features and one more", rows=17, trees=1, classes=40, clusters=3, features=129,
         dtypes=BOTH),
    Case("rows that are not aligned", rows=17, trees=1, classes=40, clusters=3, features=67,
         dtypes=HALF),
    Case("several lists of classes", rows=5, trees=1, classes=530, clusters=1, features=8,
         dtypes=BOTH),
    Case("several lists of rows", rows=530, trees=1, classes=3, clusters=1, features=8, ignored=0.0,
         dtypes=(torch.float32, *HALF)),
)  # fmt: skip


@dataclass
class Batch:
    """Arguments of the op, in its order, and the gradient of log_prob."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    cluster: Tensor
    order: Tensor
    begin: Tensor
    max_width: int
    grad: Tensor

    def arguments(self) -> tuple[Any, ...]:
        tables = self.target, self.cluster, self.order, self.begin, self.max_width
        return (self.hidden, self.weight, self.bias, *tables)

    def map(self, convert: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with a function applied to the floating-point tensors."""
        bias = None if self.bias is None else convert(self.bias)
        hidden, weight, grad = map(convert, (self.hidden, self.weight, self.grad))
        return replace(self, hidden=hidden, weight=weight, bias=bias, grad=grad)

    def to(self, device: torch.device) -> Batch:
        tensors = {n: x.to(device) for n, x in vars(self).items() if torch.is_tensor(x)}
        return replace(self, **tensors)

    def visited(self) -> set[tuple[int, int]]:
        """(tree, class) of the groups that targets have with other classes."""
        return {
            (t, v)
            for t, cluster in enumerate(self.cluster.cpu())
            for y in self.target.tolist()
            if y >= 0 and (cluster == cluster[y]).sum() > 1
            for v in (cluster == cluster[y]).nonzero().flatten().tolist()
        }


def tables_of(cluster: Tensor, clusters: int) -> tuple[Tensor, Tensor, int]:
    """order, begin and max_width of cluster [T, V]."""
    counts = torch.stack([of_tree.bincount(minlength=clusters) for of_tree in cluster])
    begin = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
    return cluster.argsort(dim=1, stable=True).int(), begin, int(counts.max())


def draw(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)

    def values(*size: int) -> Tensor:
        return torch.from_numpy(case.scale * random.standard_normal(size)).to(dtype)

    drawn = []
    for _ in range(case.trees):
        more = random.integers(0, case.clusters, case.classes - case.clusters)
        drawn.append(random.permutation(np.concatenate([np.arange(case.clusters), more])))
    cluster = torch.from_numpy(np.stack(drawn)).int()
    target = random.integers(0, case.classes, case.rows)
    target[random.random(case.rows) < case.favourite] = 0
    target[random.random(case.rows) < case.ignored] = -1
    size = (case.rows, case.trees)
    grad = random.standard_normal(size) * 10.0 ** random.uniform(-2, 1, size)
    order, begin, max_width = tables_of(cluster, case.clusters)
    return Batch(
        hidden=values(case.rows, case.features),
        weight=values(case.classes, case.features),
        bias=values(case.trees, case.classes) if case.bias else None,
        target=torch.from_numpy(target),
        cluster=cluster,
        order=order,
        begin=begin,
        max_width=max_width,
        grad=torch.from_numpy(grad).float().to(dtype),
    )


def log_prob_of(batch: Batch, sparse: bool = False) -> Tensor:
    *arguments, max_width = batch.arguments()
    return group_log_prob(*arguments, max_width=max_width, sparse=sparse)


def gradients(batch: Batch, sparse: bool = False) -> list[Tensor]:
    """log_prob, and the gradients of hidden, weight and bias where there is one."""
    given = (batch.hidden, batch.weight, batch.bias)
    leaves = [x.detach().requires_grad_() for x in given if x is not None]
    bias = leaves[2] if len(leaves) == 3 else None
    log_prob = log_prob_of(replace(batch, hidden=leaves[0], weight=leaves[1], bias=bias), sparse)
    log_prob.backward(batch.grad.to(log_prob.dtype))
    return [log_prob.detach(), *(x.grad for x in leaves)]


def backward(
    batch: Batch,
    saved: tuple[Tensor, ...],
    mask: tuple[bool, ...] = (True, True, True),
    sparse: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of hidden, weight and bias, index and bias_index; saved: of the forward pass."""
    gradients: tuple[Tensor, ...] = BACKWARD(batch.grad, *batch.arguments(), *saved, mask, sparse)
    return gradients


def reference(batch: Batch) -> Tensor:
    return group_log_prob_reference(*batch.arguments()[:5])


@dataclass
class Truth:
    """The results in float64, each with the magnitude of its terms."""

    log_prob: Checked
    gradients: list[Checked]  # of hidden, weight and, if there is one, bias
    largest: float  # magnitude of the terms of a score


def truth(batch: Batch, least: float = 2.0**-100) -> Truth:
    """least: slope below which the magnitude of a term does not fall, as small ones underflow."""
    batch = batch.map(lambda x: x.detach().to(CPU, torch.float64)).to(CPU)
    leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias) if x is not None]
    log_prob = reference(batch)
    if log_prob.requires_grad:
        log_prob.backward(batch.grad)
    values = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    with torch.no_grad():
        target = batch.target.clamp(min=0)
        own = batch.cluster[:, target]  # [T, N]
        member = own.unsqueeze(2) == batch.cluster.unsqueeze(1)  # [T, N, V]
        member &= (batch.target >= 0).unsqueeze(1) & (member.sum(2, keepdim=True) > 1)
        scores = (batch.hidden @ batch.weight.t()).expand(len(own), -1, -1)
        of_scores = (batch.hidden.abs() @ batch.weight.t().abs()).expand_as(scores)
        if batch.bias is not None:
            scores = scores + batch.bias.unsqueeze(1)
            of_scores = of_scores + batch.bias.abs().unsqueeze(1)
        p = scores.masked_fill(~member, -torch.inf).softmax(2).nan_to_num()
        # 1 - p may cancel.
        slope = (p + torch.nn.functional.one_hot(target, p.shape[2])).clamp(min=least)
        terms = slope * member * batch.grad.abs().t().unsqueeze(2)
        of_hidden = torch.einsum("tnv,vd->nd", terms, batch.weight.abs())
        of_weight = torch.einsum("tnv,nd->vd", terms, batch.hidden.abs())
        largest = (of_scores * member).amax(2) if p.shape[2] else of_scores.sum(2)
        of_log_prob = 3 * largest.t() + log_prob.abs()

    def checked(value: Tensor, terms: Tensor) -> Checked:
        return Checked(value.detach().numpy(), terms.numpy())

    pairs = zip(values, [of_hidden, of_weight, terms.sum(1)], strict=False)
    return Truth(
        checked(log_prob, of_log_prob),
        [checked(value, of) for value, of in pairs],
        float(largest.max()) if largest.numel() else 0.0,
    )


def check(batch: Batch, device: torch.device) -> None:
    """log_prob and every gradient. Of the vectors of ignored rows, which are NaN, nothing may go
    anywhere."""
    spoilt = replace(batch, hidden=batch.hidden.masked_fill(batch.target[:, None] < 0, torch.nan))
    given = spoilt.to(device)
    with filled_memory() if device == CPU else nullcontext():
        log_prob, *saved = FORWARD(*given.arguments())
        cuda = saved[1].numel() > 0  # the kernels for a GPU sort the rows
        low = cuda and batch.hidden.dtype == torch.float16  # to which they round the slopes
        true = truth(batch, 2.0**-14 if low else 2.0**-100)
        sums = torch.promote_types(batch.hidden.dtype, torch.float32)
        assert log_prob.dtype == sums
        unit, width = torch.finfo(sums).eps / 2, batch.hidden.shape[1] + batch.max_width
        got = log_prob.cpu().double().numpy()
        close("log_prob", got, true.log_prob, width, unit, 0.0, 0.0)
        own = backward(replace(given, grad=given.grad.to(sums)), tuple(saved))
        # The public function is these ops.
        for a, b in zip(gradients(given), (log_prob, *own), strict=False):
            assert torch.equal(a, b)
    # A slope has the error of its score.
    terms = len(batch.target) * len(batch.cluster) + width * (1 + 2 * true.largest)
    names = ("grad_hidden", "grad_weight", "grad_bias")
    for name, gradient, checked in zip(names, own, true.gradients, strict=False):
        assert gradient.dtype == batch.hidden.dtype
        info = torch.finfo(gradient.dtype)
        of_terms = 0.0  # the factors of products in 16 bits are rounded on CUDA
        if gradient.dtype.itemsize == 2:
            of_terms = info.eps if cuda else 2.0**-16
        got = gradient.cpu().double().numpy()
        is_finite = abs(checked.value) < 0.99 * info.max  # float16 overflows
        some = Checked(checked.value[is_finite], checked.terms[is_finite])
        tiny = info.smallest_normal * info.eps / 2
        close(name, got[is_finite], some, terms, unit, info.eps / 2, tiny, of_terms)
    ignored = given.target < 0
    assert not log_prob[ignored].any()
    assert not own[0][ignored].any()
