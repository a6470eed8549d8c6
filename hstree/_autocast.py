"""Autocast on all devices, also on meta, which has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for the device."""
    # Not torch.amp.is_autocast_available, which torch.compile of torch 2.11 cannot trace.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast for the device."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
