"""Methods of a head that torch's FSDP treats as it treats ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class ForwardMethod:
    """A method of a sharded head: registers itself with FSDP, which then gathers the parameters for
    it, when it is first looked up."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __get__(self, head: Any, owner: type) -> Any:
        if head is None:
            return self.function
        from torch.distributed.fsdp import register_fsdp_forward_method

        # Attributes of the object itself are found before this one.
        setattr(head, self.name, self.function.__get__(head))
        register_fsdp_forward_method(head, self.name)
        return getattr(head, self.name)


def register_forward_methods(cls: type, names: Iterable[str]) -> None:
    """Make the methods of a class forward methods, if it is the one that FSDP derives from the
    class of a head."""
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        for name in names:
            setattr(cls, name, ForwardMethod(name, getattr(cls, name)))
