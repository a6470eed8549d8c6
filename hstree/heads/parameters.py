"""What an optimiser has to know of a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hstree._checks import check_number


class HeadParameters(nn.Module):
    """The parameters of a head, by how they are optimised."""

    learning_rate_factor: float

    def parameter_groups(
        self, lr: float, weight_decay: float = 0.01, *, decay_biases: bool = False
    ) -> list[dict[str, Any]]:
        """The head's parameters as the optimisers of torch and :class:`hstree.optim.AdamW` take
        them.

        Biases, scales and every other parameter of one dimension have no weight decay. A tied
        embedding is the model's, and left out as frozen parameters are.

        Args:
            lr: learning rate of the model. The head's is ``learning_rate_factor`` times that, but
                for the slopes of a PLIF: 0.02.
            weight_decay: of the weights; 0 for SGD and Adagrad if gradients are row-sparse.
            decay_biases: biases and scales too, as in training for published perplexities; the
                parameters of a function of the logits never decay.

        Returns:
            Dicts of ``params``, ``lr`` and ``weight_decay``.

        Raises:
            ValueError: ``lr`` is not positive and finite, or ``weight_decay`` negative.

        Example:
            >>> groups = [{"params": backbone.parameters()}, *head.parameter_groups(lr=1e-3)]
            >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
        """
        lr = check_number("lr", lr, positive=True) * self.learning_rate_factor
        weight_decay = check_number("weight_decay", weight_decay)
        if weight_decay < 0:
            raise ValueError(f"weight_decay: expected a number of at least 0, got {weight_decay}")
        apart = {id(parameter) for parameter in self._apart()}
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and id(parameter) not in apart:
                is_weight = parameter.dim() > 1 and not name.endswith(("bias", "scale"))
                decay = weight_decay if is_weight or decay_biases else 0.0
                groups.setdefault(decay, []).append(parameter)
        return [{"params": p, "lr": lr, "weight_decay": decay} for decay, p in groups.items()]

    def _apart(self) -> Iterable[Tensor]:
        """Parameters whose settings are not those of the head's own."""
        return ()

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Parameters whose gradients in training are row-sparse (``torch.sparse_coo``)."""
        return []
