"""The module that replaces an ``lm_head``, and what it shares with the loss in one call."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from hstree.heads import Head


@dataclass
class Call:
    """What the :class:`LMHead` and the loss of a model share in one forward call."""

    skip_logits: bool
    head: Head | None = None
    hidden: Tensor | None = None
    log_prob: Tensor | None = None
    target_log_prob: Tensor | None = None
    loss: Tensor | None = None


class _Calls(threading.local):
    """The innermost call in progress of each thread. The modules hold no state of a call: threads
    share them, and PEFT replaces them by copies."""

    innermost: Call | None = None


calls = _Calls()


class _NoWeight:
    """The ``weight`` of an :class:`LMHead`: models read its dtype and device. Nothing else works,
    so that no code can train or multiply by a matrix that the head does not have."""

    def __init__(self, head: Head) -> None:
        first = next(head.parameters())
        self.dtype, self.device = first.dtype, first.device
        self._message = (
            f"lm_head.weight: expected a linear lm_head, got {type(head).__name__} of hstree, "
            f"which is not one matrix; use the loss and the logits of the model, "
            f"model(input_ids, labels=labels).loss and model(input_ids).logits"
        )

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError(self._message)

    __getitem__ = __len__ = __iter__ = __matmul__ = __rmatmul__ = __torch_function__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._message)


class LMHead(nn.Module):
    """The module that replaces a model's ``lm_head``.

    Its output, the logits of the model, is log P(v | h) of all classes, [..., V]: the softmax of
    these logits is the head's distribution. In a call of the model that skips the logits it returns
    ``hidden``, which the loss takes from the call.
    """

    head: Head
    bias = None  # read by models and libraries

    def __init__(self, head: Head | None = None) -> None:
        super().__init__()
        if head is not None:
            self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        call = calls.innermost or Call(skip_logits=False)
        call.head, call.hidden = self.head, hidden
        if call.skip_logits:
            return hidden
        call.log_prob = self.head.log_prob(hidden)
        return call.log_prob

    @property
    def weight(self) -> Any:
        return _NoWeight(self.head)

    @property
    def in_features(self) -> int:
        return self.head.in_features

    @property
    def out_features(self) -> int:
        return self.head.n_classes
