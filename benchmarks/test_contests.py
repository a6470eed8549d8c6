"""All contests of benchmarks.registry, on one core and, heads and decoding, on a GPU.

pip install -r tools/extra-benchmarks.txt    # optional: gensim and fastText
pytest benchmarks/test_contests.py --benchmark-only --benchmark-json=run.json [-k decoding]
python -m benchmarks.table run.json
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hstree
from benchmarks.contest import TINY, Build, Size, contest
from benchmarks.decoding import (
    BEST_OF_MANY,
    BEST_SIZE,
    DECODED_ROWS,
    SCREENED_CONTESTS,
    SCREENED_SIZES,
)
from benchmarks.heads import HEAD_CONTESTS, MOS_SIZE, SIZE
from benchmarks.memory import of_process
from benchmarks.optimizers import OPTIMIZER_SIZES, SUBWORD_SIZE, SUBWORDS, TRAINING_SIZES
from benchmarks.paths import GROWTH, PATH_SIZES, WIKITEXT
from benchmarks.registry import CONTESTS
from benchmarks.trainer import TRAINER_SIZE
from benchmarks.word2vec import LIBRARIES, WORD2VEC_SIZES

RUNS: dict[str, tuple[Size, int]] = {
    "plif": (SIZE, 7),
    "heads": (SIZE, 9),
    "default trees": (SIZE, 5),
    "mixtures": (SIZE, 3),
    "mos": (MOS_SIZE, 3),
    **{f"path, V = {s.classes}": (s, 3) for s in PATH_SIZES},
    "threads": (WIKITEXT, 9),
    "precision": (WIKITEXT, 9),
    "growth, T = 1": (GROWTH, 9),
    "growth, T = 8": (GROWTH, 9),
    **{f"optimizers, V = {s.classes}": (s, 7) for s in OPTIMIZER_SIZES},
    **{f"training steps, V = {s.classes}": (s, 5) for s in TRAINING_SIZES},
    SUBWORDS: (SUBWORD_SIZE, 5),
    BEST_OF_MANY: (BEST_SIZE, 3),
    "trainer": (TRAINER_SIZE, 9),
    **{f"{name}, D = {s.features}": (s, 3) for name in LIBRARIES for s in WORD2VEC_SIZES},
}
"""Size and number of rounds."""
DEVICES = [(name, device) for name in RUNS for device in ("cpu", "cuda")]
DEVICES = [(name, device) for name, device in DEVICES if device == "cpu" or name in HEAD_CONTESTS]
for device, rows in DECODED_ROWS.items():
    for n in rows:
        RUNS[f"decoding, N = {n}"] = (replace(WIKITEXT, rows=n), 5)
        DEVICES.append((f"decoding, N = {n}", device))
for name, size in zip(SCREENED_CONTESTS, SCREENED_SIZES.values(), strict=True):
    RUNS[name] = (size, 5)
    DEVICES.append((name, "cuda"))


WEIGHED = ("heads", "default trees", "mixtures", "mos", "path, ", "training steps, V = 100000")
"""The contests whose memory is measured."""


def first_step(name: str, of: str, size: Size, device: str) -> tuple[Callable[[], object], str]:
    """A step of a contestant, after a tiny one."""
    build = CONTESTS[name][of]
    build(TINY, device).step()
    return build(size, device).step, device


@pytest.mark.filterwarnings("ignore")  # of gensim and fastText
@pytest.mark.parametrize(("name", "device"), DEVICES, ids=lambda value: value)
def test_contest(benchmark: Any, short: bool, name: str, device: str) -> None:
    skip_unless_possible(name, device)
    size, rounds = (TINY, 1) if short else RUNS[name]
    torch.manual_seed(0)
    benchmark.extra_info["name"] = name
    result = contest(benchmark, CONTESTS[name], size, device, rounds)
    if not short and name.startswith(WEIGHED):
        for of in CONTESTS[name]:
            result[of]["peak_bytes"] = of_process(first_step, name, of, size, device)


def skip_unless_possible(name: str, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("CUDA: no GPU")
    if device == "cuda" and hstree.build_info().cuda is None:
        pytest.skip("CUDA: hstree was built for the CPU only")
    if name == "threads" and (os.cpu_count() or 1) < 2:
        pytest.skip("two threads: one core")
    library = name.partition(",")[0]
    if library not in LIBRARIES:
        return
    try:
        with warnings.catch_warnings():
            importlib.import_module(library)
    except ImportError as error:
        pytest.skip(f"{library}: {error}; pip install -r tools/extra-benchmarks.txt")
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads cannot be kept on one core here")


def test_every_contest_runs() -> None:
    assert set(RUNS) == set(CONTESTS)


@pytest.mark.parametrize("build", next(iter(SCREENED_CONTESTS.values())).values())
def test_best_words_without_a_gpu(build: Build) -> None:
    build(TINY, "cpu").step()


def test_peak_memory_of_another_process() -> None:
    peak = of_process(first_step, "mos", "mos", TINY, "cpu")
    assert peak is None or 0 < peak < 2**26
