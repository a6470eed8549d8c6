r"""The rank of a language model's log-probabilities, log P [contexts, words].

A softmax over d features has

    log P = H W^T + 1 b^T - z 1^T,    H [N, d], W [V, d], z [N] the log-normalizers,

of rank at most d + 1, or d + 2 with a bias b: 402 in published models with 400 features. Mixtures
and functions of the logits have no such bound (Yang et al., ICLR 2018). The Press rank of a matrix
[m, n] counts the singular values above 1/2 sqrt(m + n + 1) s_max eps, more than rounding errors
should cause (Press et al., Numerical Recipes, 2.6). Its effective rank is the least k whose k
largest singular values have all but a share epsilon of the sum of squares (Parthiban et al., AAAI
2021).

Singular values of a float32 matrix are roots of the eigenvalues of its Gram matrix, which is summed
block by block in float64, where products of float32 are exact: their error is far below the Press
threshold. A float64 matrix, of a model that computes in float64, is decomposed as a whole.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._numerics import dtype_name
from hstree.heads import Head, Softmax
from hstree.lm.cli import Argument
from hstree.lm.cli import count as whole
from hstree.lm.model import LanguageModel, read_stream
from hstree.lm.report import legend, line_style, panels, plain

from .report import DEVICE, SPLIT, TEXT, Measurement, Report, corpus_of, load_runs, record_table

DTYPES = (torch.float32, torch.float64)
EPSILONS = (1e-3, 1e-4, 1e-5)
_WINDOW_BYTES = 1 << 25  # of log-probabilities that a model computes at once
_PART_ROWS = 2048  # that are multiplied in float64 at once


@dataclass(frozen=True, eq=False)
class RankResult:
    """Singular values of a matrix, and ranks computed from them."""

    shape: tuple[int, int]
    dtype: torch.dtype
    singular_values: npt.NDArray[np.float64]  # [min(m, n)], largest first
    press_threshold: float
    press_rank: int
    effective_ranks: dict[float, int]  # by epsilon


def press_threshold(shape: tuple[int, int], s_max: float, dtype: torch.dtype) -> float:
    """1/2 sqrt(m + n + 1) s_max eps: singular values up to it may be rounding errors of a matrix of
    this dtype."""
    return 0.5 * math.sqrt(sum(shape) + 1) * s_max * torch.finfo(dtype).eps


def effective_rank(singular_values: npt.ArrayLike, epsilon: float) -> int:
    """The least k with sum_{i <= k} s_i^2 >= (1 - epsilon) sum_i s_i^2; 0 for a matrix of zeros."""
    values = np.sort(np.asarray(singular_values, np.float64))[::-1]
    if not values.any():
        return 0
    energy = np.cumsum(np.square(values / values[0]))
    return int(np.searchsorted(energy, (1 - epsilon) * energy[-1])) + 1


def softmax_rank_bound(head: Head) -> int | None:
    """The bound d + 1, or d + 2 with a bias, of a head that is a softmax over d features; None for
    other heads."""
    if isinstance(head, Softmax) and head.has_linear_scores:
        return head.weight.shape[1] + 1 + (head.bias is not None)
    return None


def log_prob_rank(
    model: LanguageModel,
    tokens: npt.NDArray[Any],
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> RankResult:
    """The ranks of a model's log P over the first ``rows`` contexts of a text [n] of class ids
    (None: all), read as one stream: row i is of the word after the first i + 1 tokens. In float64 a
    copy of the model computes, since log-probabilities rounded to float32 have full rank.

    Raises:
        ValueError: rows are out of range, or a log-probability is not finite.

    Example:
        >>> import torch
        >>> from hstree.heads import Softmax
        >>> from hstree.lab.rank import log_prob_rank, softmax_rank_bound
        >>> from hstree.lm.model import AWDLSTM, LanguageModel
        >>> backbone = AWDLSTM(n_classes=100, embedding_size=8, hidden_size=8)
        >>> model = LanguageModel(backbone, Softmax(8, 100))
        >>> text = torch.randint(100, (500,)).numpy()
        >>> result = log_prob_rank(model, text, dtype=torch.float64)
        >>> result.press_rank <= softmax_rank_bound(model.head)
        True
    """
    rows = len(tokens) if rows is None else rows
    if not 1 <= rows <= len(tokens):
        raise ValueError(f"rows: expected 1 to {len(tokens):,} (the tokens), got {rows:,}")
    return matrix_rank(log_prob_blocks(model, tokens[:rows], dtype))


@torch.no_grad()
def log_prob_blocks(
    model: LanguageModel, tokens: npt.NDArray[Any], dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """log P after each token of a text, read as one stream: blocks [b, V] of this dtype."""
    same = model.backbone.embedding.weight.dtype == dtype
    reader = model if same else copy.deepcopy(model).to(dtype)
    length = max(1, min(128, _WINDOW_BYTES // (model.head.n_classes * dtype.itemsize)))
    for hidden in read_stream(reader, tokens, length=length):
        yield reader.head.log_prob(hidden).to(dtype)


def matrix_rank(blocks: Iterable[Tensor]) -> RankResult:
    """The ranks of a matrix [m, n] given as blocks [b, n] of its rows, all float32 or all float64.
    One of fewer rows than columns, or in float64, is decomposed as a whole in float64, any other
    from its Gram matrix [n, n]. Raises ValueError for a number that is not finite."""
    gram, kept, rows = None, list[Tensor](), 0
    for block in blocks:
        if not block.isfinite().all():
            raise ValueError("matrix: expected finite numbers, got nan or infinity")
        rows, width, dtype = rows + len(block), block.shape[1], block.dtype
        kept.append(block)
        if dtype == torch.float32 and sum(map(len, kept)) >= width:
            gram, kept = _add(gram, kept), []
    if gram is None:
        values = torch.linalg.svdvals(torch.cat(kept).double())
    else:
        gram = _add(gram, kept)
        values = torch.linalg.eigvalsh(gram).flip(0).clamp_(min=0).sqrt_()
    found, shape = values.cpu().numpy(), (rows, width)
    threshold = press_threshold(shape, float(found[0]), dtype)
    press = int((found > threshold).sum())
    effective = {epsilon: effective_rank(found, epsilon) for epsilon in EPSILONS}
    return RankResult(shape, dtype, found, threshold, press, effective)


def _add(gram: Tensor | None, blocks: list[Tensor]) -> Tensor:
    """The sum of a Gram matrix and that of further rows."""
    for block in torch.split(torch.cat(blocks), _PART_ROWS) if blocks else ():
        wide = block.double()
        gram = wide.T @ wide if gram is None else gram.addmm_(wide.T, wide)
    assert gram is not None
    return gram


def measure(arguments: argparse.Namespace) -> Report:
    results, notes = {}, []
    for name, run in load_runs(arguments).items():
        split, corpus = arguments.split, corpus_of(run, arguments)
        tokens, dtype = getattr(corpus, split), getattr(torch, arguments.dtype)
        try:
            results[name] = found = log_prob_rank(run.model, tokens, arguments.rows, dtype)
        except ValueError as error:
            raise ValueError(f"{name}, {split} part: {error}") from None
        where = f"{found.shape[0]:,} contexts of the {split} part of {corpus.name}"
        bound = softmax_rank_bound(run.model.head)
        most = "" if bound is None else f"; such a softmax has rank at most {bound}"
        notes.append(f"{name}: head {run.model.head.name}, {where}{most}")
    records = [
        {"matrix": name, "dtype": dtype_name(r.dtype), "rows": r.shape[0], "columns": r.shape[1]}
        | {"largest_singular_value": float(r.singular_values[0])}
        | {"press_threshold": r.press_threshold, "press_rank": r.press_rank}
        | {f"effective_rank_{e:g}": rank for e, rank in r.effective_ranks.items()}
        for name, r in results.items()
    ]
    table = record_table("Press rank and effective ranks", records, {"press_threshold": ".3g"})
    data = {"singular_values": {name: r.singular_values for name, r in results.items()}}
    pictures = {"spectrum": rank_picture(results)}
    return Report("Ranks of log-probability matrices", [table], notes, data, pictures)


def rank_picture(results: Mapping[str, RankResult]) -> Any:
    """The singular values against their index, as shares of the largest, with the Press
    thresholds."""
    figure, axes = panels(6.5, 4.6 + 0.2 * len(results))
    for place, (name, r) in enumerate(results.items()):
        style, index = line_style(place), np.arange(1, len(r.singular_values) + 1)
        largest = r.singular_values[0] or 1
        share = r.singular_values / largest
        label = f"{plain(name)}: Press rank {r.press_rank:,}"
        axes.plot(index, np.where(share > 0, share, np.nan), **style, lw=1.4, label=label)
        axes.axhline(r.press_threshold / largest, color=style["color"], lw=0.8, ls=":")
    axes.set(ylabel="singular value / largest; dotted: Press threshold", ylim=(1e-9, 2))
    axes.set(xscale="log", yscale="log", xlabel="index of the singular value")
    legend(figure)
    return figure


_DTYPE = "dtype of the matrix and the Press threshold; with float64, models compute in it too"
COMMAND = Measurement(
    "rank",
    "rank of the log-probability matrix",
    measure,
    (
        *(SPLIT, *TEXT, *DEVICE),
        Argument("--rows", "only the first N contexts (default: all)", type=whole),
        Argument("--dtype", _DTYPE, "float32", choices=("float32", "float64")),
    ),
    runs="+",
)
