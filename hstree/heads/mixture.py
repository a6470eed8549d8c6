"""Mixtures of softmaxes and of contexts."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_int, check_probability
from hstree._numerics import (
    at_least_float32,
    draw_columns,
    log_add_exp,
)
from hstree.heads.functions import build_function
from hstree.heads.rows import sample_again
from hstree.heads.softmax import Softmax
from hstree.ops.target_log_softmax import log_softmax


class _Mixture(Softmax):
    """A head over K vectors z_k = tanh(U_k h + a_k) of each context, with priors pi = softmax(G h).

    U_k, a_k and G start as in :class:`torch.nn.Linear`, as in the published code of MoS.
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        components: int = 15,
        latent_features: int | None = None,
        latent_dropout: float = 0.0,
        function: str = "softmax",
        function_options: dict[str, Any] | None = None,
        bias: bool = True,
        embedding: nn.Embedding | None = None,
        bias_start: str = "unigram",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        size = check_int("in_features", in_features)
        size = size if embedding is None else embedding.embedding_dim
        size = check_int("latent_features", size if latent_features is None else latent_features)
        components = check_int("components", components)
        super().__init__(
            in_features,
            n_classes,
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            function=build_function(function, function_options),
            weight_features=size,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )
        self.n_components, self.latent_features = components, size
        self.latent_dropout = check_probability("latent_dropout", latent_dropout)
        self.latent = nn.Linear(in_features, components * size)
        self.prior = nn.Linear(in_features, components, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.latent.reset_parameters()
        self.prior.reset_parameters()

    def latents(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors z [..., K E] and prior logits G h [..., K]: hidden [..., D]."""
        latent = torch.tanh(self.latent(hidden))
        if self.training and self.latent_dropout:
            steps = latent[:1] if latent.dim() > 2 else latent  # the same in all steps
            latent = latent * F.dropout(torch.ones_like(steps), self.latent_dropout)
        return latent, self.prior(hidden)

    def config(self) -> dict[str, Any]:
        return self.decoder_config() | {
            "components": self.n_components,
            "latent_features": self.latent_features,
            "latent_dropout": self.latent_dropout,
            "function": self.function.name,
            "function_options": self.function.config(),
        }


class _SoftmaxMixture(_Mixture):
    """sum_k pi_k softmax(f(W z_k + b))."""

    has_normalizer = False  # every component has its own

    def encode(self, hidden: Tensor) -> Tensor:
        """Concatenation of z [..., K E] and the prior logits [..., K]."""
        return torch.cat(self.latents(hidden), -1)

    def components(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        width = self.n_components * self.latent_features
        latent, prior = hidden[:, :width], hidden[:, width:]
        shape = (hidden.shape[0], self.n_components, self.latent_features)
        return latent.reshape(shape), at_least_float32(prior).log_softmax(1)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        latent, log_prior = self.components(hidden)
        # One component after another: all at once would take [N, K, V].
        mixture = log_softmax(self.component_scores(latent[:, 0])) + log_prior[:, :1]
        for k in range(1, self.n_components):
            log_prob = log_softmax(self.component_scores(latent[:, k])) + log_prior[:, k : k + 1]
            mixture = log_add_exp(mixture, log_prob)
        return mixture

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Draws a component by its prior, then a class from that component: one dense product."""
        if temperature != 1.0 or n > 1 or not len(hidden):
            return super().sample_rows(hidden, n, temperature, generator, excluded)
        if excluded is not None:
            return sample_again(self, hidden, n, temperature, generator, excluded)
        latent, log_prior = self.components(hidden)
        chosen = draw_columns(log_prior.exp(), 1, generator).squeeze(1)
        row = torch.arange(len(hidden), device=hidden.device)
        prob = log_softmax(self.component_scores(latent[row, chosen])).exp()
        return draw_columns(prob, 1, generator), None


class MixtureOfSoftmaxes(_SoftmaxMixture):
    r"""P(y | h) = sum_k pi_k softmax(f(W tanh(U_k h + a_k) + b))[y], pi = softmax(G h).

    A training step computes 3 K dense products and needs the memory of one softmax's logits. A
    sample computes one component.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        components: number of components, K.
        latent_features: size of tanh(U_k h), E; None: the size of ``embedding``, or D.
        latent_dropout: probability of dropping an element of tanh(U_k h); the same elements in all
            steps of ``hidden`` [time, batch, D].
        function: name of f, ``"softmax"`` (the identity), ``"plif"`` (Ganea et al., see
            :class:`PLIF`) or another name of ``hstree.heads.functions.build_function``.
        function_options: arguments of f.
        bias, ..., frequencies: see :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.MixtureOfSoftmaxes(16, 100, components=3, latent_features=8)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Yang, Dai, Salakhutdinov and Cohen, Breaking the softmax bottleneck: a high-rank RNN
    language model, ICLR 2018.
    """

    name = "mos"


class MixtureOfContexts(_Mixture):
    """P(y | h) = softmax(f(W sum_k pi_k tanh(U_k h + a_k) + b))[y], pi = softmax(G h).

    It has the parameters of :class:`MixtureOfSoftmaxes`, but the cost and the low rank of one
    softmax.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        components: number of components, K.
        latent_features, ..., function_options: see :class:`MixtureOfSoftmaxes`.
        bias, ..., frequencies: see :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.MixtureOfContexts(16, 100, components=3)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Yang, Dai, Salakhutdinov and Cohen, Breaking the softmax bottleneck: a high-rank RNN
    language model, ICLR 2018.
    """

    name = "moc"

    def encode(self, hidden: Tensor) -> Tensor:
        """The mixed vector sum_k pi_k z_k [..., E]."""
        latent, prior = self.latents(hidden)
        weight = at_least_float32(prior).softmax(-1).to(latent.dtype)
        shape = (*hidden.shape[:-1], self.n_components, self.latent_features)
        return torch.einsum("...k,...ke->...e", weight, latent.view(shape))
