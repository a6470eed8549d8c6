"""Differentiation and batching of the operators.

Gradients come from an op's backward kernel. In forward mode the op is replaced by its formula in
torch's own operators, which torch differentiates any number of times. Under
:func:`torch.func.vmap` an op processes the batch as additional rows, or one element at a time.

:func:`torch.library.register_autograd` does not suffice. Up to torch 2.13 its ops raise an error
under every transform of torch.func that differentiates (pytorch issues 168393 and 179652), and in
forward mode they lose the tangent without one. tests/ops/test_registration.py tells when this
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

LIBRARY: Any = torch.library.Library("hstree", "FRAGMENT")  # type: ignore[no-untyped-call]

Vmap = Callable[..., tuple[Any, Any]]
"""The ``vmap`` of a :class:`torch.autograd.Function`."""


def define(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the op hstree::name, written in Python, with the schema of the kernel's signature.
    torch.library.custom_op would also register its own derivatives."""
    schema = torch.library.infer_schema(kernel, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hstree::{name}", fake)
    return getattr(torch.ops.hstree, name).default


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    *,
    setup_context: Callable[..., None] = lambda ctx, inputs, output: None,
    vmap: Vmap | None = None,
    formula: Callable[..., Any] | None = None,
) -> None:
    """Register the derivatives of hstree::name, like :func:`torch.library.register_autograd`, and
    its rules for torch.func.

    Args:
        name: name of the op.
        backward: as in :func:`torch.library.register_autograd`.
        setup_context: as in :func:`torch.library.register_autograd`.
        vmap: see :class:`torch.autograd.Function`; None: one element of the batch at a time.
        formula: the op in torch's own operators; None: forward mode raises an error.
    """
    op = getattr(torch.ops.hstree, name).default
    defaults = [argument.default_value for argument in op._schema.arguments]

    def forward(*inputs: Any) -> Any:
        # The kernel of the device. Without this the op would call the kernel for autograd, below,
        # again.
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def no_formula(*_: Any) -> Any:
        raise NotImplementedError(
            f"hstree::{name}: has no derivative in forward mode (torch.func.jvp, jacfwd, "
            "torch.autograd.forward_ad)"
        )

    methods = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": no_formula,
        "vmap": vmap or one_by_one(op),
    }
    function: Any = type(
        name,
        (torch.autograd.Function,),
        {key: staticmethod(method) for key, method in methods.items()},
    )
    # Skips the work of Function.apply for calls that do not come from the dispatcher.
    apply = super(torch.autograd.Function, function).apply

    def with_defaults(inputs: Sequence[Any]) -> Sequence[Any]:  # the dispatcher removes them
        return (*inputs, *defaults[len(inputs) :])

    def autograd(*inputs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
            return (formula or no_formula)(*with_defaults(inputs))
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return apply(*with_defaults(inputs))
        return forward(*inputs)

    def transformed(*inputs: Any) -> Any:
        inputs = (*with_defaults(inputs),)
        return formula(*inputs) if formula and _is_forward_mode() else function.apply(*inputs)

    LIBRARY.impl(name, autograd, "Autograd")
    # The key by which torch.func takes over, before any kernel: Function.apply then serves its
    # levels one by one, with the rules above.
    LIBRARY.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")


def refuse_transforms(name: str) -> None:
    """Make torch.func raise an error for an op that writes into its arguments."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"hstree::{name}: writes into its arguments, which torch.func does not transform"
        )

    LIBRARY.impl(name, refuse, "FuncTorchDynamicLayerFrontMode")


def _is_forward_mode() -> bool:
    """Whether a level of torch.func, or a dual level around it, is one of forward mode. A compiler
    enters levels of torch.func only."""
    if forward_ad._current_level >= 0:
        return True
    return any(level.key() == TransformType.Jvp for level in get_interpreter_stack())


def _has_tangent(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def no_second_derivative(name: str) -> Callable[..., Any]:
    def gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hstree::{name}: expected to be differentiated once, got a second derivative "
            "(create_graph=True), which is not implemented in reverse mode; use torch.func.jacfwd "
            "or torch.func.hessian, which take it in forward mode"
        )

    return gradient


def no_derivative(name: str, other: str) -> Callable[..., Any]:
    """The gradient of an op that has none; ``other``: what has one for the same classes."""

    def gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hstree::{name}: not differentiable; compute the log-probabilities of its classes "
            f"with {other}"
        )

    return gradient


def one_by_one(op: Callable[..., Any]) -> Vmap:
    """A vmap rule that processes one element of the batch at a time."""

    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
        def of_element(i: int) -> list[Any]:
            pairs = zip(inputs, in_dims, strict=True)
            return [x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs]

        results = [op(*of_element(i)) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return vmap


def by_rows(op: Callable[..., Any], inputs: Sequence[int | None], outputs: Any) -> Vmap:
    """A vmap rule that processes the batch as additional rows. If an argument that all rows share
    is batched, it processes one element at a time.

    Args:
        op: the op.
        inputs: for each argument the dimension of its rows; None: all rows share the argument.
        outputs: the dimension of the rows of the output, or of each output; None: no batch.
    """

    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if is_shared_batched(in_dims, inputs):
            return one_by_one(op)(info, in_dims, *arguments)
        results = op(*fold(arguments, in_dims, inputs, size))
        if isinstance(results, Tensor):
            return unfold(results, outputs, size), outputs
        rows = zip(results, outputs, strict=True)
        return tuple(x if row is None else unfold(x, row, size) for x, row in rows), outputs

    return vmap


def is_shared_batched(in_dims: Sequence[Any], rows: Sequence[int | None]) -> bool:
    """Whether an argument that all rows share is batched."""
    dims = zip(in_dims, rows, strict=True)
    return any(isinstance(dim, int) and row is None for dim, row in dims)


def fold(
    inputs: Sequence[Any], in_dims: Sequence[Any], rows: Sequence[int | None], size: int
) -> list[Any]:
    """The arguments with the rows of all elements of the batch."""

    def one(x: Any, dim: int | None, row: int | None) -> Any:
        if x is None or row is None:
            return x
        # Rows that are the same for all elements are repeated, as each element has results of its
        # own.
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.movedim(0, row).flatten(row, row + 1)

    return [one(*each) for each in zip(inputs, in_dims, rows, strict=True)]


def unfold(output: Tensor, row: int, size: int) -> Tensor:
    """The output with the rows of each element of the batch; the batch is dimension ``row``."""
    shape = output.shape
    return output.reshape(*shape[:row], size, shape[row] // size, *shape[row + 1 :])
