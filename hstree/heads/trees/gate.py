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
    def reset(self, head: EnsembleState) -> None:
        """Give them their first values: all trees weigh the same."""

    @abstractmethod
    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""


class UniformGate(Gate):
    """pi_t = 1 / T."""

    def register(self, head: EnsembleState) -> None:
        pass

    def reset(self, head: EnsembleState) -> None:
        pass

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        dtype = sum_dtype(hidden.dtype)
        return hidden.new_full(
            (hidden.shape[0], head.n_trees), -math.log(head.n_trees), dtype=dtype
        )


class ConstantGate(Gate):
    """pi = softmax(a), a [T] learned."""

    def register(self, head: EnsembleState) -> None:
        head.gate_logits = nn.Parameter(torch.zeros(head.n_trees))

    def reset(self, head: EnsembleState) -> None:
        nn.init.zeros_(head.gate_logits)

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        logits = head.gate_logits.to(sum_dtype(hidden.dtype))
        return logits.log_softmax(0).expand(hidden.shape[0], -1)


class ZeroLinear(nn.Linear):
    """A linear layer that is zero at first, whoever resets it."""

    def reset_parameters(self) -> None:
        super().reset_parameters()  # the random numbers that saved runs drew
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ContextGate(Gate):
    """pi = softmax(G h + a), G [T, D] and a [T] learned."""

    def register(self, head: EnsembleState) -> None:
        head.gate_linear = ZeroLinear(head.in_features, head.n_trees)

    def reset(self, head: EnsembleState) -> None:
        head.gate_linear.reset_parameters()

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        logits: Tensor = head.gate_linear(hidden.to(head.gate_linear.weight.dtype))
        return logits.to(sum_dtype(hidden.dtype)).log_softmax(1)


GATES: dict[str, Gate] = {
    "uniform": UniformGate(),
    "constant": ConstantGate(),
    "context": ContextGate(),
}
