"""Language models: backbones, the module that joins one to a head, and sampling of text."""

from .generation import generate
from .language_model import (
    LanguageModel,
    LSTMBackbone,
    State,
    detach,
    evaluate_loss,
    parameter_count,
)

__all__ = [
    "LSTMBackbone",
    "LanguageModel",
    "State",
    "detach",
    "evaluate_loss",
    "generate",
    "parameter_count",
]
