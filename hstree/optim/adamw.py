"""AdamW for dense and row-sparse gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hstree._numerics import sum_dtype
from hstree.ops import sparse_adam_
from hstree.optim.rows import summed_rows

MOMENTS = ("exp_avg", "exp_avg_sq")
REFUSED = ("amsgrad", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` for models that also have row-sparse gradients, such as those of
    ``TreeEnsemble(sparse=True)`` and ``torch.nn.Embedding(sparse=True)``.

    Parameters with a dense gradient are updated by torch's own code. A row w of a parameter that a
    row-sparse gradient g visits, at step k of the parameter, is updated by the same rule::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        w <- (1 - lr weight_decay) w - lr / (1 - beta1^k) m / (sqrt(v / (1 - beta2^k)) + eps)

    The updates are lazy: a row that the gradient does not visit keeps its weight and its moments,
    and does not decay. The cost of a step is independent of the number of rows. If every gradient
    visits every row, the result is that of torch.

    Groups, state (``step``, ``exp_avg``, ``exp_avg_sq``) and ``state_dict()`` are those of
    :class:`torch.optim.AdamW`, and each class loads the state of the other. A parameter may have
    dense gradients in some steps and sparse ones in others. The state of
    :class:`torch.optim.SparseAdam` can be loaded too, without weight decay. The moments of bfloat16
    and float16 parameters with sparse gradients are float32. Learning-rate schedulers,
    ``torch.amp.GradScaler`` and hooks work as with any optimizer. ``fused=True`` keeps the step
    counts on the device of the parameters; reading them waits for a GPU. Sparse steps are
    deterministic for any number of threads.

    Args:
        params: parameters, or groups of them, such as those of
            :meth:`hstree.heads.Head.parameter_groups`. Parameters with sparse gradients are
            contiguous, float32, float64, bfloat16 or float16, and their gradients are sparse in the
            first one or two dimensions.
        lr: learning rate.
        betas: decay of m and of v, each in [0, 1).
        eps: number added to the denominator.
        weight_decay: decoupled weight decay; for sparse gradients only in the visited rows.
        maximize: whether to maximize instead of minimizing.
        foreach: as in torch, for dense gradients.
        fused: as in torch, for dense gradients. None: if ``foreach`` is None and all parameters are
            on the CPU or a CUDA device and of a floating dtype. Torch's other code makes several
            passes over each matrix.

    Raises:
        ValueError: for a number out of range, or a group with ``amsgrad``, ``capturable`` or
            ``differentiable``, which the sparse step does not support.
        RuntimeError: from :meth:`step`, for an unsupported parameter or gradient.

    Example:
        >>> import torch, hstree
        >>> head = hstree.TreeEnsemble(8, 100, [hstree.trees.random_tree(100)], sparse=True)
        >>> backbone = torch.nn.Linear(4, 8)
        >>> groups = [{"params": backbone.parameters()}, *head.parameter_groups(lr=1e-3)]
        >>> optimizer = hstree.optim.AdamW(groups, lr=1e-3)
        >>> head(backbone(torch.randn(5, 4)), torch.arange(5)).loss.backward()
        >>> optimizer.step()
        >>> head.below.weight.grad.is_sparse
        True

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019, algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, foreach=foreach, fused=fused
        )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if fused is None and foreach is None and all(map(_is_fused_by_default, parameters)):
            self.defaults["fused"] = True
            for group in self.param_groups:
                if group["fused"] is None:
                    group["fused"] = True
        # Makes GradScaler unscale the gradients: the fused code would unscale only dense ones.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss of the closure, if there is one.

        Raises:
            RuntimeError: for an unsupported parameter or gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sparse: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if parameter.dtype != sum_dtype(parameter.dtype):
                    self._cast_moments(parameter, gradient.is_sparse)
                if gradient.is_sparse:
                    sparse.append((parameter, gradient, group))
                    # The step of torch passes over parameters without a gradient.
                    parameter.grad = None
        try:
            _step_of_torch(self)
        finally:
            for parameter, gradient, _ in sparse:
                parameter.grad = gradient
        for parameter, gradient, group in sparse:
            self._step_rows(parameter, summed_rows(gradient), group)
        return loss

    def _cast_moments(self, parameter: Tensor, sparse: bool) -> None:
        """Cast the moments of a low-precision parameter, if it has some, to the dtype that the
        step needs."""
        state = self.state[parameter]
        dtype = sum_dtype(parameter.dtype) if sparse else parameter.dtype
        for name in MOMENTS if state else ():
            state[name] = state[name].to(dtype)

    def _step_rows(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # Where the step of torch keeps it.
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=sum_dtype(parameter.dtype))
        state["step"] += 1
        if gradient._nnz() == 0:
            return
        sparse_adam_(
            parameter,
            state["exp_avg"],
            state["exp_avg_sq"],
            gradient._indices(),
            gradient._values(),
            step=int(state["step"]),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: ``params``, and options that differ from those of the optimizer.

        Raises:
            ValueError: for ``amsgrad``, ``capturable`` or ``differentiable``.
        """
        _refuse(param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _refuse(group)
            group.setdefault("weight_decay", 0.0)  # SparseAdam has none
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, of :class:`torch.optim.AdamW` or of
        :class:`torch.optim.SparseAdam`.

        Args:
            state_dict: result of ``state_dict()``.

        Raises:
            ValueError: if its groups do not match those of this optimizer, or have ``amsgrad``,
                ``capturable`` or ``differentiable``.
        """
        super().load_state_dict(state_dict)
        # The base class has cast the moments to the dtype of the parameters: restore float32 ones.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for name in MOMENTS:
                value = state_dict["state"].get(key, {}).get(name, parameter)
                if value.dtype == sum_dtype(parameter.dtype) != parameter.dtype:
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


# Without the step hooks, which our own step has run already.
_step_of_torch = inspect.unwrap(torch.optim.AdamW.step)


def _is_fused_by_default(parameter: Tensor) -> bool:
    return parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()


def _refuse(group: dict[str, Any]) -> None:
    for name in REFUSED:
        if group.get(name):
            raise ValueError(f"{name}: expected False, which the sparse step needs, got True")
