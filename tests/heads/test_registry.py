from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from heads.support import HEADS, make
from hstree.heads import (
    AdaptiveSoftmax,
    Head,
    Softmax,
    TreeEnsemble,
    head_class,
    head_names,
    load_head,
    register_head,
)
from hstree.heads import registry as module


def test_names() -> None:
    assert head_names() == sorted(set(head_names()))
    assert head_class("softmax") is Softmax
    assert head_class("adaptive") is AdaptiveSoftmax
    assert head_class("trees") is TreeEnsemble
    for name in head_names():
        assert issubclass(head_class(name), Head)
        assert head_class(name).name == name


def test_every_registered_head_is_tested() -> None:
    assert {kind.split(",")[0] for kind in HEADS} == set(head_names())


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"head: expected one of adaptive, doc, .*, trees, got 's"):
        head_class("sofmax")


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEADS", dict(module._HEADS))

    @register_head
    class Mine(Softmax):
        name = "mine"

    assert head_class("mine") is Mine
    assert "mine" in head_names()
    assert register_head(Mine) is Mine  # again: nothing happens

    class Other(Softmax):
        name = "mine"

    with pytest.raises(
        ValueError, match=r"name: .* got 'mine', the name of heads\.test_registry\..*Mine"
    ):
        register_head(Other)
    assert head_class("mine") is Mine


def test_registration_in_the_test_above_is_undone() -> None:
    assert "mine" not in head_names()


class Allocations(TorchDispatchMode):
    """The largest tensor with memory that an operator returns, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.mark.parametrize("kind", HEADS)
def test_claimed_sizes_take_no_memory(kind: str, tmp_path: Path) -> None:
    """A small file that claims large sizes is refused before anything of that size is made."""
    make(kind, torch.device("cpu")).save(tmp_path / "head")
    with safe_open(tmp_path / "head", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    ((key, text),) = metadata.items()
    for size in ("in_features", "n_classes", "units"):
        for tied in ({}, {"tied": True}):
            saved = json.loads(text)
            if size not in saved["config"]:
                continue
            saved["config"] |= {size: 2**24} | tied
            save_file(tensors, tmp_path / "claims", {key: json.dumps(saved)})
            for _ in range(2):  # the first call imports what the second needs
                tracemalloc.start()
                with (
                    Allocations() as allocated,
                    pytest.raises(ValueError, match=r"embedding:|damag"),
                ):
                    load_head(tmp_path / "claims")
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert max(allocated.largest, peak) < 2**20, (size, tied)
