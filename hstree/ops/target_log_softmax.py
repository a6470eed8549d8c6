"""Log-softmax of an increasing function of the logits, at the target:
``torch.ops.hstree.target_log_softmax``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._checks import in_torch_func
from hstree._numerics import is_transformed
from hstree.ops._gradient import once, register_gradient
from hstree.ops._recycled import recycled

_op = torch.ops.hstree.target_log_softmax.default


def target_log_softmax(
    logits: Tensor,
    target: Tensor,
    c: float = 0.0,
    k: float = 1.0,
    table: Tensor | None = None,
    radius: float = 20.0,
) -> Tensor:
    r"""Log-probability of each row's target under the softmax of f(logits), f increasing.

    .. math::
        \log p_r = f(x_{r y_r}) - \log \sum_v \exp f(x_{rv}), \qquad
        f(x) = x + (k - 1) \log \sigma(x - c)

    k = 1 is the softmax, and c = 0 with k = 2 is sigsoftmax. With a ``table``, f is the function of
    :func:`hstree.ops.piecewise`, and ``c`` and ``k`` are ignored.

    Equivalent to, with a table::

        log_prob = piecewise(logits, table, radius).log_softmax(1)
        log_prob = log_prob.gather(1, target[:, None]).squeeze(1)

    The backward pass computes the probabilities again, in a copy of ``logits`` that becomes their
    gradient. No other tensor of size R V is held. The gradient of ``table``
    is summed as in :func:`hstree.ops.piecewise`: bitwise identical on every run.

    Args:
        logits: logits, [R, V], V at least 1: float32 or float64. A class at -inf has probability 0
            and gradient 0. NaN or inf make the row NaN, and so does -inf for all classes.
        target: classes, [R] int64; -1 marks an ignored row: log-probability 0 and no gradient.
        c: point at which f bends, finite.
        k: slope of f far below c, greater than 0; far above c the slope is 1.
        table: coefficients, [K, 2] or [K, 4], dtype of ``logits``. f must be increasing, which is
            not checked.
        radius: half width of the range of the table, R > 0.

    Returns:
        Log-probabilities, [R], in nats, dtype of ``logits``.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number and, on the CPU, a target out of
            range; for a second derivative. On CUDA a target out of range makes its
            row NaN.

    Example:
        >>> import torch
        >>> from hstree.ops import target_log_softmax
        >>> logits = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> target_log_softmax(logits, torch.tensor([1, -1]))
        tensor([-0.6931,  0.0000])

    Source: Ganea, Gelly, Bécigneul and Severyn, Breaking the softmax bottleneck via learnable
    monotonic pointwise non-linearities, ICML 2019; Kanai, Fujiwara, Yamanaka and Adachi,
    Sigsoftmax: reanalysis of the softmax bottleneck, NeurIPS 2018.
    """
    run: Any = _op
    if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
        run = TargetLogSoftmax.apply if in_torch_func() else _record
    log_prob: Tensor = run(logits, target, c, k, table, radius)[0]
    return log_prob


class _LogSoftmax(torch.autograd.Function):
    """:func:`log_softmax` of scores [R, V]."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        # A normalizer near 0, which float32 rounds to little.
        log_prob = scores - scores.amax(1, keepdim=True)
        first = log_prob.new_zeros(len(log_prob), dtype=torch.int64)
        sums = torch.ops.hstree.target_log_softmax(log_prob, first, 0.0, 1.0, None, 1.0)
        log_prob -= sums[1].unsqueeze(1)
        ctx.save_for_backward(log_prob)
        return log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_prob,) = ctx.saved_tensors
        return torch._log_softmax_backward_data(grad, log_prob, 1, log_prob.dtype)


def log_softmax(scores: Tensor) -> Tensor:
    """Log-softmax of scores [..., V] over the classes, with the sums of
    :func:`target_log_softmax`: those of :func:`torch.log_softmax` are off by 1e-5 at a million
    classes and by 3% at ten million on a CPU."""
    own_sums = scores.device.type in ("cpu", "cuda", "meta")
    if not own_sums or is_transformed() or torch.compiler.is_exporting():
        return scores - scores.logsumexp(-1, keepdim=True)
    rows = scores.reshape(-1, scores.shape[-1])
    log_prob: Tensor
    if torch.compiler.is_compiling():  # which warns of an autograd.Function
        most, at = rows.max(1, keepdim=True)
        log_prob = rows - most + target_log_softmax(rows, at.squeeze(1)).unsqueeze(1)
    else:
        log_prob = _LogSoftmax.apply(rows)  # type: ignore[no-untyped-call]
    return log_prob.view(scores.shape)


def _backward(
    logits: Tensor,
    grad_log_prob: Tensor,
    target: Tensor,
    log_normalizer: Tensor,
    c: float,
    k: float,
    table: Tensor | None,
    radius: float,
    table_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of logits and table, by the in-place op on a copy."""
    grad = recycled(logits, *logits.shape).copy_(logits)
    function = (c, k, table, radius)
    return grad, torch.ops.hstree.target_log_softmax_backward_(
        grad, grad_log_prob, target, log_normalizer, *function, table_gradient
    )


def _fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2:
        raise RuntimeError(f"logits: expected shape [R, V], got {tuple(logits.shape)}")
    return logits.new_empty(logits.shape[:1]), logits.new_empty(logits.shape[:1])


def _grad_table(
    logits: Tensor, table: Tensor | None, radius: float, table_gradient: bool = True, *_: Any
) -> Tensor:
    shape = table.shape if table is not None and table_gradient else (0, 0)
    return logits.new_empty(shape, dtype=torch.float64)


def _backward_fake(
    logits: Tensor, grad: Tensor, target: Tensor, normalizer: Tensor, c: float, k: float, *rest: Any
) -> Tensor:
    return _grad_table(logits, *rest)


def _gradient_fake(
    logits: Tensor, grad: Tensor, target: Tensor, c: float, k: float, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _fake(logits)[0], _grad_table(logits, *rest)


class TargetLogSoftmax(torch.autograd.Function):
    forward: Any = _op

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, target, ctx.c, ctx.k, table, ctx.radius = inputs
        log_normalizer = output[1]
        ctx.mark_non_differentiable(log_normalizer)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, log_normalizer, table)

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_log_normalizer: None) -> Any:
        if grad_log_prob is None:
            return (None,) * 6
        logits, target, log_normalizer, table = ctx.saved_tensors
        wanted = table is not None and ctx.needs_input_grad[4]
        rows = logits, grad_log_prob, target, log_normalizer
        function = ctx.c, ctx.k, table, ctx.radius
        grad, grad_table = once("target_log_softmax", _backward, *rows, *function, wanted)
        return grad, None, None, None, grad_table.to(logits.dtype) if wanted else None, None


torch.library.register_fake("hstree::target_log_softmax", _fake)
torch.library.register_fake("hstree::target_log_softmax_backward_", _backward_fake)
torch.library.register_fake("hstree::target_log_softmax_gradient_", _gradient_fake)
_record = register_gradient(_op, TargetLogSoftmax)
