"""Tables that no tree has. On CUDA nobody waits for what a check of them says, so the kernels
defend themselves: NaN as log-probability for a row whose target is out of range and for all rows in
a tree whose tables are, no gradient, no access outside the arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from ops.against_reference import check_forward, check_gradients, truth
from ops.cases import LEAF, PATH, WIDE, Batch, Case, TreeOpUnderTest
from torch import Tensor

CLASS = 5  # the class whose tables are spoilt, in tree 1


@dataclass(frozen=True)
class Corruption:
    """How to spoil tables of tree 1, which cannot answer for any class then."""

    name: str
    spoil: Callable[[Batch], None]
    ops: tuple[TreeOpUnderTest, ...] = (PATH, WIDE, LEAF)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def offset(shift: int, value: Callable[[Batch], int]) -> Callable[[Batch], None]:
    def spoil(batch: Batch) -> None:
        batch.offset[1, CLASS + shift] = value(batch)

    return spoil


def entry(value: Callable[[Batch], int], column: int | None = None) -> Callable[[Batch], None]:
    """Replaces the last entry on the path of CLASS in tree 1."""

    def spoil(batch: Batch) -> None:
        last = int(batch.offset[1, CLASS + 1]) - 1
        assert last >= batch.offset[1, CLASS]
        batch.path[last if column is None else (last, column)] = value(batch)

    return spoil


def last_of_index(*values: int) -> Callable[[Batch], None]:
    """Replaces the last entries of feature_index or leaf_class in tree 1."""

    def spoil(batch: Batch) -> None:
        assert batch.feature_index is not None
        batch.feature_index[1, -len(values) :] = torch.tensor(values)

    return spoil


OWN = (PATH, WIDE)  # the ops on weights of each tree
CHILDREN = (WIDE, LEAF)
CORRUPTIONS = (
    Corruption("offset past the end", offset(1, lambda b: len(b.path) + 1)),
    Corruption("offset far past the end", offset(1, lambda _: 2**62)),
    Corruption("offset negative", offset(0, lambda _: -1)),
    Corruption("offset very negative", offset(0, lambda _: -(2**63))),
    Corruption("path too long", offset(0, lambda _: 0)),
    Corruption("node past the end", entry(lambda b: b.weight.shape[1] << 1), (PATH,)),
    Corruption("node far past the end", entry(lambda _: 2**31 - 1), (PATH,)),
    Corruption("node negative", entry(lambda _: -2), (PATH,)),
    Corruption("row negative", entry(lambda _: -1, 0), CHILDREN),
    Corruption("row far past the end", entry(lambda _: 2**31 - 1, 0), CHILDREN),
    Corruption("width zero", entry(lambda _: 0, 1), CHILDREN),
    Corruption("width negative", entry(lambda _: -(2**31), 1), CHILDREN),
    Corruption("width far past the end", entry(lambda _: 2**31 - 1, 1), CHILDREN),
    Corruption("width over max_width", entry(lambda b: b.longest + 1, 1), CHILDREN),
    Corruption("child negative", entry(lambda _: -1, 2), CHILDREN),
    Corruption("child past the end", entry(lambda _: 2**31 - 1, 2), CHILDREN),
    Corruption("feature past the end", last_of_index(16), OWN),
    Corruption("feature far past the end", last_of_index(2**31 - 1), OWN),
    Corruption("feature negative", last_of_index(-1), OWN),
    Corruption("features unsorted", last_of_index(15, 14), OWN),
    Corruption("feature repeated", last_of_index(15, 15), OWN),
    Corruption("class past the end", last_of_index(12), (LEAF,)),
    Corruption("class far past the end", last_of_index(2**31 - 1), (LEAF,)),
    Corruption("class negative", last_of_index(-1), (LEAF,)),
)
BAD_TARGETS = (12, 13, 2**31, 2**62, 2**63 - 1)


CASE = Case("corrupt", rows=90, trees=2, classes=12, in_features=16, subset=8, widest=4)


def corruptions(op: TreeOpUnderTest) -> list[Corruption]:
    return [corruption for corruption in CORRUPTIONS if op in corruption.ops]


def check_spoilt(op: TreeOpUnderTest, batch: Batch, clean: Batch, unusable: Tensor) -> None:
    """unusable [N, T]: NaN there and no gradient; elsewhere as the reference says of the clean
    batch, whose tables and targets are in range."""
    true = truth(op, replace(clean, grad=clean.grad.masked_fill(unusable, 0)))
    for checked in (true.log_prob, true.score):
        for array in (checked.value, checked.terms):
            array[unusable.numpy()] = 0
    log_prob, score, order, plan = op.operator(*batch.arguments())
    assert torch.equal(log_prob.isnan(), unusable)
    check_forward(batch, true, log_prob.masked_fill(unusable, 0), score)
    assert not score[unusable].any()
    rounded = torch.from_numpy(true.score.value).to(score.dtype)
    dense = op.backward(batch, rounded, order, plan)
    check_gradients(op, batch, true, dense)
    sparse_is_dense(op, batch, dense, op.backward(batch, rounded, order, plan, sparse=True))


def sparse_is_dense(
    op: TreeOpUnderTest, batch: Batch, dense: tuple[Tensor, ...], sparse: tuple[Tensor, ...]
) -> None:
    """Bit for bit: the visited rows are the dense rows, all others are zero; sorted, no repeats."""
    assert torch.equal(sparse[0], dense[0])
    _, of_weight, of_bias, index, bias_index = sparse
    bias_index = bias_index if op.shared else index
    for where, values, whole in ((index, of_weight, dense[1]), (bias_index, of_bias, dense[2])):
        assert torch.equal(whole[tuple(where)], values)
        rest = whole.index_put(tuple(where), torch.zeros_like(values))
        assert not rest.any()
        flat = where[0] if len(where) == 1 else where[0] * whole.shape[1] + where[1]
        assert (flat.diff() > 0).all()


def check_corruption(op: TreeOpUnderTest, corruption: Corruption) -> None:
    clean = op.batch(CASE, torch.float32, seed=3)
    clean.target[:12] = torch.arange(12)  # every class is asked for
    tables = {name: getattr(clean, name).clone() for name in ("offset", "path", "feature_index")}
    batch = replace(clean, **tables)
    corruption.spoil(batch)
    unusable = torch.zeros(CASE.rows, CASE.trees, dtype=torch.bool)
    unusable[:, 1] = clean.target >= 0
    check_spoilt(op, batch, clean, unusable)
    half = op.operator(*batch.map(Tensor.bfloat16).arguments())[0]
    assert torch.equal(half.isnan(), unusable)


def check_bad_targets(op: TreeOpUnderTest) -> None:
    clean = op.batch(CASE, torch.float32, seed=4)
    target = clean.target.clone()
    target[3 : 3 + len(BAD_TARGETS)] = torch.tensor(BAD_TARGETS)
    target[60:62] = torch.tensor((-100, -(2**63)))  # ignored
    unusable = (target >= 12)[:, None].expand(-1, 2)
    clean = replace(clean, target=target.where(target < 12, -1))
    check_spoilt(op, replace(clean, target=target), clean, unusable)


def check_bad_ranks(op: TreeOpUnderTest) -> None:
    """Ranks that do not belong to the paths: gradients of weights may be wrong, nothing else."""
    clean = op.batch(CASE, torch.float32, seed=5)
    ranks = torch.tensor([2**31 - 1, -1, 7, 7, -(2**31), 10**6], dtype=torch.int32)
    batch = replace(clean, leaf_position=ranks.repeat(4).view(2, 12))
    true = truth(op, clean)
    log_prob, score, order, plan = op.operator(*batch.arguments())
    check_forward(batch, true, log_prob, score)
    rounded = torch.from_numpy(true.score.value).float()
    check_gradients(op, batch, true, op.backward(batch, rounded, order, plan)[:1])
