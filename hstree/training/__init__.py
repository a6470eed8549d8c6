"""Training: settings, the loop, run folders, progress, pictures and the final figures."""

from .build import build_model, choose_device, set_threads
from .checkpoint import Run, load_config, load_model, load_run, read_metrics
from .config import RESUMABLE, ConfigError, TrainConfig
from .distributed import Processes, is_main_process, processes
from .finetune import finetuning
from .presets import PRESETS, preset
from .progress import PlainLines, ProgressBar, Reporter, Silent, default_reporter
from .records import EpochRecord, perplexity
from .run import resume, train
from .run_directory import CheckpointError, RunDirectory
from .session import TrainingInterrupted, TrainResult
from .summary import HeadCost, Summary, format_summary, measure_head_cost
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
    "read_metrics",
    "resume",
    "set_threads",
    "train",
]
