"""Runs every case on a library built with the sanitizers: `python -m kernels.sanitized LIBRARY`.

A process of its own, because AddressSanitizer must be loaded before everything else. Prints the
number of checks that passed; a finding of a sanitizer ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from kernels.cases import PATH_CASES, WIDE_CASES, check
from kernels.corruption import (
    CORRUPTIONS,
    check_bad_ranks,
    check_bad_targets,
    check_corruption,
)
from kernels.emulation import FLOAT16, FLOAT32, ORDERS, Kernels


def checks(kernels: Kernels) -> list[Callable[[], object]]:
    result: list[Callable[[], object]] = []
    for case in (*PATH_CASES, *WIDE_CASES):
        # The widths of accesses: 4, 2 and 8 bytes; float16 is as bfloat16.
        kinds = [kind for kind in case.kinds if kind is not FLOAT16]
        result += [partial(check, kernels, case, kind) for kind in kinds]
    for wide in (False, True):
        for corruption in CORRUPTIONS:
            if corruption.wide in (None, wide):
                result.append(partial(check_corruption, kernels, corruption, wide))
        result.append(partial(check_bad_targets, kernels, wide))
        result.append(partial(check_bad_ranks, kernels, wide))
    index = np.array([[0, 3, 4], [-1, 2**31 - 1, 5]], np.int32)
    values = np.ones((3, 5), np.float32)
    grad = np.ones((3, 2, 3), np.float32)
    result.append(partial(kernels.feature_gather, FLOAT32, values, index))
    result.append(partial(kernels.feature_gather_backward, FLOAT32, grad, index, 5))
    return result


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]))
    todo = checks(kernels)
    for number, one in enumerate(todo):
        kernels.set_order(*ORDERS[number % len(ORDERS)])
        one()
    print(f"{len(todo)} checks passed")


if __name__ == "__main__":
    main()
