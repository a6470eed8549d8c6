"""The API reference lists every package, whose page lists what it exports, and every constant."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import hstree

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
LISTED = set(re.findall(r"^   (\w\S*)$", PAGE, re.MULTILINE))


def packages() -> set[str]:
    """Those with a page of their own: hstree and hstree.deferred have names on the first one."""
    found = {f"hstree.{path.parent.name}" for path in (ROOT / "hstree").glob("*/__init__.py")}
    lm = {f"hstree.lm.{path.stem}" for path in (ROOT / "hstree" / "lm").glob("*.py")}
    found |= lm | {"hstree.lab.layers", "hstree.transformers"}
    return found - {"hstree.lm", "hstree.lm.__init__", "hstree.lm.cli"}


def constants(module: ModuleType) -> set[str]:
    """What a page of a package leaves out: neither a class nor a function nor a module."""
    return {
        name
        for name in module.__all__
        if not inspect.isclass(object_ := getattr(module, name))
        and not inspect.isroutine(object_)
        and not inspect.ismodule(object_)
    }


def test_every_package_is_listed() -> None:
    assert {name for name in LISTED if name.startswith("hstree.")} == packages()


def test_names_of_hstree_itself_are_listed() -> None:
    listed = {name for name in LISTED if not name.startswith("hstree.")}
    names = {
        name
        for name in hstree.__all__
        if not inspect.ismodule(getattr(hstree, name)) and not hasattr(hstree.heads, name)
    }
    assert listed == names - constants(hstree) | {"deferred.DeferredHead"}


def test_every_constant_is_described() -> None:
    described = re.findall(r"^\.\. py:data:: (\w+)\n   :module: (\S+)$", PAGE, re.MULTILINE)
    exported = {
        (name, module)
        for module in packages() | {"hstree"}
        for name in constants(importlib.import_module(module))
    }
    assert set(described) == exported
