r"""Robustness of the Press rank of a matrix.

Two experiments on n x n matrices of rank r. The first decomposes and multiplies a matrix
repeatedly. This leaves rounding errors, which the Press threshold is designed to ignore; if they
accumulate, it eventually counts them. The second adds noise, which the threshold does not ignore:
independent normal elements of variance c / n^2 have singular values of up to :math:`2 \sqrt{c /
n}`, distributed by the quarter-circle law (Marchenko and Pastur, 1967). The first of them pass the
threshold :math:`\tfrac12 \sqrt{2 n + 1}\, s_{\max}\, \epsilon` once c exceeds :math:`(n\,
s_{\max}\, \epsilon)^2 / 8`, and nine in ten at 160 times that, although their share of the matrix's
energy is negligible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hstree._progress import track

from ..rank.compute import EPSILONS, effective_rank, press_threshold


@dataclass(frozen=True)
class NoisePoint:
    """Ranks of a matrix with noise of variance c / n^2: the measured Press rank, the one of
    :func:`expected_press_rank`, and effective ranks by epsilon."""

    c: float
    press_rank: int
    expected: float
    effective_ranks: dict[float, int]


def reconstructions(
    size: int,
    rank: int = 10,
    repetitions: int = 10,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    prune: bool = True,
) -> tuple[list[int], float]:
    """Prune a matrix of independent standard normal elements to its largest singular values, then
    repeatedly decompose and reconstruct it.

    Args:
        size, rank: size n of the n x n matrix, and number r of singular values to keep.
        repetitions: number of decompositions.
        dtype, device: dtype and device of the computation.
        seed: seed of the matrix.
        prune: whether to reconstruct from the r largest singular values each time; otherwise from
            all of them, including rounding errors, which then accumulate.

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
    rank: int = 10,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    epsilons: Sequence[float] = EPSILONS,
) -> list[NoisePoint]:
    """Compute ranks of a matrix of rank r plus normal noise of variance c / n^2, for every c.

    The matrix has random singular vectors and the singular values exp(-i / 2), i = 0 .. r - 1; with
    r = 10 its effective ranks are 7, 9 and 10 for epsilon 1e-3, 1e-4 and 1e-5. The noise is the
    same for every c, except for its scale.

    Args:
        size, rank, dtype, device: see :func:`reconstructions`.
        variances: values of the scaled variance, c.
        seed: seed of matrix and noise.
        epsilons: epsilons of the effective ranks.

    Raises:
        ValueError: unless 1 <= rank < size and every c is finite and at least 0.
    """
    _check_rank(rank, size)
    for c in variances:
        if not (math.isfinite(c) and c >= 0):
            raise ValueError(f"variances: expected finite numbers of at least 0, got {c}")
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q
        for _ in range(2)
    )
    clean = (left * torch.exp(-torch.arange(rank, dtype=torch.float64) / 2)) @ right.T
    noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
    points = []
    for c in track(variances, "adding noise", len(variances)):
        s = torch.linalg.svdvals((clean + math.sqrt(c) / size * noise).to(device, dtype))
        expected = expected_press_rank(size, c, rank, dtype)
        values = s.double().cpu().numpy()
        effective = {epsilon: effective_rank(values, epsilon) for epsilon in epsilons}
        points.append(NoisePoint(c, _press_rank(s), expected, effective))
    return points


def expected_press_rank(size: int, c: float, rank: int, dtype: torch.dtype) -> float:
    r"""Number of singular values of n x n noise of variance c / n^2 above the Press threshold of a
    matrix with s_max = 1, at least ``rank``.

    As n grows, the share of them below :math:`x \sqrt{c / n}` becomes
    :math:`\tfrac1\pi \left(\tfrac{x}{2} \sqrt{4 - x^2} + 2 \arcsin \tfrac{x}{2}\right)`, x in
    [0, 2].
    """
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
