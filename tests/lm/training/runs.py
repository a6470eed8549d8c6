"""Run folders of the same training, compared to the last bit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hstree.lm.report import EpochRecord, Reporter
from hstree.lm.run import read_epochs

# What depends on the clock.
CLOCK = ("seconds", "tokens_per_second")


class Recorder(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.losses: list[float] = []
        self.records: list[EpochRecord] = []
        self.tokens = self.stopped = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.losses.append(loss)
        self.tokens += tokens

    def epoch(self, record: EpochRecord) -> None:
        self.records.append(record)

    def stop(self) -> None:
        self.stopped += 1


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without what depends on the clock."""
    return [
        {name: value for name, value in asdict(record).items() if name not in CLOCK}
        for record in read_epochs(run)
    ]


def assert_same_run(run: Path, expected: Path) -> None:
    """The same files, metrics, best weights and state for going on; no leftovers of a save."""
    files, expected_files = (sorted(p.name for p in folder.iterdir()) for folder in (run, expected))
    assert files == expected_files
    assert metrics(run) == metrics(expected)
    for name in ("model.safetensors", "last.safetensors"):
        mine, theirs = tensors(run / name), tensors(expected / name)
        assert mine.keys() == theirs.keys()
        different = [key for key in mine if not torch.equal(mine[key], theirs[key])]
        assert different == [], f"{name} differs"
    assert (run / "vocabulary.txt").read_bytes() == (expected / "vocabulary.txt").read_bytes()
