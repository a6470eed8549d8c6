"""How often a word that is drawn from a draft head is accepted."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.heads import Head
from hstree.ops import default_chunk_rows


def expected_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    r"""Probability that speculative sampling accepts a class drawn from the draft.

    .. math::
        \sum_y \min(p(y), q(y)) = 1 - \tfrac{1}{2} \sum_y |p(y) - q(y)|

    for the target's distribution p and the draft's distribution q: a class drawn from q is accepted
    with probability min(1, p(y) / q(y)).

    Args:
        target: log-probabilities of the target, log p [..., V].
        draft: log-probabilities of the draft, log q [..., V].

    Returns:
        The probability of acceptance [...], between 0 and 1.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> import torch
        >>> from hstree.decoding import expected_acceptance
        >>> target, draft = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.6, 0.4, 0.0]).log()
        >>> round(expected_acceptance(target, draft).item(), 4)
        0.8

    Source: Leviathan, Kalman and Matias, Fast inference from transformers via speculative decoding,
    ICML 2023, section 3.
    """
    if target.shape != draft.shape:
        raise ValueError(f"draft: expected shape {list(target.shape)}, got {list(draft.shape)}")
    return torch.minimum(target, draft).exp().sum(-1)


def check_draft(draft: Head, target: Head) -> None:
    """Raises ValueError unless the draft reads the features and gives the classes of the target."""
    for name in ("in_features", "n_classes"):
        expected, got = getattr(target, name), getattr(draft, name)
        if got != expected:
            raise ValueError(
                f"draft: expected {name} = {expected}, that of the model's head, got {got}"
            )


class Agreement(NamedTuple):
    """How close the distribution of a draft is to that of its target, for each context.

    Attributes:
        acceptance: see :func:`expected_acceptance`, [...].
        divergence: Kullback-Leibler divergence from the target p to the draft q,
            sum_y p(y) log(p(y) / q(y)), in nats, [...]. The perplexity of the draft on words of the
            target is exp(divergence) times that of the target.

    Example:
        >>> import torch, hstree
        >>> from hstree.decoding import agreement
        >>> head, hidden = hstree.Softmax(16, 100), torch.randn(3, 16)
        >>> agreement(head, head, hidden).acceptance.round(decimals=4)
        tensor([1., 1., 1.])
    """

    acceptance: Tensor
    divergence: Tensor


@torch.no_grad()
def agreement(target: Head, draft: Head, hidden: Tensor) -> Agreement:
    """Compare a draft with its target on contexts, a few at a time: the log-probabilities of all
    classes are never held for all contexts.

    Args:
        target: the head whose distribution is wanted.
        draft: the head that words are drawn from, over the same V classes.
        hidden: context vectors [..., D].

    Raises:
        ValueError: if the sizes of the heads differ.

    Example:
        >>> import torch, hstree
        >>> from hstree.decoding import agreement
        >>> target = hstree.Softmax(16, 2000)
        >>> draft = hstree.TreeEnsemble.from_linear(target, tied=True, root=64)
        >>> acceptance, divergence = agreement(target, draft, torch.randn(10, 16))
        >>> bool(acceptance.min() > 0.9), bool(divergence.max() < 0.1)
        (True, True)
    """
    check_draft(draft, target)
    rows, parts = hidden.flatten(0, -2), []
    for chunk in torch.split(rows, default_chunk_rows(hidden, 4 * target.n_classes)):
        p, q = target.log_prob(chunk), draft.log_prob(chunk)
        divergence = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        parts.append(torch.stack([expected_acceptance(p, q), divergence]))
    acceptance, divergence = torch.cat(parts, 1).view(2, *hidden.shape[:-1])
    return Agreement(acceptance, divergence)
