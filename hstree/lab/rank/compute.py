r"""Singular values and ranks of a matrix of log-probabilities.

A softmax over d features without a bias has log-probabilities

.. math:: \log P = H W^\top - z 1^\top, \qquad H\ [N, d],\ W\ [V, d],\ z\ [N],

with the log-normalizer z of each row: the sum of a matrix of rank d and one of rank 1 has rank at
most d + 1. A bias b adds :math:`1 b^\top`, also of rank 1: at most d + 2, the 402 of published
models with 400 features. Mixtures and deformed logits have no such bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._numerics import dtype_name
from hstree.heads import Head, MixtureOfContexts, Softmax
from hstree.heads.functions import Identity
from hstree.lm._memory import available_memory, gibibytes
from hstree.lm.models import LanguageModel

from .matrix import BlockMatrix, model_log_prob

EPSILONS = (1e-3, 1e-4, 1e-5)
METHODS = ("auto", "svd", "gram", "qr")

_SVD_ELEMENTS = 1 << 24  # largest matrix for which auto chooses svd
_BLOCK_BYTES = 1 << 28  # of float64
_COLUMNS = 1024  # width of a strip of the Gram matrix


@dataclass(frozen=True)
class RankPlan:
    """The method for the singular values of a matrix: ``route`` is svd, gram or qr of
    :func:`matrix_rank`."""

    matrix: BlockMatrix
    route: str

    @property
    def memory(self) -> int:
        """Upper estimate of the peak memory in bytes, without model and text."""
        matrix, size = self.matrix, self.matrix.dtype.itemsize
        rows, columns = matrix.shape
        short, long = sorted(matrix.shape)
        block = _block(long, short, self.route)
        if self.route == "svd":  # LAPACK's copy, and a square workspace
            work = (long + 2 * short) * short * size
        elif self.route == "gram":  # a block, G, and LAPACK's copy
            work = 8 * (block + 2 * short) * short
        else:  # a block; it and R, and LAPACK's copy; the new R
            work = 8 * (3 * block + 3 * short) * short
        whole = self.route == "svd" or rows < columns
        read = rows + 3 * _block(rows, columns) if whole else 3 * block
        return work + read * columns * size + matrix.window_bytes

    def __str__(self) -> str:
        rows, columns = self.matrix.shape
        size = f"{rows:,} x {columns:,} {dtype_name(self.matrix.dtype)}"
        return f"{size}, {self.route}, {gibibytes(self.memory)} of memory"


@dataclass(frozen=True, eq=False)
class RankResult:
    """Singular values of a matrix, and ranks computed from them.

    Attributes:
        shape, dtype: of the matrix [m, n].
        route: svd, gram or qr of :func:`matrix_rank`.
        singular_values: float64 [min(m, n)], largest first.
        error_bound: bound on the absolute error of every singular value.
        press_error: the same bound for singular values of at least the Press threshold.
        press_threshold: see :func:`press_threshold`.
        press_rank: number of singular values above it.
        effective_ranks: :func:`effective_rank` for each epsilon.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    route: str
    singular_values: npt.NDArray[np.float64]
    error_bound: float
    press_error: float
    press_threshold: float
    press_rank: int
    effective_ranks: dict[float, int]

    @property
    def s_max(self) -> float:
        """The largest singular value."""
        return float(self.singular_values[0])


def press_threshold(shape: tuple[int, int], s_max: float, dtype: torch.dtype) -> float:
    r"""The threshold below which a singular value may be rounding error: :math:`\tfrac12 \sqrt{m +
    n + 1}\, s_{\max}\, \epsilon`, with the machine epsilon of ``dtype``.

    Press et al., Numerical Recipes, third edition, section 2.6.
    """
    return 0.5 * math.sqrt(sum(shape) + 1) * s_max * torch.finfo(dtype).eps


