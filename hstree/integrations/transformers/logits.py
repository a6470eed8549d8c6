"""What a model gives to its ``lm_head``, and what it does to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

PROBES = (1e-5, 1e6, 0.0, 1.0, -3.0, 10.0, -30.0, 100.0)
SMALL, LARGE = PROBES[:2]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, for a while."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:  # not train(), which would change what is frozen in it
            module.training = True


def scale_and_cap(
    model: transformers.PreTrainedModel, linear: nn.Linear
) -> tuple[float, float | None]:
    """Scale s and soft cap c of a model whose logits are s l, or c tanh(s l / c), for the output l
    of its ``lm_head``; c is None without a cap.

    Models keep these numbers under several names, and multiply or divide by them. So the model is
    run on one token, with known numbers in the place of l.

    Raises:
        ValueError: for a model that does something else to them.
    """
    size = len(linear.weight)
    given = torch.tensor(PROBES, device=linear.weight.device)
    given = given.repeat(-(-size // len(given)))[:size]

    def replace(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return given.expand(output.shape)

    hook = linear.register_forward_hook(replace)
    try:
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with evaluating(model):
            found: Tensor = model(token).logits.flatten().float()
    finally:
        hook.remove()
    given = given.to(found.device)
    if found.shape == given.shape:
        scale = (found[given == SMALL] / SMALL).mean().item()
        largest = found.abs().max().item()
        cap = largest if largest < 0.999 * scale * LARGE else None
        expected = scale * given if cap is None else cap * (scale * given / cap).tanh()
        if scale > 0 and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return scale, cap
    raise ValueError(
        "model: expected logits that are those of its lm_head, scaled or softly capped, got "
        f"{type(model).__name__}, which does something else to them; pass a head"
    )


def hidden_states(
    model: transformers.PreTrainedModel, lm_head: nn.Module, tokens: Tensor
) -> Tensor:
    """What the ``lm_head`` reads for texts: tokens int64 [n, time], result [n, time, D]."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found.append(inputs[0])
        return (inputs[0][:, :1],)  # the logits of one token alone

    hook = lm_head.register_forward_pre_hook(keep)
    try:
        with evaluating(model):
            for row in tokens.to(model.device):
                model(row[None], use_cache=False)
    finally:
        hook.remove()
    return torch.cat(found)
