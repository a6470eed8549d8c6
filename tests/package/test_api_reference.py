"""The API reference lists what the packages export, no more and no less."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs" / "api").glob("*.md")) if page.stem != "index"]
ELSEWHERE = {
    "hstree.deferred": {"defer_logits", "undefer"},  # described under hstree
}


def module_of(text: str) -> ModuleType:
    (name,) = re.findall(r"^\.\. py:module:: (\S+)$", text, re.MULTILINE)
    return importlib.import_module(name)


def listed_names(text: str) -> set[str]:
    return set(re.findall(r"^(?:   |\.\. py:data:: )(\w+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_lists_what_its_package_exports(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    module = module_of(text)
    names = set(module.__all__) - ELSEWHERE.get(module.__name__, set())
    if module.__name__ == "hstree":  # gathers packages and heads, which have pages of their own
        heads = importlib.import_module("hstree.heads")
        names = {
            name
            for name in names
            if not inspect.ismodule(getattr(module, name)) and not hasattr(heads, name)
        }
    assert listed_names(text) == names


def test_every_package_has_a_page() -> None:
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "hstree").glob("*/__init__.py")
        if path.parent.name != "lm"
    }
    packages |= {
        f"hstree.lm.{path.stem}"
        for path in (ROOT / "hstree" / "lm").glob("*.py")
        if path.stem not in ("__init__", "cli")
    }
    packages |= {"hstree", "hstree.deferred", "hstree.lab.layers", "hstree.transformers"}
    assert {module_of(page.read_text(encoding="utf-8")).__name__ for page in PAGES} == packages
    contents = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^(\w+)$", contents, re.MULTILINE)) == {page.stem for page in PAGES}
