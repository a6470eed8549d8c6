"""Runs an op on random tables; prints how many it refused and accepted. Argument: the op's name."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import torch

from ops.cases import LEAF, PATH, WIDE, Case

TABLES = ("target", "offset", "path", "leaf_position", "feature_index")


def main(name: str) -> None:
    torch.set_num_threads(1)
    op = {op.name: op for op in (LEAF, PATH, WIDE)}[name]
    random = np.random.default_rng(0)
    refused = accepted = 0
    for seed in range(40):
        case = Case("corrupt", rows=40, subset=7, classes=int(random.integers(1, 30)))
        batch = op.batch(case, torch.float32, seed)
        score = op.forward(*batch.arguments())[1]
        for _ in range(10):
            table = TABLES[random.integers(len(TABLES))]
            value = getattr(batch, table).clone()
            flat = value.view(-1).numpy()
            info = np.iinfo(flat.dtype)
            count = int(random.integers(1, 4))
            places = random.integers(0, max(1, len(flat)), count)
            wild = random.integers(info.min, info.max, count, dtype=flat.dtype)
            near = random.integers(-3, 60, count).astype(flat.dtype)
            if len(flat):
                flat[places] = np.where(random.random(count) < 0.3, wild, near)
            bad = replace(batch, **{table: value})
            try:
                op.forward(*bad.arguments())
                for sparse in (False, True):
                    for mask in ((True, True, True), (True, False, False)):
                        op.backward(bad, score, mask=mask, sparse=sparse)
                accepted += 1
            except RuntimeError as error:
                if not str(error).startswith("hstree::"):
                    raise
                refused += 1
    print(refused, accepted)


if __name__ == "__main__":
    main(sys.argv[1])
