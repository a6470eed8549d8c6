"""Runs every case on a library built with the sanitizers, or one of so many parts of the cases:
`python -m kernels.sanitized LIBRARY PART PARTS`.

A process of its own, because AddressSanitizer must be loaded before everything else. Prints the
number of checks that passed; a finding of a sanitizer ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cuda_emu.library import ORDERS, EmulatedLibrary
from ops import test_tree_log_softmax
from ops.against_reference import check
from ops.cases import CASES, DTYPES, LEAF, PATH, TILES, WIDE
from ops.mixtures import BLOCKS, MIXTURES
from ops.test_sample import test_draws_are_those_of_the_reference as check_draws
from ops.test_sparse_adam import SHAPES
from ops.test_sparse_adam import check as check_sparse_adam
from ops.test_tree_log_softmax import mixed
from ops.test_tree_log_softmax import test_equals_reference as check_tree_log_softmax

import hstree  # noqa: F401  (the schemas of the operators)
from kernels import sample_cases, tree_log_softmax_cases
from kernels.corruption import (
    check_bad_ranks,
    check_bad_targets,
    check_corruption,
    corruptions,
)
from kernels.emulation import ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64, Kernels
from kernels.logit_cases import (
    MONOTONE_CASES,
    PLIF_CASES,
    check_extreme_elements,
    check_misaligned_rows,
    check_monotone,
    check_piecewise,
    check_spoilt_rows,
)

CPU = torch.device("cpu")


def checks(kernels: Kernels) -> list[Callable[[], object]]:
    result: list[Callable[[], object]] = []
    for op in (PATH, WIDE, LEAF):
        for case in (*CASES, *TILES):
            # The widths of accesses: 4, 2 and 8 bytes; float16 is as bfloat16.
            for dtype in case.dtypes or DTYPES:
                if dtype != torch.float16:
                    result.append(partial(check, op, case, dtype, CPU))
        result += [partial(check_corruption, op, corruption) for corruption in corruptions(op)]
        result += [partial(check_bad_targets, op), partial(check_bad_ranks, op)]
    index = np.array([[0, 3, 4], [-1, 2**31 - 1, 5]], np.int32)
    values = np.ones((3, 5), np.float32)
    grad = np.ones((3, 2, 3), np.float32)
    result.append(partial(kernels.feature_gather, FLOAT32, values, index))
    result.append(partial(kernels.feature_gather_backward, FLOAT32, grad, index, 5))
    for shape in SHAPES:
        result += [partial(check_sparse_adam, shape, dtype, CPU) for dtype in DTYPES]
    for case in PLIF_CASES:
        kinds = [kind for kind in case.kinds if kind is not FLOAT16]
        result += [partial(check_piecewise, kernels, case, kind) for kind in kinds]
    for case in MONOTONE_CASES:
        result += [partial(check_monotone, kernels, case, kind) for kind in case.kinds]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        if dtype != torch.bfloat16:
            for tree_case in test_tree_log_softmax.BLOCKS:
                result.append(partial(check_tree_log_softmax, tree_case, dtype, mixed, CPU))
        for name in (*MIXTURES, *BLOCKS):
            result.append(partial(check_draws, name, 1.0, dtype, CPU))
    for seed in range(60):
        result.append(partial(tree_log_softmax_cases.check_corrupt_tables, seed))
        result.append(partial(tree_log_softmax_cases.check_corrupt_leaf_tables, seed))
        result.append(partial(sample_cases.check_corrupt_tables, seed))
    for width in (2, 4):
        for kind in ELEMENT_TYPES:
            result.append(partial(check_extreme_elements, kernels, kind, width))
        for kind in (FLOAT32, FLOAT64):
            result.append(partial(check_spoilt_rows, kernels, kind, width))
            result.append(partial(check_misaligned_rows, kernels, kind, width))
    return result


def main() -> None:
    library, part, parts = sys.argv[1:]
    kernels = Kernels(EmulatedLibrary(Path(library)))
    todo = list(enumerate(checks(kernels)))[int(part) :: int(parts)]
    for number, one in todo:
        kernels.set_order(*ORDERS[number % len(ORDERS)])
        with kernels.library.on_cpu_tensors():
            one()
    print(f"{len(todo)} checks passed")


if __name__ == "__main__":
    main()
