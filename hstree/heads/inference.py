"""What a head answers about its distribution, besides the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, overload

import torch
from torch import Tensor, nn

from hstree._autocast import autocasts
from hstree._checks import (
    check_classes,
    check_generator,
    check_int,
    check_temperature,
    check_tensor,
)
from hstree.heads.buffers import Tables
from hstree.heads.losses import in_row_chunks, split_rows
from hstree.heads.sharding import is_distributed_hook
from hstree.ops import mark_targets

QUERIES = ("log_prob", "entropy", "topk", "predict", "sample", "candidate_log_prob")
"""Methods that take ``hidden`` [..., D]."""


class Inference(nn.Module, ABC):
    """Methods of :class:`hstree.heads.Head`, from the log-probabilities of all classes unless a
    head overrides the methods of rows."""

    in_features: int
    n_classes: int
    ignore_index: int

    def encode(self, hidden: Tensor) -> Tensor:
        """Input [..., F] of :meth:`target_loss` and the other row methods, computed from hidden
        [..., D]. By default ``hidden`` itself."""
        return hidden

    @abstractmethod
    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, F], from :meth:`encode`."""

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [..., V] of all classes, in nats: hidden [..., D]. Differentiable."""
        return self.class_log_prob(self._queried(hidden)).view(*hidden.shape[:-1], self.n_classes)

    def entropy(self, hidden: Tensor) -> Tensor:
        """Entropy [...] of each row's distribution, in nats: hidden [..., D]. Differentiable.

        Exact: computed from the log-probabilities of all classes, in chunks of rows.

        Example:
            >>> import torch, hstree
            >>> head = hstree.Softmax(8, 4, bias=False)
            >>> head.entropy(torch.zeros(2, 8))
            tensor([1.3863, 1.3863], grad_fn=<ViewBackward0>)
        """
        return in_row_chunks(self._row_entropy, self.n_classes, self._queried(hidden)).view(
            hidden.shape[:-1]
        )

    def _row_entropy(self, hidden: Tensor) -> Tensor:
        log_prob = self.class_log_prob(hidden)
        finite = log_prob.clamp(min=-1e30)  # 0 log 0 = 0, also times the gradient
        return -(log_prob.exp() * finite).sum(1)

    def predict(self, hidden: Tensor) -> Tensor:
        """Most probable class [...] of each row, int64: hidden [..., D]."""
        with torch.no_grad():
            return self.topk(hidden, 1)[1].squeeze(-1)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row, most probable first.

        Returns:
            Log-probabilities [..., k], in nats and differentiable, and classes [..., k].

        Raises:
            ValueError: unless k is a whole number in [1, V].
        """
        k = check_int("k", k, 1, self.n_classes)
        values, classes = self.topk_rows(self._queried(hidden), k)
        shape = (*hidden.shape[:-1], k)
        return values.view(shape), classes.view(shape)

    def topk_rows(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Both results of :meth:`topk`, [N, k] each: hidden [N, F], from :meth:`encode`. Computed
        in chunks of rows."""
        chunks = split_rows(self.n_classes, hidden)
        parts = [self.class_log_prob(rows).topk(k, dim=-1) for (rows,) in chunks]
        values, classes = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(classes)

    @overload
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Classes drawn from each row's distribution, independently: hidden [..., D].

        Args:
            hidden: context vectors, [..., D].
            n: number of draws for each row; None: one, without a dimension of its own.
            temperature: at most 1e6 and at least 1e-6; below 1 sharper, above 1 flatter. Draws from
                p^(1 / temperature), normalized. Trees divide the scores of every node instead, and
                keep the gate: another distribution, whose draws score as few nodes. For
                p^(1 / temperature) of trees, or its k most probable classes, see
                :func:`hstree.lm.models.sample_log_prob`.
            generator: random generator on the device of ``hidden``; None: the default one.
            return_log_prob: whether to return the log-probabilities of the classes as well, under
                the distribution that they are drawn from: exact, for trees under the whole mixture.

        Returns:
            Classes [...], or [..., n] with ``n``, int64. With ``return_log_prob`` also their
            log-probabilities, of the same shape, in nats, without gradient; see
            :meth:`candidate_log_prob`.

        Raises:
            TypeError: if ``generator`` is not a generator.
            ValueError: for ``n`` or ``temperature`` out of range, or a generator of another device.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(8, range(2000, 0, -1))
            >>> classes, log_prob = head.sample(torch.randn(5, 8), 3, return_log_prob=True)
            >>> classes.shape, log_prob.shape
            (torch.Size([5, 3]), torch.Size([5, 3]))
        """
        draws = 1 if n is None else check_int("n", n)
        temperature = check_temperature(temperature)
        check_tensor("hidden", hidden)
        check_generator(generator, hidden.device)
        rows = self._queried(hidden)
        classes, log_prob = self.sample_rows(rows, draws, temperature, generator)
        shape = hidden.shape[:-1] if n is None else (*hidden.shape[:-1], draws)
        if not return_log_prob:
            return classes.view(shape)
        if log_prob is None:
            log_prob = self.candidate_rows(rows, classes, temperature)
        return classes.view(shape), log_prob.view(shape)

    def sample_rows(
        self, hidden: Tensor, n: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Classes [N, n] and their log-probabilities [N, n], or None if those are
        :meth:`candidate_rows`: hidden [N, F], from :meth:`encode`."""
        if not len(hidden):
            shape = (0, n)
            return hidden.new_empty(shape, dtype=torch.int64), hidden.new_empty(shape)
        log_prob = tempered(self.class_log_prob(hidden), temperature)
        classes = torch.multinomial(log_prob.exp(), n, replacement=True, generator=generator)
        return classes, log_prob.gather(1, classes)

    def candidate_log_prob(
        self,
        hidden: Tensor,
        candidates: Tensor,
        *,
        temperature: float = 1.0,
        ignore_index: int | None = None,
    ) -> Tensor:
        """Log-probabilities of K classes of each row. Differentiable.

        For distillation from the top k of a teacher, losses over several labels, scoring of
        candidates and verification of drafts. Trees score the root once for each row. Without
        gradients on the CPU they look up candidates that share paths, so that every node is scored
        once; otherwise they score the groups of all candidates together, or all classes where that
        is less work. Other heads compute all classes, in chunks of rows.

        Args:
            hidden: context vectors, [..., D].
            candidates: classes, int64 or uint8 [..., K], in [0, V) or ``ignore_index``, which has
                log-probability 0 and no gradient. Other values as in :meth:`forward`.
            temperature: of the distribution that :meth:`sample` draws from.
            ignore_index: candidate to ignore; None: the ``ignore_index`` of the head. With -1 every
                class has its log-probability, also where the head ignores a class.

        Returns:
            Log-probabilities, [..., K], in nats.

        Raises:
            ValueError: for a wrong shape or dtype, ``temperature`` out of range, and on the CPU for
                a candidate out of range.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(8, range(2000, 0, -1))
            >>> head.candidate_log_prob(torch.randn(5, 8), torch.randint(2000, (5, 64))).shape
            torch.Size([5, 64])
        """
        check_tensor("hidden", hidden)
        candidates = check_classes("candidates", candidates)
        if candidates.shape[:-1] != hidden.shape[:-1] or not candidates.ndim:
            raise ValueError(
                f"candidates: expected shape {[*hidden.shape[:-1], 'K']} for hidden of shape "
                f"{list(hidden.shape)}, got {list(candidates.shape)}"
            )
        ignored = self.ignore_index if ignore_index is None else ignore_index
        marked = mark_targets(candidates, self.n_classes, ignored, name="candidates").reshape(
            hidden.shape[:-1].numel(), candidates.shape[-1]
        )
        temperature = check_temperature(temperature)
        log_prob = self.candidate_rows(self._queried(hidden), marked, temperature)
        return log_prob.view(candidates.shape)

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """Log-probabilities [N, K]: hidden [N, F], from :meth:`encode`, and candidates [N, K] from
        :func:`hstree.ops.mark_targets`."""

        def chosen(hidden: Tensor, candidates: Tensor) -> Tensor:
            log_prob = tempered(self.class_log_prob(hidden), temperature)
            return log_prob.gather(1, candidates.clamp(0, self.n_classes - 1))

        log_prob = in_row_chunks(chosen, self.n_classes, hidden, candidates)
        return mask_candidates(log_prob, candidates, self.n_classes)

    def _queried(self, hidden: Tensor) -> Tensor:
        """:meth:`_encoded` of what the forward pre-hooks make of ``hidden``. They run in every
        query as in a call of the head: pruning and weight norm compute the weights in them."""
        if self._forward_pre_hooks:
            # With a graph: a loss whose backward pass computes again reads these weights.
            with torch.inference_mode(False), torch.enable_grad():
                hidden = self._hooked(hidden)
        return self._encoded(hidden)

    def _hooked(self, hidden: Tensor) -> Tensor:
        for key, hook in self._forward_pre_hooks.items():
            if is_distributed_hook(hook):
                continue
            if key in self._forward_pre_hooks_with_kwargs:
                result = hook(self, (hidden,), {})
                result = result if result is None else result[0]
            else:
                result = hook(self, (hidden,))
            if result is not None:
                hidden = result[0] if isinstance(result, tuple) else result
        return hidden

    def _encoded(self, hidden: Tensor) -> Tensor:
        check_tensor("hidden", hidden)
        if hidden.ndim < 1 or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape [..., {self.in_features}], got {tuple(hidden.shape)}"
            )
        if not hidden.is_floating_point():
            raise ValueError(f"hidden: expected a floating-point dtype, got {hidden.dtype}")
        if isinstance(self, Tables):
            self.place_tables(hidden.device)
        if not autocasts(hidden.device):
            parameter = next(self.parameters(), None)  # none: trees over a single class
            hidden = hidden if parameter is None else hidden.to(parameter.dtype)
        hidden = self.encode(hidden)
        return hidden.reshape(-1, hidden.shape[-1])


def mask_candidates(log_prob: Tensor, candidates: Tensor, n_classes: int) -> Tensor:
    """The log-probabilities with 0 for candidates -1 and NaN for V."""
    log_prob = log_prob.masked_fill(candidates == -1, 0.0)
    return log_prob.masked_fill(candidates == n_classes, torch.nan)


def tempered(log_prob: Tensor, temperature: float) -> Tensor:
    """Logarithms [..., V] of p^(1 / temperature), normalized."""
    if temperature == 1.0:
        return log_prob
    most = log_prob.amax(-1, keepdim=True)
    return ((log_prob - most) / temperature).log_softmax(-1)
