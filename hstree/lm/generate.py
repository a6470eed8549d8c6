"""Text generation, word by word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hstree._checks import check_generator, check_int, check_temperature
from hstree._memory import available_memory, gibibytes
from hstree._numerics import draw_columns
from hstree._progress import track
from hstree.lm.model import LanguageModel, State

__all__ = [
    "generate",
    "sample_log_prob",
]


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

    By default the head's own sampler draws the words; that of trees draws a path from the root
    down. With ``temperature``, ``top_k`` or ``top_p`` the words are drawn from the
    log-probabilities of all classes, or of the ``top_k`` best, which trees find by best-first
    search. All options work for every head.

    Args:
        model: language model, set to evaluation mode.
        prompt: classes of the prompt, at least one.
        n_words: number of words to draw for each sample.
        n_samples: number of independent continuations.
        seed: seed of the draws; the same seed gives the same words on the same device.
        avoid: class that is never drawn; words are drawn from the distribution conditioned on the
            other classes.
        temperature: divisor of the log-probabilities: below 1 sharper, above 1 flatter.
        top_k: draw only from the k most probable classes.
        top_p: draw only from the most probable classes that together reach this probability.

    Returns:
        ``n_samples`` lists of ``n_words`` classes.

    Raises:
        ValueError: for an empty prompt, a class out of range, a ``temperature``, ``top_k`` or
            ``top_p`` out of range, or samples that do not fit into memory.

    Example:
        >>> import hstree
        >>> from hstree.lm.model import AWDLSTM, LanguageModel
        >>> from hstree.lm.generate import generate
        >>> head = hstree.TreeEnsemble.from_counts(16, range(2000, 0, -1))
        >>> model = LanguageModel(AWDLSTM(2000, 8, 16), head)
        >>> samples = generate(model, prompt=[3, 14], n_words=5, n_samples=2, top_k=10)
        >>> [len(sample) for sample in samples]
        [5, 5]
    """
    head = model.head
    if not prompt or min(prompt) < 0 or max(prompt) >= head.n_classes:
        raise ValueError(
            f"prompt: expected class ids in [0, {head.n_classes}), got {list(prompt)[:10]}"
        )
    check_int("seed", seed, -(2**63), 2**64 - 1)
    device = model.backbone.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    exclude = None if avoid is None else torch.tensor([avoid], device=device)
    plain = temperature is None and top_k is None and top_p is None
    temperature = 1.0 if temperature is None else temperature
    _check_options(temperature, top_k, top_p, head.n_classes)
    _check_memory(model, len(prompt), n_words, n_samples, 0 if plain or top_k else head.n_classes)

    def draw(hidden: Tensor) -> Tensor:
        if plain:
            return head.sample(hidden, generator=generator, exclude=exclude)
        if top_k is None:
            log_prob = head.log_prob(hidden, exclude=exclude)
            return sample_log_prob(log_prob, generator, temperature=temperature, top_p=top_p)
        most = min(head.n_classes - (avoid is not None), top_k)
        log_prob, classes = head.topk(hidden, most, exclude=exclude)
        place = sample_log_prob(log_prob, generator, temperature=temperature, top_p=top_p)
        return classes.gather(1, place[:, None]).squeeze(1)

    tokens = torch.tensor(prompt, device=device)[:, None].repeat(1, n_samples)
    drawn = torch.empty(n_samples, n_words, dtype=torch.int64, device=device)
    state: State | None = None
    model.eval()
    for position in track(range(n_words), "drawing words", n_words):
        hidden, state = model.hidden(tokens, state)
        tokens = draw(hidden[-1])[None]
        drawn[:, position] = tokens[0]
    samples: list[list[int]] = drawn.tolist()
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

    Three steps, each followed by normalization: take p^(1 / temperature); keep the ``top_k`` most
    probable classes; keep the shortest run of the most probable classes whose sum is at least
    ``top_p``. Of classes with the same probability the first counts as more probable.

    Args:
        log_prob: log-probabilities, [N, V], in nats, not necessarily normalized; -inf for classes
            that are never drawn.
        generator: random generator on the device of ``log_prob``; None: the default generator.
        temperature: divisor of the log-probabilities, in [1e-6, 1e6].
        top_k: number of classes to keep, in [1, V]; None: all.
        top_p: probability to keep, in (0, 1]; None: 1.

    Returns:
        The classes, int64 [N].

    Raises:
        TypeError: if ``generator`` is not a generator.
        ValueError: for an option out of range, or a generator of another device.

    Example:
        >>> import torch
        >>> from hstree.lm.generate import sample_log_prob
        >>> log_prob = torch.tensor([[0.1, 0.6, 0.3]]).log()
        >>> sample_log_prob(log_prob, top_p=0.5)  # class 1 alone reaches 0.5
        tensor([1])
    """
    _check_options(temperature, top_k, top_p, log_prob.shape[1])
    check_generator(generator, log_prob.device, "log_prob")
    if not len(log_prob):
        return torch.empty(0, dtype=torch.int64, device=log_prob.device)
    values, classes = log_prob.sort(dim=1, descending=True, stable=True)
    values = ((values - values[:, :1]) / temperature)[:, :top_k]
    prob = values.softmax(1, dtype=torch.float64)
    if top_p is not None and top_p < 1.0:
        reached = prob.cumsum(1)[:, :-1] >= top_p
        prob[:, 1:] = prob[:, 1:].masked_fill(reached, 0.0)
    return classes.gather(1, draw_columns(prob, 1, generator)).squeeze(1)


def _check_memory(
    model: LanguageModel, n_read: int, n_words: int, n_samples: int, more: int
) -> None:
    """Raises ValueError if samples do not fit into memory. Each has words of 8 bytes, of which
    ``n_read`` are read at once, a state, hidden vectors, and ``more`` numbers of 4 bytes."""
    backbone = model.backbone
    available = available_memory(backbone.embedding.weight.device)
    numbers = 2 * sum(backbone.layer_sizes[1:]) + n_read * backbone.out_features + more
    size = n_samples * (4 * numbers + 8 * (n_read + n_words))
    if available is not None and size > available:
        raise ValueError(
            f"n_samples: expected samples that fit into memory, got {n_samples:,} of {n_words:,} "
            f"words, which take at least {gibibytes(size)}, where {gibibytes(available)} are "
            "available"
        )


def _check_options(
    temperature: float, top_k: int | None, top_p: float | None, n_classes: int
) -> None:
    check_temperature(temperature)
    if top_k is not None:
        check_int("top_k", top_k, 1, n_classes)
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected a number in (0, 1], got {top_p}")
