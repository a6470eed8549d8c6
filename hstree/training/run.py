"""A run from its settings to its final figures, and on from where it stopped."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hstree.heads import head_class
from hstree.runs import RESUMABLE, ConfigError, TrainConfig, load_config
from hstree.runs.settings import flag_name

from .distributed import processes
from .progress import Reporter
from .session import Session, TrainResult


def train(config: TrainConfig, reporter: Reporter | None = None) -> TrainResult:
    """Train as configured and leave a run folder.

    The folder appears when training begins, complete; from then on its files are replaced
    atomically, so it can be read at any time, and :func:`resume` goes on from the last state that
    was saved, whatever stopped the training: at the start, at the end of every epoch, in between
    every ``config.save_interval`` seconds, and when Ctrl-C or SIGTERM stop it between two steps.
    While weights are averaged, it is the averages that are validated and kept.

    In processes that ``torchrun`` started, each trains on ``config.batch_size`` streams of its own,
    with the mean of their gradients; the first validates, reports and writes.

    Raises:
        ValueError: a setting, the corpus or the run folder is not usable; nothing was written.
        TrainingError: the loss is not finite; the best epoch so far is kept.
        TrainingInterrupted: on Ctrl-C or SIGTERM.
    """
    head_class(config.head)
    with processes(config.device) as group:
        session = Session(config, reporter, group)
        with session.folder(None):
            return session.run(session.begin())


def resume(
    run: str | os.PathLike[str], /, reporter: Reporter | None = None, **changes: Any
) -> TrainResult:
    """Go on with a run from the last state that was saved.

    On the same CPU, with as many threads and processes, the weights become those of a run that was
    never interrupted, bit for bit, unless settings change.

    Args:
        run: the folder.
        reporter: told of every step from there.
        **changes: of :data:`~hstree.runs.RESUMABLE`. With more ``epochs`` a falling learning rate
            goes on as if it had been planned for that many.

    Raises:
        CheckpointError: the folder has no readable state, its text has changed, or another process
            trains in it.
        ConfigError: another setting is to change, or all epochs are done.
        TrainingError, TrainingInterrupted: as :func:`train`.
    """
    for name in changes:
        if name not in RESUMABLE:
            raise ConfigError(
                f"--{flag_name(name)}: expected a setting that can change with --resume "
                f"({', '.join('--' + flag_name(n) for n in RESUMABLE)}), got {changes[name]!r}"
            )
    folder = Path(run)
    config = replace(load_config(folder), **changes)
    with processes(config.device) as group:
        session = Session(config, reporter, group)
        with session.folder(folder):
            return session.run(session.load(folder))
