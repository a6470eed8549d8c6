"""Text word by word: each is drawn given all words before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree._progress import track

from .awd_lstm import State
from .language_model import LanguageModel

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
    top_k: int | None = None,
    top_p: float | None = None,
) -> list[list[int]]:
    """Continue a prompt.

    Words are drawn by the head's own sampler (of trees: a path from the root down), unless
    ``temperature``, ``top_k`` or ``top_p`` is given: then from the log-probabilities of all
    classes, or of the ``top_k`` best (of trees: by best-first search), as :func:`sample_log_prob`
    says. All work for every head.

    Args:
        model: put in evaluation mode.
        prompt: class ids, at least one.
        n_words: words to draw for each sample.
        n_samples: independent continuations.
        seed: of the draws; the same seed gives the same words on the same device.
        avoid: a class that is never drawn; words come from the distribution given that they are
            not this one.
        temperature: divides log-probabilities: below 1 sharper, above 1 flatter.
        top_k: draw from the k most probable classes only.
        top_p: draw from the most probable classes that together reach this probability only.

    Returns:
        ``n_samples`` lists of ``n_words`` class ids.

    Raises:
        ValueError: an empty prompt, a prompt out of range, or a temperature, ``top_k`` or ``top_p``
            out of range.
    """
    n_classes = model.head.n_classes
    if not prompt or min(prompt) < 0 or max(prompt) >= n_classes:
        raise ValueError(f"prompt: expected class ids in [0, {n_classes}), got {list(prompt)[:10]}")
    device = model.backbone.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)

    def from_log_prob(hidden: Tensor) -> Tensor:
        if top_k is None:
            log_prob = model.head.log_prob(hidden)
            classes = torch.arange(n_classes, device=device).expand_as(log_prob)
        else:  # one more, as the avoided one may be among them
            most = min(n_classes, top_k + (avoid is not None))
            log_prob, classes = model.head.topk(hidden, most)
        if avoid is not None:
            log_prob = log_prob.masked_fill(classes == avoid, -torch.inf)
        place = sample_log_prob(
            log_prob,
            generator,
            temperature=1.0 if temperature is None else temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return classes.gather(1, place[:, None]).squeeze(1)

    def from_sampler(hidden: Tensor) -> Tensor:
        return _sample_but(hidden, avoid, lambda h: model.head.sample(h, generator), from_log_prob)

    plain = temperature is None and top_k is None and top_p is None
    draw = from_sampler if plain else from_log_prob
    _check_options(1.0 if temperature is None else temperature, top_k, top_p, n_classes)
    tokens = torch.tensor(prompt, device=device)[:, None].repeat(1, n_samples)
    drawn: list[Tensor] = []
    state: State | None = None
    model.eval()
    for _ in track(range(n_words), "drawing words", n_words):
        hidden, state = model.hidden(tokens, state)
        drawn.append(draw(hidden[-1]))
        tokens = drawn[-1][None]
    samples: list[list[int]] = (
        torch.stack(drawn, dim=1).tolist() if drawn else [[] for _ in range(n_samples)]
    )
    return samples


@torch.no_grad()
def sample_log_prob(
    log_prob: Tensor,
    generator: torch.Generator | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """One class of each row, drawn from a sharpened or truncated distribution.

    In this order: p^(1 / temperature), normalised; of that only the ``top_k`` most probable
    classes, normalised; of those only the shortest run of the most probable classes whose sum is
    at least ``top_p``, normalised. Of classes with the same probability the first counts as the
    more probable.

    Args:
        log_prob: [N, V], in nats; need not be normalised; -inf for classes that are not drawn.
        generator: on the device of ``log_prob``.
        temperature: positive.
        top_k: in [1, V].
        top_p: in (0, 1].

    Returns:
        int64 [N].

    Raises:
        ValueError: an option out of range.
    """
    _check_options(temperature, top_k, top_p, log_prob.shape[1])
    if not len(log_prob):
        return torch.empty(0, dtype=torch.int64, device=log_prob.device)
    values, classes = log_prob.sort(dim=1, descending=True, stable=True)
    values = ((values - values[:, :1]) / temperature)[:, :top_k]
    prob = values.softmax(1, dtype=sum_dtype(values.dtype))
    if top_p is not None and top_p < 1.0:
        reached = prob.cumsum(1)[:, :-1] >= top_p
        prob[:, 1:] = prob[:, 1:].masked_fill(reached, 0.0)
    return classes.gather(1, torch.multinomial(prob, 1, generator=generator)).squeeze(1)


def _sample_but(
    hidden: Tensor,
    avoid: int | None,
    sample: Callable[[Tensor], Tensor],
    otherwise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Draws by ``sample``; where it is ``avoid`` again and again, by ``otherwise``."""
    word = sample(hidden)
    if avoid is None:
        return word
    for _ in range(_REDRAWS):
        again = word.eq(avoid).nonzero().squeeze(1)
        if not len(again):
            return word
        word[again] = sample(hidden[again])
    again = word.eq(avoid).nonzero().squeeze(1)
    word[again] = otherwise(hidden[again])
    return word


def _check_options(
    temperature: float, top_k: int | None, top_p: float | None, n_classes: int
) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature: expected a positive number, got {temperature}")
    if top_k is not None and not 1 <= top_k <= n_classes:
        raise ValueError(f"top_k: expected 1 to {n_classes} (the number of classes), got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p}")
