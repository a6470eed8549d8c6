"""The examples in the docstrings run as pasted: with no names but those they import."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

import hstree
from hstree.heads import registry

PUBLIC_PACKAGES = [
    "hstree",
    "hstree.heads",
    "hstree.ops",
    "hstree.trees",
    "hstree.optim",
    "hstree.lab.layers",
    "hstree.lm.model",
    "hstree.lm.generate",
]


def _examples() -> dict[str, doctest.DocTest]:
    """Every docstring with examples in the package, by the full name of what it describes."""
    finder, found = doctest.DocTestFinder(), {}
    for module in pkgutil.walk_packages(hstree.__path__, "hstree."):
        if module.name.split(".")[-1] not in ("__main__", "_C"):
            tests = finder.find(importlib.import_module(module.name), module.name, globs={})
            found |= {test.name: test for test in tests if test.examples}
    return found


EXAMPLES = _examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_HEADS", dict(registry._HEADS))
    torch.manual_seed(0)
    output: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(EXAMPLES[name], out=output.append)
    assert result.failed == 0, "".join(output)


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_everything_public_has_an_example(package: str) -> None:
    module = importlib.import_module(package)
    without = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            full = f"{value.__module__}.{value.__qualname__}"
            if full not in EXAMPLES:
                without.append(full)
    assert without == []
