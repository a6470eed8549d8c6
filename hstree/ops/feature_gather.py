"""The subset of the features of each tree: ``torch.ops.hstree.feature_gather``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._checks import in_torch_func
from hstree._numerics import is_transformed
from hstree.ops._gradient import once, register_gradient

_op = torch.ops.hstree.feature_gather.default


def feature_gather(hidden: Tensor, feature_index: Tensor) -> Tensor:
    """The features that each of T trees reads: output[n, t, s] = hidden[n, feature_index[t, s]].

    Equivalent to::

        hidden[:, feature_index.long()]

    Deterministic: the gradient is summed over the trees in order, in float32 (float64 for float64).

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        feature_index: features of each tree, [T, S] int32, each row increasing within [0, D).

    Returns:
        The features, [N, T, S], dtype of ``hidden``.

    Raises:
        RuntimeError: for a wrong shape, dtype or device and, on the CPU, an index out of range. On
            CUDA an index out of range gives NaN. For a second derivative.

    Example:
        >>> import torch
        >>> from hstree.ops import feature_gather
        >>> index = torch.tensor([[0, 2]], dtype=torch.int32)
        >>> feature_gather(torch.tensor([[1.0, 2.0, 3.0]]), index)
        tensor([[[1., 3.]]])
    """
    run: Any = _op
    if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
        run = FeatureGather.apply if in_torch_func() else _record
    output: Tensor = run(hidden, feature_index)
    return output


def _fake(hidden: Tensor, feature_index: Tensor) -> Tensor:
    if hidden.dim() != 2:
        raise RuntimeError(f"hidden: expected shape [N, D], got {tuple(hidden.shape)}")
    if feature_index.dim() != 2:
        raise RuntimeError(
            f"feature_index: expected shape [T, S], got {tuple(feature_index.shape)}"
        )
    return hidden.new_empty((hidden.shape[0], *feature_index.shape))


def _backward_fake(grad: Tensor, feature_index: Tensor, in_features: int) -> Tensor:
    return grad.new_empty((grad.shape[0], in_features))


class FeatureGather(torch.autograd.Function):
    forward: Any = _op

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        hidden, feature_index = inputs
        ctx.in_features = hidden.shape[1]
        ctx.save_for_backward(feature_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        backward = torch.ops.hstree.feature_gather_backward.default
        return once("feature_gather", backward, grad, *ctx.saved_tensors, ctx.in_features), None


torch.library.register_fake("hstree::feature_gather", _fake)
torch.library.register_fake("hstree::feature_gather_backward", _backward_fake)
_record = register_gradient(_op, FeatureGather)
