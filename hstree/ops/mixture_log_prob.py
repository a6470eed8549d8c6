"""Log-probabilities of a mixture of softmaxes in chunks of rows:
``torch.ops.hstree.mixture_log_prob``, written in Python with
``torch.ops.hstree.target_log_softmax``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._numerics import (
    autocasts,
    is_batched,
    is_transformed,
    linear_scores,
    log_sum_exp,
    sum_dtype,
)
from hstree.ops._autograd import (
    by_rows,
    define,
    fold,
    is_shared_batched,
    no_second_derivative,
    one_by_one,
    register_autograd,
    unfold,
)
from hstree.ops._mixture_chunks import Problem, empty_gradients, run
from hstree.ops.logit_function import IDENTITY, LogitFunction
from hstree.ops.target_log_softmax import formula as monotone_formula

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**29}
"""Default size of a chunk of logits, by device."""


def mixture_log_prob(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    function: LogitFunction = IDENTITY,
    *,
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

    Memory and dtypes are as in :func:`monotone_cross_entropy`.

    Args:
        latent: component vectors, z [N, K, D].
        log_prior: log-priors of the components, log pi [N, K]; None for K = 1.
        weight: class vectors, W [V, D], dtype of ``latent``.
        bias: class biases, b [V], or None.
        target: classes, [N] int64 in [0, V), or -1 for a log-probability of 0 without gradient.
        function: increasing function f; default: the identity.
        row_weight: factor of each row in the loss, [N], without gradient; the mean divides by the
            sum of the factors. None: all 1.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``.
        chunk_rows: number of rows whose K V logits are held at a time; None: as in
            :func:`monotone_cross_entropy`.

    Returns:
        log_prob [N] and the reduced loss. A gradient through the loss needs no further product
        unless ``reduction`` is ``"none"``. A gradient through log_prob computes the logits again.

    Raises:
        ValueError: for a wrong shape, dtype or reduction, or ``chunk_rows`` below 1.

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
        latent, weight = latent.to(low), weight.to(low)
    _check(latent, log_prior, weight, bias, target, row_weight)
    if chunk_rows is None:
        _, components, features = latent.shape
        # So many rows keep products at their peak on a CPU. On a GPU each chunk reads and writes
        # the gradient of the weight, which then takes less time than the products.
        least = features // 2 if latent.is_cuda else 128
        chunk_rows = default_chunk_rows(latent, components * weight.shape[0])
        chunk_rows = max(chunk_rows, -(-least // components))
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    sums = sum_dtype(latent.dtype)
    log_prior, bias, table = (
        None if t is None else t.to(sums) for t in (log_prior, bias, function.table)
    )
    slope, row_weight = (
        None if t is None else t.detach().to(sums) for t in (function.gradient_slope, row_weight)
    )
    c, k, radius = function.c, function.k, function.radius
    problem = Problem(
        latent, log_prior, weight, bias, table, target, slope, c, k, radius, chunk_rows
    )
    with_loss = torch.is_grad_enabled() and reduction != "none" and not is_transformed()
    wanted = [with_loss and t is not None and t.requires_grad for t in problem[:5]]
    log_prob, loss, *_ = _forward_op(*problem, row_weight, reduction == "mean", wanted)
    if reduction == "none":
        loss = -log_prob if row_weight is None else -_loss_weight(problem, row_weight) * log_prob
    return log_prob, loss


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
    row_weight: Tensor | None,
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
    if row_weight is not None and row_weight.shape != target.shape:
        raise ValueError(f"row_weight: expected shape [{rows}], got {tuple(row_weight.shape)}")


def _loss_weight(problem: Problem, row_weight: Tensor | None) -> Tensor:
    """Factor [N] of each row in the loss, 0 where it is ignored."""
    kept = problem.target != -1
    if row_weight is None:
        return kept.to(sum_dtype(problem.latent.dtype))
    return row_weight.masked_fill(~kept, 0)


def _scale(weight: Tensor, mean: bool) -> Tensor:
    """1 / sum of the weights for a mean, or 1 if the sum is 0, where all gradients are 0."""
    total = weight.sum() if mean else weight.new_ones(())
    return total.masked_fill(total == 0, 1).reciprocal()


def _is_low(problem: Problem) -> bool:
    """Whether products are in half precision. They need gradients of order one, so that the scale
    of a mean is applied after them, where the gradients are rounded."""
    return problem.latent.dtype in (torch.bfloat16, torch.float16)


def _rounded(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """factor * gradient in ``dtype``, in one pass; may overwrite the gradient."""
    if factor is None:
        return gradient.to(dtype)
    if is_batched(factor):
        return (gradient * factor).to(dtype)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def _forward(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    slope: Tensor | None,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    row_weight: Tensor | None,
    mean: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_prob [N], the loss and the wanted gradients of latent, log_prior, weight, bias and table,
    in the dtype of sums; those of a mean of half precision without its scale."""
    problem = Problem(
        latent, log_prior, weight, bias, table, target, slope, c, k, radius, chunk_rows
    )
    factor = _loss_weight(problem, row_weight)
    scale = _scale(factor, mean)
    upstream = -factor if _is_low(problem) else -scale * factor
    log_prob, gradients = run(problem, wanted, upstream)
    loss = -(factor * log_prob).sum()
    if mean:
        loss = loss / factor.sum()
    return log_prob, loss, *gradients


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, _row_weight, _mean, wanted = arguments
    problem = Problem(*fields)
    latent = problem.latent
    log_prob = latent.new_empty(latent.shape[0], dtype=sum_dtype(latent.dtype))
    return log_prob, log_prob.new_empty(()), *empty_gradients(problem, wanted)


