"""Evaluation of models that keep learning from the text they read: neural cache, dynamic
evaluation."""

from .cache import NeuralCache
from .dynamic import evaluate_dynamic, gradient_rms
from .stream import evaluate_stream

__all__ = ["NeuralCache", "evaluate_dynamic", "evaluate_stream", "gradient_rms"]
