"""Search for the most probable classes, and its limit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.support import D, draw, randomise
from hstree.heads import Head, TreeEnsemble
from hstree.heads.trees.queries import most_scored, pays_to_search

CLASSES = 4000


def head_of(**options: object) -> TreeEnsemble:
    """Trees of a uniform distribution."""
    counts = torch.ones(CLASSES)
    return TreeEnsemble.from_counts(D, counts, root=64, **options)  # type: ignore[arg-type]


def ranked_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows in each call that ranks all classes."""
    seen: list[int] = []
    whole = Head.topk_rows

    def topk_rows(head: Head, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        seen.append(len(hidden))
        return whole(head, hidden, k)

    monkeypatch.setattr(Head, "topk_rows", topk_rows)
    return seen


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("n_trees", [1, 4])
def test_flat_rows_are_ranked_from_all_classes(
    n_trees: int, node_vectors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is exact in either case, with gradients too."""
    head = randomise(head_of(n_trees=n_trees, node_vectors=node_vectors), scale=0.01)
    sharp = randomise(head_of(n_trees=n_trees, node_vectors=node_vectors), scale=5.0)
    hidden, ranked = draw(1, D), ranked_rows(monkeypatch)
    for of, flat in ((head, True), (sharp, False)):
        assert isinstance(of, TreeEnsemble)
        wanted, order = of.log_prob(hidden).topk(3)
        assert pays_to_search(of.layout, hidden, 3)
        values, classes = of.topk(hidden, 3)
        torch.testing.assert_close(values, wanted)
        assert torch.equal(classes, order)
        assert ranked == ([1] if flat else [])
        ranked.clear()


def test_only_the_rows_that_are_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(n_trees=1)
    randomise(head, scale=5.0)
    hidden, ranked = draw(4, D), ranked_rows(monkeypatch)
    hidden[1] *= 1e-3
    with torch.no_grad():
        for bias in (head.nodes.root_bias, head.nodes.leaf_bias):
            assert bias is not None
            bias.zero_()
    with torch.no_grad():
        values, classes = head._search(hidden, 1)
        wanted, order = head.log_prob(hidden).topk(1)
    assert ranked == [1]
    torch.testing.assert_close(values, wanted)
    assert torch.equal(classes, order)


def test_limit() -> None:
    """A third of all vectors for a row by itself, less in a batch, where all classes cost less."""
    head = head_of(n_trees=2)
    limits = [most_scored(head.layout, torch.empty(n, D)) for n in (0, 1, 2, 5, 100)]
    assert limits == [1333, 1333, 666, 266, 266]


def test_compiled_and_mapped_searches_have_no_limit() -> None:
    head = randomise(head_of(n_trees=1), scale=0.01)
    hidden = draw(3, D)
    with torch.no_grad():
        wanted, order = head.log_prob(hidden).topk(3)
        compiled = torch.compile(head.topk, fullgraph=True, backend="aot_eager")
        for values, classes in (
            compiled(hidden, 3),
            torch.func.vmap(lambda x: head.topk(x, 3))(hidden),
        ):
            torch.testing.assert_close(values, wanted)
            assert torch.equal(classes, order)
