"""Where the settings of a run let torch compute."""

from __future__ import annotations

import torch

from .config import TrainConfig
from .settings import ConfigError


def choose_device(name: str) -> torch.device:
    """The device of a ``--device`` setting. Raises ConfigError if there is no GPU but one is asked
    for."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda was asked for, but torch finds no GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def set_threads(config: TrainConfig) -> None:
    """Set torch's number of CPU threads, if the configuration says one."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
