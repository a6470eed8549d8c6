"""The options of every head with their defaults, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import hstree
from hstree.heads import functions, head_class, head_names, head_options, register_head, registry

from .support import FREQUENCIES, D, V, trees

OF_EVERY_HEAD = {
    "ignore_index": -100,
    "reduction": "mean",
    "class_weight": None,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "frequencies": None,
}
OF_FLAT_HEADS = {"bias": True, "embedding": None, "bias_start": "unigram"}
LATENT = {
    "latent_features": None,
    "latent_dropout": 0.0,
    "function": "softmax",
    "function_options": None,
}
SLOPES = {
    "intervals": 100_000,
    "radius": 20.0,
    "slope_std": 1.0,
    "slope_learning_rate": 0.02,
    "slope_decay": 0.0,
}
DRAWS = {"in_batch": True, "distribution": "unigram", "alpha": 0.75, "sparse": False}
FLAT: dict[str, dict[str, Any]] = {
    "softmax": {"scale": 1.0, "soft_cap": None},
    "sigsoftmax": {},
    "gss": {"c": -1.5, "k": 2.5},
    "plif": {**SLOPES, "frozen": False},
    "monotonic": {"units": 1000, "intervals": 4096},
    "mos": {"components": 15, **LATENT},
    "moc": {"components": 15, **LATENT},
    "mixtape": {"own_gates": None, "order": None, "gate_features": 64, "latent_features": None},
    "forest": {
        "n_trees": 4,
        "clusters": 256,
        "vectors": None,
        "trees": None,
        "gate": "context",
        "tree_dropout": 0.0,
        "seed": 0,
        "negatives": None,
        **DRAWS,
    },
    "sampled": {"negatives": "batch", **DRAWS},
}
OPTIONS = {name: {**own, **OF_FLAT_HEADS, **OF_EVERY_HEAD} for name, own in FLAT.items()}
OPTIONS["adaptive"] = {"cutoffs": None, "div_value": 4.0, "order": None, **OF_EVERY_HEAD}
OPTIONS["trees"] = {
    "subset_size": None,
    "gate": "context",
    "groups": None,
    "embedding": None,
    "sparse": False,
    "seed": 0,
    **OF_EVERY_HEAD,
}
NEEDED: dict[str, dict[str, Any]] = {
    "sampled": {"frequencies": FREQUENCIES},
    "trees": {"trees": trees()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_head(name: str) -> None:
    """By name, and none changes the head if it is given as its default."""
    own = OPTIONS[name]
    built = {"n_trees", "clusters", "binary", "recipe", "contexts", "tree_options"}
    if name == "forest":
        built = {"recipe", "contexts", "tree_options"}
        assert head_options(name) == (set(own) | built) - {"trees", "vectors"}
    else:
        of_trees = built if name == "trees" else set()
        assert head_options(name) == (set(own) - {"groups"}) | of_trees
    make: Any = head_class(name)
    expected = make(D, V, **NEEDED.get(name, {}))
    assert make(D, V, **own | NEEDED.get(name, {})).config() == expected.config()


def test_every_head_of_the_library_is_here() -> None:
    heads = {head_class(name) for name in head_names()}
    assert {h.name for h in heads if h.__module__.startswith("hstree.")} == set(OPTIONS)


@pytest.mark.parametrize("name", head_names())
def test_other_options_are_refused(name: str) -> None:
    head: Any = head_class(name)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lable_smoothing'"):
        head(D, V, **NEEDED.get(head.name, {}), lable_smoothing=0)


def test_the_softmax_takes_no_function() -> None:
    """A file of such a head could not be read."""
    with pytest.raises(TypeError, match="function, weight_features: expected None for a Softmax"):
        hstree.Softmax(D, V, function=functions.GSS())


def test_heads_of_users_have_the_options_of_their_base() -> None:
    class Mine(hstree.Softmax):
        name = "mine"

        def __init__(self, in_features: int, n_classes: int, *, flavour: int = 3, **options: Any):
            super().__init__(in_features, n_classes, **options)

    class Closed(hstree.Softmax):
        name = "closed"

        def __init__(self, in_features: int, n_classes: int, *, flavour: int = 3) -> None:
            super().__init__(in_features, n_classes)

    known = dict(registry._HEADS)
    try:
        for kind, expected in ((Mine, {"flavour", *OPTIONS["softmax"]}), (Closed, {"flavour"})):
            register_head(kind)
            assert head_options(kind.name) == expected
    finally:
        registry._HEADS.clear()
        registry._HEADS.update(known)
