"""Training steps of the heads of a study as shares of one of them, timed in turns in one process,
so that other load on the machine counts less."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hstree._files import write_atomic
from hstree.lab.report import provenance
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, Streams
from hstree.lm.train import Step, Trainer, build_model, head_cost

STEPS, ROUNDS = 3, 15
"""Steps of a turn, and turns of every head."""


def measure(
    configs: Mapping[str, TrainConfig], corpus: Corpus, *, rounds: int = ROUNDS
) -> dict[str, Any]:
    """:func:`in_turns` of runs whose settings are given by name."""
    turns: dict[str, Iterator[Any]] = {}
    for name, config in configs.items():
        model = build_model(config, len(corpus.vocabulary), corpus.statistics())
        turns[name] = endless_steps(Trainer(model, corpus, config))
    return in_turns(turns, rounds=rounds)


def head_share(config: TrainConfig, corpus: Corpus) -> float:
    """Time of a training step of the head alone, untrained, over that of ``F.linear`` +
    ``F.cross_entropy``, with one thread."""
    torch.set_num_threads(1)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    cost = head_cost(model, config, Streams(corpus.train, config.batch_size))
    return cost.head_seconds / cost.flat_seconds


def in_turns(turns: Mapping[str, Iterator[Any]], *, rounds: int = ROUNDS) -> dict[str, Any]:
    """Time training steps, given by name as iterators that make one each, in turns, in this
    process, with one thread: ``shares``, for each name the median over the rounds of the CPU
    seconds of its steps over those of the first one; machine, versions and date."""
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        seconds = {name: _turn(steps) for name, steps in turns.items()}
        first = next(iter(seconds.values()))
        for name, own in seconds.items():
            if number:  # the first round has cold caches
                ratios[name].append(own / first)
    return {"shares": {name: median(values) for name, values in ratios.items()}, **provenance()}


def _turn(steps: Iterator[Any]) -> float:
    begin = time.process_time()
    for _ in range(STEPS):
        next(steps)
    return time.process_time() - begin


def endless_steps(trainer: Trainer) -> Iterator[Step]:
    """Make steps, epoch after epoch, without validation."""
    while True:
        yield from trainer.steps()
        trainer.note_validation(0.0)


def file_of(records: Path) -> Path:
    """The file of the times of a study, beside that of its records."""
    return records.with_name(f"{records.stem}-times.json")


def save(times: Mapping[str, Any], records: Path) -> None:
    """Write the result of :func:`measure`."""
    write_atomic(file_of(records), (json.dumps(times, indent=2) + "\n").encode())


def load(records: Path) -> dict[str, Any] | None:
    """The times of a study, or None if they have not been measured yet."""
    file = file_of(records)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
