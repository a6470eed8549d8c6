from __future__ import annotations

import copy
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from heads.support import FREQUENCIES, HEADS, ORDER, D, V, make
from hstree.heads import (
    PLIF,
    AdaptiveSoftmax,
    Head,
    MixtureOfSoftmaxes,
    SampledSoftmax,
    ScreenedSoftmax,
    Softmax,
    TreeEnsemble,
    build_head,
    head_class,
    head_names,
    load_head,
    register_head,
)
from hstree.heads import registry as module
from hstree.heads.state import Tables


def test_names() -> None:
    assert head_names() == sorted(set(head_names()))
    assert head_class("softmax") is Softmax
    assert head_class("adaptive") is AdaptiveSoftmax
    assert head_class("trees") is TreeEnsemble
    for name in head_names():
        assert issubclass(head_class(name), Head)


def test_every_registered_head_is_tested() -> None:
    assert {kind.split(",")[0] for kind in HEADS} <= set(head_names())


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError, match=r"head: expected one of adaptive, forest, .*, trees, got 's"
    ):
        head_class("sofmax")


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEADS", dict(module._HEADS))

    @register_head
    class Mine(Softmax):
        name = "mine"

    assert head_class("mine") is Mine
    assert "mine" in head_names()
    assert register_head(Mine) is Mine  # again: nothing happens
    for _ in range(2):
        assert register_head(Mine, "rough", label_smoothing=0.25, bias=False) is Mine
    assert head_class("rough") is Mine
    rough, smooth = build_head("rough", 4, 5), build_head("rough", 4, 5, label_smoothing=0.0)
    assert (rough.name, rough.label_smoothing, smooth.label_smoothing) == ("rough", 0.25, 0.0)
    assert [list(head.state_dict()) for head in (rough, smooth)] == [["weight"]] * 2
    assert (build_head("mine", 4, 5).name, Mine(4, 5).label_smoothing) == ("mine", 0.0)
    with pytest.raises(ValueError, match=r"name: .* got 'rough', the name of .*Mine"):
        register_head(Mine, "rough", label_smoothing=0.5, bias=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'smoothing'"):
        build_head("rough", 4, 5, smoothing=0.1)

    class Other(Softmax):
        name = "mine"

    with pytest.raises(
        ValueError, match=r"name: .* got 'mine', the name of heads\.test_registry\..*Mine"
    ):
        register_head(Other)
    assert head_class("mine") is Mine


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("plif-frozen", PLIF, {"frozen": True}),
        ("mos-plif", MixtureOfSoftmaxes, {"function": "plif"}),
    ],
)
def test_a_name_for_a_class_with_an_option(
    name: str, kind: type[Head], options: dict[str, Any], tmp_path: Path
) -> None:
    head = build_head(name, 4, 5)
    assert type(head) is kind
    assert head.config().items() >= options.items()
    head.save(tmp_path / "head")
    others = (load_head(tmp_path / "head"), copy.deepcopy(head), head.resized(6))
    assert {other.name for other in (head, *others)} == {name}
    assert kind(4, 5).name == kind(4, 5, **options).name != name


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


# Head, table, place and value there; a column of the place for tables [V, T].
OUT_OF_RANGE: list[tuple[str, str, Any, float]] = [
    ("forest", "cluster", (5, 1), 6),
    ("forest", "cluster", (5, 1), -1),
    ("forest, sampled, sparse, tied", "cluster", (0, 0), 2**31 - 1),
    ("in batch", "cumulative", 3, 7),
    ("in batch", "cumulative", 0, 0),
    ("in batch", "cumulative", -1, -(2**62)),
    ("sampled", "cumulative", -1, 2**53),
    ("in batch", "share", 3, torch.nan),
    ("in batch", "share", 3, -0.1),
    ("in batch", "share", 3, 0.9),
    ("adaptive", "order", 3, V),
    ("adaptive", "order", 3, 2**40),
    ("mixtape", "own", 3, V),
    ("mixtape", "own", 3, -1),
    ("mixtape", "own", 3, int(ORDER[4])),
    ("trees, groups", "feature_index", (1, 5), D),
    ("trees, groups", "feature_index", (1, 0), -1),
    ("trees, groups", "feature_index", (1, 4), 0),
    ("screened", "rotation", (1, 2), torch.inf),
    ("screened", "rotation_bias", 1, torch.nan),
    ("screened", "row_scale", 3, torch.nan),
    ("screened", "row_scale", 3, -1.0),
    ("screened", "offset", 3, torch.inf),
    ("screened", "offset", 3, torch.nan),
    ("screened", "offset", -1, 5.0),
]


def with_tables(kind: str) -> Any:
    if kind == "in batch":
        return SampledSoftmax(D, V, negatives=5, frequencies=FREQUENCIES)
    if kind == "screened":
        linear = torch.nn.Linear(D, V)
        return ScreenedSoftmax.from_linear(linear, torch.randn(40, D), rank=8, exact=4)
    return make(kind)


@pytest.mark.parametrize(("kind", "table", "place", "value"), OUT_OF_RANGE)
def test_tables_out_of_range_are_refused(
    kind: str, table: str, place: Any, value: float, tmp_path: Path
) -> None:
    head = with_tables(kind)
    owner = head.below if table == "feature_index" else head
    head.save(tmp_path / "right")
    load_head(tmp_path / "right")
    spoilt = getattr(owner, table).clone()
    spoilt[place] = value
    owner.register_table(table, spoilt)
    head.save(tmp_path / "spoilt")
    with pytest.raises(ValueError, match=rf"spoilt, which is damaged.*: {table}.*: expected .*"):
        load_head(tmp_path / "spoilt")


def test_every_table_is_in_the_test_above() -> None:
    heads = [with_tables(kind) for kind in (*HEADS, "in batch", "screened")]
    parts = [part for head in heads for part in head.modules() if isinstance(part, Tables)]
    tables = {name for part in parts for name in part._own_tables}
    assert tables - {"preview"} == {table for _, table, _, _ in OUT_OF_RANGE}


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
