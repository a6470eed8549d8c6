"""Text by ancestral sampling: each word is drawn given all words before it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .language_model import LanguageModel, State

_REDRAWS = 100


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    n_words: int,
    n_samples: int = 1,
    *,
    seed: int = 0,
    avoid: int | None = None,
    temperature: float | None = None,
) -> list[list[int]]:
    """Continue a prompt by the head's own sampler.

    Args:
        model: put in evaluation mode.
        prompt: class ids, at least one.
        n_words: words to draw for each sample.
        n_samples: independent continuations.
        seed: of the draws; the same seed gives the same words on the same device.
        avoid: a class that is drawn again, up to 100 times, so that words come from the
            distribution given that they are not this one.
        temperature: passed to the head's sampler.

    Returns:
        ``n_samples`` lists of ``n_words`` class ids.

    Raises:
        ValueError: an empty prompt, a prompt out of range, a temperature that is not positive or
            that the head's sampler does not know.
    """
    if not prompt or min(prompt) < 0 or max(prompt) >= model.backbone.n_classes:
        raise ValueError(
            f"prompt: expected class ids in [0, {model.backbone.n_classes}), "
            f"got {list(prompt)[:10]}"
        )
    head = model.head
    options: dict[str, Any] = {}
    if temperature is not None:
        if not temperature > 0:
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        if "temperature" not in inspect.signature(head.sample).parameters:
            raise ValueError(
                f"temperature: the sampler of the head {head.name!r} has none; leave it out"
            )
        options["temperature"] = temperature
    device = model.backbone.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor(prompt, device=device)[:, None].repeat(1, n_samples)
    drawn: list[Tensor] = []
    state: State | None = None
    model.eval()
    for _ in range(n_words):
        hidden, state = model.hidden(tokens, state)
        word = head.sample(hidden[-1], generator, **options)
        for _ in range(_REDRAWS):
            again = torch.nonzero(word.eq(-1 if avoid is None else avoid)).squeeze(1)
            if not len(again):
                break
            word[again] = head.sample(hidden[-1][again], generator, **options)
        drawn.append(word)
        tokens = word[None]
    samples: list[list[int]] = (
        torch.stack(drawn, dim=1).tolist() if drawn else [[] for _ in range(n_samples)]
    )
    return samples