def _backward(
    grad_log_prob: Tensor,
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    slope: Tensor | None,
    c: float,
    k: float,
    radius: float,
    chunk_rows: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The wanted gradients for ``grad_log_prob`` [N], in the dtype of sums."""
    problem = Problem(
        latent, log_prior, weight, bias, table, target, slope, c, k, radius, chunk_rows
    )
    _, gradients = run(problem, wanted, grad_log_prob.contiguous())
    return gradients


def _backward_fake(grad_log_prob: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *fields, wanted = arguments
    return empty_gradients(Problem(*fields), wanted)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *fields, row_weight, ctx.mean, ctx.wanted = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*fields[:7], row_weight)
    ctx.scalars = fields[7:]
    ctx.gradients = output[2:] if any(ctx.wanted) else None


def _gradient(ctx: Any, grad_log_prob: Tensor | None, grad_loss: Tensor | None, *_: Any) -> Any:
    needed = ctx.needs_input_grad[:5]
    *tensors, row_weight = ctx.saved_tensors
    problem = Problem(*tensors, *ctx.scalars)
    # Released in the first backward pass; a second one computes them again.
    ready, ctx.gradients = ctx.gradients, None
    again = torch.is_grad_enabled()  # create_graph: the recomputation raises the error
    if again or any(need and not want for want, need in zip(ctx.wanted, needed, strict=True)):
        ready = None
    factor = None
    if ready is not None and grad_log_prob is None and grad_loss is not None:
        gradients = ready
        factor = grad_loss
        if ctx.mean and _is_low(problem):
            factor = factor * _scale(_loss_weight(problem, row_weight), True)
        readable = type(factor) is Tensor and not factor.is_cuda and not is_batched(factor)
        if readable and factor.item() == 1:
            factor = None
    else:
        weight = _loss_weight(problem, row_weight)
        upstream = torch.zeros_like(weight)
        if grad_log_prob is not None:
            upstream = upstream + grad_log_prob
        if grad_loss is not None:
            upstream = upstream - grad_loss * _scale(weight, ctx.mean) * weight
        gradients = _backward_op(upstream, *problem, needed)
    result = [
        _rounded(gradient, factor, tensor.dtype) if tensor is not None and need else None
        for gradient, tensor, need in zip(gradients, problem[:5], needed, strict=True)
    ]
    return *result, *[None] * 9


_ROWS = (0, 0, None, None, None, 0, None, None, None, None, None)  # row dimensions, for by_rows
_NO_GRADIENTS = (None,) * 5


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Computes the log-probabilities of all rows of the batch, and from them the losses."""
    *_, mean, wanted = arguments
    rows = (*_ROWS, 0, None, None)
    if any(wanted) or is_shared_batched(in_dims, rows):
        return one_by_one(_forward_op)(info, in_dims, *arguments)
    flat = fold(arguments, in_dims, rows, info.batch_size)
    log_prob, _, *gradients = _forward_op(*flat)
    weight = _loss_weight(Problem(*flat[:11]), flat[11])
    log_prob, weight = (unfold(x, 0, info.batch_size) for x in (log_prob, weight))
    loss = -(weight * log_prob).sum(1)
    loss = loss / weight.sum(1) if mean else loss
    return (log_prob, loss, *gradients), (0, 0, *_NO_GRADIENTS)


def _backward_vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    *_, wanted = arguments
    _latent, _log_prior, *of_shared = wanted  # weight, bias and table
    if any(of_shared):
        return one_by_one(_backward_op)(info, in_dims, *arguments)
    return by_rows(_backward_op, (0, *_ROWS, None), (0, 0, None, None, None))(
        info, in_dims, *arguments
    )


def _formula(*arguments: Any) -> tuple[Any, ...]:
    """The op in torch's own operators, without gradients: torch differentiates it."""
    *fields, row_weight, mean, _wanted = arguments
    problem = Problem(*fields)
    latent, log_prior, weight, bias, table, target, slope, c, k, radius, _ = problem
    components = latent.shape[1]
    logits = linear_scores(latent.flatten(0, 1), weight)
    logits = logits if bias is None else logits + bias
    of_components = target.repeat_interleave(components)
    log_prob = monotone_formula(logits, of_components, c, k, table, radius, slope)[0]
    if log_prior is not None:
        joint = log_prior + log_prob.view(-1, components)
        log_prob = log_sum_exp(joint, 1).masked_fill(target == -1, 0)
    row_weight = _loss_weight(problem, row_weight)
    loss = -(row_weight * log_prob).sum()
    loss = loss / row_weight.sum() if mean else loss
    return log_prob, loss, *empty_gradients(problem, [False] * 5)


_forward_op = define(
    "mixture_log_prob",
    _forward,
    _forward_fake,
)
_backward_op = define(
    "mixture_log_prob_backward",
    _backward,
    _backward_fake,
)
register_autograd(
    "mixture_log_prob",
    _gradient,
    setup_context=_save_for_backward,
    vmap=_vmap,
    formula=_formula,
)
register_autograd(
    "mixture_log_prob_backward",
    no_second_derivative("mixture_log_prob_backward"),
    vmap=_backward_vmap,
)
