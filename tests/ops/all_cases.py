"""Checks every case against the reference in this process and saves the results of a batch.

Arguments: the op's name, or logit_functions, and a file to write."""

from __future__ import annotations

import sys

import torch

from ops.against_reference import check
from ops.cases import BLOCKS, CASES, DTYPES, LEAF, PATH, WIDE, TreeOpUnderTest
from ops.logit_function_cases import check_every_case
from ops.tree_op_suite import MANY


def check_every_tree(op: TreeOpUnderTest) -> list[torch.Tensor]:
    for case in (*CASES, *BLOCKS):
        for dtype in DTYPES:
            check(op, case, dtype, torch.device("cpu"))
    return op.gradients(op.batch(MANY, torch.float32))


def main(name: str, path: str) -> None:
    torch.set_num_threads(1)
    if name == "logit_functions":
        results = check_every_case()
    else:
        results = check_every_tree({op.name: op for op in (LEAF, PATH, WIDE)}[name])
    torch.save(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
