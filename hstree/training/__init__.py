"""Training: the loop, its presets and optimisers, progress, pictures and the final figures."""

from hstree.runs import TrainConfig

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
    "PlainLines",
    "Processes",
    "ProgressBar",
    "Reporter",
    "Silent",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "build_model",
    "default_reporter",
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
