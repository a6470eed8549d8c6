"""The gate: how the trees of an ensemble are weighed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from hstree._dtypes import sum_dtype
from hstree.heads.trees.state import EnsembleState


class Gate(ABC):
    """Weights pi of T trees. Its parameters are the head's own, so that saved heads name them
    alike whatever the gate."""

    @abstractmethod
    def register(self, head: EnsembleState) -> None:
        """Give the head the parameters of the gate."""

    @abstractmethod
    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""


class UniformGate(Gate):
    """pi_t = 1 / T."""

    def register(self, head: EnsembleState) -> None:
        pass

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        dtype = sum_dtype(hidden.dtype)
        return hidden.new_full((len(hidden), head.n_trees), -math.log(head.n_trees), dtype=dtype)


class ConstantGate(Gate):
    """pi = softmax(a), a [T] learned."""

    def register(self, head: EnsembleState) -> None:
        head.gate_logits = nn.Parameter(torch.zeros(head.n_trees))

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        logits = head.gate_logits.to(sum_dtype(hidden.dtype))
        return logits.log_softmax(0).expand(len(hidden), -1)


class ContextGate(Gate):
    """pi = softmax(G h + a), G [T, D] and a [T] learned."""

    def register(self, head: EnsembleState) -> None:
        head.gate_linear = nn.Linear(head.in_features, head.n_trees)
        nn.init.zeros_(head.gate_linear.weight)
        nn.init.zeros_(head.gate_linear.bias)

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        logits: Tensor = head.gate_linear(hidden.to(head.gate_linear.weight.dtype))
        return logits.to(sum_dtype(hidden.dtype)).log_softmax(1)


GATES: dict[str, Gate] = {
    "uniform": UniformGate(),
    "constant": ConstantGate(),
    "context": ContextGate(),
}
