"""Training: the training loop, presets, optimizers, progress, learning curves and final figures."""

from hstree.runs import TrainConfig

from .build import build_model
from .distributed import Processes, is_main_process, processes
from .finetune import finetuning
from .presets import PRESETS, preset
from .progress import ConsoleReporter, Reporter, Silent
from .run import resume, train
from .session import TrainingInterrupted, TrainResult
from .summary import format_summary, measure_head_cost
from .trainer import Trainer, TrainingError, evaluate

__all__ = [
    "PRESETS",
    "ConsoleReporter",
    "Processes",
    "Reporter",
    "Silent",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "build_model",
    "evaluate",
    "finetuning",
    "format_summary",
    "is_main_process",
    "measure_head_cost",
    "preset",
    "processes",
    "resume",
    "train",
]
