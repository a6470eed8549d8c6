"""Training steps of the heads of a study as shares of one of them, timed in turns in one process,
so that other load on the machine counts less."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hstree
from benchmarks.ptb import cpu_name
from hstree._files import write_atomic
from hstree.data import Corpus
from hstree.runs import TrainConfig
from hstree.training import Trainer, build_model

from .plan import Contender

STEPS, ROUNDS = 3, 15
"""Steps of a turn, and turns of every head."""
NO_SETTINGS = ("seconds",)
"""What the settings of a contender hold beside those of a run."""


def measure(
    contenders: Sequence[Contender],
    corpus: Corpus,
    elsewhere: Mapping[str, Any],
    *,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Time training steps of all contenders in turns, in this process, with one thread.

    Args:
        contenders: the first one is what the others are compared with.
        corpus: the text.
        elsewhere: further settings of the runs.
        rounds: number of turns.

    Returns:
        ``shares``: for each name of a contender, the median over the rounds of the CPU seconds of
        its steps over those of the first one; machine, versions and date.
    """
    torch.set_num_threads(1)
    turns = {c.name: _steps(c, corpus, elsewhere) for c in contenders}
    ratios: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        seconds = {name: _turn(steps) for name, steps in turns.items()}
        first = seconds[contenders[0].name]
        for name, own in seconds.items():
            if number:  # the first round has cold caches
                ratios[name].append(own / first)
    return {
        "shares": {name: median(values) for name, values in ratios.items()},
        "machine": cpu_name(),
        "versions": {
            "hstree": hstree.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "date": str(date.today()),
    }


def _steps(contender: Contender, corpus: Corpus, elsewhere: Mapping[str, Any]) -> Iterator[Any]:
    settings = {k: v for k, v in contender.settings.items() if k not in NO_SETTINGS}
    config = TrainConfig(seed=1, **settings, **elsewhere)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    trainer = Trainer(model, corpus, config)
    while True:
        yield from trainer.steps()
        trainer.note_validation(0.0)


def _turn(steps: Iterator[Any]) -> float:
    begin = time.process_time()
    for _ in range(STEPS):
        next(steps)
    return time.process_time() - begin


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
