"""Log-probabilities of a mixture of softmaxes in chunks of rows:
``torch.ops.hstree.mixture_log_prob``, which is written in Python over
``torch.ops.hstree.monotone_log_prob``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree._transforms import is_batched, is_transformed
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
from hstree.ops.logit_function import IDENTITY, LogitFunction
from hstree.ops.monotone_log_prob import formula as monotone_formula

CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**29}
"""Size of a chunk of logits where the caller does not choose."""


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
    r"""Log-probability of each target under a mixture of softmax(f(W z + b)), and the loss.

    .. math::
        \log p_n = \log \sum_k \pi_{nk}\, \mathrm{softmax}(f(W z_{nk} + b))_{y_n}

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
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(latent, latent.shape[1] * weight.shape[0])
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    sums = sum_dtype(latent.dtype)
    log_prior, bias, table = (
        None if t is None else t.to(sums) for t in (log_prior, bias, function.table)
    )
    c, k, radius = function.c, function.k, function.radius
    problem = Problem(latent, log_prior, weight, bias, table, target, c, k, radius, chunk_rows)
    with_loss = torch.is_grad_enabled() and reduction != "none" and not is_transformed()
    wanted = [with_loss and t is not None and t.requires_grad for t in problem[:5]]
    log_prob, loss, *_ = _forward_op(*problem, reduction == "mean", wanted)
    return log_prob, -log_prob if reduction == "none" else loss


