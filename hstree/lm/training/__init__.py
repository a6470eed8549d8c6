"""Training: the training loop, presets, optimizers, progress, learning curves and final figures."""

from hstree.lm.runs import TrainConfig

from .build import build_model
from .distributed import Processes, is_main_process, processes
from .finetune import finetuning
from .presets import PRESETS, SOURCES, preset, preset_sources
from .progress import ConsoleReporter, Reporter
from .session import TrainingInterrupted, TrainingMemoryError, TrainResult, resume, train
from .sources import SettingSource, setting_sources
from .summary import format_summary, measure_head_cost
from .trainer import Trainer, TrainingError
from .validation import evaluate

__all__ = [
    "PRESETS",
    "SOURCES",
    "ConsoleReporter",
    "Processes",
    "Reporter",
    "SettingSource",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "TrainingMemoryError",
    "build_model",
    "evaluate",
    "finetuning",
    "format_summary",
    "is_main_process",
    "measure_head_cost",
    "preset",
    "preset_sources",
    "processes",
    "resume",
    "setting_sources",
    "train",
]
