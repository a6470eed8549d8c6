"""Checks every case against the reference in this process and saves the results of one batch.

Arguments: the op's name, a file to write."""

from __future__ import annotations

import sys

import torch

from ops.cases import CASES, DTYPES, PATH, WIDE, check
from ops.tree_op_suite import MANY


def main(name: str, path: str) -> None:
    torch.set_num_threads(1)
    op = {op.name: op for op in (PATH, WIDE)}[name]
    for case in CASES:
        for dtype in DTYPES:
            check(op, case, dtype, torch.device("cpu"))
    torch.save(op.gradients(op.batch(MANY, torch.float32)), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
