"""Run folders: settings, records, and what writes a folder and reads it back."""

from .checkpoint import load_model
from .config import RESUMABLE, UNGROUPED, TrainConfig, read_settings
from .device import choose_device, set_threads
from .folder import RunDirectory
from .names import CheckpointError
from .reader import (
    Run,
    load_config,
    load_run,
    load_tokenizer,
    load_vocabulary,
    run_names,
)
from .records import EpochRecord, HeadCost, Summary, perplexity
from .results import RunResults, counterpart, read_epochs, read_run
from .settings import ConfigError, parse_options

__all__ = [
    "RESUMABLE",
    "UNGROUPED",
    "CheckpointError",
    "ConfigError",
    "EpochRecord",
    "HeadCost",
    "Run",
    "RunDirectory",
    "RunResults",
    "Summary",
    "TrainConfig",
    "choose_device",
    "counterpart",
    "load_config",
    "load_model",
    "load_run",
    "load_tokenizer",
    "load_vocabulary",
    "parse_options",
    "perplexity",
    "read_epochs",
    "read_run",
    "read_settings",
    "run_names",
    "set_threads",
]
