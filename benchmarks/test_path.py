"""The path kernel, forward and backward: against torch's flat losses and vectorized trees in
torch's own ops, with two threads, in bfloat16, and for growing numbers of classes.

pytest benchmarks/test_path.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.baselines import bag_dot, gathered_dot
from benchmarks.contest import TINY, Size, contest
from benchmarks.memory import measure
from benchmarks.paths import GROWTH, MANY, PATH_SIZES, WIKITEXT, draw_paths, errors
from benchmarks.registry import CONTESTS


@pytest.mark.parametrize("size", PATH_SIZES, ids=str)
def test_path(benchmark: Any, short: bool, size: Size) -> None:
    name = f"path, V = {size.classes}"
    builds, many = CONTESTS[name], size.classes >= MANY
    size, rounds = (TINY, 1) if short else (size, 1 if many else 3)
    benchmark.group = f"{name} (cpu)"
    result = contest(benchmark, builds, size, "cpu", rounds)
    if not short:
        measured = [of for of in builds if "T = " in of or not many]
        for of, peak in measure(name, measured, size, "cpu").items():
            result[of]["peak_bytes"] = peak


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("threads", WIKITEXT),
        ("precision", WIKITEXT),
        ("growth, T = 1", GROWTH),
        ("growth, T = 8", GROWTH),
    ],
    ids=["threads", "precision", "growth-T1", "growth-T8"],
)
def test_variants(benchmark: Any, short: bool, name: str, size: Size) -> None:
    if name == "threads" and (os.cpu_count() or 1) < 2:
        pytest.skip("two threads: one core")
    size, rounds = (TINY, 1) if short else (size, 9)
    benchmark.group = f"{name} (cpu)"
    result = contest(benchmark, CONTESTS[name], size, "cpu", rounds)
    if name == "precision":
        found = errors(size, torch.bfloat16)
        result["T = 8, bfloat16"]["error"] = found["hstree"]
        result["torch tree, T = 8, bfloat16"] = {"parameters": 0, "error": found["torch"]}


@pytest.mark.parametrize("n_trees", [1, 8])
@pytest.mark.parametrize("dot", [gathered_dot, bag_dot])
def test_baselines_are_the_same_trees(n_trees: int, dot: Any) -> None:
    """The vectorized baseline trees compute the same log-probabilities and gradients as hstree."""
    paths = draw_paths(Size(30, 16, 50, 16), n_trees)
    for got, want in zip(paths.results(), paths.torch_results(torch.float32, dot), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_errors_of_float32_are_small() -> None:
    assert max(errors(Size(30, 16, 50, 16), torch.float32).values()) < 1e-5
