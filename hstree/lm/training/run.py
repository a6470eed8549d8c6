"""Train a run from its settings to its final figures, or resume it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hstree.heads import head_class
from hstree.lm.runs import RESUMABLE, ConfigError, TrainConfig, load_config
from hstree.lm.runs.settings import flag_name

from .distributed import processes
from .progress import Reporter
from .session import Session, TrainResult


def train(config: TrainConfig, reporter: Reporter | None = None) -> TrainResult:
    """Train as configured and write a run folder.

    The folder appears, complete, when training begins. Its files are then replaced atomically, so
    it can be read at any time. The state is saved at the start, at the end of every epoch, every
    ``config.save_interval`` seconds within an epoch, and when Ctrl-C or SIGTERM stops the training;
    :func:`resume` continues from the last saved state. While weights are averaged, the averages are
    validated and saved.

    With ``torchrun``, each process trains on ``config.batch_size`` streams of its own, with the
    mean of their gradients. The first process validates, reports and writes.

    Raises:
        ValueError: a setting, the corpus or the run folder is not valid; nothing was written.
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
    """Resume a run from its last saved state.

    On the same CPU, with the same number of threads and processes and unchanged settings, the
    weights are bitwise identical to those of a run that was never interrupted.

    Args:
        run: the folder.
        reporter: receives every further step.
        **changes: new values of settings in :data:`~hstree.lm.runs.RESUMABLE`. With more ``epochs``
            the rest of the learning rate schedule is that of a run planned for that many.

    Raises:
        CheckpointError: the state cannot be read, the text has changed, or another process trains
            in the folder.
        ConfigError: a setting that cannot change, or all epochs are done.
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
