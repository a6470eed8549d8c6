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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hstree._numerics import dtype_name
from hstree._progress import track
from hstree.lm.cli import Argument, not_negative
from hstree.lm.report import legend, line_style, panels

from .rank import DTYPES, EPSILONS, effective_rank, press_threshold
from .report import Measurement, Report, record_table

Device = torch.device | str


class NoisePoint(NamedTuple):
    """Ranks of a matrix with noise of variance c / n^2: the measured Press rank, the one of
    :func:`expected_press_rank`, and effective ranks by epsilon."""

    c: float
    press_rank: int
    expected: float
    effective_ranks: dict[float, int]


def reconstructions(
    size: int,
    rank: int,
    repetitions: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: Device = "cpu",
    *,
    prune: bool = True,
) -> tuple[list[int], float]:
    """Prune a matrix [size, size] of independent standard normal elements to its ``rank`` largest
    singular values, then decompose and reconstruct it repeatedly, from these alone (``prune``) or
    from all, with the rounding errors that accumulate.

    Returns:
        Press ranks of the pruned matrix and after every repetition, and the relative change: the
        Frobenius norm of the last minus the first matrix, divided by that of the first.

    Raises:
        ValueError: unless 1 <= rank < size and repetitions >= 1.
    """
    _check_rank(rank, size)
    if repetitions < 1:
        raise ValueError(f"repetitions: expected at least 1, got {repetitions}")
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(normal.to(device, dtype))
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
    size: int,
    variances: Sequence[float],
    rank: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: Device = "cpu",
) -> list[NoisePoint]:
    """Ranks of a matrix [size, size] plus normal noise of variance c / size^2, for every c of
    ``variances``; the noise is the same for all, except for its scale.

    The matrix has random singular vectors and the singular values exp(-i / 2), 0 <= i < rank;
    of 10, its effective ranks are 7, 9 and 10 for epsilon 1e-3, 1e-4 and 1e-5.

    Raises:
        ValueError: unless 1 <= rank < size and every c is finite and at least 0.
    """
    _check_rank(rank, size)
    for c in variances:
        if not (math.isfinite(c) and c >= 0):
            raise ValueError(f"variances: expected finite numbers of at least 0, got {c}")
    options: Any = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    left, right = (torch.linalg.qr(torch.randn(size, rank, **options)).Q for _ in range(2))
    clean = (left * torch.exp(-torch.arange(rank, dtype=torch.float64) / 2)) @ right.T
    noise = torch.randn(size, size, **options)
    points = []
    for c in track(variances, "adding noise", len(variances)):
        s = torch.linalg.svdvals((clean + math.sqrt(c) / size * noise).to(device, dtype))
        effective = {e: effective_rank(s.double().cpu().numpy(), e) for e in EPSILONS}
        expected = expected_press_rank(size, c, rank, dtype)
        points.append(NoisePoint(c, _press_rank(s), expected, effective))
    return points


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


def _check_rank(rank: int, size: int) -> None:
    if not 1 <= rank < size:
        raise ValueError(f"rank: expected 1 to {size - 1} (below the size), got {rank}")


def measure(arguments: argparse.Namespace) -> Report:
    size, rank, seed, device = arguments.size, arguments.rank, arguments.seed, arguments.device
    if rank >= size:
        raise ValueError(f"--rank: expected a number below --size, {size}, got {rank}")
    repeated, n = [], arguments.repetitions
    for prune, dtype in itertools.product((True, False), DTYPES):
        ranks, change = reconstructions(size, rank, n, dtype, seed, device, prune=prune)
        pruned = "every time" if prune else "once"
        row: dict[str, Any] = {"dtype": dtype_name(dtype), "pruned": pruned, "repetitions": n}
        row |= {"lowest_press_rank": min(ranks), "highest_press_rank": max(ranks)}
        repeated.append(row | {"relative_change": change})
    variances = sorted(set(arguments.c or (10.0**power for power in range(-30, -4))))
    points = {dtype_name(d): noise_ranks(size, variances, rank, d, seed, device) for d in DTYPES}
    rows = [
        {"dtype": name, "c": p.c, "press_rank": p.press_rank, "expected": p.expected}
        | {f"effective_rank_{e:g}": rank for e, rank in p.effective_ranks.items()}
        for name, own in points.items()
        for p in own
    ]
    tables = [
        record_table("Decomposed and multiplied repeatedly", repeated, {"relative_change": ".1e"}),
        record_table("With normal noise of variance c / n^2", rows, {"expected": ",.0f"}),
    ]
    notes = [
        f"matrices of {size:,} x {size:,}, rank {rank}, seed {seed}",
        "singular values of the matrix before the noise: exp(-i / 2), i = 0, 1, ...; "
        "expected: by the quarter-circle law for the singular values of noise",
    ]
    data = {"size": size, "rank": rank, "seed": seed, "reconstructions": repeated, "noise": rows}
    pictures = {"noise": noise_picture(points)}
    return Report("Robustness of the Press rank", tables, notes, data, rows, pictures)


def noise_picture(points: Mapping[str, Sequence[NoisePoint]]) -> Any:
    """Press ranks, measured and expected by the quarter-circle law, and the effective ranks of the
    last dtype, against c. ``points``: by dtype, in increasing c."""
    figure, axes = panels(7.6, 5.6)
    for place, (name, every) in enumerate(points.items()):
        own, colour = [point for point in every if point.c > 0], line_style(place)["color"]
        c = [point.c for point in own]
        measured, law = [p.press_rank for p in own], [p.expected for p in own]
        axes.plot(c, measured, "o-", ms=4, lw=1, color=colour, label=f"Press rank, {name}")
        label = f"the same by the quarter-circle law, {name}"
        axes.plot(c, law, "o", mfc="none", ms=9, color=colour, label=label)
    for place, epsilon in enumerate(EPSILONS, start=len(points)):
        ranks, label = [p.effective_ranks[epsilon] for p in own], f"effective rank, {epsilon:g}"
        axes.plot(c, ranks, "s--", ms=4, lw=1, color=line_style(place)["color"], label=label)
    axes.set(xlabel="c, variance of the noise times n squared (log scale)", xscale="log")
    axes.set(ylabel="rank (log scale)", yscale="log")
    legend(figure, ncols=2)
    return figure


C = "n^2 times the variance of the noise; may be repeated (default: every power of ten from 1e-30 "
COMMAND = Measurement(
    "robustness",
    "Press rank under rounding and noise",
    measure,
    (
        Argument("--size", "n, rows and columns of the matrices", 1000),
        Argument("--rank", "r, number of singular values to keep", 10),
        Argument("--repetitions", "number of times that a matrix is decomposed and multiplied", 10),
        Argument("--c", f"{C}to 1e-5)", type=not_negative, action="append"),
        Argument("--seed", "seed of matrices and noise", 0, type=int),
    ),
    settings=("device", "threads"),
)
