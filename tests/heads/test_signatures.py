"""Signatures of heads name every option with its default, and nothing else."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import pytest

import hstree
from hstree.heads import Head, head_class, head_names
from hstree.heads.flat import FlatHead

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
    "mean_slope_gradient": False,
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
    "doc": {
        "layer_sizes": inspect.Parameter.empty,
        "experts": None,
        "prior_penalty": 0.0,
        **LATENT,
    },
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
    "sampled": {"negatives": 128, **DRAWS},
}
OPTIONS = {name: {**own, **OF_FLAT_HEADS, **OF_EVERY_HEAD} for name, own in FLAT.items()}
OPTIONS["adaptive"] = {"cutoffs": None, "div_value": 4.0, "order": None, **OF_EVERY_HEAD}
OPTIONS["trees"] = {
    "subset_size": None,
    "subset_block": 1,
    "gate": "context",
    "node_vectors": "free",
    "embedding": None,
    "sparse": False,
    "seed": 0,
    **OF_EVERY_HEAD,
}
NEEDED: dict[str, dict[str, Any]] = {
    "doc": {"layer_sizes": [D]},
    "sampled": {"frequencies": FREQUENCIES},
    "trees": {"trees": trees()},
}


def parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(head_class(name)).parameters.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_signature_lists_every_option_with_its_default(name: str) -> None:
    options = [p for p in parameters(name) if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert {option.name: option.default for option in options} == OPTIONS[name]


def test_every_head_of_the_library_is_here() -> None:
    heads = {head_class(name) for name in head_names()}
    assert {h.name for h in heads if h.__module__.startswith("hstree.")} == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_head_takes_the_options_of_its_signature(name: str) -> None:
    """Given one by one as defaults, none changes the head."""
    given = {p.name: p.default for p in parameters(name) if p.default is not p.empty}
    make: Any = head_class(name)
    expected = make(D, V, **NEEDED.get(name, {}))
    assert make(D, V, **given | NEEDED.get(name, {})).config() == expected.config()


@pytest.mark.parametrize("name", FLAT)
def test_what_a_subclass_sets_is_no_option(name: str) -> None:
    options = {parameter.name for parameter in parameters(name)}
    assert "weight_features" not in options
    assert ("function" in options) == (name in ("mos", "moc", "doc"))
    assert {"function", "weight_features"} <= set(inspect.signature(FlatHead).parameters)


def test_the_softmax_takes_no_function() -> None:
    """A file of such a head could not be read."""
    with pytest.raises(TypeError, match="function"):
        hstree.Softmax(D, V, function=None)


def test_help_names_the_options() -> None:
    text = pydoc.plain(pydoc.render_doc(hstree.Softmax))
    assert "**options" not in text.partition("P(y | h)")[0]
    assert "label_smoothing: 'float' = 0.0" in text
    assert "frequencies: 'npt.ArrayLike | None' = None" in text


@pytest.mark.parametrize(
    ("builder", "given"),
    [
        ("from_counts", {"frequencies"}),
        ("from_tokens", set()),
        ("from_features", {"frequencies"}),
    ],
)
def test_builders_name_the_options_of_the_head(builder: str, given: set[str]) -> None:
    found = set(inspect.signature(getattr(hstree.TreeEnsemble, builder)).parameters)
    assert OPTIONS["trees"].keys() - given <= found
    assert not given & found
    assert {"n_trees", "root", "leaf", "levels"} <= found
    assert "options" not in found


def test_heads_of_users_have_the_options_of_their_base() -> None:
    class Mine(hstree.Softmax):
        def __init__(self, in_features: int, *, flavour: int = 3, **options: Any) -> None:
            super().__init__(in_features, V, **options)

    class Own(Mine):
        pass

    class Closed(hstree.Softmax):
        def __init__(self, in_features: int) -> None:
            super().__init__(in_features, V)

    kinds: list[type[Head]] = [Mine, Own]
    for kind in kinds:
        found = inspect.signature(kind).parameters
        assert list(found)[:2] == ["in_features", "flavour"]
        assert set(found) == {
            "in_features",
            "flavour",
            *FLAT["softmax"],
            *OF_FLAT_HEADS,
            *OF_EVERY_HEAD,
        }
    assert list(inspect.signature(Closed).parameters) == ["in_features"]
