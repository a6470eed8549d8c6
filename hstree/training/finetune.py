"""Fine-tuning: averaged SGD from the best weights of another run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hstree.models import LanguageModel
from hstree.runs import ConfigError, Run, TrainConfig, load_config
from hstree.runs.config import DROPOUTS
from hstree.runs.settings import flag_name

# Settings of one run, not of the model.
_NOT_INHERITED = ("run", "device", "threads", "relearn_trees")


def finetuning(origin: str | os.PathLike[str], /, **changes: Any) -> TrainConfig:
    """Settings that fine-tune a run: its own settings, with ``finetune`` and the given changes.

    Args:
        origin: folder of the run.
        **changes: fields of :class:`TrainConfig` that replace those of the run.

    Raises:
        CheckpointError: the settings of the folder cannot be read.
        ConfigError: a value that is not valid, or a run that was not trained with SGD.
    """
    settings = dataclasses.asdict(load_config(origin))
    for name in _NOT_INHERITED:
        del settings[name]
    return TrainConfig(**(settings | {"finetune": os.fspath(origin)} | changes))


def starting_model(config: TrainConfig, run: Run) -> LanguageModel:
    """The model of a run, with the dropouts and the head's learning rate of a configuration.

    Raises:
        ConfigError: another setting of the model or the head differs from that of the run.
    """
    for field in dataclasses.fields(TrainConfig):
        mine, theirs = getattr(config, field.name), getattr(run.config, field.name)
        fixed = field.metadata["group"] in ("data", "model", "head")
        fixed = fixed and field.name not in ("data", "relearn_trees", *DROPOUTS)
        if fixed and mine != theirs:
            raise ConfigError(
                f"--{flag_name(field.name)}: expected {theirs!r} as in {run.path}, the run to "
                f"fine-tune, got {mine!r}"
            )
    model = run.model
    for name in DROPOUTS:
        setattr(model.backbone, name, getattr(config, name))
    model.head.learning_rate_factor = config.head_learning_rate_factor
    return model