def default_chunk_rows(latent: Tensor, columns: int) -> int:
    """Rows of ``columns`` logits that fit a chunk on the device of ``latent``, at least 1.

    Example:
        >>> default_chunk_rows(torch.empty(1400, 400), columns=10_000)
        419
    """
    budget = CHUNK_BYTES.get(latent.device.type, CHUNK_BYTES["cpu"])
    return max(1, budget // max(1, columns * sum_dtype(latent.dtype).itemsize))


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


class Problem(NamedTuple):
    """What the op and its backward op have in common, in their order: z, log pi, W, b and f; the
    first five have gradients."""

    latent: Tensor  # [N, K, D]
    log_prior: Tensor | None  # [N, K]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    table: Tensor | None  # [., 2] or [., 4]
    target: Tensor  # [N], -1 for an ignored row
    c: float
    k: float
    radius: float
    chunk_rows: int

    def rows(self, chunk: slice) -> Problem:
        """The problem of some of the rows."""
        log_prior = None if self.log_prior is None else self.log_prior[chunk]
        return self._replace(
            latent=self.latent[chunk], log_prior=log_prior, target=self.target[chunk]
        )


_PROBLEM = (
    "Tensor latent, Tensor? log_prior, Tensor weight, Tensor? bias, Tensor? table, Tensor target, "
    "float c, float k, float radius, SymInt chunk_rows"
)
_GRADIENTS = (
    "Tensor grad_latent, Tensor grad_log_prior, Tensor grad_weight, Tensor grad_bias, "
    "Tensor grad_table"
)


def _empty_gradients(problem: Problem, wanted: Sequence[bool]) -> list[Tensor]:
    """Uninitialised, in the dtype of sums; of no elements where it is not wanted."""
    latent, _, weight, _, table, *_ = problem
    table_shape = () if table is None else table.shape
    shapes = (latent.shape, latent.shape[:2], weight.shape, weight.shape[:1], table_shape)
    return [
        latent.new_empty(shape if want else (0,), dtype=sum_dtype(latent.dtype))
        for want, shape in zip(wanted, shapes, strict=True)
    ]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def _write_logits(logits: Tensor, latent: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """logits [R, V] of latent [R, D]."""
    if latent.dtype == logits.dtype:
        torch.mm(latent, weight.t(), out=logits)
    else:
        logits.copy_(_product(latent, weight.t()))
    if bias is not None:
        logits += bias


def _log_prob(
    chunk: Problem, logits: Tensor, upstream: Tensor | None, sum_table: bool
) -> tuple[Tensor, Any, Any]:
    """log_prob [N] from logits [N K, V]. Where its gradient ``upstream`` [N] is given, the gradient
    of the logits is written over them, and the gradients of log_prior and, in float64, of the table
    are returned too."""
    components = chunk.latent.shape[1]
    target = chunk.target.repeat_interleave(components)
    ops, function = torch.ops.hstree, (chunk.c, chunk.k, chunk.table, chunk.radius)
    if chunk.log_prior is None and upstream is not None:
        log_prob, grad_table = ops.monotone_log_prob_gradient_(
            logits, upstream, target, *function, sum_table
        )
        return log_prob, None, grad_table
    log_prob, normalizer = ops.monotone_log_prob(logits, target, *function)
    if chunk.log_prior is None:
        return log_prob, None, None
    ignored = chunk.target == -1
    joint = chunk.log_prior + log_prob.view(-1, components)
    log_prob = joint.logsumexp(1).masked_fill(ignored, 0)
    if upstream is None:
        return log_prob, None, None
    responsibility = upstream[:, None] * joint.softmax(1)
    grad_table = ops.monotone_log_prob_backward_(
        logits, responsibility.reshape(-1), target, normalizer, *function, sum_table
    )
    return log_prob, responsibility.masked_fill(ignored[:, None], 0), grad_table


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b; the first time total = a @ b, whatever was in memory there."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    elif first:
        total.copy_(_product(a, b))
    else:
        total += _product(a, b)


def _run(problem: Problem, wanted: Sequence[bool], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """log_prob [N], and the wanted gradients for ``upstream`` [N], its gradient."""
    latent, _, weight, bias, *_ = problem
    rows, components, features = latent.shape
    gradients = _empty_gradients(problem, wanted)
    grad_latent, grad_log_prior, grad_weight, grad_bias, grad_table = (
        gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
    )
    if grad_bias is not None:
        grad_bias.zero_()
    if grad_weight is not None and not rows:
        grad_weight.zero_()
    table_sum = None if grad_table is None else torch.zeros_like(grad_table, dtype=torch.float64)
    log_prob = latent.new_empty(rows, dtype=sum_dtype(latent.dtype))
    size = min(problem.chunk_rows, rows) * components
    buffer = log_prob.new_empty((size, len(weight)))
    for begin in range(0, rows, problem.chunk_rows):
        chunk = slice(begin, begin + problem.chunk_rows)
        part = problem.rows(chunk)
        z = part.latent.reshape(-1, features)
        logits = buffer[: len(z)]
        _write_logits(logits, z, weight, bias)
        log_prob[chunk], by_log_prior, by_table = _log_prob(
            part, logits, upstream[chunk] if any(wanted) else None, table_sum is not None
        )
        if grad_log_prior is not None:
            grad_log_prior[chunk] = by_log_prior
        if table_sum is not None:
            table_sum += by_table
        if grad_bias is not None:
            grad_bias += logits.sum(0)
        if grad_latent is None and grad_weight is None:
            continue
        grad_logits = logits.to(latent.dtype)
        if grad_latent is not None:
            grad_latent[chunk] = _product(grad_logits, weight).view(part.latent.shape)
        if grad_weight is not None:
            _add_product(grad_weight, grad_logits.t(), z, first=begin == 0)
    if grad_table is not None and table_sum is not None:
        grad_table.copy_(table_sum)
    return log_prob, gradients


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """log_prob [N], the loss and its wanted gradients, in the dtype of sums."""
    *fields, mean, wanted = arguments
    problem = Problem(*fields)
    latent, target = problem.latent, problem.target
    count = (target != -1).sum().to(sum_dtype(latent.dtype))
    scale = count.clamp(min=1).reciprocal() if mean else torch.ones_like(count)
    # Products in half precision take gradients of order one; the scale comes after them.
    low = latent.dtype in (torch.bfloat16, torch.float16)
    upstream = (-torch.ones_like(scale) if low else -scale).expand(len(latent)).contiguous()
    log_prob, gradients = _run(problem, wanted, upstream)
    loss = -log_prob.sum()
    if mean:
        loss = loss / count
        if low:
            for gradient in gradients:
                gradient *= scale
    return log_prob, loss, *gradients


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, _mean, wanted = arguments
    problem = Problem(*fields)
    latent = problem.latent
    log_prob = latent.new_empty(latent.shape[0], dtype=sum_dtype(latent.dtype))
    return log_prob, log_prob.new_empty(()), *_empty_gradients(problem, wanted)


def _backward(grad_log_prob: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The wanted gradients for ``grad_log_prob`` [N], in the dtype of sums."""
    *fields, wanted = arguments
    return tuple(_run(Problem(*fields), wanted, grad_log_prob.contiguous())[1])


def _backward_fake(grad_log_prob: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *fields, wanted = arguments
    return tuple(_empty_gradients(Problem(*fields), wanted))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *fields, ctx.mean, ctx.wanted = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*fields[:6])
    ctx.scalars = fields[6:]
    ctx.gradients = output[2:] if any(ctx.wanted) else None


def _gradient(ctx: Any, grad_log_prob: Tensor | None, grad_loss: Tensor | None, *_: Any) -> Any:
    needed = ctx.needs_input_grad[:5]
    problem = Problem(*ctx.saved_tensors, *ctx.scalars)
    # Given away at the first backward pass; a second one computes them again.
    ready, ctx.gradients = ctx.gradients, None
    again = torch.is_grad_enabled()  # create_graph: what the recomputation refuses
    if again or any(need and not want for want, need in zip(ctx.wanted, needed, strict=True)):
        ready = None
    if ready is not None and grad_log_prob is None and grad_loss is not None:
        readable = type(grad_loss) is Tensor and not grad_loss.is_cuda
        one = readable and not is_batched(grad_loss) and grad_loss.item() == 1
        gradients = ready if one else [gradient * grad_loss for gradient in ready]
    else:
        upstream = _upstream(problem, grad_log_prob, grad_loss, ctx.mean)
        gradients = _backward_op(upstream, *problem, needed)
    result = [
        gradient.to(tensor.dtype) if tensor is not None and need else None
        for gradient, tensor, need in zip(gradients, problem[:5], needed, strict=True)
    ]
    return *result, *[None] * 7


def _upstream(
    problem: Problem, grad_log_prob: Tensor | None, grad_loss: Tensor | None, mean: bool
) -> Tensor:
    """Gradient [N] with respect to log_prob that comes through both outputs."""
    target = problem.target
    upstream = torch.zeros_like(target, dtype=sum_dtype(problem.latent.dtype))
    if grad_log_prob is not None:
        upstream = upstream + grad_log_prob
    if grad_loss is not None:
        upstream = upstream - (grad_loss / (target != -1).sum().clamp(min=1) if mean else grad_loss)
    return upstream


_ROWS = (0, 0, None, None, None, 0, None, None, None, None)  # as by_rows takes them
_NO_GRADIENTS = (None,) * 5


def _vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The losses of a batch come from the log-probabilities of all its rows."""
    *_, mean, wanted = arguments
    rows = (*_ROWS, None, None)
    if any(wanted) or is_shared_batched(in_dims, rows):
        return one_by_one(_forward_op)(info, in_dims, *arguments)
    flat = fold(arguments, in_dims, rows, info.batch_size)
    log_prob, _, *gradients = _forward_op(*flat)
    log_prob, target = (unfold(x, 0, info.batch_size) for x in (log_prob, flat[5]))
    loss = -log_prob.sum(1)
    loss = loss / (target != -1).sum(1) if mean else loss
    return (log_prob, loss, *gradients), (0, 0, *_NO_GRADIENTS)


def _backward_vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    if any(arguments[-1][2:]):  # gradients of what all rows share
        return one_by_one(_backward_op)(info, in_dims, *arguments)
    return by_rows(_backward_op, (0, *_ROWS, None), (0, 0, None, None, None))(
        info, in_dims, *arguments
    )


def _formula(*arguments: Any) -> tuple[Any, ...]:
    """Without gradients: torch takes those of the formula itself."""
    *fields, mean, _wanted = arguments
    problem = Problem(*fields)
    latent, log_prior, weight, bias, table, target, c, k, radius, _ = problem
    components = latent.shape[1]
    logits = F.linear(latent.flatten(0, 1), weight).to(sum_dtype(latent.dtype))
    logits = logits if bias is None else logits + bias
    of_components = target.repeat_interleave(components)
    log_prob = monotone_formula(logits, of_components, c, k, table, radius)[0]
    if log_prior is not None:
        joint = log_prior + log_prob.view(-1, components)
        log_prob = joint.logsumexp(1).masked_fill(target == -1, 0)
    loss = -log_prob.sum()
    loss = loss / (target != -1).sum() if mean else loss
    return log_prob, loss, *_empty_gradients(problem, [False] * 5)


_forward_op = define(
    "mixture_log_prob",
    f"({_PROBLEM}, bool mean, bool[] wanted) -> (Tensor log_prob, Tensor loss, {_GRADIENTS})",
    _forward,
    _forward_fake,
)
_backward_op = define(
    "mixture_log_prob_backward",
    f"(Tensor grad_log_prob, {_PROBLEM}, bool[] wanted) -> ({_GRADIENTS})",
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
