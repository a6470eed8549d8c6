"""Parameter groups of a head for optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hstree._checks import check_nonnegative, check_number


class HeadParameters(nn.Module):
    """The parameters of a head, grouped by how they are optimized."""

    learning_rate_factor: float

    def parameter_groups(
        self, lr: float, weight_decay: float = 0.01, *, decay_biases: bool = False
    ) -> list[dict[str, Any]]:
        """Parameter groups for the optimizers of torch and :class:`hstree.optim.AdamW`.

        Biases and all other one-dimensional parameters have no weight decay. Frozen parameters are
        omitted, and so is a tied embedding, which belongs to the model.

        Args:
            lr: learning rate of the model. The head's learning rate is ``learning_rate_factor``
                times that, except for the slopes of a PLIF: its ``slope_learning_rate``.
            weight_decay: weight decay of the weights; 0 for SGD and Adagrad with row-sparse
                gradients.
            decay_biases: whether biases decay too, as in the training of published perplexities.
                The parameters of a function of the logits do not, except for the slopes of a PLIF
                with ``slope_decay``.

        Returns:
            Dicts of ``params``, ``lr`` and ``weight_decay``.

        Raises:
            ValueError: if ``lr`` is not positive and finite, or ``weight_decay`` is negative.

        Example:
            >>> import torch, hstree
            >>> backbone, head = torch.nn.Linear(8, 16), hstree.Softmax(16, 100)
            >>> groups = [{"params": backbone.parameters()}, *head.parameter_groups(lr=1e-3)]
            >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
            >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
            [(0.001, 0.01), (0.008, 0.01), (0.008, 0.0)]
        """
        lr = check_number("lr", lr, positive=True) * self.learning_rate_factor
        weight_decay = check_nonnegative("weight_decay", weight_decay)
        apart = {id(parameter) for parameter in self._apart()}
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and id(parameter) not in apart:
                is_weight = parameter.dim() > 1 and not name.endswith("bias")
                decay = weight_decay if is_weight or decay_biases else 0.0
                groups.setdefault(decay, []).append(parameter)
        return [{"params": p, "lr": lr, "weight_decay": decay} for decay, p in groups.items()]

    def _apart(self) -> Iterable[Tensor]:
        """Parameters that are not in the head's own groups."""
        return ()

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Parameters with row-sparse gradients (``torch.sparse_coo``) in training."""
        return []
