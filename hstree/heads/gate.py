"""The gate: weights of the trees of an ensemble."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hstree._numerics import input_dtype, is_low, linear_scores, sum_dtype


class UniformGate(nn.Module):
    """log pi [N, T] with pi_t = 1 / T: hidden [N, D]."""

    name = "uniform"

    def __init__(self, in_features: int, n_trees: int) -> None:
        super().__init__()
        self.n_trees = n_trees

    def reset(self) -> None:
        """Give all trees the same weight. Not called ``reset_parameters``, so that callers that
        reset every module leave the head's order of resets alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        shape, value = (hidden.shape[0], self.n_trees), -math.log(self.n_trees)
        return hidden.new_full(shape, value, dtype=sum_dtype(hidden.dtype))


class ConstantGate(UniformGate):
    """pi = softmax(a) with a learned a [T]."""

    name = "constant"

    def __init__(self, in_features: int, n_trees: int) -> None:
        super().__init__(in_features, n_trees)
        self.logits = nn.Parameter(torch.zeros(n_trees))

    def reset(self) -> None:
        nn.init.zeros_(self.logits)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.logits.to(sum_dtype(hidden.dtype))
        return logits.log_softmax(0).expand(hidden.shape[0], -1)


class _ZeroLinear(nn.Linear):
    """A linear layer that starts at zero, also after ``reset_parameters``."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ContextGate(UniformGate):
    """pi = softmax(G h + a) with learned G [T, D] and a [T]."""

    name = "context"

    def __init__(self, in_features: int, n_trees: int) -> None:
        super().__init__(in_features, n_trees)
        self.linear = _ZeroLinear(in_features, n_trees)

    def reset(self) -> None:
        self.linear.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        linear, dtype = self.linear, input_dtype(self.linear)
        hidden = hidden.to(dtype)
        if is_low(hidden):
            return linear_scores(hidden, linear.weight, linear.bias).log_softmax(1)
        logits: Tensor = linear(hidden)  # may be quantized
        return logits.to(sum_dtype(dtype)).log_softmax(1)


GATES: dict[str, type[UniformGate]] = {
    gate.name: gate for gate in (UniformGate, ConstantGate, ContextGate)
}
