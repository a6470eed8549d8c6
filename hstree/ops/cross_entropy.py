"""Cross-entropy of linear + pointwise f + softmax, and of mixtures of these, in chunks of rows."""

from __future__ import annotations

from torch import Tensor

from hstree._checks import mark_targets
from hstree.ops.logit_function import IDENTITY, LogitFunction
from hstree.ops.mixture_log_prob import mixture_log_prob


def monotone_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    function: LogitFunction = IDENTITY,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    r"""Cross-entropy of softmax(f(W h + b)), without holding the logits of all rows.

    Equivalent to::

        logits = function(F.linear(hidden, weight, bias).float())
        F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    Memory in addition to the arguments and the gradients: O(chunk_rows V), or O(N V) in forward
    mode; in 16 bits on a GPU also 2 V min(N, 4 D) bytes. The gradients of a sum or mean are
    computed with the loss, with three matrix products in total. With ``"none"`` the backward pass
    computes the logits again. Logits of bfloat16 and float16 are float32: on a CPU the weight is
    cast in small blocks. Deterministic if the matrix products are.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: class vectors, W [V, D], dtype of ``hidden``.
        bias: class biases, b [V], or None.
        target: classes, [N] int64, in [0, V) or ``ignore_index``.
        function: increasing function f; default: the identity.
        ignore_index: targets of this value contribute neither loss nor gradient.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` over the rows that are not ignored.
        chunk_rows: number of rows whose logits are held at a time; None: as many as fit into 16 MiB
            on a CPU or 512 MiB on a GPU, but at least 256, and D / 2 in float32 on a GPU.

    Returns:
        The loss in nats, [] or, for ``"none"``, [N], float32 (float64 for float64).

    Raises:
        ValueError: for a wrong shape, dtype or reduction and, on the CPU, a bad target. On a GPU a
            row with a bad target gives NaN.
        RuntimeError: for a bad table of ``function``, or tensors on different devices.

    Example:
        >>> import torch
        >>> from hstree.ops import LogitFunction, monotone_cross_entropy
        >>> hidden, weight = torch.zeros(5, 8), torch.randn(100, 8)
        >>> target, sigsoftmax = torch.arange(5), LogitFunction(c=0.0, k=2.0)
        >>> monotone_cross_entropy(hidden, weight, None, target, sigsoftmax)
        tensor(4.6052)
    """
    if hidden.dim() != 2:
        raise ValueError(f"hidden: expected shape [N, D], got {tuple(hidden.shape)}")
    return _loss(
        hidden[:, None], None, weight, bias, target, function, ignore_index, reduction, chunk_rows
    )


def mixture_cross_entropy(
    latent: Tensor,
    log_prior: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    function: LogitFunction = IDENTITY,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    r"""Cross-entropy of sum_k pi_k softmax(f(W z_k + b)), the mixture of softmaxes.

    Equivalent to::

        logits = function(F.linear(latent, weight, bias).float())        # [N, K, V]
        log_prob = (log_prior[:, :, None] + logits.log_softmax(-1)).logsumexp(1)
        F.nll_loss(log_prob, target, ignore_index=ignore_index, reduction=reduction)

    Memory is as in :func:`monotone_cross_entropy`. A chunk holds all components of its rows, so
    that their responsibilities are known before the gradients and no product is computed twice.

    Args:
        latent: component vectors, z [N, K, D].
        log_prior: log-priors of the components, log pi [N, K], float32 (float64 for float64).
        weight: class vectors, W [V, D], dtype of ``latent``.
        bias: class biases, b [V], or None.
        target: classes, [N] int64, in [0, V) or ``ignore_index``.
        function: increasing function f; default: the identity.
        ignore_index: targets of this value contribute neither loss nor gradient.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` over the rows that are not ignored.
        chunk_rows: number of rows whose K V logits are held at a time; None: as in
            :func:`monotone_cross_entropy`.

    Returns:
        The loss in nats, [] or, for ``"none"``, [N], float32 (float64 for float64).

    Raises:
        ValueError: as in :func:`monotone_cross_entropy`.
        RuntimeError: for a bad table of ``function``, or tensors on different devices.

    Example:
        >>> import torch
        >>> from hstree.ops import mixture_cross_entropy
        >>> latent, prior = torch.zeros(5, 3, 8), torch.full((5, 3), 1 / 3)
        >>> mixture_cross_entropy(latent, prior.log(), torch.randn(100, 8), None, torch.arange(5))
        tensor(4.6052)

    Source: Yang, Dai, Salakhutdinov and Cohen, Breaking the softmax bottleneck: a high-rank RNN
    language model, ICLR 2018.
    """
    return _loss(
        latent, log_prior, weight, bias, target, function, ignore_index, reduction, chunk_rows
    )


def _loss(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    function: LogitFunction,
    ignore_index: int,
    reduction: str,
    chunk_rows: int | None,
) -> Tensor:
    target = mark_targets(target, weight.shape[0], ignore_index)
    return mixture_log_prob(
        latent,
        log_prior,
        weight,
        bias,
        target,
        function,
        reduction=reduction,
        chunk_rows=chunk_rows,
    )[1]
