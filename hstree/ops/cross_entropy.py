"""Cross-entropy of linear + pointwise f + softmax, and of mixtures of it, in chunks of rows."""

from __future__ import annotations

from torch import Tensor

from hstree.ops.logit_function import IDENTITY, LogitFunction
from hstree.ops.mixture_log_prob import mixture_log_prob
from hstree.ops.targets import mark_targets


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
    r"""Cross-entropy of softmax(f(W h + b)) without the logits of all rows.

    Equivalent to::

        logits = function(F.linear(hidden, weight, bias).float())
        F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    Args:
        hidden: [N, D]: float32, float64, bfloat16 or float16.
        weight: [V, D], dtype of ``hidden``.
        bias: [V] or None.
        target: [N] int64, in [0, V) or ``ignore_index``.
        function: increasing f, by default the identity.
        ignore_index: targets of this value contribute neither loss nor gradient.
        reduction: ``"none"``, ``"sum"`` or ``"mean"`` over the rows that are not ignored.
        chunk_rows: rows whose logits are held at a time; None: as many as fit 16 MiB on a CPU, 512
            MiB on a GPU, at least one.

    Returns:
        The loss in nats, float32 (float64 for float64): [] or, for ``"none"``, [N].

    Raises:
        ValueError, RuntimeError: for shapes, dtypes or, on the CPU, targets that do not fit. On a
            GPU a row with a bad target gives NaN.

    Memory beyond the arguments and the gradients: O(chunk_rows V), in forward mode O(N V). The
    gradients of a sum or mean are computed with the loss, three matrix products in all; with
    ``"none"`` the logits are computed again in the backward pass. Logits of bfloat16 and float16
    products are float32 on a GPU; on a CPU the product itself rounds them. Deterministic as far as
    the matrix products are.

    Example:
        >>> h, w = torch.randn(5, 8), torch.randn(100, 8)
        >>> y = torch.randint(100, (5,))
        >>> loss = monotone_cross_entropy(h, w, None, y, LogitFunction(c=0.0, k=2.0))
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

    Args:
        latent: z [N, K, D].
        log_prior: log pi [N, K], float32 (float64 for float64).
        weight, bias, target, function, ignore_index, reduction: as in
            :func:`monotone_cross_entropy`.
        chunk_rows: rows, each with its K components, whose logits are held at a time.

    Returns, raises and memory as in :func:`monotone_cross_entropy`: components of a row stay
    together, so that its responsibilities are known before any gradient, and no product is computed
    twice. Yang et al., Breaking the Softmax Bottleneck: A High-Rank RNN Language Model, 2018.

    Example:
        >>> z, prior = torch.randn(5, 3, 8), torch.full((5, 3), 1 / 3)
        >>> w, y = torch.randn(100, 8), torch.randint(100, (5,))
        >>> loss = mixture_cross_entropy(z, prior.log(), w, None, y)
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
