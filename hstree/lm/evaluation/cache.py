"""The neural cache: words that recently followed similar hidden vectors become more likely."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hstree._checks import check_bool, check_up_to
from hstree._numerics import sum_dtype

LARGEST_THETA = 1e6
"""Long before, only the most similar step counts; far beyond, the scores overflow."""


class NeuralCache:
    """The last hidden vectors of a stream and the words that followed them.

        p_cache(y | h_t) = sum over i with y_i = y of softmax_i(theta h_t . h_i)
        P(y | h_t) = (1 - weight) p_model(y | h_t) + weight p_cache(y | h_t)

    where i runs over t - window <= i < t.

    At the first step of a stream the cache is empty and P = p_model. Before ``window`` steps have
    been read, the cache holds all of them, or with ``wait`` P = p_model.

    Args:
        window: number of steps to remember.
        weight: weight of the cache in the mixture, lambda.
        theta: inverse temperature of the softmax over the remembered steps, in [0, 1e6].
        wait: whether the cache waits until its window is full. AWD-LSTM's code does so, and leaves
            it out for one more step in each block of text that it reads at once.

    Raises:
        ValueError: a window below 1, a weight outside [0, 1), a theta outside [0, 1e6], or a
            ``wait`` that is not True or False.

    Source: Grave, Joulin and Usunier, *Improving Neural Language Models with a Continuous Cache*
    (2017). The defaults are those of AWD-LSTM on Penn Treebank.

    Example::

        loss = evaluate_stream(model, tokens, NeuralCache(window=2000))
    """

    def __init__(
        self, window: int = 500, weight: float = 0.1, theta: float = 1.0, *, wait: bool = False
    ) -> None:
        if window < 1:
            raise ValueError(f"window: expected at least 1, got {window}")
        if not 0.0 <= weight < 1.0:
            raise ValueError(f"weight: expected a number in [0, 1), got {weight}")
        theta = check_up_to("theta", theta, LARGEST_THETA, "1e6")
        self.window = window
        self.weight = weight
        self.theta = theta
        self.wait = check_bool("wait", wait)
        self._hidden: Tensor | None = None
        self._words: Tensor | None = None

    def clear(self) -> None:
        """Forget everything, as at the start of a stream."""
        self._hidden = self._words = None

    @torch.no_grad()
    def mix(self, hidden: Tensor, target: Tensor, log_prob: Tensor) -> Tensor:
        """log P of the next steps of a stream, which are then added to the cache.

        Args:
            hidden: hidden vectors of T steps, h, floating point [T, D].
            target: the word after each step, int64 [T].
            log_prob: log p_model of these words, [T], in nats.

        Returns:
            log P of these words, [T], in nats. Work and memory O(T (window + T)).

        Raises:
            ValueError: inconsistent shapes, or another D than before.
        """
        if hidden.ndim != 2 or not target.shape == log_prob.shape == hidden.shape[:1]:
            raise ValueError(
                "hidden, target, log_prob: expected shapes [T, D], [T], [T], got "
                f"{tuple(hidden.shape)}, {tuple(target.shape)}, {tuple(log_prob.shape)}"
            )
        hidden = hidden.to(sum_dtype(hidden.dtype))
        keys, words = hidden, target
        if self._hidden is not None and self._words is not None:
            if self._hidden.shape[1] != hidden.shape[1]:
                raise ValueError(
                    f"hidden: expected {self._hidden.shape[1]} features as before, "
                    f"got {hidden.shape[1]}"
                )
            keys, words = torch.cat([self._hidden, hidden]), torch.cat([self._words, target])
        remembered = len(words) - len(target)
        now = torch.arange(remembered, len(words), device=hidden.device)[:, None]
        then = torch.arange(len(words), device=hidden.device)
        visible = (then < now) & (then >= now - self.window)
        scores = (self.theta * hidden @ keys.t()).masked_fill(~visible, -torch.inf)
        followed = scores.masked_fill(words != target[:, None], -torch.inf)
        log_cache = followed.logsumexp(1) - scores.logsumexp(1)
        self._hidden, self._words = keys[-self.window :], words[-self.window :]
        if self.weight == 0.0:
            return log_prob
        mixture = torch.logaddexp(
            log_prob + math.log1p(-self.weight), log_cache + math.log(self.weight)
        )
        mixed = visible.sum(1) >= (self.window if self.wait else 1)
        return torch.where(mixed, mixture, log_prob)
