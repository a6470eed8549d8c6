"""Calls that torch.compile leaves out of its graphs. Imported where one is compiled, because this
imports torch._dynamo, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


uncompiled = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _call,
    reason="torch.compile has no sparse gradients (pass sparse=False), and does not look into "
    "deferred logits that were made outside of what it compiles",
)
"""``uncompiled(function, *arguments)`` is ``function(*arguments)``."""
