"""The examples in the docstrings of the ops run as they stand."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hstree
from hstree import ops


@pytest.mark.parametrize("name", ops.__all__)
def test_example(name: str) -> None:
    function: Callable[..., Any] = getattr(ops, name)
    names = {"hstree": hstree, "torch": torch, **{name: getattr(ops, name) for name in ops.__all__}}
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