def effective_rank(singular_values: npt.ArrayLike, epsilon: float) -> int:
    r"""The smallest k with :math:`\sum_{i \le k} s_i^2 \ge (1 - \epsilon) \sum_i s_i^2`: the lowest
    rank of an approximation of the matrix whose squared relative error in the Frobenius norm is at
    most epsilon. 0 for a matrix of zeros.

    Raises:
        ValueError: epsilon is not between 0 and 1.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon: expected a number between 0 and 1, got {epsilon}")
    values = np.sort(np.asarray(singular_values, np.float64))[::-1]
    if not values.any():
        return 0
    energy = np.cumsum(np.square(values / values[0]))
    return int(np.searchsorted(energy, (1 - epsilon) * energy[-1])) + 1


def softmax_rank_bound(head: Head) -> int | None:
    """The bound d + 1, or d + 2 with a bias, of a head that is a softmax over d features; None for
    other heads. See the docstring of this module."""
    if isinstance(head, (Softmax, MixtureOfContexts)) and isinstance(head.function, Identity):
        return head.weight.shape[1] + 1 + (head.bias is not None)
    return None


def log_prob_rank(
    model: LanguageModel,
    tokens: npt.NDArray[Any],
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    method: str = "auto",
    epsilons: Sequence[float] = EPSILONS,
    max_memory: int | None = None,
) -> RankResult:
    """Compute the ranks of a model's log P matrix over a text, on the device of the model. For
    arguments and errors, see :func:`model_log_prob`, :func:`plan_rank` and :func:`matrix_rank`.

    Example:
        >>> import torch
        >>> from hstree.heads import Softmax
        >>> from hstree.lab import log_prob_rank, softmax_rank_bound
        >>> from hstree.lm.models import AWDLSTM, LanguageModel
        >>> backbone = AWDLSTM(n_classes=100, embedding_size=8, hidden_size=8)
        >>> model = LanguageModel(backbone, Softmax(8, 100))
        >>> text = torch.randint(100, (500,)).numpy()
        >>> result = log_prob_rank(model, text, dtype=torch.float64)
        >>> result.press_rank <= softmax_rank_bound(model.head)
        True
    """
    matrix = model_log_prob(model, tokens, rows, dtype)
    return matrix_rank(plan_rank(matrix, method, max_memory), epsilons)


def plan_rank(matrix: BlockMatrix, method: str = "auto", max_memory: int | None = None) -> RankPlan:
    """Choose the method and check that it fits into memory, without computing anything.

    Args:
        matrix: the matrix, [m, n].
        method: ``"svd"``, ``"gram"`` or ``"qr"`` of :func:`matrix_rank`, or ``"auto"``: svd for
            matrices of up to 2^24 elements; above, gram for float32, and for float64 qr or svd,
            whichever needs less memory.
        max_memory: limit in bytes; None: the memory available on the device.

    Raises:
        ValueError: an unknown method, gram for float64, or more memory than allowed.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if method == "gram" and matrix.dtype != torch.float32:
        raise ValueError(
            "method: gram resolves singular values down to about 1e-6 of the largest, far above "
            "the Press threshold of float64; expected qr or svd"
        )
    routes = [method]
    if method == "auto" and math.prod(matrix.shape) <= _SVD_ELEMENTS:
        routes = ["svd"]
    elif method == "auto":
        routes = ["gram"] if matrix.dtype == torch.float32 else ["qr", "svd"]
    plan = min((RankPlan(matrix, route) for route in routes), key=lambda plan: plan.memory)
    allowed = available_memory(matrix.device) if max_memory is None else max_memory
    if allowed is not None and plan.memory > allowed:
        raise ValueError(
            f"max_memory: expected enough for {plan}, but {gibibytes(allowed)} "
            f"{'are available' if max_memory is None else 'are allowed'}; fewer rows or another "
            "method may need less"
        )
    return plan


