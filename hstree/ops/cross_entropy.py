"""Cross-entropy of linear + pointwise f + softmax, and of mixtures of it, in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hstree.ops._derivatives import no_second_derivative
from hstree.ops.logit_function import LogitFunction
from hstree.ops.targets import mark_targets

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**29}
"""Size of a chunk of logits where the caller does not choose."""

IDENTITY = LogitFunction()


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

    Memory beyond the arguments and the gradients: O(chunk_rows V). The gradients of a sum or mean
    are computed with the loss, three matrix products in all; with ``"none"`` the logits are
    computed again in the backward pass. Logits of bfloat16 and float16 products are float32 on a
    GPU; on a CPU the product itself rounds them. Deterministic as far as the matrix products are.

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


def mixture_log_prob(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    function: LogitFunction = IDENTITY,
    *,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What both losses are made of: log-probability of each target, and the loss.

    Args:
        latent: [N, K, D].
        log_prior: [N, K]; None for K = 1.
        target: [N] int64 in [0, V), or -1 for a log-probability of 0 and no gradient.
        weight, bias, function, reduction, chunk_rows: as in :func:`monotone_cross_entropy`.

    Returns:
        log_prob [N] and the reduced loss. A gradient through the loss costs no further product
        unless ``reduction`` is ``"none"``; one through log_prob computes the logits again.

    Example:
        >>> z, w = torch.zeros(2, 1, 8), torch.randn(4, 8)
        >>> mixture_log_prob(z, None, w, None, torch.tensor([3, -1]))
        (tensor([-1.3863,  0.0000]), tensor(1.3863))
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected one of none, sum, mean, got {reduction!r}")
    if torch.is_autocast_enabled(latent.device.type) and latent.dtype != torch.float64:
        low = torch.get_autocast_dtype(latent.device.type)
        latent, weight = latent.to(low), weight.to(low)
    _check(latent, log_prior, weight, bias, target)
    sums = torch.float64 if latent.dtype == torch.float64 else torch.float32
    table = function.table
    if bias is not None:
        bias = bias.to(sums)
    if log_prior is not None:
        log_prior = log_prior.to(sums)
    if table is not None:
        table = table.to(sums)
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(latent, latent.shape[1] * weight.shape[0])
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    arguments = (latent, log_prior, weight, bias, table)
    wanted = [
        torch.is_grad_enabled() and t is not None and t.requires_grad and reduction != "none"
        for t in arguments
    ]
    scalars = (function.c, function.k, function.radius, chunk_rows)
    log_prob, loss, *_ = _mixture(*arguments, target, *scalars, reduction == "mean", wanted)
    return log_prob, -log_prob if reduction == "none" else loss


def default_chunk_rows(input: Tensor, columns: int) -> int:
    """Rows of ``columns`` logits that fit a chunk on the device of ``input``, at least 1.

    Example:
        >>> default_chunk_rows(torch.empty(1400, 400), columns=10_000)
        419
    """
    budget = CHUNK_BYTES.get(input.device.type, CHUNK_BYTES["cpu"])
    return max(1, budget // max(1, columns * _sum_dtype(input).itemsize))


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


def _check(
    latent: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor | None, target: Tensor
) -> None:
    if latent.dim() != 3:
        raise ValueError(f"latent: expected shape [N, K, D], got {tuple(latent.shape)}")
    rows, components, features = latent.shape
    if not latent.is_floating_point():
        raise ValueError(f"latent: expected a floating-point dtype, got {latent.dtype}")
    if weight.dim() != 2 or weight.shape[1] != features or not len(weight):
        raise ValueError(
            f"weight: expected shape [V, {features}] with V of at least 1, "
            f"got {tuple(weight.shape)}"
        )
    if weight.dtype != latent.dtype:
        raise ValueError(f"weight: expected dtype {latent.dtype}, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    if log_prior is None and components != 1:
        raise ValueError(f"log_prior: expected shape [{rows}, {components}], got None")
    if log_prior is not None and log_prior.shape != latent.shape[:2]:
        raise ValueError(
            f"log_prior: expected shape [{rows}, {components}], got {tuple(log_prior.shape)}"
        )
    if target.shape != latent.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            f"target: expected shape [{rows}] and dtype torch.int64, "
            f"got {tuple(target.shape)} and {target.dtype}"
        )


class _Gradients:
    """Sums over chunks of the gradients that are wanted."""

    def __init__(self, wanted: Sequence[bool], latent: Tensor, weight: Tensor, table: Any) -> None:
        sums = _sum_dtype(latent)
        want_latent, want_prior, want_weight, want_bias, want_table = wanted
        self.any = any(wanted)
        self.latent = torch.empty_like(latent, dtype=sums) if want_latent else None
        self.log_prior = latent.new_empty(latent.shape[:2], dtype=sums) if want_prior else None
        self.weight = torch.empty_like(weight, dtype=sums) if want_weight else None
        if self.weight is not None and not len(latent):
            self.weight.zero_()
        self.bias = weight.new_zeros(len(weight), dtype=sums) if want_bias else None
        self.table = torch.zeros_like(table, dtype=torch.float64) if want_table else None

    def add(self, rows: slice, latent: Tensor, weight: Tensor, logits: Tensor) -> None:
        """logits: gradient with respect to the logits [c K, V] of ``latent`` [c K, D]."""
        if self.bias is not None:
            self.bias += logits.sum(0)
        low = logits.to(latent.dtype)
        if self.latent is not None:
            self.latent[rows] = _product(low, weight).view(self.latent[rows].shape)
        if self.weight is not None:
            first = rows.start == 0  # finds what was in memory there before
            if low is logits:
                self.weight.addmm_(logits.t(), latent, beta=0 if first else 1)
            elif first:
                self.weight.copy_(_product(low.t(), latent))
            else:
                self.weight += _product(low.t(), latent)

    def tensors(self, like: Tensor, table: Tensor | None) -> list[Tensor]:
        if self.table is not None and table is not None:
            self.table = self.table.to(table.dtype)
        parts = (self.latent, self.log_prior, self.weight, self.bias, self.table)
        return [like.new_empty(0) if part is None else part for part in parts]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def _run(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    wanted: Sequence[bool],
    upstream: Tensor | None,
) -> tuple[Tensor, _Gradients]:
    """log_prob [N] and the gradients for ``upstream`` [N], its gradient."""
    rows, components, features = latent.shape
    sums = _sum_dtype(latent)
    log_prob = latent.new_empty(rows, dtype=sums)
    gradients = _Gradients(wanted, latent, weight, table)
    ops, function = torch.ops.hstree, (c, k, table, radius)
    sum_table = gradients.table is not None
    size = min(chunk_rows, rows) * components
    buffer = latent.new_empty((size, len(weight)), dtype=sums)
    for begin in range(0, rows, chunk_rows):
        chunk = slice(begin, begin + chunk_rows)
        part = latent[chunk].reshape(-1, features)
        logits = buffer[: len(part)]
        if part.dtype == sums:
            torch.mm(part, weight.t(), out=logits)
        else:
            logits.copy_(_product(part, weight.t()))
        if bias is not None:
            logits += bias
        classes = target[chunk].repeat_interleave(components)
        if upstream is not None and log_prior is None and gradients.any:
            log_prob[chunk], grad_table = ops.monotone_log_prob_gradient_(
                logits, upstream[chunk], classes, *function, sum_table
            )
        else:
            each, normalizer = ops.monotone_log_prob(logits, classes, *function)
            ignored = target[chunk] == -1
            if log_prior is None:
                log_prob[chunk] = each
            else:
                joint = log_prior[chunk] + each.view(-1, components)
                log_prob[chunk] = joint.logsumexp(1).masked_fill(ignored, 0)
            if upstream is None or not gradients.any:
                continue
            responsibility = upstream[chunk, None] * joint.softmax(1)
            if gradients.log_prior is not None:
                gradients.log_prior[chunk] = responsibility.masked_fill(ignored[:, None], 0)
            grad_table = ops.monotone_log_prob_backward_(
                logits, responsibility.reshape(-1), classes, normalizer, *function, sum_table
            )
        if gradients.table is not None:
            gradients.table += grad_table
        gradients.add(chunk, part, weight, logits)
    return log_prob, gradients


_Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("hstree::mixture_log_prob", mutates_args=())
def _mixture(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    mean: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_prob [N], the loss, and its gradients with respect to the first five arguments as far as
    they are wanted, in the dtype of sums."""
    count = (target != -1).sum().to(_sum_dtype(latent))
    scale = count.clamp(min=1).reciprocal() if mean else torch.ones_like(count)
    # Products in half precision take gradients of order one; the scale comes after them.
    low = latent.dtype in (torch.bfloat16, torch.float16)
    upstream = (-torch.ones_like(scale) if low else -scale).expand(len(latent)).contiguous()
    log_prob, gradients = _run(
        latent, log_prior, weight, bias, table, target, c, k, radius, chunk_rows, wanted, upstream
    )
    loss = -log_prob.sum()
    parts = gradients.tensors(log_prob, table)
    if mean:
        loss = loss / count
        if low:
            for part in parts:
                part *= scale
    return log_prob, loss, *parts  # type: ignore[return-value]


