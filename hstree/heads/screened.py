"""A trained softmax whose best classes are found by a preview of all classes in few bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import (
    check_bool,
    check_entries,
    check_int,
    check_number,
    check_tensor,
    check_up_to,
)
from hstree._numerics import draw_columns, no_autocast
from hstree.heads.base import Head
from hstree.heads.rows import sample_again, split_rows, topk_without
from hstree.heads.state import HasWeight, Tables, weight_to_tie
from hstree.ops.screened_topk import BLOCK, Screened, quantize_preview, screened_topk

if TYPE_CHECKING:
    from typing_extensions import Self

BITS = (4, 8)
AGREEMENT = 0.998
"""Share of the contexts whose best class a screen should find, if the caller names none."""


class ScreenedSoftmax(Tables, Head):
    r"""A trained softmax that scores few classes exactly, for inference.

    A preview of all V scores comes from R rotated features in 4 or 8 bits a number; the n classes
    with the best previews are scored exactly, and all others keep their preview:

    .. math::
        q(y \mid h) \propto \begin{cases}
        \exp(W_y \cdot h + b_y) & \text{if } y \text{ is among the } n\\
        \exp(a_y(h)) & \text{otherwise}\end{cases}
        \qquad
        a_y(h) = W_y \cdot m + b_y + \bar W \cdot (h - m) + P_y \cdot R (h - m)

    with the mean context m and the mean row :math:`\bar W`. So q is a distribution over all classes
    with known log-probabilities, which :meth:`log_prob`, :meth:`sample`, :meth:`candidate_log_prob`
    and, in evaluation mode, ``forward`` give without gradients. The whole of the
    weight is read for no query; see :func:`hstree.ops.screened_topk`. A scale or a soft cap is
    applied to all scores, as :class:`Softmax` does.

    :meth:`from_linear` makes the head. The weight is the linear layer's own, and the preview one of
    its values at that time: train the layer with :class:`Softmax`, and screen it again afterwards.
    ``forward`` raises an error in training mode.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        rank: number of features of the preview, R.
        bits: bits of a number of the preview, 4 or 8.
        exact: number of classes that are scored exactly, n.
        agreement: share of held-out contexts whose best class was among the n; None: not measured.
        bias: whether there is a bias b.
        scale: factor of the scores, positive.
        soft_cap: bound of the scaled scores, positive; None: no bound.
        embedding: the linear layer.
        ignore_index, ..., frequencies: see :class:`Head`.

    Example:
        >>> import torch, hstree
        >>> linear, hidden = torch.nn.Linear(64, 1000), torch.randn(512, 64)
        >>> head = hstree.ScreenedSoftmax.from_linear(linear, hidden, exact=256).eval()
        >>> log_prob, classes = head.topk(hidden[:4], 5)
        >>> drawn, log_q = head.sample(hidden[:4], temperature=0.8, return_log_prob=True)

    Source: Shim, Lee, Choi, Boo and Sung, SVD-softmax: fast softmax approximation on large
    vocabulary neural networks, NeurIPS 2017, which rotates by the singular vectors of W. That the
    rotation weighs contexts, the numbers of few bits and the choice of the shape are hstree's own.
    Learned sets of classes instead: Chen, Si, Kumar, Li and Hsieh, Learning to screen for fast
    softmax inference on large vocabulary neural networks, ICLR 2019.
    """

    name = "screened"
    trainable = False

    rotation: Tensor
    rotation_bias: Tensor
    preview: Tensor
    row_scale: Tensor
    offset: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        rank: int,
        bits: int,
        exact: int,
        agreement: float | None = None,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
        embedding: HasWeight | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(
            in_features,
            n_classes,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )
        self.scale = check_number("scale", scale, positive=True)
        self.soft_cap = soft_cap
        if soft_cap is not None:
            self.soft_cap = check_number("soft_cap", soft_cap, positive=True)
        self.rank = check_int("rank", rank, 1, in_features)
        self.bits = _check_bits(bits)
        self.exact = check_int("exact", exact, 1, n_classes)
        self.agreement = agreement
        self.tied = True  # the default of from_linear
        if embedding is not None:
            self.weight = weight_to_tie(embedding, n_classes, in_features)
        else:
            self.weight = nn.Parameter(torch.empty(n_classes, in_features))
        self.bias = nn.Parameter(torch.zeros(n_classes), requires_grad=False) if bias else None
        blocks, groups = -(-n_classes // BLOCK), -(-self.rank * self.bits // 32)
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        # All features are not rotated: only the score of the mean row is left.
        rows = 1 if self.rank == in_features else self.rank + 1
        for name, size, kind in (
            ("rotation", (rows, in_features), torch.float32),
            ("rotation_bias", (rows,), torch.float32),
            ("preview", (blocks, groups, BLOCK, 4), dtype),
            ("row_scale", (BLOCK * blocks,), torch.float32),
            ("offset", (BLOCK * blocks,), torch.float32),
        ):
            self.register_table(name, torch.zeros(size, dtype=kind, device="cpu"))

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: HasWeight,
        hidden: Tensor | None = None,
        *,
        rank: int | None = None,
        bits: int | None = None,
        exact: int | None = None,
        agreement: float | None = None,
        tied: bool = True,
        **options: Any,
    ) -> Self:
        """The screen of a linear layer, in seconds and without training.

        The features are those in which the scores of ``hidden`` vary most: the eigenvectors of
        C^1/2 W^T W C^1/2, where C is the covariance of ``hidden`` and W is centered; all D are not
        rotated. The last quarter of ``hidden``, at most 1,024 contexts, is held out. The shape is
        the one that reads the fewest bytes of those that find the best class of a share
        ``agreement`` of it, or the one that finds most if none does. The head has the share that it
        found as ``agreement``.

        Args:
            linear: weight [V, D] in float32, bfloat16 or float16, with or without a bias.
            hidden: context vectors of the model, [..., D], a few thousand. None: all features in 4
                bits without rotation, and 256 classes, unless given; ``agreement`` is then None.
            rank: number of features of the preview; None: chosen from D / 8, D / 4, D / 2 and D.
            bits: 4 or 8; None: chosen.
            exact: number of classes that are scored exactly; None: chosen, a power of two.
            agreement: share of contexts whose best class is to be found; None: 0.998.
            tied: whether the weight stays the layer's, so that :meth:`Head.save` can leave it out.
                False for an ``lm_head`` of transformers that is not tied to its embedding.
            **options: ``scale`` and ``soft_cap``, and further arguments of :class:`Head`.

        Raises:
            ValueError: for an argument out of range, values that are not finite, or less than 8
                contexts; without ``hidden`` for an ``agreement`` or a rank other than D.
        """
        weight, bias = linear.weight.detach(), getattr(linear, "bias", None)
        bias = None if bias is None else bias.detach()
        n_classes, in_features = weight.shape
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                "linear: expected a weight in float32, bfloat16 or float16, got "
                f"{str(weight.dtype).removeprefix('torch.')}"
            )
        _check_finite("linear", weight)
        if bias is not None:
            _check_finite("linear", bias.masked_fill(bias == -torch.inf, 0.0))
        contexts = held = best = None
        if hidden is not None:
            contexts = _contexts(hidden, in_features, weight.device)
            some = min(len(contexts) // 4, 1024)
            contexts, held = contexts[:-some], contexts[-some:].to(weight.dtype)
            full = weight.float()  # products of 16 bits are rounded, so that many are equal
            parts = (F.linear(x.float(), full) for x in torch.split(held, 64))
            best = torch.cat([(x if bias is None else x + bias).argmax(1) for x in parts])
        elif agreement is not None or rank not in (None, in_features):
            name, given = ("rank", rank) if agreement is None else ("agreement", agreement)
            raise ValueError(f"{name}: expected hidden states to choose it by, got {given} alone")
        tied = check_bool("tied", tied)
        wanted = AGREEMENT if agreement is None else check_up_to("agreement", agreement, 1.0)
        ranks = {min(in_features, 8 * -(-in_features // (8 * part))) for part in (8, 4, 2, 1)}
        ranks = {in_features} if hidden is None else ranks
        if rank is not None:
            ranks = {check_int("rank", rank, 1, in_features)}
        some_bits = BITS if hidden is not None else BITS[:1]
        if bits is not None:
            some_bits = (_check_bits(bits),)
        if exact is not None:
            exact = check_int("exact", exact, 1, n_classes)

        features_of_weight = _Axes.of(weight, bias, None)
        axes = features_of_weight if contexts is None else _Axes.of(weight, bias, contexts)
        chosen: tuple[tuple[float, float], Self] | None = None
        shapes = ((features * width, features, width) for features in ranks for width in some_bits)
        for size, features, width in sorted(shapes):
            bytes_read = size / 8 * n_classes
            if chosen is not None and chosen[0] <= (0.0, bytes_read):
                break
            head = cls(
                in_features, n_classes, rank=features, bits=width,
                exact=exact or min(256, n_classes), bias=bias is not None, embedding=linear,
                **options,
            ).to(weight.device)  # fmt: skip
            head.tied = tied
            if bias is not None:
                head.bias = nn.Parameter(bias.clone(), requires_grad=False)
            (features_of_weight if features == in_features else axes).fill(head, weight)
            if held is None or best is None:
                return head
            places = head._places(held, best)
            if exact is None:
                found = max(1, math.ceil(wanted * len(places)))
                needed = int(places.kthvalue(found).values) + 1
                head.exact = min(n_classes, max(64, 2 ** math.ceil(math.log2(needed))))
            head.agreement = float((places < head.exact).float().mean())
            # Rows in no order take twice their bytes.
            bytes_read += 2 * head.exact * in_features * weight.element_size()
            cost = (max(0.0, wanted - head.agreement), bytes_read)
            if chosen is None or cost < chosen[0]:
                chosen = cost, head
        assert chosen is not None
        return chosen[1]

    def check_tables(self) -> None:
        for name in ("rotation", "rotation_bias", "row_scale"):
            table = getattr(self, name)
            check_entries(name, table, table.isfinite(), "a finite number")
        scale, offset = self.row_scale, self.offset
        check_entries("row_scale", scale, scale >= 0, "a number of at least 0")
        check_entries("offset", offset, offset < torch.inf, "a number below infinity")
        padding = offset[self.n_classes :]
        check_entries("offset of padding", padding, padding == -torch.inf, "-inf")

    def _places(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """The place [N] of a class of each row among the previews of all classes."""
        places = []
        for rows, some in zip(torch.split(hidden, 64), torch.split(classes, 64), strict=True):
            found = self._found(rows, 1, 1, 1.0, True)
            # Its preview is gone: it was the largest.
            scores = found.scores.scatter(1, found.classes, torch.inf)
            places.append((scores > scores.gather(1, some[:, None])).sum(1))
        return torch.cat(places)

    def _found(
        self, hidden: Tensor, n: int, k: int, temperature: float, all_scores: bool
    ) -> Screened:
        """Without scale and soft cap, which change no order."""
        with torch.no_grad(), no_autocast(hidden.device):
            hidden = hidden.to(self.weight.dtype)
            query = F.linear(hidden.float(), self.rotation, self.rotation_bias)
            if self.rank == self.in_features:
                query = torch.cat([hidden.float(), query], 1)
            return screened_topk(
                query, self.preview, self.row_scale, self.offset, hidden, self.weight.detach(),
                self.bias, n, k, temperature=temperature, all_scores=all_scores,
            )  # fmt: skip

    def _screened(
        self, hidden: Tensor, n: int, k: int, temperature: float = 1.0, all_scores: bool = False
    ) -> Screened:
        factor, cap = self.scale, self.soft_cap
        if cap is None:
            found = self._found(hidden, n, k, temperature / factor, all_scores)
            if factor == 1:
                return found
            return found._replace(score=factor * found.score, scores=factor * found.scores)
        found = self._found(hidden, n, n, temperature, True)
        score, scores = (
            cap * (each * (factor / cap)).tanh() for each in (found.score, found.scores)
        )
        rest = scores.scatter(1, found.classes, -torch.inf)
        log_rest, log_normalizer = ((x / temperature).logsumexp(1) for x in (rest, scores))
        classes, scores = found.classes[:, :k], scores if all_scores else scores[:0]
        return Screened(score[:, :k], classes, log_rest, log_normalizer, scores)

    def class_scores(self, hidden: Tensor) -> Tensor:
        """Exact for the ``exact`` best previews, previews for all others; on the scale of the
        linear layer."""
        return self._screened(hidden, self.exact, 1, all_scores=True).scores

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError(
                "ScreenedSoftmax: expected evaluation mode, head.eval(), since it is not trained; "
                "train hstree.Softmax on the same weight and screen that again"
            )
        return self.candidate_rows(hidden, target[:, None], 1.0).squeeze(1)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return self.tempered_log_prob(hidden, 1.0)

    def tempered_log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        found = self._screened(hidden, self.exact, 1, temperature, all_scores=True)
        return found.scores / temperature - found.log_normalizer[:, None]

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k best of the ``exact`` classes; of k classes, and as many more as are excluded, if
        that is more."""
        if excluded is not None:
            n = min(self.n_classes, max(self.exact, k + excluded.shape[1]))
            parts = [
                topk_without(self._screened(rows, n, 1, all_scores=True).scores, k, some)
                for rows, some in split_rows(
                    self.n_classes, hidden, excluded.expand(len(hidden), -1)
                )
            ]
            values, classes = zip(*parts, strict=True)
            return torch.cat(values), torch.cat(classes)
        found = self._screened(hidden, max(self.exact, k), k)
        return found.score - found.log_normalizer[:, None], found.classes

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if excluded is not None:
            return sample_again(self, hidden, n, temperature, generator, excluded)
        found = self._screened(hidden, self.exact, self.exact, temperature)
        log_normalizer = found.log_normalizer[:, None]
        log_prob = (
            torch.cat([found.score / temperature, found.log_rest[:, None]], 1) - log_normalizer
        )
        if not len(hidden):
            return found.classes[:, :1].expand(0, n), log_prob[:, :1].expand(0, n)
        place = draw_columns(log_prob.exp(), n, generator)
        log_prob, rest = log_prob.gather(1, place), place == self.exact
        classes = found.classes.gather(1, place.clamp(max=self.exact - 1))
        (rows,) = rest.any(1).nonzero(as_tuple=True)
        if len(rows):  # drawn from the classes that have only a preview
            scores = self._screened(hidden[rows], self.exact, 1, temperature, True).scores
            scores = scores.scatter(1, found.classes[rows], -torch.inf) / temperature
            drawn = draw_columns(scores.softmax(1), n, generator)
            of_drawn = scores.gather(1, drawn) - log_normalizer[rows]
            classes[rows] = torch.where(rest[rows], drawn, classes[rows])
            log_prob[rows] = torch.where(rest[rows], of_drawn, log_prob[rows])
        return classes, log_prob

    def tied_parameters(self) -> Iterator[Tensor]:
        return self.parameters()

    def config(self) -> dict[str, Any]:
        names = ("rank", "bits", "exact", "agreement", "tied", "scale", "soft_cap")
        own = {name: getattr(self, name) for name in names} | {"bias": self.bias is not None}
        return super().config() | own

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: HasWeight | None = None,
    ) -> Self:
        head = super().from_config(config, tensors, embedding)
        head.tied = config["tied"]
        return head

    def extra_repr(self) -> str:
        agreement = "None" if self.agreement is None else f"{self.agreement:.4f}"
        return (
            f"{super().extra_repr()}, rank={self.rank}, bits={self.bits}, exact={self.exact}, "
            f"agreement={agreement}"
        )


