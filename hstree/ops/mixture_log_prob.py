"""Log-probabilities of a mixture of softmaxes in chunks of rows:
``torch.ops.hstree.mixture_log_prob``, written in Python with
``torch.ops.hstree.target_log_softmax``."""

from __future__ import annotations

import torch
from torch import Tensor

from hstree._numerics import autocasts, sum_dtype
from hstree.ops._chunked_loss import (
    ChunkedLoss,
    check_decoder,
    check_offset,
    keeps_low,
)
from hstree.ops._mixture_chunks import Problem, empty_gradients, run, tile_rows
from hstree.ops.logit_function import IDENTITY, LogitFunction

CHUNK_BYTES = {"cpu": 2**24, "cuda": 3 * 2**27}
"""Default size of a chunk of logits, by device."""


def mixture_log_prob(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    function: LogitFunction = IDENTITY,
    *,
    offset: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Log-probability of each target under a mixture of softmax(f(W z + b)), and the loss.

    .. math::
        \log p_n = \log \sum_k \pi_{nk}\, \mathrm{softmax}(f(W z_{nk} + b))_{y_n}

    Equivalent to, for targets in [0, V) and a mean::

        logits = function(F.linear(latent, weight, bias).float())        # [N, K, V]
        log_prob = (log_prior[:, :, None] + logits.log_softmax(-1)).logsumexp(1)
        log_prob = log_prob.gather(1, target[:, None]).squeeze(1)
        loss = -(row_weight * log_prob).sum() / row_weight.sum()

    Memory in addition to the arguments and the gradients: O(chunk_rows K V); in 16 bits on a GPU
    also 2 V min(N K, 4 D) bytes, or 2 V min(N K, 2 D) with a weight in float32, where that is more
    rows than a chunk has. The gradients of a sum or mean are computed with the loss, with three
    matrix products for a component in total. Logits of bfloat16 and float16 are float32: on a CPU
    the weight is cast in small blocks. Deterministic if the matrix products are.

    Args:
        latent: component vectors, z [N, K, D]: float32, float64, bfloat16 or float16.
        log_prior: log-priors of the components, log pi [N, K]; None for K = 1.
        weight: class vectors, W [V, D], dtype of ``latent``; float32 too for a ``latent`` of 16
            bits, as under autocast: products round it, and its gradient is float32.
        bias: class biases, b [V], or None.
        target: classes, [N] int64 in [0, V), or -1 for a log-probability of 0 without gradient;
            :func:`mark_targets` gives them.
        function: increasing function f; default: the identity.
        offset: number added to the logit of each class, [V], but not to that of a row's target;
            without gradient. -inf leaves a class out. The sampled softmax corrects by it for how
            often a class is drawn. None: all 0.
        row_weight: factor of each row in the loss, [N], without gradient; the mean divides by the
            sum of the factors. None: all 1.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``.
        chunk_rows: number of rows whose K V logits are held at a time; None: as many as fit into
            16 MiB on a CPU or 384 MiB on a GPU, but at least 256 / K, and D / (2 K) in float32 on a
            GPU.

    Returns:
        log_prob [N] and the reduced loss. A gradient through the loss needs no further product
        unless ``reduction`` is ``"none"``. A gradient through log_prob computes the logits again.

    Raises:
        ValueError: for a wrong shape, dtype or reduction, or ``chunk_rows`` below 1.
        RuntimeError: for a bad table of ``function``, or tensors on different devices.

    Example:
        >>> import torch
        >>> from hstree.ops import mixture_log_prob
        >>> latent, weight = torch.zeros(2, 1, 8), torch.randn(4, 8)
        >>> mixture_log_prob(latent, None, weight, None, torch.tensor([3, -1]))
        (tensor([-1.3863,  0.0000]), tensor(1.3863))
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected one of none, sum, mean, got {reduction!r}")
    if autocasts(latent.device) and latent.dtype != torch.float64:
        low = torch.get_autocast_dtype(latent.device.type)
        latent, weight = latent.to(low), weight if weight.dtype == torch.float32 else weight.to(low)
    _check(latent, log_prior, weight, bias, target, offset, row_weight)
    if chunk_rows is None:
        _, components, features = latent.shape
        # So many rows keep products near their peak. On a GPU each chunk in float32 reads and
        # writes the gradient of the weight, which then takes less time than the products.
        least = features // 2 if latent.is_cuda and not keeps_low(latent) else 256
        tile = tile_rows(components) if latent.is_cuda else 1
        chunk_rows = default_chunk_rows(latent, components * weight.shape[0]) // tile * tile
        chunk_rows = max(chunk_rows, -(-least // (components * tile)) * tile)
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    sums = sum_dtype(latent.dtype)
    log_prior, bias, table = (
        None if t is None else t.to(sums) for t in (log_prior, bias, function.table)
    )
    offset = None if offset is None else offset.detach().to(sums)
    c, k, radius = function.c, function.k, function.radius
    problem = Problem(
        latent, log_prior, weight, bias, table, target, offset, c, k, radius, chunk_rows
    )
    return LOSS(problem, row_weight, reduction)


def default_chunk_rows(latent: Tensor, columns: int) -> int:
    """Number of rows of ``columns`` logits in a chunk on the device of ``latent``, at least 1.

    Args:
        latent: a tensor of the device and dtype in question.
        columns: number of logits in a row.

    Example:
        >>> import torch
        >>> from hstree.ops import default_chunk_rows
        >>> default_chunk_rows(torch.empty(1400, 400), columns=10_000)
        419
    """
    budget = CHUNK_BYTES.get(latent.device.type, CHUNK_BYTES["cpu"])
    return max(1, budget // max(1, columns * sum_dtype(latent.dtype).itemsize))


def _check(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    offset: Tensor | None,
    row_weight: Tensor | None,
) -> None:
    if latent.dim() != 3:
        raise ValueError(f"latent: expected shape [N, K, D], got {tuple(latent.shape)}")
    rows, components, _ = latent.shape
    check_decoder("latent", latent, weight, bias, target, row_weight)
    check_offset(offset, weight)
    if log_prior is None and components != 1:
        raise ValueError(f"log_prior: expected shape [{rows}, {components}], got None")
    if log_prior is not None and log_prior.shape != latent.shape[:2]:
        raise ValueError(
            f"log_prior: expected shape [{rows}, {components}], got {tuple(log_prior.shape)}"
        )


LOSS = ChunkedLoss("mixture_log_prob", Problem, run, empty_gradients)
