"""The options of heads: signatures that name those of the base classes, and errors for options that
a head does not have."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "class_weight": ("weight", "weights", "class_weights"),
    "label_smoothing": ("smoothing", "epsilon"),
    "ignore_index": ("padding_idx", "pad_token_id", "ignore_id"),
    "embedding": ("tied", "tie", "tie_weights", "tie_word_embeddings", "tied_embedding"),
    "frequencies": ("counts", "class_counts", "unigram"),
    "components": ("n_components", "num_components", "n_experts", "num_experts", "mixtures", "K"),
    "latent_dropout": ("dropout",),
    "latent_features": ("latent_size", "latent_dim"),
    "negatives": ("n_negatives", "num_negatives", "num_sampled", "n_samples", "samples"),
    "cutoffs": ("cutoff", "clusters"),
    "clusters": ("n_clusters", "num_clusters"),
    "n_trees": ("trees", "num_trees", "ensemble_size"),
    "root": ("root_width", "width", "clusters"),
    "leaf": ("leaf_size", "group", "groups"),
    "levels": ("depth", "n_levels", "num_levels", "height"),
    "sparse": ("sparse_grad", "row_sparse"),
}
"""Options of heads, and what they are called elsewhere."""

BUILDERS = ("from_counts", "from_tokens", "from_features")
BUILDING = ("n_trees", "recipe", "root", "leaf", "levels")
"""Options of the constructors that also build trees."""


def unknown_option(head: type, name: str) -> TypeError:
    """The error for an option that the head does not have."""
    own = inspect.signature(head).parameters.keys()
    building = set(BUILDING) if all(hasattr(head, builder) for builder in BUILDERS) else set()
    meant = name if name in building else _meant(name, own) or _meant(name, building)
    if meant is None:
        hint = f"its options are {', '.join(sorted(own))}"
    elif meant in building:
        hint = f"{', '.join(BUILDERS)}, which build the trees, take {meant!r}"
    else:
        hint = f"did you mean {meant!r}?"
    return TypeError(f"{head.__name__}() got an unexpected keyword argument {name!r}; {hint}")


def _meant(name: str, options: Iterable[str]) -> str | None:
    other = next((option for option in options if name in OTHER_NAMES.get(option, ())), None)
    return other or next(iter(get_close_matches(name, options, 1, 0.75)), None)


def name_options(head: type) -> None:
    """Let ``inspect.signature`` and ``help`` name the options of a head whose constructor passes
    its ``**options`` to the next one: the keywords of that one which it does not have itself,
    except the ``for_subclasses`` of its class."""
    init: Any = vars(head).get("__init__")
    if init is None or all(
        each.kind is not each.VAR_KEYWORD for each in inspect.signature(init).parameters.values()
    ):
        return
    base, inherited = _next_constructor(head)
    _name(init, inherited, vars(base).get("for_subclasses", ()))


def name_builder_options(head: type, builder: str, given: Collection[str]) -> None:
    """The same for a class method that builds the head and passes its ``**options`` to the
    constructor; ``given``: the keywords of that which it sets itself."""
    _name(vars(head)[builder].__func__, inspect.signature(vars(head)["__init__"]), given)


def _name(function: Any, inherited: inspect.Signature, left_out: Collection[str]) -> None:
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    options = [
        parameter
        for parameter in inherited.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.name not in {*signature.parameters, *left_out}
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])


def _next_constructor(head: type) -> tuple[type, inspect.Signature]:
    """The next class with a constructor, and the signature of that, which names its own options
    already. A mixin whose constructor passes on ``*arguments`` is not one."""
    for base in head.__mro__[1:]:
        if "__init__" in vars(base):
            signature = inspect.signature(vars(base)["__init__"])
            if all(each.kind is not each.VAR_POSITIONAL for each in signature.parameters.values()):
                return base, signature
    raise TypeError(f"{head.__name__}: expected a subclass of Head")
