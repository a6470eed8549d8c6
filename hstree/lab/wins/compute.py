"""Which of several models predicts the tokens of a text: hits and pairwise wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.lm.models import LanguageModel

from ..rank.matrix import model_log_prob

_ROWS = 128  # contexts that are read at once


@dataclass(frozen=True)
class PairwiseWins:
    """Counts of the tokens that models predict, for each pair of models.

    Attributes:
        models: names of the M models.
        tokens: number of predicted tokens, n.
        hits: int64 [M, M]; ``hits[i, j]`` is the number of tokens that model i predicts correctly
            and model j does not, ``hits[i, i]`` the number that model i predicts correctly.
        wins: int64 [M, M]; ``wins[i, j]`` is the number of tokens to which model i gives a higher
            probability than model j. The diagonal is 0.
    """

    models: tuple[str, ...]
    tokens: int
    hits: npt.NDArray[np.int64]
    wins: npt.NDArray[np.int64]


def pairwise_wins(models: Mapping[str, LanguageModel], tokens: npt.NDArray[Any]) -> PairwiseWins:
    """Count which of several models predict the tokens of a text.

    With y_t the token after the context c_t and y^_i(c) the most probable class of model i,

        hits[i, j] = #{t : y^_i(c_t) = y_t and y^_j(c_t) != y_t}
        hits[i, i] = #{t : y^_i(c_t) = y_t}
        wins[i, j] = #{t : P_i(y_t | c_t) > P_j(y_t | c_t)}.

    Each model reads the text once, as one stream from a zero state. Every token but the first is
    predicted.

    Ties: among equally probable classes, a model predicts the one with the lowest id. Equal
    probabilities of a token (in float32) are a win of neither model, so ``wins[i, j] + wins[j, i]``
    can be less than n.

    Args:
        models: at least two models with the same vocabulary, by name; used in evaluation mode.
        tokens: class ids, [n + 1], of any integer type; may be a memory map.

    Returns:
        The counts. Memory: O(M n) in addition to the models and one block of probabilities.

    Raises:
        ValueError: there are fewer than two models or tokens, or models differ in their number of
            classes.

    Example:
        >>> import hstree, torch
        >>> from hstree.lab import pairwise_wins
        >>> from hstree.lm.models import AWDLSTM, LanguageModel
        >>> heads = {"softmax": hstree.Softmax(16, 50), "gss": hstree.GSS(16, 50)}
        >>> models = {name: LanguageModel(AWDLSTM(50, 8, 16), head) for name, head in heads.items()}
        >>> found = pairwise_wins(models, torch.randint(50, (200,)).numpy())
        >>> found.tokens, found.wins.shape, bool(found.wins.sum() <= found.tokens)
        (199, (2, 2), True)
    """
    if len(models) < 2:
        raise ValueError(f"models: expected at least two, got {len(models)}")
    (first, size), *others = [(name, model.head.n_classes) for name, model in models.items()]
    for name, classes in others:
        if classes != size:
            raise ValueError(
                f"models: expected models with one vocabulary, but {first} has {size:,} classes "
                f"and {name} {classes:,}"
            )
    text = np.asarray(tokens)
    if len(text) < 2:
        raise ValueError(f"tokens: expected at least 2, got {len(text)}")
    read = [_predicted(model, text) for model in models.values()]
    correct = np.stack([found for found, _ in read]).astype(np.float64)  # for the matrix product
    hits = correct @ (1 - correct).T + np.diag(correct.sum(1))
    wins = [[int((a > b).sum()) for _, b in read] for _, a in read]
    return PairwiseWins(tuple(models), len(text) - 1, hits.astype(np.int64), np.array(wins))


@torch.no_grad()
def _predicted(
    model: LanguageModel, text: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """For each token but the first, [n]: whether the model predicts it, and its
    log-probability."""
    target = torch.from_numpy(text[1:].astype(np.int64))
    correct: list[Tensor] = []
    log_prob: list[Tensor] = []
    start = 0
    for block in model_log_prob(model, text[:-1]).blocks(_ROWS):
        own = target[start : start + len(block)].to(block.device)
        start += len(block)
        correct.append((block.argmax(1) == own).cpu())
        log_prob.append(block.gather(1, own[:, None])[:, 0].cpu())
    return torch.cat(correct).numpy(), torch.cat(log_prob).numpy()
