"""What the backward operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def no_second_derivative(name: str) -> Callable[..., Any]:
    def gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hstree::{name}: expected to be differentiated once, got a second derivative "
            "(create_graph=True), which is not implemented"
        )

    return gradient
