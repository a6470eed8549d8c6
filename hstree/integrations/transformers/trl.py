"""The fused lm_head of TRL's trainers, computed by a head of hstree.

``add_fused_lm_head`` of TRL replaces the forward method of a model by one that multiplies the
hidden vectors by ``lm_head.weight``. The method here has the same arguments and results.
"""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from hstree.heads import Head
from hstree.heads.losses import split_rows
from hstree.integrations.transformers.lm_head import Call


def is_fused(forward: Any) -> bool:
    """Whether a forward method is that of ``add_fused_lm_head``."""
    function = getattr(forward, "__func__", None)
    return "fused_lm_head" in (getattr(function, "__kwdefaults__", None) or ())


def score_with_head(fused: MethodType) -> MethodType:
    """The forward method of a model with a head that replaces the one of ``add_fused_lm_head``.

    Raises:
        ValueError: for an option of TRL that only a linear lm_head has.
    """
    settings = inspect.getclosurevars(fused.__func__).nonlocals
    for name, expected in (("temperature", 1.0), ("cast_lm_head_to_fp32", False)):
        if settings[name] != expected:
            raise ValueError(
                f"{name}: expected {expected} for a model with a head of hstree, got "
                f"{settings[name]}"
            )
    fields = {"log_probs", *settings["outputs"]}
    unknown = fields - {"log_probs", *_STATISTICS}
    if unknown:
        raise ValueError(
            f"outputs: expected some of {', '.join(_STATISTICS)} for a model with a head of "
            f"hstree, got {', '.join(sorted(unknown))}"
        )

    @functools.wraps(fused.__func__)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> Any:
        given: dict[str, Any] = {
            "labels": labels,
            "shift_labels": shift_labels,
            "num_items_in_batch": num_items_in_batch,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if not fused_lm_head:
            return fused(*args, **given, **options)
        from trl.trainer.utils import FusedCausalLMOutput

        target: Tensor = given["shift_labels"] if "shift_labels" in given else labels[:, 1:]
        mask = target.ne(-100)
        # At least 1: a batch without labels has a loss of 0.
        given.setdefault("num_items_in_batch", mask.sum().clamp(min=1))
        given.setdefault("labels", target)
        call = Call(skip_logits=True)
        out = self.run(call, *args, **(options | given | {"use_cache": False}))
        head: Any = call.head
        hidden: Any = call.hidden
        log_prob: Any = call.target_log_prob
        if head.samples_in_training and self.training:
            raise TypeError(
                f"lm_head: expected a head with exact log-probabilities, as TRL needs them in "
                f"training, got {type(head).__name__}, which samples classes; use the Trainer of "
                f"transformers"
            )
        if "shift_labels" not in given:
            hidden, log_prob = hidden[:, :-1], log_prob[:, :-1]
        target, mask = target.to(hidden.device), mask.to(hidden.device)
        statistics = {
            name: None
            if name not in fields
            else _at(mask, function(head, hidden[mask], target[mask]))
            for name, function in _STATISTICS.items()
        }
        return FusedCausalLMOutput(
            loss=out.loss,
            log_probs=log_prob,
            label_mask=mask,
            aux_loss=out.get("aux_loss"),
            **statistics,
        )

    return MethodType(forward, fused.__self__)


def _at(mask: Tensor, values: Tensor) -> Tensor:
    """Values in the places of a mask, else 0."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _entropy(head: Head, hidden: Tensor, target: Tensor) -> Tensor:
    return head.entropy(hidden)


def _is_top1(head: Head, hidden: Tensor, target: Tensor) -> Tensor:
    return head.predict(hidden) == target


@torch.no_grad()
def _log_sum_sq_probs(head: Head, hidden: Tensor, target: Tensor) -> Tensor:
    chunks = split_rows(head.n_classes, hidden)
    return torch.cat([(2 * head.log_prob(rows)).logsumexp(-1) for (rows,) in chunks])


@torch.no_grad()
def _mean_logits(head: Head, hidden: Tensor, target: Tensor) -> Tensor:
    chunks = split_rows(head.n_classes, hidden)
    return torch.cat([head.log_prob(rows).mean(-1) for (rows,) in chunks])


_STATISTICS = {
    "entropy": _entropy,
    "is_top1": _is_top1,
    "log_sum_sq_probs": _log_sum_sq_probs,
    "mean_logits": _mean_logits,
}
