"""Autocast on devices that may not have it, such as meta."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for the device."""
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast for the device."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
