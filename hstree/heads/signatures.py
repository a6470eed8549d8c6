"""Signatures of heads that name the options of their base classes."""

from __future__ import annotations

import inspect
from typing import Any


def name_options(head: type) -> None:
    """Let ``inspect.signature`` and ``help`` name the options of a head whose constructor passes
    its ``**options`` to the next one: the keywords of that one which it does not have itself,
    except the ``for_subclasses`` of its class."""
    init: Any = vars(head).get("__init__")
    if init is None:
        return
    signature = inspect.signature(init)
    *own, last = signature.parameters.values()
    if last.kind is not last.VAR_KEYWORD:
        return
    base, inherited = _next_constructor(head)
    left_out = {*signature.parameters, *vars(base).get("for_subclasses", ())}
    options = [
        parameter
        for parameter in inherited.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in left_out
    ]
    init.__signature__ = signature.replace(parameters=[*own, *options])


def _next_constructor(head: type) -> tuple[type, inspect.Signature]:
    """The next class with a constructor, and the signature of that, which names its own options
    already. A mixin whose constructor passes on ``*arguments`` is not one."""
    for base in head.__mro__[1:]:
        if "__init__" in vars(base):
            signature = inspect.signature(vars(base)["__init__"])
            if all(each.kind is not each.VAR_POSITIONAL for each in signature.parameters.values()):
                return base, signature
    raise TypeError(f"{head.__name__}: expected a subclass of Head")
