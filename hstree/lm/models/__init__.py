"""Language models: the AWD-LSTM, its combination with a head, their loss, and text generation."""

from .awd_lstm import AWDLSTM, BackboneOutput, State, activation_penalty, cpu_has_lstm, detach
from .generation import generate, sample_log_prob
from .language_model import LanguageModel, LanguageModelOutput
from .stream import read_contexts, read_stream

__all__ = [
    "AWDLSTM",
    "BackboneOutput",
    "LanguageModel",
    "LanguageModelOutput",
    "State",
    "activation_penalty",
    "cpu_has_lstm",
    "detach",
    "generate",
    "read_contexts",
    "read_stream",
    "sample_log_prob",
]
