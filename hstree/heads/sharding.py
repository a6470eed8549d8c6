"""Methods of a head that FSDP treats like ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class ForwardMethod:
    """A method of a sharded head. Registers itself with FSDP when it is first looked up, so that
    FSDP gathers the parameters for it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __get__(self, head: Any, owner: type) -> Any:
        if head is None:
            return self.function
        from torch.distributed.fsdp import register_fsdp_forward_method

        # An attribute of the instance takes precedence over this descriptor.
        setattr(head, self.name, self.function.__get__(head))
        register_fsdp_forward_method(head, self.name)
        return getattr(head, self.name)


def register_forward_methods(cls: type, names: Iterable[str]) -> None:
    """Make the named methods forward methods if ``cls`` is the class that FSDP derives from the
    class of a head."""
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        for name in names:
            setattr(cls, name, ForwardMethod(name, getattr(cls, name)))


def is_distributed_hook(hook: Callable[..., Any]) -> bool:
    """Whether torch.distributed registered this forward pre-hook. FSDP has its own way into the
    queries, :class:`ForwardMethod`, and other such hooks belong to a forward hook."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")
