from __future__ import annotations

import pytest

from heads.support import HEADS
from hstree.heads import (
    AdaptiveSoftmax,
    Head,
    Softmax,
    TreeEnsemble,
    head_class,
    head_names,
    register_head,
)
from hstree.heads import registry as module


def test_names() -> None:
    assert head_names() == [
        "adaptive",
        "doc",
        "gss",
        "mixtape",
        "moc",
        "monotonic",
        "mos",
        "mos-plif",
        "plif",
        "plif-frozen",
        "sampled",
        "sigsoftmax",
        "softmax",
        "trees",
    ]
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
