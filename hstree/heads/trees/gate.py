"""The gate: weights of the trees of an ensemble."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from hstree._dtypes import input_dtype, sum_dtype
from hstree._products import is_low, linear_scores
from hstree.heads.trees.state import EnsembleState


class Gate(ABC):
    """Weights pi of T trees. The gate registers its parameters on the head itself: their names in
    saved heads have no prefix."""

    @abstractmethod
    def register(self, head: EnsembleState) -> None:
        """Register the parameters of the gate on the head."""

    @abstractmethod
    def reset(self, head: EnsembleState) -> None:
        """Set the parameters to their initial values, which give all trees the same weight."""

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
    """pi = softmax(a) with a learned a [T]."""

    def register(self, head: EnsembleState) -> None:
        head.gate_logits = nn.Parameter(torch.zeros(head.n_trees))

    def reset(self, head: EnsembleState) -> None:
        nn.init.zeros_(head.gate_logits)

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        logits = head.gate_logits.to(sum_dtype(hidden.dtype))
        return logits.log_softmax(0).expand(hidden.shape[0], -1)


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero, also after ``reset_parameters``."""

    def reset_parameters(self) -> None:
        super().reset_parameters()  # draws the same random numbers as earlier versions
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ContextGate(Gate):
    """pi = softmax(G h + a) with learned G [T, D] and a [T]."""

    def register(self, head: EnsembleState) -> None:
        head.gate_linear = ZeroLinear(head.in_features, head.n_trees)

    def reset(self, head: EnsembleState) -> None:
        head.gate_linear.reset_parameters()

    def log_gate(self, head: EnsembleState, hidden: Tensor) -> Tensor:
        linear, dtype = head.gate_linear, input_dtype(head.gate_linear)
        hidden = hidden.to(dtype)
        if is_low(hidden):
            return linear_scores(hidden, linear.weight, linear.bias).log_softmax(1)
        logits: Tensor = linear(hidden)  # may be quantized
        return logits.to(sum_dtype(dtype)).log_softmax(1)


GATES: dict[str, Gate] = {
    "uniform": UniformGate(),
    "constant": ConstantGate(),
    "context": ContextGate(),
}
