"""Mixtape: one softmax over logits that are mixed separately for each class."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_entries, check_int, check_order
from hstree._numerics import at_least_float32, linear_scores
from hstree.heads.base import Head
from hstree.heads.rows import in_row_chunks
from hstree.heads.softmax import Softmax
from hstree.heads.state import Tables
from hstree.ops.target_log_softmax import target_log_softmax

COMPONENTS, GATES = 4, 3


class ZeroBiasLinear(nn.Linear):
    """A linear layer whose bias starts at zero, also after ``reset_parameters``."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)


class Mixtape(Tables, Softmax):
    r"""P(y | h) = softmax(l)[y], l_x = sum_k pi_{x,k} w_x . tanh(U_k h + a_k) + b_x, K = 4.

    The priors of a class come from three sigmoids, g_j = sigmoid(v_x . tanh(Q_j h + q_j) + u_j . h
    + c_xj), as (g1 g2, g1 (1 - g2), (1 - g1) g3, (1 - g1) (1 - g3)). Infrequent classes have no v
    and c: they share the gates sigmoid(u_j . h), and so one context vector
    sum_k pi_k tanh(U_k h + a_k), and cost as much as in a softmax.

    The biases a, q and c start at 0, v uniform in [-0.1, 0.1].

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        own_gates: number of classes with their own gates, the first ones of ``order``; None:
            V / 10, rounded up.
        order: classes from the most to the least frequent, int64 [V]; None: by ``frequencies``, or
            0, 1, 2, ... without them.
        gate_features: size of tanh(Q_j h).
        latent_features: size of tanh(U_k h), E; None: the size of ``embedding``, or D.
        bias, ..., frequencies: see :class:`Softmax`.

    Raises:
        ValueError: for ``own_gates`` outside [0, V], an ``order`` that is not a permutation, or a
            size below 1.

    Example:
        >>> import torch, hstree
        >>> head = hstree.Mixtape(16, 100, own_gates=10)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Yang, Luong, Salakhutdinov and Le, Mixtape: breaking the softmax bottleneck efficiently,
    NeurIPS 2019. ``Mixtape`` in Mesh TensorFlow (transformer/vocab_embeddings.py) agrees in the
    tree of sigmoids, the gates that infrequent classes share, the share of classes with their own
    (a tenth) and zero initial a and q. It differs: v, c and u start as N(0, 1), h is multiplied by
    D^-0.5, there is dropout on tanh(Q_j h + q_j) and on the logits of the components, optional
    noise on the arguments of the sigmoids, and no b. Here there is neither dropout nor noise. No
    code of the authors was found: the initial values and the size of the gates could not be
    compared with theirs.
    """

    name = "mixtape"
    resizable = False

    own: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        own_gates: int | None = None,
        order: Tensor | None = None,
        gate_features: int = 64,
        latent_features: int | None = None,
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
        features = check_int("in_features", in_features)
        features = features if embedding is None else embedding.embedding_dim
        features = features if latent_features is None else latent_features
        features = check_int("latent_features", features)
        super().__init__(
            in_features,
            n_classes,
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            weight_features=features,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )
        own_gates = -(-n_classes // 10) if own_gates is None else own_gates
        own_gates = check_int("own_gates", own_gates, 0)
        if own_gates > n_classes:
            raise ValueError(f"own_gates: expected 0 to {n_classes} (n_classes), got {own_gates}")
        order = check_order(order, n_classes, self.frequencies)
        self.own_gates = own_gates
        self.gate_features = check_int("gate_features", gate_features)
        self.latent_features = features
        self.register_table("own", order[:own_gates])
        self.latent = ZeroBiasLinear(in_features, COMPONENTS * features)
        self.gate_hidden = ZeroBiasLinear(in_features, GATES * self.gate_features)
        self.gate_context = nn.Linear(in_features, GATES, bias=False)
        self.gate_weight = nn.Parameter(torch.empty(own_gates, self.gate_features))
        self.gate_bias = nn.Parameter(torch.empty(own_gates, GATES))
        self._reset_gates()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for linear in (self.latent, self.gate_hidden, self.gate_context):
            linear.reset_parameters()
        self._reset_gates()

    def _reset_gates(self) -> None:
        nn.init.uniform_(self.gate_weight, -0.1, 0.1)
        nn.init.zeros_(self.gate_bias)

    def check_tables(self) -> None:
        own = self.own.sort().values
        right = (own.diff(prepend=own.new_full((1,), -1)) > 0) & (own < self.n_classes)
        check_entries("own", own, right, f"different classes in [0, {self.n_classes})")

    def encode(self, hidden: Tensor) -> Tensor:
        """Concatenation of tanh(U_k h) [..., K E], tanh(Q_j h) [..., 3 G] and u_j . h [..., 3]."""
        parts = [torch.tanh(self.latent(hidden)), torch.tanh(self.gate_hidden(hidden))]
        return torch.cat([*parts, self.gate_context(hidden)], -1)

    def _gates(self, encoded: Tensor) -> list[Tensor]:
        """g1, g2 and g3, each [N, own_gates + 1]; the last column is that of all other classes."""
        hidden, context = torch.split(encoded, [GATES * self.gate_features, GATES], 1)
        hidden = hidden.reshape(-1, GATES, self.gate_features)
        scores = linear_scores(hidden, self.gate_weight) + self.gate_bias.t()
        # Classes without gates of their own have the score of the context alone.
        scores = F.pad(scores, (0, 1)) + context[:, :, None]
        return list(torch.sigmoid(scores).unbind(1))

    def priors(self, hidden: Tensor) -> Tensor:
        """Priors pi [..., own_gates + 1, 4] of the classes ``own``, and of all other classes in the
        last row: hidden [..., D]."""
        encoded = self._query_rows(hidden)
        g1, g2, g3 = self._gates(encoded[:, COMPONENTS * self.latent_features :])
        priors = torch.stack([g1 * g2, g1 * (1 - g2), (1 - g1) * g3, (1 - g1) * (1 - g3)], -1)
        return priors.view(*hidden.shape[:-1], self.own_gates + 1, COMPONENTS)

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        def log_prob(hidden: Tensor, target: Tensor) -> Tensor:
            return target_log_softmax(self.class_scores(hidden), target)

        return in_row_chunks(log_prob, self.n_classes, hidden, target)

    def target_loss(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return Head.target_loss(self, hidden, target)

    @property
    def has_linear_scores(self) -> bool:
        return False

    def target_score(self, hidden: Tensor, target: Tensor) -> Tensor:
        target = target.clamp(0, self.n_classes - 1)
        size = COMPONENTS * self.latent_features
        latent = hidden[:, :size].reshape(-1, COMPONENTS, 1, self.latent_features)
        row = torch.full((self.n_classes,), self.own_gates, device=target.device)
        row[self.own] = torch.arange(self.own_gates, device=target.device)
        gate = row[target, None]
        gates = (g.gather(1, gate).unsqueeze(-1) for g in self._gates(hidden[:, size:]))
        context = _mix(latent, *gates).squeeze(1)
        score = (context * at_least_float32(F.embedding(target, self.weight))).sum(1)
        return score if self.bias is None else score + at_least_float32(self.bias)[target]

    def class_scores(self, hidden: Tensor) -> Tensor:
        size = COMPONENTS * self.latent_features
        latent = hidden[:, :size].reshape(-1, COMPONENTS, self.latent_features)
        g1, g2, g3 = (gate.unsqueeze(-1) for gate in self._gates(hidden[:, size:]))
        # Classes with the same gates have one mixed context, and one product. The others mix four
        # logits.
        context = _mix(latent.unsqueeze(2), g1[:, -1:], g2[:, -1:], g3[:, -1:]).squeeze(1)
        logits = linear_scores(context.to(latent.dtype), self.weight)
        if self.own_gates:
            each = linear_scores(latent, self.weight[self.own])
            own = _mix(each.unsqueeze(-1), g1[:, :-1], g2[:, :-1], g3[:, :-1]).squeeze(-1)
            logits = logits.index_copy(1, self.own, own)
        return logits if self.bias is None else logits + self.bias

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "own_gates": self.own_gates,
            "gate_features": self.gate_features,
            "latent_features": self.latent_features,
        }


def _mix(part: Tensor, g1: Tensor, g2: Tensor, g3: Tensor) -> Tensor:
    """sum_k pi_k part_k over dimension 1 of [N, 4, ., .], pi from the gates [N, ., 1]."""
    left = torch.lerp(part[:, 1].to(g2.dtype), part[:, 0].to(g2.dtype), g2)
    right = torch.lerp(part[:, 3].to(g3.dtype), part[:, 2].to(g3.dtype), g3)
    return torch.lerp(right, left, g1)
