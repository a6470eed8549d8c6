"""Mixtures of softmaxes, of contexts, and of softmaxes that read several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_int, check_nonnegative, check_probability, check_sequence
from hstree._numerics import (
    at_least_float32,
    draw_columns,
    input_dtype,
    log_add_exp,
    without_ignored,
)
from hstree.heads.base import HeadOptions, HeadOutput
from hstree.heads.flat import FlatHead
from hstree.heads.functions import build_function

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ZeroBiasLinear(nn.Linear):
    """A linear layer whose bias starts at zero, also after ``reset_parameters``."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)


class LatentOptions(HeadOptions, total=False):
    """Keywords of mixtures that their constructors pass on."""

    latent_features: int | None
    latent_dropout: float
    function: str
    function_options: dict[str, Any] | None
    embedding: nn.Embedding | None
    bias: bool
    bias_start: str


class _Mixture(FlatHead):
    """A head over K vectors z_k = tanh(U_k h + a_k) of each context, with priors pi = softmax(G h).

    U_k, a_k and G start as in :class:`torch.nn.Linear`, as in the published code of MoS.

    Args:
        layers: size and number of components of each part of ``hidden``; the last part gives the
            priors.
        n_classes: number of classes, V.
        **options: as in :class:`MixtureOfSoftmaxes`.
    """

    _latent_layer: ClassVar[type[nn.Linear]] = nn.Linear

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        n_classes: int,
        *,
        latent_features: int | None = None,
        latent_dropout: float = 0.0,
        function: str = "softmax",
        function_options: dict[str, Any] | None = None,
        embedding: nn.Embedding | None = None,
        bias: bool = True,
        bias_start: str = "unigram",
        **options: Unpack[HeadOptions],
    ) -> None:
        size = layers[-1][0] if embedding is None else embedding.embedding_dim
        size = check_int("latent_features", size if latent_features is None else latent_features)
        super().__init__(
            sum(size for size, _ in layers),
            n_classes,
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            function=build_function(function, function_options),
            weight_features=size,
            **options,
        )
        self.layers = list(layers)
        self.n_components = sum(experts for _, experts in layers)
        self.latent_features = size
        self.latent_dropout = check_probability("latent_dropout", latent_dropout)
        self.latent = nn.ModuleList(
            self._latent_layer(features, experts * size) for features, experts in layers if experts
        )
        self.prior = nn.Linear(layers[-1][0], self.n_components, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for linear in (*self.latent, self.prior):
            linear.reset_parameters()

    def latents(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors z [..., K E] and prior logits G h [..., K]: hidden [..., D]."""
        parts = torch.split(hidden, [features for features, _ in self.layers], dim=-1)
        read = [part for part, (_, experts) in zip(parts, self.layers, strict=True) if experts]
        latents = [linear(part) for linear, part in zip(self.latent, read, strict=True)]
        latent = torch.tanh(torch.cat(latents, -1) if len(latents) > 1 else latents[0])
        if self.training and self.latent_dropout:
            latent = latent * self.dropout_mask(latent)
        return latent, self.prior(parts[-1])

    def dropout_mask(self, latent: Tensor) -> Tensor:
        """Factors for z: [1, ..., K E] for z [time, ..., K E], or [N, K E]."""
        steps = latent[:1] if latent.dim() > 2 else latent
        return F.dropout(torch.ones_like(steps), self.latent_dropout)

    def config(self) -> dict[str, Any]:
        return self.decoder_config() | {
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
        mixture = self.component_log_prob(latent[:, 0]) + log_prior[:, :1]
        for k in range(1, self.n_components):
            log_prob = self.component_log_prob(latent[:, k]) + log_prior[:, k : k + 1]
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
            return self.sample_again(hidden, n, temperature, generator, excluded)
        latent, log_prior = self.components(hidden)
        chosen = draw_columns(log_prior.exp(), 1, generator).squeeze(1)
        row = torch.arange(len(hidden), device=hidden.device)
        prob = self.component_log_prob(latent[row, chosen]).exp()
        return draw_columns(prob, 1, generator), None


class MixtureOfSoftmaxes(_SoftmaxMixture):
    r"""P(y | h) = sum_k pi_k softmax(f(W tanh(U_k h + a_k) + b))[y], pi = softmax(G h).

    A training step computes 3 K dense products and needs the memory of one softmax's logits. A
    sample computes one component.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        components: number of components, K.
        **options: arguments of the latent vectors, below; ``bias``, ``embedding`` and
            ``bias_start`` of :class:`FlatHead`; and the arguments of :class:`Head`.

            - ``latent_features``: size of tanh(U_k h), E; None: the size of ``embedding``, or D.
            - ``latent_dropout``: probability of dropping an element of tanh(U_k h); the same
              elements in all steps of ``hidden`` [time, batch, D].
            - ``function``: name of f, ``"softmax"`` (the identity), ``"plif"`` (Ganea et al., see
              :class:`PLIF`) or another name of ``hstree.heads.functions.build_function``.
            - ``function_options``: arguments of f.

    Example:
        >>> import torch, hstree
        >>> head = hstree.MixtureOfSoftmaxes(16, 100, components=3, latent_features=8)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Yang, Dai, Salakhutdinov and Cohen, Breaking the softmax bottleneck: a high-rank RNN
    language model, ICLR 2018.
    """

    name = "mos"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        components: int = 15,
        **options: Unpack[LatentOptions],
    ) -> None:
        layer = (check_int("in_features", in_features), check_int("components", components))
        super().__init__([layer], n_classes, **options)

    def config(self) -> dict[str, Any]:
        return super().config() | {"components": self.n_components}


class MixtureOfContexts(_Mixture):
    """P(y | h) = softmax(f(W sum_k pi_k tanh(U_k h + a_k) + b))[y], pi = softmax(G h).

    It has the parameters of :class:`MixtureOfSoftmaxes`, but the cost and the low rank of one
    softmax.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        components: number of components, K.
        **options: further arguments of :class:`MixtureOfSoftmaxes`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.MixtureOfContexts(16, 100, components=3)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Yang, Dai, Salakhutdinov and Cohen, Breaking the softmax bottleneck: a high-rank RNN
    language model, ICLR 2018.
    """

    name = "moc"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        components: int = 15,
        **options: Unpack[LatentOptions],
    ) -> None:
        layer = (check_int("in_features", in_features), check_int("components", components))
        super().__init__([layer], n_classes, **options)

    def encode(self, hidden: Tensor) -> Tensor:
        """The mixed vector sum_k pi_k z_k [..., E]."""
        latent, prior = self.latents(hidden)
        weight = at_least_float32(prior).softmax(-1).to(latent.dtype)
        shape = (*hidden.shape[:-1], self.n_components, self.latent_features)
        return torch.einsum("...k,...ke->...e", weight, latent.view(shape))

    def config(self) -> dict[str, Any]:
        return super().config() | {"components": self.n_components}


class DOC(_SoftmaxMixture):
    r"""Direct output connection: a mixture of softmaxes whose components read different layers.

    P(y | h) = sum_j pi_j softmax(W tanh(U_j h^(layer_j) + a_j) + b)[y]. The word embedding counts
    as a layer. The priors pi are computed from the last layer. ``latent_dropout`` drops the same
    elements in all components.

    In training mode the penalty makes the components be used equally. Each row's loss grows by

    .. math::
        \lambda (J - 1) \frac{\mathrm{var}(B)}{\mathrm{mean}(B)^2}, \qquad
        B_{sj} = \sum_t \pi_{tsj}

    for J components and all sequences s in ``hidden`` [time, ..., D], or one sequence for
    [N, D]. The variance is the unbiased one over all numbers B. Rows that are ignored do not count.

    Args:
        in_features: sum of ``layer_sizes``; ``hidden`` is the concatenation of the layers.
        n_classes: number of classes, V.
        layer_sizes: size of each layer's output, first to last.
        experts: number of components that read each layer; None: 15 for the last layer, 5 for the
            one before it.
        prior_penalty: coefficient of the penalty, lambda; 0.001 in the published models.
        **options: further arguments of :class:`MixtureOfSoftmaxes`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.DOC(24, 100, layer_sizes=[8, 16], experts=[1, 3])
        >>> layers = [torch.randn(4, 8), torch.randn(4, 16)]
        >>> head(torch.cat(layers, dim=-1), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Takase, Suzuki and Nagata, Direct output connection for a high-rank language model,
    EMNLP 2018. The paper's penalty is lambda (std(B) / mean(B))^2 with B summed over the batch; its
    results come from the authors' code, which has the penalty above.
    """

    name = "doc"
    reads_layers = True
    _latent_layer = ZeroBiasLinear

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        layer_sizes: Sequence[int],
        experts: Sequence[int] | None = None,
        prior_penalty: float = 0.0,
        **options: Unpack[LatentOptions],
    ) -> None:
        given = check_sequence("layer_sizes", layer_sizes)
        sizes = [check_int("layer_sizes", size) for size in given]
        if sum(sizes) != in_features:
            raise ValueError(
                f"layer_sizes: expected sizes with the sum {in_features} (in_features), got {sizes}"
            )
        if experts is None:
            experts = ([0] * len(sizes) + [5, 15])[-len(sizes) :]
        given = check_sequence("experts", experts)
        if len(given) != len(sizes):
            raise ValueError(
                f"experts: expected {len(sizes)} numbers of components, one for each layer, "
                f"got {experts!r}"
            )
        experts = [check_int("experts", number, 0) for number in given]
        if not any(experts):
            raise ValueError(f"experts: expected at least one component, got {experts}")
        super().__init__(list(zip(sizes, experts, strict=True)), n_classes, **options)
        self.prior_penalty = check_nonnegative("prior_penalty", prior_penalty)

    def dropout_mask(self, latent: Tensor) -> Tensor:
        mask = super().dropout_mask(latent[..., : self.latent_features])
        return torch.cat([mask] * self.n_components, -1)

    def forward(self, hidden: Tensor, target: Tensor) -> HeadOutput:
        output, loss = super().forward(hidden, target)
        if self.training and self.prior_penalty:
            ignored = target.long() == self.ignore_index
            last = hidden[..., -self.prior.in_features :].to(input_dtype(self.prior))
            last = without_ignored(last, ignored)
            prior = (
                at_least_float32(self.prior(last))
                .softmax(-1)
                .masked_fill(ignored.unsqueeze(-1), 0.0)
            )
            kept = (~ignored).to(output.dtype)
            loss = loss + self.reduced(self.prior_penalty * imbalance(prior) * kept, kept)
        return HeadOutput(output, loss)

    def config(self) -> dict[str, Any]:
        sizes, experts = zip(*self.layers, strict=True)
        return super().config() | {
            "layer_sizes": list(sizes),
            "experts": list(experts),
            "prior_penalty": self.prior_penalty,
        }


def imbalance(prior: Tensor) -> Tensor:
    """(J - 1) var(B) / mean(B)^2, B the sums over time of priors [time, ..., J], or over the rows
    of [N, J]; 0 if all priors are 0."""
    components = prior.shape[-1]
    sums = prior.sum(0) if prior.dim() > 2 else prior.reshape(-1, components).sum(0)
    share = sums / sums.mean().clamp(min=torch.finfo(sums.dtype).tiny)
    square = (share - share.mean()).square().sum()
    return square * ((components - 1) / max(share.numel() - 1, 1))
