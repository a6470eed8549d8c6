"""How large the house may be. A change that raises a figure says what it buys and removes."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hstree

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(hstree.__file__).parent  # installed, or of the checkout

SUFFIXES = {".py", ".pyi", ".cpp", ".cu", ".cuh", ".h", ".md"}
LINES = {
    "hstree": 24_150,
    "hstree/lm": 6_370,
    "hstree/lab": 3_660,
    "csrc": 19_580,
    "tests": 43_050,
    "benchmarks": 6_870,
    "docs": 3_500,
}
"""At most; what is aimed at: 17,000, 3,500, 2,800, 17,500, 30,000, 5,500 and 3,200."""

NAMES = 92  # 70 are aimed at
FILES, MOVES = 7, 14
"""Of one training call of a default head: files of hstree that a reader meets, and how often the
next line stands in another one."""


@pytest.mark.parametrize("room", LINES)
def test_lines(room: str) -> None:
    made = {"results", "generated", "__pycache__"}
    files = [p for p in (ROOT / room).rglob("*") if p.suffix in SUFFIXES and not made & {*p.parts}]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert LINES[room] // 2 < lines <= LINES[room]


def test_exported_names() -> None:
    modules = ["hstree", *(f"hstree.{name}" for name in ("heads", "ops", "trees", "optim", "lab"))]
    modules += ["hstree.deferred", "hstree.transformers"]
    names = {name for module in modules for name in importlib.import_module(module).__all__}
    assert len(names) <= NAMES


def test_a_training_call_is_read_in_few_files() -> None:
    head = hstree.TreeEnsemble.from_counts(16, torch.arange(5000, 0, -1))
    hidden, target = torch.randn(8, 16, requires_grad=True), torch.randint(5000, (8,))
    head(hidden, target)
    files: list[str] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(record)
    try:
        head(hidden, target)
    finally:
        sys.setprofile(None)
    moves = 1 + sum(one != other for one, other in pairwise(files))
    assert 1 < len(set(files)) <= FILES
    assert moves <= MOVES
