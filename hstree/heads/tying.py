"""Heads that read the weight of another module as their own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class TyingError(ValueError):
    """A head cannot be tied to an embedding. Its message begins with ``embedding:``.

    Attributes:
        expected: shape of the weight that the head reads, if that of the embedding is another.
    """

    def __init__(self, message: str, expected: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.expected = expected


class HasWeight(Protocol):
    """A module whose weight [V, D] a head can read as its own, such as :class:`torch.nn.Embedding`,
    :class:`torch.nn.Linear` and :class:`hstree.Softmax`."""

    @property
    def weight(self) -> Tensor: ...


def weight_to_tie(embedding: HasWeight, n_classes: int, in_features: int) -> Tensor:
    """The weight of ``embedding``.

    Raises:
        ValueError: if it is not a tensor [n_classes, in_features].
    """
    weight, expected = getattr(embedding, "weight", None), (n_classes, in_features)
    if not isinstance(weight, Tensor):
        raise TyingError(
            f"embedding: expected a module with a weight {expected} to tie to, got "
            f"{type(embedding).__name__}"
        )
    if tuple(weight.shape) != expected:
        raise TyingError(
            f"embedding: expected a weight of shape {expected} to tie to, "
            f"got {tuple(weight.shape)}",
            expected,
        )
    return weight


def tied_names(head: nn.Module, embedding: HasWeight) -> list[str]:
    """Names of the parameters of the head that are the weight of ``embedding``."""
    weight = embedding.weight
    return [name for name, parameter in head.named_parameters() if parameter is weight]
