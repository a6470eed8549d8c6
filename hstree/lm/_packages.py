"""Packages that only some commands need."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any


def optional_package(name: str, needed_by: str, extra: str) -> Any:
    """The imported package. If it is missing, raises ValueError that names what needs it, such as a
    flag, and the extra of hstree that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"{needed_by}: needs the package {name}: pip install 'hstree[{extra}]'"
        ) from None


def has_pictures() -> bool:
    """Whether pictures can be drawn: matplotlib is part of the extra ``lm``."""
    return find_spec("matplotlib") is not None
