"""Errors for options that a head does not have: what the caller may have meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches

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
    "n_trees": ("trees", "num_trees", "ensemble_size"),
    "root": ("root_width", "width", "clusters"),
    "leaf": ("leaf_size", "group", "groups"),
    "levels": ("depth", "n_levels", "num_levels", "height"),
    "sparse": ("sparse_grad", "row_sparse"),
}
"""Options of heads, and what they are called elsewhere."""

BUILDERS = ("from_counts", "from_corpus", "from_linear")
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
