"""Fine-tuning: averaged SGD from the best weights of another run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hstree.lm.models import LanguageModel
from hstree.lm.runs import ConfigError, Run, TrainConfig, load_config
from hstree.lm.runs.settings import flag_name, names_where

TRAINING_NOISE = names_where(TrainConfig, noise=True)
"""The settings of the backbone that act in training only."""

NOT_INHERITED = names_where(TrainConfig, inherited=False)
"""Settings of one run, not of the model."""


def finetuning(origin: str | os.PathLike[str], /, **changes: Any) -> TrainConfig:
    """Settings that fine-tune a run: its own settings, with ``finetune`` and the given changes.
    The learning rate is ``finetune_learning_rate``, if it is set and no ``learning_rate`` is given.

    Args:
        origin: folder of the run.
        **changes: fields of :class:`TrainConfig` that replace those of the run.

    Raises:
        CheckpointError: the settings of the folder cannot be read.
        ConfigError: a value that is not valid, or a run that was not trained with SGD.
    """
    settings = dataclasses.asdict(load_config(origin))
    for name in NOT_INHERITED:
        del settings[name]
    settings |= {"finetune": os.fspath(origin)} | changes
    if "learning_rate" not in changes and settings["finetune_learning_rate"] is not None:
        settings["learning_rate"] = settings["finetune_learning_rate"]
    return TrainConfig(**settings)


def starting_model(config: TrainConfig, run: Run) -> LanguageModel:
    """The model of a run, with the dropouts and the noise of a configuration. Raises ConfigError if
    another setting of the model or the head differs."""
    for field in dataclasses.fields(TrainConfig):
        mine, theirs = getattr(config, field.name), getattr(run.config, field.name)
        fixed = field.metadata["group"] in ("data", "model", "head")
        fixed = fixed and field.name not in ("data", "column", *TRAINING_NOISE)
        if fixed and mine != theirs:
            raise ConfigError(
                f"--{flag_name(field.name)}: expected {theirs!r} as in {run.path}, the run to "
                f"fine-tune, got {mine!r}"
            )
    model = run.model
    for name in TRAINING_NOISE:
        setattr(model.backbone, name, getattr(config, name))
    return model
