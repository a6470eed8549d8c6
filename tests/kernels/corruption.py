"""Tables that no tree has. On CUDA nobody waits for what a check of them says, so the kernels
defend themselves: NaN as log-probability for a row whose target is out of range and for all rows in
a tree whose tables are, no gradient, no access outside the arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from ops import group_cases
from ops.against_reference import check_forward, check_gradients, truth
from ops.apart import corrupt
from ops.cases import PATH, Batch, Case
from torch import Tensor

from kernels.emulation import group_results, sparse_is_dense

CLASS = 5  # the class whose tables are spoilt, in tree 1


@dataclass(frozen=True)
class Corruption:
    """How to spoil tables of tree 1, which cannot answer for any class then."""

    name: str
    spoil: Callable[[Batch], None]

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def offset(shift: int, value: Callable[[Batch], int]) -> Callable[[Batch], None]:
    def spoil(batch: Batch) -> None:
        batch.path_offset[1, CLASS + shift] = value(batch)

    return spoil


def entry(value: Callable[[Batch], int]) -> Callable[[Batch], None]:
    """Replaces the last entry on the path of CLASS in tree 1."""

    def spoil(batch: Batch) -> None:
        last = int(batch.path_offset[1, CLASS + 1]) - 1
        assert last >= batch.path_offset[1, CLASS]
        batch.path[last] = value(batch)

    return spoil


def last_of_index(*values: int) -> Callable[[Batch], None]:
    """Replaces the last entries of feature_index in tree 1."""

    def spoil(batch: Batch) -> None:
        assert batch.feature_index is not None
        batch.feature_index[1, -len(values) :] = torch.tensor(values)

    return spoil


CORRUPTIONS = (
    Corruption("offset past the end", offset(1, lambda b: len(b.path) + 1)),
    Corruption("offset far past the end", offset(1, lambda _: 2**62)),
    Corruption("offset negative", offset(0, lambda _: -1)),
    Corruption("offset very negative", offset(0, lambda _: -(2**63))),
    Corruption("path too long", offset(0, lambda _: 0)),
    Corruption("node past the end", entry(lambda b: b.weight.shape[1] << 1)),
    Corruption("node far past the end", entry(lambda _: 2**31 - 1)),
    Corruption("node negative", entry(lambda _: -2)),
    Corruption("feature past the end", last_of_index(16)),
    Corruption("feature far past the end", last_of_index(2**31 - 1)),
    Corruption("feature negative", last_of_index(-1)),
    Corruption("features unsorted", last_of_index(15, 14)),
    Corruption("feature repeated", last_of_index(15, 15)),
)
BAD_TARGETS = (12, 13, 2**31, 2**62, 2**63 - 1)


CASE = Case("corrupt", rows=90, trees=2, classes=12, in_features=16, subset=8)


def check_spoilt(batch: Batch, clean: Batch, unusable: Tensor) -> None:
    """unusable [N, T]: NaN there and no gradient; elsewhere as the reference says of the clean
    batch, whose tables and targets are in range."""
    true = truth(replace(clean, grad=clean.grad.masked_fill(unusable, 0)))
    for checked in (true.log_prob, true.score):
        for array in (checked.value, checked.terms):
            array[unusable.numpy()] = 0
    log_prob, score, *others = PATH.operator(*batch.arguments())
    assert torch.equal(log_prob.isnan(), unusable)
    check_forward(batch, true, log_prob.masked_fill(unusable, 0), score)
    assert not score[unusable].any()
    saved = (torch.from_numpy(true.score.value).to(score.dtype), *others)
    dense = PATH.backward(batch, saved)
    check_gradients(batch, true, dense)
    sparse_is_dense(dense, PATH.backward(batch, saved, sparse=True))


def check_corruption(corruption: Corruption) -> None:
    clean = PATH.batch(CASE, torch.float32, seed=3)
    clean.target[:12] = torch.arange(12)  # every class is asked for
    tables = {
        name: getattr(clean, name).clone() for name in ("path_offset", "path", "feature_index")
    }
    batch = replace(clean, **tables)
    corruption.spoil(batch)
    unusable = torch.zeros(CASE.rows, CASE.trees, dtype=torch.bool)
    unusable[:, 1] = clean.target >= 0
    check_spoilt(batch, clean, unusable)
    half = PATH.operator(*batch.map(Tensor.bfloat16).arguments())[0]
    assert torch.equal(half.isnan(), unusable)


def check_bad_targets() -> None:
    clean = PATH.batch(CASE, torch.float32, seed=4)
    target = clean.target.clone()
    target[3 : 3 + len(BAD_TARGETS)] = torch.tensor(BAD_TARGETS)
    target[60:62] = torch.tensor((-100, -(2**63)))  # ignored
    unusable = (target >= 12)[:, None].expand(-1, 2)
    clean = replace(clean, target=target.where(target < 12, -1))
    check_spoilt(replace(clean, target=target), clean, unusable)


def check_bad_ranks() -> None:
    """Ranks that do not belong to the paths: gradients of weights may be wrong, nothing else."""
    clean = PATH.batch(CASE, torch.float32, seed=5)
    ranks = torch.tensor([2**31 - 1, -1, 7, 7, -(2**31), 10**6], dtype=torch.int32)
    batch = replace(clean, leaf_position=ranks.repeat(4).view(2, 12))
    true = truth(clean)
    log_prob, score, *others = PATH.operator(*batch.arguments())
    check_forward(batch, true, log_prob, score)
    saved = (torch.from_numpy(true.score.value).float(), *others)
    check_gradients(batch, true, PATH.backward(batch, saved)[:1])


# The group op


def check_bad_targets_of_groups() -> None:
    clean = group_cases.draw(group_cases.Case("corrupt", rows=90, classes=12), torch.float32, 4)
    target = clean.target.clone()
    target[3 : 3 + len(BAD_TARGETS)] = torch.tensor(BAD_TARGETS)
    target[60:62] = torch.tensor((-100, -(2**63)))  # ignored
    unusable = target >= 12
    clean = replace(clean, target=target.where(~unusable, -1))
    expected, dense, _ = group_results(clean)
    got, bad_dense, bad_sparse = group_results(replace(clean, target=target))
    assert torch.equal(got[0].isnan(), unusable[:, None].expand_as(got[0]))
    assert torch.equal(got[0].masked_fill(unusable[:, None], 0), expected[0])
    for a, b in zip(bad_dense[:3], dense[:3], strict=True):
        assert torch.equal(a, b)
    sparse_is_dense(bad_dense, bad_sparse)


def check_corrupt_groups(seed: int) -> None:
    """Random numbers in a table: a result, and no stray access."""
    random = np.random.default_rng(seed)
    classes = int(random.integers(2, 40))
    clusters = int(random.integers(1, classes))
    case = group_cases.Case("corrupt", rows=70, trees=2, classes=classes, clusters=clusters)
    batch = group_cases.draw(case, (torch.float32, torch.bfloat16)[seed % 2], seed)
    name = ("cluster", "order", "begin", "target")[random.integers(4)]
    group_results(replace(batch, **{name: corrupt(getattr(batch, name), random)}))
