"""What the API reference needs beyond autodoc and napoleon."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def package_of(cls: type) -> str:
    """The package that exports a class of hstree: hstree.heads for hstree.heads.base.Head. The
    modules of hstree.lm export their own."""
    parts = cls.__module__.split(".")
    return ".".join(parts[: 3 if parts[1] == "lm" else 2])


def is_public(cls: type) -> bool:
    if not cls.__module__.startswith("hstree."):
        return not cls.__name__.startswith("_")
    return cls.__name__ in sys.modules[package_of(cls)].__all__


def show_public_bases(app: Sphinx, name: str, obj: type, options: Any, bases: list[Any]) -> None:
    """In place of a base that hstree does not export, shows the nearest ancestor that it does."""
    for i, base in enumerate(bases):
        if isinstance(base, type):
            bases[i] = next(ancestor for ancestor in base.__mro__ if is_public(ancestor))


def skip_fields(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Skips fields of named tuples: the docstring of the class describes them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def keep_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Begins the text below a field with an empty comment: napoleon reads what stands before the
    first colon of the first line as a type."""
    if what == "attribute":
        lines[:0] = ["..", ""]


def join_attributes(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Keeps ``:ivar a, b:`` in one piece, which Sphinx would read as type and name."""
    for i, line in enumerate(lines):
        match = re.match(r":ivar \w+(, \w+)+:", line)
        if match:
            lines[i] = match[0].replace(", ", ",\\ ") + line[match.end() :]


def find_inherited(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Finds a method that the docstring of a subclass names, on the page of a base class."""
    module, name, target = node.get("py:module"), node.get("py:class"), node["reftarget"]
    if node["reftype"] != "meth" or not module or not name or "." in target:
        return None
    for base in getattr(importlib.import_module(module), name).__mro__:
        full_name = f"{package_of(base)}.{base.__name__}.{target}"
        found = env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, "meth", full_name, node, text
        )
        if found is not None:
            return found
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", join_attributes, priority=600)  # after napoleon
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", find_inherited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
