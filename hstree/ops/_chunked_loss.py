"""What operators share that compute log-probabilities of targets, their loss and its gradients in
chunks of rows: :mod:`hstree.ops.mixture_log_prob` and :mod:`hstree.ops.forest_log_prob`.

hstree::NAME takes the fields of a problem, the factors of the rows in the loss, whether the loss is
a mean, and which gradients are wanted. It returns log_prob [N], the loss and the gradients of the
first five fields, in the dtype of sums, or, the large ones, in that of :func:`gradient_dtype`;
those of a mean of float16 without its scale. A weight in float32 may come with contexts of 16 bits:
products round it to their dtype, and its gradient is not rounded.
hstree::NAME_backward computes them for any gradient of log_prob.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hstree._checks import in_torch_func
from hstree._numerics import (
    is_low,
    is_transformed,
    onednn_is_faster,
    sum_dtype,
    write_onednn_product,
)
from hstree.ops._gradient import once, register_gradient
from hstree.ops._recycled import recycled

GRADIENTS = 5
_SCHEMA = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "int": "SymInt"}
_RESULTS = "Tensor, Tensor, Tensor, Tensor, Tensor"


def check_decoder(
    name: str,
    context: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_weight: Tensor | None,
) -> None:
    """Checks what the operators have in common; ``context``: [N, ..., D], called ``name``."""
    rows, features = context.shape[0], context.shape[-1]
    if not context.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {context.dtype}")
    if weight.dim() != 2 or weight.shape[1] != features or weight.shape[0] == 0:
        raise ValueError(
            f"weight: expected shape [V, {features}] with V of at least 1, "
            f"got {tuple(weight.shape)}"
        )
    if weight.dtype != context.dtype and not (is_low(context) and weight.dtype == torch.float32):
        raise ValueError(f"weight: expected dtype {context.dtype}, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    if target.shape != context.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            f"target: expected shape [{rows}] and dtype torch.int64, "
            f"got {tuple(target.shape)} and {target.dtype}"
        )
    if row_weight is not None and row_weight.shape != target.shape:
        raise ValueError(f"row_weight: expected shape [{rows}], got {tuple(row_weight.shape)}")


def check_offset(offset: Tensor | None, weight: Tensor) -> None:
    if offset is not None and offset.shape != weight.shape[:1]:
        raise ValueError(f"offset: expected shape [{weight.shape[0]}], got {tuple(offset.shape)}")


def add_offset(scores: Tensor, offset: Tensor, target: Tensor, dim: int) -> None:
    """Add the offset [V] to scores, [R, V] or [V, R] with the classes in dimension ``dim``, but not
    at the target [R] of a row."""
    at = target.clamp(0, len(offset) - 1).unsqueeze(dim)
    # Saved and written back: a mask of the targets would be another [R, V].
    of_target = scores.gather(dim, at)
    scores += offset.unsqueeze(1 - dim)
    scores.scatter_(dim, at, of_target)


def write_product(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None) -> None:
    """out = a @ b, or addend + a @ b; ``addend``: broadcast, or ``out``. On the CPU torch rounds
    products of bfloat16 to 16 bits, which gradients have anyway."""
    if a.dtype == torch.float16 and not a.is_cuda:  # faster
        a, b = a.float(), b.float()
    if onednn_is_faster(a, b):
        write_onednn_product(out, a, b, addend)
        return
    if a.dtype == out.dtype:
        options: dict[str, Any] = {}
    elif a.is_cuda:
        options = {"out_dtype": out.dtype}
        if addend is not None and addend is not out:  # faster than torch's own sum
            torch.mm(a, b, out=out, **options)
            out += addend
            return
    else:
        product = torch.mm(a, b)
        out.copy_(product) if addend is None else torch.add(product, addend, out=out)
        return
    if addend is None:
        torch.mm(a, b, out=out, **options)
    else:
        torch.addmm(addend, a, b, out=out, **options)


def rounded_weight(weight: Tensor, context: Tensor) -> Tensor:
    """The weight in the dtype of the contexts."""
    if weight.dtype == context.dtype:
        return weight
    return recycled(context, *weight.shape).copy_(weight)


def keeps_low(weight: Tensor) -> bool:
    """Whether gradients of scores are kept in 16 bits until :func:`group_chunks` chunks of them
    give that of the weight in one product. Chunk by chunk a GPU reads and writes the sum in float32
    each time, which takes a fifth of the product."""
    return weight.is_cuda and is_low(weight)


def group_chunks(weight: Tensor, chunk_rows: int) -> int:
    """Number of chunks whose gradients of scores are kept: so many that they take at most the
    memory of the gradient of the weight [V, D] in float32, or twice as much where that is rounded
    to 16 bits, and at least 1."""
    memory = 4 if is_low(weight) else 2
    return max(1, memory * weight.shape[1] // max(1, chunk_rows))


def gradient_dtype(factor: Tensor) -> torch.dtype:
    """Dtype of the gradient of a factor of the products: that of sums, or bfloat16, which needs no
    scale, where the sums of a product are rounded once."""
    low = keeps_low(factor) and factor.dtype == torch.bfloat16
    return factor.dtype if low else sum_dtype(factor.dtype)


ALIGNED = 8
"""Rows of matrices of 16 bits begin at multiples of so many numbers, 16 bytes: products of others
take 3 to 7 times as long on an H200."""


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _loss_weight(problem: Any, row_weight: Tensor | None) -> Tensor:
    """Factor [N] of each row in the loss, 0 where it is ignored."""
    kept: Tensor = problem.target != -1
    if row_weight is None:
        return kept.to(sum_dtype(problem[0].dtype))
    return row_weight.masked_fill(~kept, 0)


def _scale(weight: Tensor, mean: bool) -> Tensor:
    """1 / sum of the weights for a mean, or 1 if the sum is 0, where all gradients are 0."""
    total = weight.sum() if mean else weight.new_ones(())
    return total.masked_fill(total == 0, 1).reciprocal()


def _is_half(problem: Any) -> bool:
    """Whether products are in float16. They need gradients of order one, so that the scale of a
    mean is applied after them, where the gradients are rounded."""
    context: Tensor = problem[0]
    return context.dtype == torch.float16


def _rounded(gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """factor * gradient in ``dtype``, in one pass; may overwrite the gradient."""
    if torch.is_grad_enabled():  # create_graph
        return (gradient if factor is None else gradient * factor).to(dtype)
    if gradient.dtype != dtype:
        out = recycled(gradient, *gradient.shape, dtype=dtype)
        return out.copy_(gradient) if factor is None else torch.mul(gradient, factor, out=out)
    if factor is None:
        return gradient
    plain = type(gradient) is Tensor and gradient.is_contiguous()
    if gradient.is_cuda and gradient.dtype != torch.float64 and plain:
        # It takes nothing for the 1 of backward(), and 16 bits a fourth of a product in torch.
        torch.ops.hstree.scale_(gradient, factor.float())
        return gradient
    return gradient.mul_(factor)


class ChunkedLoss:
    """The operators of one kind of problem, with their gradients.

    Args:
        name: name of the op.
        problem: named tuple of its first arguments, annotated as strings: tensors, of which the
            first five have gradients, then numbers. The first are the contexts, [N, ...]; the field
            target is [N], -1 for an ignored row.
        run: log_prob [N] and the wanted gradients for ``upstream`` [N], of a problem, ``wanted``
            and ``upstream``.
        empty: the gradients, uninitialized, of a problem and ``wanted``.
    """

    def __init__(
        self,
        name: str,
        problem: Any,
        run: Callable[..., tuple[Tensor, Sequence[Tensor]]],
        empty: Callable[..., Sequence[Tensor]],
    ) -> None:
        self.name, self.problem, self.run, self.empty = name, problem, run, empty
        # A named tuple wraps annotations that are strings; the schema needs their text.
        types = [getattr(t, "__forward_arg__", t) for t in problem.__annotations__.values()]
        self.n_fields = len(types)
        self.n_tensors = sum(type.startswith("Tensor") for type in types)
        named = zip(types, problem._fields, strict=True)
        fields = ", ".join(f"{_SCHEMA[type]} {field}" for type, field in named)
        self.op = self._define(
            name,
            f"({fields}, Tensor? row_weight, bool mean, bool[] wanted)",
            f"(Tensor, Tensor, {_RESULTS})",
            self._forward,
            self._forward_fake,
        )
        self.backward_op = self._define(
            f"{name}_backward",
            f"(Tensor grad_log_prob, {fields}, bool[] wanted)",
            f"({_RESULTS})",
            self._backward,
            lambda _, *arguments: self.empty(problem(*arguments[:-1]), arguments[-1]),
        )
        function: Any = type(
            name,
            (torch.autograd.Function,),
            {
                "forward": self.op,
                "setup_context": staticmethod(self._save_for_backward),
                "backward": staticmethod(self._gradient),
            },
        )
        self.function, self.record = function, register_gradient(self.op, function)

    @staticmethod
    def _define(name: str, arguments: str, results: str, kernel: Any, fake: Any) -> Any:
        name, schema = f"hstree::{name}", f"{arguments} -> {results}"
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", kernel)
        torch.library.register_fake(name, fake)
        return getattr(torch.ops.hstree, name.removeprefix("hstree::")).default

    def __call__(
        self, problem: Any, row_weight: Tensor | None, reduction: str
    ) -> tuple[Tensor, Tensor]:
        """log_prob [N] and the reduced loss, without gradients through ``row_weight`` [N]."""
        if row_weight is not None:
            row_weight = row_weight.detach().to(sum_dtype(problem[0].dtype))
        # Gradients of the loss are computed along with it, while the scores of a chunk exist. Those
        # of rows, and transforms, get them from the backward op.
        with_loss = torch.is_grad_enabled() and reduction != "none" and not is_transformed()
        wanted = [with_loss and t is not None and t.requires_grad for t in problem[:GRADIENTS]]
        mean = reduction == "mean"
        run = self.op
        if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
            run = self.function.apply if in_torch_func() else self.record
        log_prob, loss, *_ = run(*problem, row_weight, mean, wanted)
        if reduction == "none":
            loss = -log_prob
            if row_weight is not None:
                loss = loss * _loss_weight(problem, row_weight)
        return log_prob, loss

    def _forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        *fields, row_weight, mean, wanted = arguments
        problem = self.problem(*fields)
        factor = _loss_weight(problem, row_weight)
        upstream = -factor if _is_half(problem) else -_scale(factor, mean) * factor
        log_prob, gradients = self.run(problem, wanted, upstream)
        loss = -(factor * log_prob).sum()
        # NaN if all rows are ignored, as in torch.
        return log_prob, loss / factor.sum() if mean else loss, *gradients

    def _forward_fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        *fields, _row_weight, _mean, wanted = arguments
        context = fields[0]
        log_prob = context.new_empty(context.shape[0], dtype=sum_dtype(context.dtype))
        return log_prob, log_prob.new_empty(()), *self.empty(self.problem(*fields), wanted)

    def _backward(self, grad_log_prob: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *fields, wanted = arguments
        return (*self.run(self.problem(*fields), wanted, grad_log_prob.contiguous())[1],)

    def _save_for_backward(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *fields, row_weight, ctx.mean, ctx.wanted = inputs
        ctx.mark_non_differentiable(*output[2:])
        # None tells which of log_prob and the loss is not differentiated.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*fields[: self.n_tensors], row_weight)
        ctx.scalars = fields[self.n_tensors :]
        ctx.gradients = output[2:] if any(ctx.wanted) else None

    def _gradient(
        self, ctx: Any, grad_log_prob: Tensor | None, grad_loss: Tensor | None, *_: Any
    ) -> Any:
        needed = ctx.needs_input_grad[:GRADIENTS]
        *tensors, row_weight = ctx.saved_tensors
        problem = self.problem(*tensors, *ctx.scalars)
        # Released in the first backward pass; a second one computes them again.
        ready, ctx.gradients = ctx.gradients, None
        again = torch.is_grad_enabled()  # create_graph: the recomputation raises the error
        if again or any(need and not want for want, need in zip(ctx.wanted, needed, strict=True)):
            ready = None
        factor = None
        if ready is not None and grad_log_prob is None and grad_loss is not None:
            gradients = ready
            factor = grad_loss
            # They were computed without the scale of the mean.
            if ctx.mean and _is_half(problem):
                factor = factor * _scale(_loss_weight(problem, row_weight), True)
            # The 1 of loss.backward() saves a pass over all gradients. On a GPU reading it would
            # wait.
            if type(factor) is Tensor and not factor.is_cuda and factor.item() == 1:
                factor = None
        else:
            weight = _loss_weight(problem, row_weight)
            upstream = torch.zeros_like(weight)
            if grad_log_prob is not None:
                upstream = upstream + grad_log_prob
            if grad_loss is not None:
                upstream = upstream - grad_loss * _scale(weight, ctx.mean) * weight
            gradients = once(self.name, self.backward_op, upstream, *problem, needed)
        result = [
            _rounded(gradient, factor, tensor.dtype) if tensor is not None and need else None
            for gradient, tensor, need in zip(gradients, problem[:GRADIENTS], needed, strict=True)
        ]
        return *result, *[None] * (self.n_fields - GRADIENTS + 3)


torch.library.register_fake("hstree::scale_", lambda x, factor: None)
