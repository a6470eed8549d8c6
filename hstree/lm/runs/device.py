"""The device and the threads that the settings of a run name."""

from __future__ import annotations

import torch

from .config import TrainConfig
from .settings import ConfigError


def choose_device(name: str) -> torch.device:
    """The device of a ``--device`` setting. Raises ConfigError for ``cuda`` where torch finds no
    GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected cpu or auto, since torch finds no GPU, got cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def set_threads(config: TrainConfig) -> None:
    """Set the number of CPU threads of torch, if the configuration has one."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