def matrix_rank(plan: RankPlan, epsilons: Sequence[float] = EPSILONS) -> RankResult:
    r"""Compute the singular values of a matrix [m, n], its Press rank and its effective ranks.

    ``svd``
        The SVD of LAPACK or cuSOLVER, of the whole matrix in its own dtype. Backward stable: the
        error bound is the Press threshold, the growth of rounding errors that Press et al. expect.
        Proven bounds are larger, and observed errors smaller.
    ``gram``
        For float32 matrices: square roots of the eigenvalues, clamped at 0, of :math:`G = A^\top A`
        (:math:`A A^\top` if m < n), summed block by block in float64, where products of float32
        numbers are exact. With b rows in a block and B blocks, the sums are accurate to
        :math:`\gamma_{b + B} \|A\|_F^2`, :math:`\gamma_k = k u / (1 - k u)`, u = 2^-53, and
        LAPACK's eigenvalues add an error of :math:`n\, u\, s_{\max}^2`. With the sum :math:`\delta`
        of both errors, a singular value s is accurate to
        :math:`\min(\sqrt\delta, \delta / s)`.
    ``qr``
        Singular values of R of a QR decomposition in float64, block by block: the current R,
        stacked on the next block, is decomposed again. Backward stable: the error bound is the
        Press threshold of float64, for any dtype of the matrix.

    Args:
        plan: result of :func:`plan_rank`; its matrix is read once.
        epsilons: epsilons of the effective ranks, each between 0 and 1.

    Raises:
        ValueError: an epsilon is out of range, or a number in the matrix is not finite.
    """
    for epsilon in epsilons:
        if not 0 < epsilon < 1:
            raise ValueError(f"epsilons: expected numbers between 0 and 1, got {epsilon}")
    matrix, route, delta = plan.matrix, plan.route, 0.0
    if route == "gram":
        values, delta = _gram_values(matrix)
    else:
        values = torch.linalg.svdvals(_whole(matrix) if route == "svd" else _triangle(matrix))
    found = values.double().cpu().numpy()
    threshold, in_float64 = (
        press_threshold(matrix.shape, float(found[0]), dtype)
        for dtype in (matrix.dtype, torch.float64)
    )
    bound = press_error = threshold if route == "svd" else in_float64
    if route == "gram":
        bound = math.sqrt(delta)
        press_error = min(bound, delta / threshold) if threshold else 0.0
    return RankResult(
        matrix.shape,
        matrix.dtype,
        route,
        singular_values=found,
        error_bound=bound,
        press_error=press_error,
        press_threshold=threshold,
        press_rank=int((found > threshold).sum()),
        effective_ranks={epsilon: effective_rank(found, epsilon) for epsilon in epsilons},
    )


def _block(length: int, width: int, route: str = "svd") -> int:
    """Number of rows of a block of a matrix [length, width]. The QR of R and a block as tall as R
    costs twice the QR of the block; shorter blocks would cost more."""
    rows = max(1, _BLOCK_BYTES // (8 * width))
    return min(length, max(rows, width) if route == "qr" else rows)


def _finite_blocks(matrix: BlockMatrix, size: int) -> Iterator[Tensor]:
    for block in matrix.blocks(size):
        if not block.isfinite().all():
            raise ValueError("matrix: expected finite numbers, got nan or infinity")
        yield block


def _whole(matrix: BlockMatrix) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    rest = whole
    for part in _finite_blocks(matrix, _block(*matrix.shape)):
        rest[: len(part)] = part
        rest = rest[len(part) :]
    return whole


def _tall_blocks(matrix: BlockMatrix, route: str) -> Iterator[Tensor]:
    """Blocks [b, min(m, n)] in float64 of the matrix or its transpose, whichever is taller."""
    rows, columns = matrix.shape
    if rows >= columns:
        for block in _finite_blocks(matrix, _block(rows, columns, route)):
            yield block.double()
    else:
        for part in torch.split(_whole(matrix), _block(columns, rows, route), dim=1):
            yield part.double().T


def _gram_values(matrix: BlockMatrix) -> tuple[Tensor, float]:
    """The singular values of the matrix, and delta of :func:`matrix_rank`."""
    n = min(matrix.shape)
    gram = torch.zeros(n, n, dtype=torch.float64, device=matrix.device)
    longest = number = 0
    for block in _tall_blocks(matrix, "gram"):
        for start in range(0, n, _COLUMNS):  # the lower triangle, in strips
            stop = min(start + _COLUMNS, n)
            gram[start:stop, :stop].addmm_(block[:, start:stop].T, block[:, :stop])
        longest, number = max(longest, len(block)), number + 1
    unit = 2.0**-53
    products = (longest + number) * unit
    frobenius = float(gram.diagonal().sum())
    eigenvalues = torch.linalg.eigvalsh(gram).flip(0)
    delta = products / (1 - products) * frobenius + n * unit * float(eigenvalues[0])
    return eigenvalues.clamp_(min=0).sqrt_(), delta


def _triangle(matrix: BlockMatrix) -> Tensor:
    r = torch.empty(0, min(matrix.shape), dtype=torch.float64, device=matrix.device)
    for block in _tall_blocks(matrix, "qr"):
        r = torch.linalg.qr(torch.cat((r, block)), mode="r").R
    return r
