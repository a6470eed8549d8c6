"""One step of speculative sampling: which drafted words are accepted, and the word after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hstree._checks import check_generator
from hstree._numerics import draw_columns

CANDIDATES = 64
"""Draws from p that a rejected word is replaced from, before all classes are computed."""


def verify(
    log_p: Tensor,
    drafted: Tensor,
    drafted_log_q: Tensor,
    log_q: Callable[[Tensor, Tensor, Tensor], Tensor],
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept the first of the drafted words, and draw the word after them.

    Args:
        log_p: the model's log-probabilities before each of the n drafted words and after the last,
            [n + 1, B, V].
        drafted: drafted words, int64 [n, B].
        drafted_log_q: log-probabilities of the drafted words in the distributions that they were
            drawn from, [n, B].
        log_q: log-probabilities [R, K] in these distributions, for R places (step [R], row [R]) of
            the classes [R, K]; asked only where a word is rejected.
        generator: random generator on the device; None: the default generator.

    Returns:
        Number of accepted words [B], and the word after them [B]: a draw from max(p - q, 0) where
        a word was rejected, else from p.

    Raises:
        TypeError: if ``generator`` is not a :class:`torch.Generator`.
        ValueError: if it is on another device.

    Example:
        >>> import torch
        >>> from hstree.decoding import verify
        >>> p = torch.tensor([0.2, 0.8]).log().expand(2, 1, 2)  # before and after one drafted word
        >>> drafted, log_q = torch.tensor([[0]]), torch.tensor([[0.1]]).log()
        >>> count, word = verify(p, drafted, log_q, lambda step, row, classes: classes.log())
        >>> count  # accepted: q drafts it more rarely than p
        tensor([1])

    Source: Leviathan, Kalman and Matias, Fast inference from transformers via speculative decoding,
    ICML 2023; Chen et al., Accelerating large language model decoding with speculative sampling,
    2023.
    """
    n, batch = drafted.shape
    check_generator(generator, log_p.device, "log_p")
    drafted_log_p = log_p[:-1].gather(2, drafted[:, :, None]).squeeze(2)
    ratio = (drafted_log_p.double() - drafted_log_q).exp()
    uniform = torch.rand(n, batch, dtype=ratio.dtype, device=ratio.device, generator=generator)
    count = (uniform < ratio).long().cumprod(0).sum(0)
    row = torch.arange(batch, device=count.device)
    of_row = log_p[count, row]
    words = draw_columns(of_row.exp(), CANDIDATES, generator)
    last = words[:, 0].clone()
    (rejected,) = (count < n).nonzero(as_tuple=True)
    if len(rejected):
        last[rejected] = _replacement(
            of_row[rejected], words[rejected], partial(log_q, count[rejected], rejected), generator
        )
    return count, last


def _replacement(
    log_p: Tensor,
    words: Tensor,
    log_q: Callable[[Tensor], Tensor],
    generator: torch.Generator | None,
) -> Tensor:
    """Draws [R] from the normalized max(p - q, 0): log_p [R, V], words [R, K] drawn from p.

    The first of the words that is kept with probability max(1 - q / p, 0) is such a draw, and only
    these words need their q. Where none is kept, the q of all classes.
    """
    share = (log_q(words).double() - log_p.gather(1, words)).exp()
    uniform = torch.rand(share.shape, dtype=share.dtype, device=share.device, generator=generator)
    kept = uniform >= share
    drawn = words.gather(1, kept.int().argmax(1, keepdim=True)).squeeze(1)
    (left,) = (~kept.any(1)).nonzero(as_tuple=True)
    if len(left):
        prob = log_p.exp()
        everything = torch.arange(log_p.shape[1], device=log_p.device).expand(log_p.shape)
        rest = (prob - log_q(everything).exp().to(prob.dtype)).clamp(min=0.0)[left]
        some = rest.sum(1, keepdim=True) > 0  # p = q up to rounding leaves nothing
        rest = torch.where(some, rest, prob[left])
        drawn[left] = draw_columns(rest, 1, generator).squeeze(1)
    return drawn
