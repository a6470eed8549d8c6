"""What a head answers about its distribution, besides the loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, overload

import torch
from torch import Tensor, nn

from hstree._checks import (
    check_classes,
    check_generator,
    check_int,
    check_temperature,
    check_tensor,
    mark_targets,
)
from hstree._numerics import draw_columns, is_transformed, log_sum_exp, without_ignored
from hstree.heads.rows import (
    check_exclude,
    in_row_chunks,
    is_excluded,
    mask_candidates,
    mask_excluded,
    split_rows,
    tempered,
    topk_without,
    without,
)

ROUNDS = 8
"""So many times draws that are excluded are drawn again before all classes are scored."""


class Queries(nn.Module, ABC):
    """The queries of :class:`hstree.heads.Head`: arguments are checked, and rows [N, F] computed
    from hidden [..., D], which the methods of rows then read. Those compute all classes, unless a
    head overrides them."""

    n_classes: int
    ignore_index: int

    @abstractmethod
    def check_hidden(self, hidden: Tensor) -> None:
        """Raises TypeError or ValueError unless these are hidden vectors [..., D]."""

    @abstractmethod
    def encoded_rows(self, hidden: Tensor) -> Tensor:
        """Rows [N, F], encoded, of hidden [..., D]."""

    def _query_rows(self, hidden: Tensor) -> Tensor:
        """:meth:`encoded_rows` of what the forward pre-hooks make of ``hidden``. They run in every
        query as in a call of the head: pruning and weight norm compute the weights in them."""
        if self._forward_pre_hooks:
            # With a graph: a loss whose backward pass computes again reads these weights.
            with torch.inference_mode(False), torch.enable_grad():
                hidden = run_pre_hooks(self, hidden)
        self.check_hidden(hidden)
        return self.encoded_rows(hidden)

    @abstractmethod
    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, F], from :meth:`encode`."""

    def numbers_of_a_row(self, device: torch.device) -> int:
        """Numbers that :meth:`class_log_prob` holds for a row."""
        return self.n_classes

    def tempered_log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """:meth:`class_log_prob` of the distribution that :meth:`sample` draws from."""
        return tempered(self.class_log_prob(hidden), temperature)

    def class_scores(self, hidden: Tensor) -> Tensor:
        """Scores [N, V], float32 or float64: hidden [N, F], from :meth:`encode`."""
        raise NotImplementedError(
            f"scores: {type(self).__name__} has no scores of all classes whose softmax is its "
            "distribution; log_prob gives log-probabilities, whose softmax it is, too"
        )

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits [..., V]: scores of all classes whose softmax is the distribution, such as W h + b
        of :class:`Softmax`, scaled and capped. Float32, or float64 for weights in float64;
        differentiable. Hidden [..., D].

        Raises:
            NotImplementedError: for heads with more than one softmax: mixtures of softmaxes,
                forests, trees and the adaptive softmax.

        Example:
            >>> import torch, hstree
            >>> head, hidden = hstree.GSS(8, 5), torch.randn(2, 8)
            >>> scores = head.scores(hidden)
            >>> torch.allclose(scores.log_softmax(-1), head.log_prob(hidden), atol=1e-5)
            True
        """
        scores = self.class_scores(self._query_rows(hidden))
        return scores.view(*hidden.shape[:-1], self.n_classes)

    def log_prob(self, hidden: Tensor, *, exclude: Tensor | None = None) -> Tensor:
        """Log-probabilities [..., V] of all classes, in nats: hidden [..., D]. Differentiable.

        Args:
            hidden: context vectors, [..., D].
            exclude: classes to leave out, int64 or uint8: [K] for all rows, or [..., K] padded
                with -1. They have -inf, and the probabilities of the others sum to 1.

        Raises:
            ValueError: for a wrong shape or dtype of ``exclude``; on a CPU, where its values are
                read, for other values, or if no class is left.

        Example:
            >>> import torch, hstree
            >>> head, hidden = hstree.Softmax(8, 5), torch.randn(2, 8)
            >>> log_prob = head.log_prob(hidden, exclude=torch.tensor([[0, 3], [4, -1]]))
            >>> log_prob.isneginf().nonzero().tolist()
            [[0, 0], [0, 3], [1, 4]]
            >>> torch.allclose(log_prob.exp().sum(1), torch.ones(2))
            True
        """
        rows = self._query_rows(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, 1)
        log_prob = self.class_log_prob(rows)
        if excluded is not None:
            log_prob = without(log_prob, excluded)
        return log_prob.view(*hidden.shape[:-1], self.n_classes)

    def entropy(self, hidden: Tensor) -> Tensor:
        """Entropy [...] of each row's distribution, in nats: hidden [..., D]. Differentiable.

        Exact: computed from the log-probabilities of all classes, in chunks of rows.

        Example:
            >>> import torch, hstree
            >>> head = hstree.Softmax(8, 4, bias=False)
            >>> head.entropy(torch.zeros(2, 8))
            tensor([1.3863, 1.3863], grad_fn=<ViewBackward0>)
        """
        return in_row_chunks(self._row_entropy, self.n_classes, self._query_rows(hidden)).view(
            hidden.shape[:-1]
        )

    def _row_entropy(self, hidden: Tensor) -> Tensor:
        log_prob = self.class_log_prob(hidden)
        finite = log_prob.clamp(min=-1e30)  # 0 log 0 = 0, also times the gradient
        return -(log_prob.exp() * finite).sum(1)

    def predict(self, hidden: Tensor, *, exclude: Tensor | None = None) -> Tensor:
        """Most probable class [...] of each row, int64: hidden [..., D], ``exclude`` as in
        :meth:`topk`."""
        with torch.no_grad():
            return self.topk(hidden, 1, exclude=exclude)[1].squeeze(-1)

    def topk(
        self, hidden: Tensor, k: int, *, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row, most probable first.

        Args:
            hidden: context vectors, [..., D].
            k: number of classes, at most V, or as many as ``exclude`` leaves.
            exclude: classes to leave out, as in :meth:`log_prob`: padding, or items that were seen.
                The values are those of the distribution over the other classes. Trees search for
                as many classes more, where a search pays.

        Returns:
            Log-probabilities [..., k], in nats and differentiable, and classes [..., k].

        Raises:
            ValueError: unless k is a whole number in [1, V]; for ``exclude`` as in
                :meth:`log_prob`, or if it leaves fewer than k classes. On a GPU, where its values
                are not read, the last classes are then excluded ones, of -inf.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(8, range(2000, 0, -1))
            >>> seen = torch.tensor([[3, 7, 8], [5, -1, -1]])
            >>> values, classes = head.topk(torch.randn(2, 8), 10, exclude=seen)
            >>> bool(torch.isin(seen[0], classes[0]).any())
            False
        """
        k = check_int("k", k, 1, self.n_classes)
        rows = self._query_rows(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, k)
        values, classes = self.topk_rows(rows, k, excluded)
        shape = (*hidden.shape[:-1], k)
        return values.view(shape), classes.view(shape)

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both results of :meth:`topk`, [N, k] each: hidden [N, F], from :meth:`encode`, excluded
        from ``check_exclude``. Computed in chunks of rows."""
        columns = self.numbers_of_a_row(hidden.device)
        parts: list[tuple[Tensor, Tensor]]
        if excluded is None:
            chunks = split_rows(columns, hidden)
            parts = [self.class_log_prob(rows).topk(k, dim=-1) for (rows,) in chunks]
        else:
            chunks = split_rows(columns, hidden, excluded.expand(hidden.shape[0], -1))
            parts = [topk_without(self.class_log_prob(rows), k, some) for rows, some in chunks]
        values, classes = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(classes)

    def log_prob_without(
        self, hidden: Tensor, classes: Tensor, excluded: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities [N, n] of classes [N, n] that are not excluded, normalized over those:
        hidden [N, F], from :meth:`encode`, excluded from ``check_exclude``.

        Scores the classes and those excluded, and all classes of the rows whose excluded ones have
        more than half of the probability: 1 minus that would be rounded. Reads values.
        """
        excluded = excluded.expand(len(hidden), -1)
        some = self.candidate_rows(hidden, torch.cat([classes, excluded], 1), temperature)
        log_prob, of_excluded = some[:, : classes.shape[1]], some[:, classes.shape[1] :]
        log_excluded = log_sum_exp(of_excluded.masked_fill(excluded < 0, -math.inf), 1)
        most = log_excluded > -math.log(2)
        rest = torch.log1p(-log_excluded.masked_fill(most, -math.inf).exp())
        if bool(most.any()):
            every = self.tempered_log_prob(hidden[most], temperature)
            of_others = log_sum_exp(mask_excluded(every, excluded[most]), 1)
            rest = rest.masked_scatter(most, of_others.to(rest.dtype))
        return log_prob - rest[:, None]

    @overload
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: Literal[False] = False,
        exclude: Tensor | None = None,
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
        exclude: Tensor | None = None,
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
        exclude: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Classes drawn from each row's distribution, independently: hidden [..., D].

        Args:
            hidden: context vectors, [..., D].
            n: number of draws for each row; None: one, without a dimension of its own.
            temperature: at most 1e6 and at least 1e-6; below 1 sharper, above 1 flatter. Draws from
                p^(1 / temperature), normalized. Trees divide the scores of every node instead, and
                keep the gate: another distribution, whose draws score as few nodes. For
                p^(1 / temperature) of trees, draw from the softmax of ``log_prob(hidden) /
                temperature``.
            generator: random generator on the device of ``hidden``; None: the default one.
            return_log_prob: whether to return the log-probabilities of the classes as well, under
                the distribution that they are drawn from: exact, for trees under the whole mixture.
            exclude: classes that are not drawn, as in :meth:`log_prob`: draws and
                log-probabilities are those of the distribution over the other classes. Heads that
                draw without the scores of all classes draw again, which reads values on a GPU too.

        Returns:
            Classes [...], or [..., n] with ``n``, int64. With ``return_log_prob`` also their
            log-probabilities, of the same shape, in nats, without gradient; see
            :meth:`candidate_log_prob`.

        Raises:
            TypeError: if ``generator`` is not a generator.
            ValueError: for ``n`` or ``temperature`` out of range, a generator of another device, or
                ``exclude`` as in :meth:`log_prob`.

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
        rows = self._query_rows(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, 1)
        classes, log_prob = self.sample_rows(rows, draws, temperature, generator, excluded)
        shape = hidden.shape[:-1] if n is None else (*hidden.shape[:-1], draws)
        if not return_log_prob:
            return classes.view(shape)
        if log_prob is None:
            log_prob = (
                self.candidate_rows(rows, classes, temperature)
                if excluded is None
                else self.log_prob_without(rows, classes, excluded, temperature)
            )
        return classes.view(shape), log_prob.view(shape)

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Classes [N, n] and their log-probabilities [N, n], or None if those are
        :meth:`candidate_rows` or, with excluded from ``check_exclude``,
        :meth:`log_prob_without`: hidden [N, F], from :meth:`encode`."""
        if not len(hidden):
            shape = (0, n)
            return hidden.new_empty(shape, dtype=torch.int64), hidden.new_empty(shape)
        log_prob = self.tempered_log_prob(hidden, temperature)
        if excluded is not None:
            log_prob = without(log_prob, excluded)
        classes = draw_columns(log_prob.exp(), n, generator)
        return classes, log_prob.gather(1, classes)

    def sample_again(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`sample_rows` of a head that draws without the scores of all classes: draws that
        are excluded are drawn again and, after ``ROUNDS``, from all classes."""
        if torch.compiler.is_compiling() or is_transformed() or hidden.is_meta:  # no values
            return Queries.sample_rows(self, hidden, n, temperature, generator, excluded)
        classes, _ = self.sample_rows(hidden, n, temperature, generator)
        again = is_excluded(classes, excluded)
        for _ in range(ROUNDS):
            row, draw = again.nonzero(as_tuple=True)
            if not len(row):
                return classes, None
            some, _ = self.sample_rows(hidden[row], 1, temperature, generator)
            classes[row, draw] = some.squeeze(1)
            again = is_excluded(classes, excluded)
        (rows,) = again.any(1).nonzero(as_tuple=True)
        excluded = excluded.expand(len(hidden), -1)[rows]
        some, _ = Queries.sample_rows(self, hidden[rows], n, temperature, generator, excluded)
        classes[rows] = torch.where(again[rows], some, classes[rows])
        return classes, None

    def candidate_log_prob(
        self,
        hidden: Tensor,
        candidates: Tensor,
        *,
        temperature: float = 1.0,
        ignore_index: int | None = None,
    ) -> Tensor:
        """Log-probabilities of K classes of each row. Differentiable.

        For distillation from the top k of a teacher, losses over several labels and scoring of
        candidates. Trees score the root once for each row. Without
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
        nothing = (marked == -1).all(1).view(hidden.shape[:-1])
        rows = self._query_rows(without_ignored(hidden, nothing))
        log_prob = self.candidate_rows(rows, marked, temperature)
        return log_prob.view(candidates.shape)

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """Log-probabilities [N, K]: hidden [N, F], from :meth:`encode`, and candidates [N, K] from
        :func:`hstree.ops.mark_targets`."""

        def chosen(hidden: Tensor, candidates: Tensor) -> Tensor:
            log_prob = self.tempered_log_prob(hidden, temperature)
            return log_prob.gather(1, candidates.clamp(0, self.n_classes - 1))

        log_prob = in_row_chunks(chosen, self.n_classes, hidden, candidates)
        return mask_candidates(log_prob, candidates, self.n_classes)


def run_pre_hooks(module: nn.Module, hidden: Tensor) -> Tensor:
    """What the forward pre-hooks of a module make of its input."""
    for key, hook in module._forward_pre_hooks.items():
        # FSDP undoes its own after forward, and register_fsdp_forward_method calls them.
        if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            result = hook(module, (hidden,), {})
            result = result if result is None else result[0]
        else:
            result = hook(module, (hidden,))
        if result is not None:
            hidden = result[0] if isinstance(result, tuple) else result
    return hidden
