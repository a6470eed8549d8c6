"""No kernel has races, and the detector sees it where a barrier of a kernel is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from cuda_emu.library import CSRC, EmulatedLibrary
from ops import group_cases, mixtures, test_sparse_adam
from ops import test_tree_log_softmax as tree
from ops.cases import CASES, PATH, TILES, Case
from ops.logit_function_cases import (
    MonotoneCase,
    PiecewiseCase,
    check_low_rows,
    increasing_table,
    monotone_batch,
    monotone_gradients,
    piecewise_batch,
    piecewise_gradients,
)
from ops.test_feature_gather import batch as feature_batch
from ops.test_forest_log_prob import arguments as forest_arguments
from ops.test_forest_log_prob import chunk_gradients
from ops.test_screened_topk import draw as draw_screened

from hstree.ops import sample, screened_topk
from kernels.corrupt_tables import SEED
from kernels.emulation import emulated_tests, group_results, path_results
from kernels.test_piecewise import LARGE, LATE, usual_gradient

pytestmark = emulated_tests
ops = torch.ops.hstree

TREE_CASES = [
    case
    for case in (*CASES, *TILES)
    if case.why
    in (
        "ragged paths, odd subset",
        "nested runs of few rows",
        "several chunks of features",
        "runs over several segments",
        "several blocks of columns, part of a group of four",
    )
]

GROUP_CASES = [
    case
    for case in (*group_cases.CASES, *group_cases.TILES)
    if case.why
    in (
        "groups of one class and others",
        "no features",
        "a tile of rows and one more",
        "several tiles of rows",
        "several tiles of classes",
        "several chunks of features",
        "several lists of rows",
    )
]


def path(case: Case, dtype: torch.dtype) -> None:
    path_results(PATH.batch(case, dtype))


def groups(case: group_cases.Case, dtype: torch.dtype) -> None:
    group_results(group_cases.draw(case, dtype))


def tree_log_softmax() -> None:
    ops.tree_log_softmax(*tree.draw(tree.BLOCKS[2], torch.float32).arguments())
    batch = tree.draw(tree.GROUP_BLOCKS[2], torch.float32, groups=True)
    ops.tree_log_softmax(*batch.arguments())


def sampled(name: str) -> None:
    mixture = mixtures.BLOCKS[name]().to(torch.bfloat16)
    sample(*mixture.arguments(), seed=SEED, n=3)


def feature_gather() -> None:
    values, index, grad = feature_batch(7, 6, 40, 20, torch.float32)
    ops.feature_gather(values, index)
    ops.feature_gather_backward(grad, index, 40)


def sparse_adam() -> None:
    test_sparse_adam.check(test_sparse_adam.SHAPES[0], torch.float32, torch.device("cpu"))


def screened(bits: int, k: int) -> None:
    screened_topk(*draw_screened((2, 2500, 30, 12), bits), 20, k, all_scores=True)


def piecewise() -> None:
    case = PiecewiseCase("sums of few intervals", shape=(3001,), intervals=12)
    piecewise_gradients(piecewise_batch(case, 2, torch.float32))


def late_sums() -> None:
    """More intervals than a block has sums of."""
    grad = usual_gradient()
    grad[LATE[:20_000]] *= 1e3
    x = torch.linspace(-1.9, 1.9, LARGE).double()
    ops.piecewise_backward(grad, x, increasing_table(10_000, 2, 2.0), 2.0)


def target_log_softmax(classes: int, intervals: int) -> None:
    case = MonotoneCase("table", rows=60, classes=classes, intervals=intervals)
    monotone_gradients(monotone_batch(case, torch.float32))


def rounded(classes: int) -> None:
    """Gradients of 16 bits in the memory of the logits."""
    check_low_rows(MonotoneCase("", rows=9, classes=classes), torch.device("cpu"))


def forest() -> None:
    chunk_gradients(forest_arguments(70, 300, 2, 3))


def scale() -> None:
    torch.ops.hstree.scale_(torch.ones(5000, dtype=torch.bfloat16), torch.tensor(0.5))


# Shapes at which threads meet, in all kernels and at all barriers.
COMPUTATIONS: tuple[Callable[[], None], ...] = (
    *(
        partial(path, case, dtype)
        for case, dtype in product(TREE_CASES, (torch.float32, torch.bfloat16))
    ),
    *(
        partial(groups, case, dtype)
        for case, dtype in product(GROUP_CASES, (torch.float32, torch.bfloat16))
    ),
    partial(groups, GROUP_CASES[-1], torch.float16),  # whose factors are scaled
    tree_log_softmax,
    partial(sampled, "wide groups"),
    partial(sampled, "aligned rows"),
    feature_gather,
    sparse_adam,
    partial(screened, 4, 20),
    partial(screened, 8, 1),
    piecewise,
    late_sums,
    partial(target_log_softmax, 83, 20),
    partial(target_log_softmax, 1025, 800),  # the sums of 512 intervals are in shared memory
    partial(rounded, 83),
    partial(rounded, 6000),
    forest,
    scale,
)


def find(pattern: str) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, group 1) for the lines of the kernels that match."""
    for path in sorted((CSRC / "kernels").glob("*.cu*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in re.finditer(pattern, line):
                yield f"{path.name}:{number}", match[1]


# Barriers without which there is no race: Tile::fill begins with one for a second call in a kernel,
# which none makes.
SPARE = ["tile.cuh"]


def test_no_races_but_without_a_barrier(library: EmulatedLibrary) -> None:
    """Every barrier is taken for none once, in computations that pass it, until a race shows."""
    seen = []
    for compute in COMPUTATIONS:
        with library.watching_races() as of_one:
            compute()
        seen.append(of_one)
    every = set[str]().union(*seen)
    kernels = {f"{len(name)}{name}B6kernel" for _, name in find(r"\b([a-z_]+_kernel)\(")}
    assert {name for name in kernels if not any(name in each for each in every)} == set()

    def shows(compute: Callable[[], None], barrier: str) -> bool:
        try:
            with library.watching_races(unordered=barrier):
                compute()
        except RuntimeError as error:
            return "race in" in str(error)
        return False

    silent = {
        barrier
        for barrier, _ in find(r"^\s*(__syncthreads)\(\)")
        if not any(
            shows(compute, barrier)
            for compute, passed in zip(COMPUTATIONS, seen, strict=True)
            if barrier in passed
        )
    }
    assert sorted(barrier.partition(":")[0] for barrier in silent) == SPARE, silent
