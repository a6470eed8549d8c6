r"""Robustness of the Press rank against rounding and noise, in float32 and float64.

Two experiments on n x n matrices of rank r (Parthiban et al., AAAI 2021). First, a matrix is
decomposed and multiplied repeatedly, pruned to r singular values every time or only once: rounding
errors should not change its Press rank. Then normal noise of variance c / n^2 is added. Its
singular values follow the quarter-circle law (Marchenko and Pastur, 1967):

    share of them below x sqrt(c / n) = (x / 2 sqrt(4 - x^2) + 2 arcsin(x / 2)) / pi

so the first of them pass the Press threshold 1/2 sqrt(2 n + 1) s_max eps once c exceeds
(n s_max eps)^2 / 8, and nine in ten at 160 times that, although their share of the energy is
negligible: the effective ranks stay.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hstree._numerics import dtype_name
from hstree._progress import track
from hstree.lm.cli import Argument
from hstree.lm.report import legend, line_style, panels

from .rank import DTYPES, EPSILONS, effective_rank, press_threshold
from .report import Measurement, Report, record_table

VARIANCES = [10.0**power for power in range(-30, -4)]  # c


def reconstructions(
    size: int, rank: int, repetitions: int, dtype: torch.dtype, seed: int = 0, prune: bool = True
) -> tuple[list[int], float]:
    """Prune a matrix [size, size] of independent standard normal elements to its ``rank`` largest
    singular values, then decompose and reconstruct it repeatedly, from these alone (``prune``) or
    from all, with the rounding errors that accumulate.

    Returns:
        Press ranks of the pruned matrix and after every repetition, and the relative change: the
        Frobenius norm of the last minus the first matrix, divided by that of the first.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(normal.to(dtype))
    matrix = first = (u[:, :rank] * s[:rank]) @ vh[:rank]
    keep = rank if prune else size
    ranks = []
    for _ in track(range(repetitions), "reconstructing", repetitions):
        u, s, vh = torch.linalg.svd(matrix)
        ranks.append(_press_rank(s))
        matrix = (u[:, :keep] * s[:keep]) @ vh[:keep]
    ranks.append(_press_rank(torch.linalg.svdvals(matrix)))
    return ranks, float((matrix - first).norm() / first.norm())


def noise_ranks(
    size: int, variances: Sequence[float], rank: int, dtype: torch.dtype, seed: int = 0
) -> list[dict[str, Any]]:
    """Ranks of a matrix [size, size] plus normal noise of variance c / size^2, for every c of
    ``variances``; the noise is the same for all, except for its scale. A row for each c:
    ``press_rank``; what is ``expected`` of it, see ``expected_press_rank``;
    ``effective_rank_EPSILON``.

    The matrix has random singular vectors and the singular values exp(-i / 2), 0 <= i < rank;
    of 10, its effective ranks are 7, 9 and 10 for epsilon 1e-3, 1e-4 and 1e-5.
    """
    options: Any = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    left, right = (torch.linalg.qr(torch.randn(size, rank, **options)).Q for _ in range(2))
    clean = (left * torch.exp(-torch.arange(rank, dtype=torch.float64) / 2)) @ right.T
    noise = torch.randn(size, size, **options)
    rows = []
    for c in track(variances, "adding noise", len(variances)):
        s = torch.linalg.svdvals((clean + math.sqrt(c) / size * noise).to(dtype))
        row = {"dtype": dtype_name(dtype), "c": c, "press_rank": _press_rank(s)}
        row["expected"] = expected_press_rank(size, c, rank, dtype)
        values = s.double().numpy()
        rows.append(row | {f"effective_rank_{e:g}": effective_rank(values, e) for e in EPSILONS})
    return rows


def expected_press_rank(size: int, c: float, rank: int, dtype: torch.dtype) -> float:
    """Number of singular values of noise of variance c / size^2 above the Press threshold of a
    matrix with s_max = 1, by the quarter-circle law; at least ``rank``."""
    if c == 0:
        return float(rank)
    x = min(2.0, press_threshold((size, size), 1.0, dtype) / math.sqrt(c / size))
    below = (x / 2 * math.sqrt(4 - x * x) + 2 * math.asin(x / 2)) / math.pi
    return max(float(rank), size * (1 - below))


def _press_rank(s: Tensor) -> int:
    return int((s > press_threshold((len(s), len(s)), float(s[0]), s.dtype)).sum())


def measure(arguments: argparse.Namespace) -> Report:
    size, rank, seed = arguments.size, arguments.rank, arguments.seed
    if not rank < size:
        raise ValueError(f"--rank: expected a number below --size, {size}, got {rank}")
    repeated, n = [], arguments.repetitions
    for prune, dtype in itertools.product((True, False), DTYPES):
        ranks, change = reconstructions(size, rank, n, dtype, seed, prune)
        pruned = "every time" if prune else "once"
        row: dict[str, Any] = {"dtype": dtype_name(dtype), "pruned": pruned, "repetitions": n}
        row |= {"lowest_press_rank": min(ranks), "highest_press_rank": max(ranks)}
        repeated.append(row | {"relative_change": change})
    rows = [r for d in DTYPES for r in noise_ranks(size, VARIANCES, rank, d, seed)]
    tables = [
        record_table("Decomposed and multiplied repeatedly", repeated, {"relative_change": ".1e"}),
        record_table("With normal noise of variance c / n^2", rows, {"expected": ",.0f"}),
    ]
    notes = [
        f"matrices of {size:,} x {size:,}, rank {rank}, seed {seed}",
        "singular values of the matrix before the noise: exp(-i / 2), i = 0, 1, ...; "
        "expected: by the quarter-circle law for the singular values of noise",
    ]
    pictures = {"noise": noise_picture(rows)}
    return Report("Robustness of the Press rank", tables, notes, pictures=pictures)


def noise_picture(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Press ranks, measured and expected by the quarter-circle law, and the effective ranks of the
    last dtype, against c."""
    figure, axes = panels(7.6, 5.6)
    curves = []
    for dtype in map(dtype_name, DTYPES):
        curves += [("press_rank", dtype, "o-", f"Press rank, {dtype}")]
        curves += [("expected", dtype, "s", f"the same by the quarter-circle law, {dtype}")]
    curves += [(f"effective_rank_{e:g}", dtype, "x--", f"effective rank, {e:g}") for e in EPSILONS]
    for place, (key, dtype, marker, label) in enumerate(curves):
        ranks = [row[key] for row in rows if row["dtype"] == dtype]
        colour = line_style(place)["color"]
        axes.plot(VARIANCES, ranks, marker, ms=4, mfc="none", color=colour, label=label)
    axes.set(xlabel="c, variance of the noise times n squared (log scale)", xscale="log")
    axes.set(ylabel="rank (log scale)", yscale="log")
    legend(figure, ncols=2)
    return figure


COMMAND = Measurement(
    "robustness",
    "Press rank under rounding and noise",
    measure,
    (
        Argument("--size", "n, rows and columns of the matrices", 1000),
        Argument("--rank", "r, number of singular values to keep", 10),
        Argument("--repetitions", "number of times that a matrix is decomposed and multiplied", 10),
        Argument("--seed", "seed of matrices and noise", 0, type=int),
    ),
)