class _Axes(NamedTuple):
    """The features of the scores W (h - m), centered over the classes, from the one in which they
    vary most: column i of ``of_rows`` times W, row i of ``of_contexts`` times h - m."""

    mean_context: Tensor
    mean_row: Tensor
    offset: Tensor
    of_rows: Tensor | None  # [D, D]; None: the features of W themselves
    of_contexts: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, contexts: Tensor | None) -> _Axes:
        mean_row = weight.mean(0, dtype=torch.float32)
        mean = torch.zeros_like(mean_row) if contexts is None else contexts.mean(0)
        offset = torch.cat([part.float() @ mean for part in torch.split(weight, 2**14)])
        if bias is not None:
            offset = offset + bias
        if contexts is None:
            return cls(mean, mean_row, offset, None, None)
        centered = (contexts - mean).double()
        covariance = centered.T @ centered / len(contexts)
        # A small share of the mean variance keeps directions that no context has.
        covariance.diagonal().add_(1e-4 * covariance.diagonal().mean() + 1e-30)
        gram = torch.zeros_like(covariance)
        for part in torch.split(weight, 2**14):
            rows = part.float() - mean_row
            gram += (rows.T @ rows).double() / len(weight)
        variance, vectors = torch.linalg.eigh(covariance)
        root = variance.sqrt()
        half, inverse = vectors * root @ vectors.T, vectors / root @ vectors.T
        strength, axes = torch.linalg.eigh(half @ gram @ half)
        axes, strength = axes.flip(1), strength.flip(0).clamp(min=1e-12 * strength.max() + 1e-30)
        # The root of a feature's deviation on each side, so that rows and contexts lose as little
        # when they are rounded to steps of their largest number.
        share = strength**0.25
        return cls(
            mean,
            mean_row,
            offset,
            (half @ axes / share).float(),
            (inverse @ axes * share).T.float(),
        )

    def fill(self, head: ScreenedSoftmax, weight: Tensor) -> None:
        """Give the head its tables."""
        parts = [part.float() - self.mean_row for part in torch.split(weight, 2**14)]
        rotation = self.mean_row[None]
        if self.of_rows is not None and self.of_contexts is not None:
            parts = [part @ self.of_rows[:, : head.rank] for part in parts]
            rotation = torch.cat([self.of_contexts[: head.rank], rotation])
        preview, scale = quantize_preview(torch.cat(parts), head.bits)
        offset = F.pad(self.offset, (0, len(scale) - len(weight)), value=-torch.inf)
        head.register_table("rotation", rotation)
        head.register_table("rotation_bias", -(rotation @ self.mean_context))
        head.register_table("preview", preview)
        head.register_table("row_scale", scale)
        head.register_table("offset", offset)


def _check_bits(bits: Any) -> int:
    if bits not in BITS or isinstance(bits, bool):
        raise ValueError(f"bits: expected 4 or 8, got {bits!r}")
    return int(bits)


def _contexts(hidden: Tensor, in_features: int, device: torch.device) -> Tensor:
    """The context vectors as rows in float32."""
    check_tensor("hidden", hidden)
    if hidden.ndim < 1 or hidden.shape[-1] != in_features or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: expected floating-point numbers [..., {in_features}], got "
            f"{hidden.dtype} {tuple(hidden.shape)}"
        )
    rows = hidden.detach().reshape(-1, in_features).to(device, torch.float32)
    if len(rows) < 8:
        raise ValueError(f"hidden: expected at least 8 contexts, got {len(rows)}")
    _check_finite("hidden", rows)
    return rows


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name}: expected finite numbers, got infinity or NaN")
