"""Runs every case on a library built with the sanitizers, or one of so many parts of the cases:
`python -m kernels.sanitized LIBRARY PART PARTS`.

A process of its own, because AddressSanitizer must be loaded before everything else. Prints the
number of checks that passed; a finding of a sanitizer ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from cuda_emu.library import ORDERS, EmulatedLibrary
from ops import group_cases
from ops.cases import CASES, DTYPES, PATH, TILES, Case
from ops.logit_function_cases import (
    EDGES,
    FUNCTIONS,
    MonotoneCase,
    PiecewiseCase,
    check_bias,
    check_low_rows,
    monotone_batch,
    monotone_gradients,
    piecewise_batch,
    piecewise_gradients,
)
from ops.mixtures import BLOCKS, MIXTURES
from ops.test_forest_log_prob import arguments as forest_arguments
from ops.test_forest_log_prob import check as check_forest
from ops.test_forest_log_prob import check_bad_numbers_on_cuda
from ops.test_sample import test_draws_are_those_of_the_reference as check_draws
from ops.test_scale import test_is_the_product_rounded_once as check_scale
from ops.test_screened_topk import check_all as check_screened_topk
from ops.test_sparse_adam import SHAPES
from ops.test_sparse_adam import check as check_sparse_adam
from ops.test_tree_log_softmax import BLOCKS as TREE_BLOCKS
from ops.test_tree_log_softmax import GROUP_BLOCKS
from ops.tree_softmax_cases import check_against, draw, mixed, reference

import hstree  # noqa: F401  (the schemas of the operators)
from kernels import corrupt_tables
from kernels.corruption import (
    CORRUPTIONS,
    check_bad_ranks,
    check_bad_targets,
    check_bad_targets_of_groups,
    check_corrupt_groups,
    check_corruption,
)
from kernels.emulation import group_results, path_results
from kernels.logit_cases import (
    FEW_ELEMENTS,
    check_extreme_elements,
    check_misaligned_rows,
    check_spoilt_rows,
)
from kernels.test_feature_gather import check_out_of_range

CPU = torch.device("cpu")


def run_path(case: Case, dtype: torch.dtype) -> None:
    path_results(PATH.batch(case, dtype))


def run_groups(case: group_cases.Case, dtype: torch.dtype) -> None:
    group_results(group_cases.draw(case, dtype))


def run_piecewise(case: PiecewiseCase, width: int, dtype: torch.dtype) -> None:
    piecewise_gradients(piecewise_batch(case, width, dtype))


def run_target_log_softmax(case: MonotoneCase, dtype: torch.dtype) -> None:
    monotone_gradients(monotone_batch(case, dtype))


def checks() -> list[Callable[[], object]]:
    result: list[Callable[[], object]] = []
    # The widths of accesses: 4, 2 and 8 bytes; float16 is as bfloat16.
    for tree_case in (*CASES, *TILES):
        for dtype in tree_case.dtypes or DTYPES:
            if dtype != torch.float16:
                result.append(partial(run_path, tree_case, dtype))
    for group_case in (*group_cases.CASES, *group_cases.TILES):
        for dtype in group_case.dtypes or DTYPES:
            if dtype != torch.float16:
                result.append(partial(run_groups, group_case, dtype))
    result += [partial(check_corruption, corruption) for corruption in CORRUPTIONS]
    result += [partial(check_corrupt_groups, seed) for seed in range(60)]
    result += [check_bad_targets, check_bad_ranks, check_bad_targets_of_groups]
    result += [check_out_of_range, partial(check_bad_numbers_on_cuda, CPU)]
    for sizes in ((70, 41, 3, 20), (15, 300, 2, 3), (8, 1, 1, 1)):
        result.append(partial(check_forest, forest_arguments(*sizes)))
    result.append(check_screened_topk)
    for shape in SHAPES:
        result += [partial(check_sparse_adam, shape, dtype, CPU) for dtype in DTYPES]
    for dtype, shift in product((torch.bfloat16, torch.float16), (0, 1)):
        result.append(partial(check_scale, shift, dtype, CPU))
    for piecewise_case in FEW_ELEMENTS:
        for width in (2, 4):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                result.append(partial(run_piecewise, piecewise_case, width, dtype))
    functions = [MonotoneCase(name, **options) for name, options in FUNCTIONS]  # type: ignore[arg-type]
    for case in (*functions, *EDGES):
        for dtype in (torch.float32, torch.float64):
            result.append(partial(run_target_log_softmax, case, dtype))
            result.append(partial(check_bias, case, dtype, CPU))
        result.append(partial(check_low_rows, case, CPU))
    for dtype in (torch.float32, torch.float64):
        for groups, blocks in ((False, TREE_BLOCKS), (True, GROUP_BLOCKS)):
            for block in blocks:
                batch = draw(block, dtype, groups=groups)
                result.append(partial(check_against, batch, reference, mixed, CPU))
    for name in (*MIXTURES, *BLOCKS):
        result.append(partial(check_draws, name, 1.0, CPU))
    for seed in range(60):
        result.append(partial(corrupt_tables.check_tree_log_softmax, seed))
        result.append(partial(corrupt_tables.check_sample, seed))
    for width in (2, 4):
        case = MonotoneCase("", rows=5, classes=33, intervals=12, width=width)
        result += [partial(check_extreme_elements, dtype, width) for dtype in DTYPES]
        for dtype in (torch.float32, torch.float64):
            result.append(partial(check_spoilt_rows, case, dtype))
            result.append(partial(check_misaligned_rows, case, dtype))
    return result


def main() -> None:
    library, part, parts = sys.argv[1:]
    emulated = EmulatedLibrary(Path(library))
    todo = list(enumerate(checks()))[int(part) :: int(parts)]
    for number, one in todo:
        emulated.set_order(*ORDERS[number % len(ORDERS)])
        with emulated.on_cpu_tensors():
            one()
    print(f"{len(todo)} checks passed")


if __name__ == "__main__":
    main()
