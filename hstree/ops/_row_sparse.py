"""Gradients with few rows: row-sparse ones, and those of a weight that is read as a whole and by
rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._numerics import is_transformed
from hstree.ops._recycled import recycled


def sparse_gradient(
    parameter: Tensor, index: Tensor, values: Tensor, *, distinct: bool = False
) -> Tensor:
    """The row-sparse gradient of a parameter; ``distinct``: whether the rows increase.

    Raises:
        NotImplementedError: if torch cannot add it to the gradient that the parameter has: it adds
            no sparse tensors of float16 on a CPU.
    """
    if parameter.dtype == torch.float16 and parameter.device.type == "cpu" and parameter.is_leaf:
        before = parameter.grad
        if before is not None and before.is_sparse:
            raise NotImplementedError(
                "grad: expected None before the backward pass, as torch does not add row-sparse "
                f"gradients of float16 on a CPU, got a gradient of shape {tuple(before.shape)}; "
                "call zero_grad() before each backward pass, or use bfloat16 or sparse=False"
            )
    return torch.sparse_coo_tensor(
        index, values, parameter.shape, check_invariants=False, is_coalesced=distinct or None
    )


class _WithRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, sparse: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, index)
        ctx.sparse = sparse
        return weight.view_as(weight), weight.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_rows: Tensor | None) -> Any:
        weight, index = ctx.saved_tensors
        if grad_rows is None:
            return grad, None, None
        if ctx.sparse if grad is None else grad.is_sparse:
            rows = sparse_gradient(weight, index.unsqueeze(0), grad_rows)
            if grad is None:
                return rows, None, None
            if weight.dtype != torch.float16:  # merges increasing rows in order
                return grad + rows, None, None
            indices = torch.cat([grad._indices(), rows._indices()], 1)
            values = torch.cat([grad._values(), grad_rows])
            return sparse_gradient(weight, indices, values), None, None
        if grad is None:
            grad = recycled(weight, *weight.shape).zero_()
        elif torch.is_grad_enabled() or not grad.is_contiguous():
            return grad.index_add(0, index, grad_rows), None, None
        # In place: a second [V, D] would take longer than all else. Only ops read the weight, and
        # their gradients are new tensors.
        return grad.index_add_(0, index, grad_rows), None, None


def with_rows(weight: Tensor, index: Tensor, *, sparse: bool = False) -> tuple[Tensor, Tensor]:
    """The weight [V, ...], and its rows [K, ...]: index int64 [K], in any order, with repetitions.

    The gradient of both is one tensor, with the rows added into that of the weight. If the weight
    gets none, it is row-sparse with ``sparse``. Dense under torch.func.
    """
    if is_transformed() or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return weight, weight.index_select(0, index)
    whole, rows = _WithRows.apply(weight, index, sparse)  # type: ignore[no-untyped-call]
    return whole, rows


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(parameter)
        return parameter.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        if not grad.is_sparse:
            return grad.to(parameter.dtype), None
        values = grad._values().to(parameter.dtype)
        distinct = grad.is_coalesced()
        return sparse_gradient(parameter, grad._indices(), values, distinct=distinct), None


def cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """``parameter.to(dtype)`` whose gradient may be row-sparse, which that of torch may not be."""
    plain = is_transformed() or torch.compiler.is_compiling()
    if plain or parameter.dtype == dtype or not torch.is_grad_enabled():
        return parameter.to(dtype)
    out: Tensor = _Cast.apply(parameter, dtype)  # type: ignore[no-untyped-call]
    return out