@_mixture.register_fake
def _(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    mean: bool,
    wanted: Sequence[bool],
) -> _Seven:
    log_prob = latent.new_empty(latent.shape[0], dtype=_sum_dtype(latent))
    parts = _empty_gradients(wanted, latent, weight, table)
    return log_prob, log_prob.new_empty(()), *parts


def _empty_gradients(
    wanted: Sequence[bool], latent: Tensor, weight: Tensor, table: Tensor | None
) -> _Five:
    sums = _sum_dtype(latent)
    shapes: list[Sequence[int]] = [
        latent.shape,
        latent.shape[:2],
        weight.shape,
        weight.shape[:1],
        () if table is None else table.shape,
    ]
    made = [
        latent.new_empty(shape if want else (0,), dtype=sums)
        for want, shape in zip(wanted, shapes, strict=True)
    ]
    return made[0], made[1], made[2], made[3], made[4]


@torch.library.custom_op("hstree::mixture_log_prob_backward", mutates_args=())
def _mixture_backward(
    grad_log_prob: Tensor,
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to the first five tensors of the forward op, in the dtype of sums."""
    upstream = grad_log_prob.contiguous()
    _, gradients = _run(
        latent, log_prior, weight, bias, table, target, c, k, radius, chunk_rows, wanted, upstream
    )
    parts = gradients.tensors(upstream, table)
    return parts[0], parts[1], parts[2], parts[3], parts[4]


@_mixture_backward.register_fake
def _(
    grad_log_prob: Tensor,
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    wanted: Sequence[bool],
) -> _Five:
    return _empty_gradients(wanted, latent, weight, table)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, c, k, radius, chunk_rows, mean, wanted = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(t for t in tensors if t is not None))
    ctx.present = [t is not None for t in tensors]
    ctx.scalars = (c, k, radius, chunk_rows)
    ctx.mean = mean
    ctx.wanted = wanted
    ctx.gradients = output[2:] if any(wanted) else None


def _backward(ctx: Any, grad_log_prob: Tensor | None, grad_loss: Tensor | None, *_: Any) -> Any:
    needed = ctx.needs_input_grad[:5]
    saved = iter(ctx.saved_tensors)
    tensors = [next(saved) if present else None for present in ctx.present]
    # Given away at the first backward pass; a second one computes them again.
    ready, ctx.gradients = ctx.gradients, None
    again = torch.is_grad_enabled()  # create_graph: what the recomputation refuses
    if again or any(need and not want for want, need in zip(ctx.wanted, needed, strict=True)):
        ready = None
    if ready is not None and grad_log_prob is None and grad_loss is not None:
        one = type(grad_loss) is Tensor and not grad_loss.is_cuda and grad_loss.item() == 1
        parts = ready if one else [part * grad_loss for part in ready]
    else:
        upstream = _upstream(tensors[0], tensors[5], grad_log_prob, grad_loss, ctx.mean)
        parts = _mixture_backward(upstream, *tensors, *ctx.scalars, needed)
    result = [
        None if tensor is None or not need else part.to(tensor.dtype)
        for part, tensor, need in zip(parts, tensors[:5], needed, strict=True)
    ]
    return *result, *[None] * 7


def _upstream(
    latent: Any,
    target: Any,
    grad_log_prob: Tensor | None,
    grad_loss: Tensor | None,
    mean: bool,
) -> Tensor:
    """Gradient [N] with respect to log_prob that comes through both outputs."""
    upstream = torch.zeros_like(target, dtype=_sum_dtype(latent))
    if grad_log_prob is not None:
        upstream = upstream + grad_log_prob
    if grad_loss is not None:
        upstream = upstream - (grad_loss / (target != -1).sum().clamp(min=1) if mean else grad_loss)
    return upstream


_mixture.register_autograd(_backward, setup_context=_setup_context)
_mixture_backward.register_autograd(no_second_derivative("mixture_log_prob_backward"))
