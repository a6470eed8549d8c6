"""Options and calls of heads that are spelled otherwise elsewhere: errors name the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from hstree.heads import (
    AdaptiveSoftmax,
    Head,
    MixtureOfSoftmaxes,
    SampledSoftmax,
    Softmax,
    TreeEnsemble,
    head_class,
    head_names,
)

from .support import D, V

COUNTS = range(V, 0, -1)
TOKENS = [0, 1, 2, 3] * 9
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: TreeEnsemble(D, V), "trees: .*got none; .*from_counts.*from_tokens.*from_features"),
    (lambda: TreeEnsemble(D, V, 4), "trees: .*got a int; .*from_counts.* n_trees"),  # type: ignore[arg-type]
    (lambda: TreeEnsemble(D, V, n_trees=4), "from_counts, .*build the trees, take 'n_trees'"),
    (lambda: TreeEnsemble.from_counts(D, COUNTS, trees=8), "trees: from_counts .* as n_trees"),
    (lambda: TreeEnsemble.from_counts(D, COUNTS, num_trees=8), "take 'n_trees'"),
    (lambda: TreeEnsemble.from_counts(D, COUNTS, depth=2), "take 'levels'"),
    (lambda: TreeEnsemble.from_counts(D, COUNTS, frequencies=COUNTS), "from counts; leave"),
    (lambda: TreeEnsemble.from_tokens(D, V, TOKENS, trees=8), "trees: from_tokens .* as n_trees"),
    (lambda: TreeEnsemble.from_tokens(D, V, TOKENS, n_tree=8), "take 'n_trees'"),
    (lambda: TreeEnsemble.from_counts(D, COUNTS, gates="context"), "mean 'gate'"),
    (lambda: Softmax(D, V, tied=nn.Embedding(V, D)), "mean 'embedding'"),
    (lambda: Softmax(D, V, counts=COUNTS), "mean 'frequencies'"),
    (lambda: MixtureOfSoftmaxes(D, V, n_components=3), "mean 'components'"),
    (lambda: MixtureOfSoftmaxes(D, V, dropout=0.3), "mean 'latent_dropout'"),
    (lambda: SampledSoftmax(D, V, num_sampled=3, frequencies=COUNTS), "mean 'negatives'"),
    (lambda: AdaptiveSoftmax(D, V, cutoff=[3]), "mean 'cutoffs'"),
    (lambda: AdaptiveSoftmax(D, V, colour=1), "argument 'colour'; its options are .*cutoffs"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_the_error_names_the_right_call(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("name", head_names())
def test_misspelled_options_of_every_head(name: str) -> None:
    for wrong, right in (
        ("lable_smoothing", "label_smoothing"),
        ("weight", "class_weight"),
        ("pad_token_id", "ignore_index"),
    ):
        head: Any = head_class(name)
        options: dict[str, Any] = {"layer_sizes": [D]} if name == "doc" else {}
        with pytest.raises(TypeError, match=f"argument '{wrong}'; did you mean '{right}'"):
            head(D, V, **options, **{wrong: 0})


def test_options_of_a_subclass_are_known() -> None:
    class Mine(Softmax):
        name = "mine"

        def __init__(self, in_features: int, n_classes: int, *, flavour: int = 0, **more: Any):
            super().__init__(in_features, n_classes, **more)

    head: type[Head] = Mine
    with pytest.raises(TypeError, match="did you mean 'flavour'"):
        head(D, V, flavor=1)
