"""Training: settings, the loop, run folders, progress, pictures and the final figures."""

from .checkpoint import (
    CheckpointError,
    Run,
    RunDirectory,
    load_config,
    load_model,
    load_run,
    read_metrics,
)
from .config import ConfigError, TrainConfig
from .finetune import finetuning
from .presets import PRESETS, preset
from .progress import PlainLines, ProgressBar, Reporter, Silent, default_reporter
from .records import EpochRecord, perplexity
from .summary import HeadCost, Summary, format_summary, measure_head_cost
from .trainer import (
    Trainer,
    TrainingError,
    TrainingInterrupted,
    TrainResult,
    build_model,
    choose_device,
    evaluate,
    set_threads,
    train,
)

__all__ = [
    "PRESETS",
    "CheckpointError",
    "ConfigError",
    "EpochRecord",
    "HeadCost",
    "PlainLines",
    "ProgressBar",
    "Reporter",
    "Run",
    "RunDirectory",
    "Silent",
    "Summary",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "build_model",
    "choose_device",
    "default_reporter",
    "evaluate",
    "finetuning",
    "format_summary",
    "load_config",
    "load_model",
    "load_run",
    "measure_head_cost",
    "perplexity",
    "preset",
    "read_metrics",
    "set_threads",
    "train",
]
