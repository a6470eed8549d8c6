"""The gradients of every head by torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.testing import assert_close

from heads.support import HEADS, draw, draw_targets, make

ROWS = 4
# In torch's own code, the first time that forward mode is at work.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
every_head = pytest.mark.parametrize("kind", HEADS)
close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def check_gradients(kind: str, **options: Any) -> None:
    """By hidden and all parameters, of the loss and of all classes, equal to those of autograd."""
    head = make(kind, reduction="sum", **options).double().eval()
    hidden, target = draw(ROWS, head.in_features, dtype=torch.float64), draw_targets(ROWS)
    target[1] = -100
    state = {name: parameter.detach() for name, parameter in head.named_parameters()}

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: Tensor) -> Tensor:
            return self.head(hidden, target).loss + self.head.log_prob(hidden)[:, 3].sin().sum()

    def total(state: dict[str, Tensor], hidden: Tensor) -> Tensor:
        named = {f"head.{name}": x for name, x in state.items()}
        result: Tensor = functional_call(Call(), named, (hidden,))
        return result

    of_parameters, of_hidden = grad(total, (0, 1))(state, hidden)
    learned = dict(head.named_parameters())
    for parameter in learned.values():
        parameter.requires_grad_()
    plain = torch.autograd.grad(
        Call()(hidden.requires_grad_()),
        [hidden, *learned.values()],
        allow_unused=True,
        materialize_grads=True,
    )
    assert_close(of_hidden, plain[0], **close)
    for name, expected in zip(learned, plain[1:], strict=True):
        assert_close(of_parameters[name], expected.to_dense(), **close)
    assert of_hidden.any()


@every_head
def test_gradients(kind: str) -> None:
    check_gradients(kind)


@pytest.mark.parametrize("kind", ["softmax", "mos", "mixtape", "trees, subset"])
def test_gradients_of_other_losses(kind: str) -> None:
    check_gradients(kind, label_smoothing=0.1, class_weight=torch.rand(37) + 0.5)
