"""Training: the loop, its presets and optimisers, progress, pictures and the final figures."""

from hstree.runs import (  # what moved there, for those that still ask here
    RESUMABLE,
    CheckpointError,
    ConfigError,
    EpochRecord,
    HeadCost,
    Run,
    RunDirectory,
    Summary,
    TrainConfig,
    choose_device,
    load_config,
    load_model,
    load_run,
    perplexity,
    set_threads,
)

from .build import build_model
from .distributed import Processes, is_main_process, processes
from .finetune import finetuning
from .presets import PRESETS, preset
from .progress import PlainLines, ProgressBar, Reporter, Silent, default_reporter
from .run import resume, train
from .session import TrainingInterrupted, TrainResult
from .summary import format_summary, measure_head_cost
from .trainer import Trainer, TrainingError, evaluate

__all__ = [
    "PRESETS",
    "RESUMABLE",
    "CheckpointError",
    "ConfigError",
    "EpochRecord",
    "HeadCost",
    "PlainLines",
    "Processes",
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
    "is_main_process",
    "load_config",
    "load_model",
    "load_run",
    "measure_head_cost",
    "perplexity",
    "preset",
    "processes",
    "resume",
    "set_threads",
    "train",
]
