"""The learning rates of an optimizer, for schedulers that replace them."""

from __future__ import annotations

from torch.optim import Optimizer

from hstree._checks import check_number


def learning_rates(optimizer: Optimizer, factor: float = 1.0) -> list[float]:
    """The learning rate of each parameter group, times ``factor``.

    For :class:`torch.optim.lr_scheduler.OneCycleLR` and ``CyclicLR``: they set the rates of all
    groups to the number they get, which removes the ``learning_rate_factor`` of a head. A list has
    a rate for each group. Other schedulers of torch multiply the rates of the groups, and need no
    list. Call it before a scheduler changes the rates.

    Args:
        optimizer: the optimizer.
        factor: positive.

    Returns:
        One rate for each of ``optimizer.param_groups``.

    Raises:
        ValueError: if the factor is not positive and finite.

    Example:
        >>> import torch, hstree
        >>> backbone, head = torch.nn.Linear(8, 16), hstree.Softmax(16, 100)
        >>> groups = [{"params": backbone.parameters()}, *head.parameter_groups(lr=1e-3)]
        >>> optimizer = hstree.optim.AdamW(groups, lr=1e-3)
        >>> hstree.optim.learning_rates(optimizer)
        [0.001, 0.008, 0.008]
        >>> max_lr = hstree.optim.learning_rates(optimizer, 2)
        >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=100)
        >>> [group["max_lr"] for group in optimizer.param_groups]
        [0.002, 0.016, 0.016]
    """
    factor = check_number("factor", factor, positive=True)
    return [float(group["lr"]) * factor for group in optimizer.param_groups]
