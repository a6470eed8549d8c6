"""Packages that only some texts need."""

from __future__ import annotations

import importlib
from typing import Any


def optional_package(name: str, flag: str) -> Any:
    """The imported package. If it is missing, raises ValueError that names the flag that needs it
    and the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"{flag}: needs the package {name}: pip install 'hstree[data]'") from None
