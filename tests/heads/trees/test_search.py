"""Search for the most probable classes, and its limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.support import D, draw, randomise
from hstree.heads import Head, TreeEnsemble
from hstree.heads.trees import queries
from hstree.heads.trees.queries import most_scored, pays_to_search

CLASSES = 4000


def head_of(**options: object) -> TreeEnsemble:
    """Trees of a uniform distribution, in groups of about eight classes."""
    counts = torch.ones(CLASSES)
    return TreeEnsemble.from_counts(D, counts, root=512, **options)  # type: ignore[arg-type]


class Rows:
    """Numbers of rows in the calls that search, rank leaf groups, and compute all classes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searched: list[int] = []
        self.ranked: list[int] = []
        self.whole: list[int] = []
        search, rank, every = queries.tree_topk, queries.leaf_tree_topk, Head.topk_rows

        def tree_topk(**arguments: object) -> tuple[Tensor, Tensor]:
            self.searched.append(len(arguments["hidden"]))  # type: ignore[arg-type]
            return search(**arguments)  # type: ignore[arg-type]

        def leaf_tree_topk(**arguments: object) -> tuple[Tensor, Tensor]:
            self.ranked.append(len(arguments["leaf_score"]))  # type: ignore[arg-type]
            return rank(**arguments)  # type: ignore[arg-type]

        def topk_rows(head: Head, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
            self.whole.append(len(hidden))
            return every(head, hidden, k)

        monkeypatch.setattr(queries, "tree_topk", tree_topk)
        monkeypatch.setattr(queries, "leaf_tree_topk", leaf_tree_topk)
        monkeypatch.setattr(Head, "topk_rows", topk_rows)

    def take(self) -> tuple[list[int], list[int], list[int]]:
        seen = self.searched, self.ranked, self.whole
        self.searched, self.ranked, self.whole = [], [], []
        return seen


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("n_trees", [1, 4])
def test_flat_rows_are_ranked_from_all_classes(
    n_trees: int, node_vectors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is exact in either case, with gradients too."""
    head = randomise(head_of(n_trees=n_trees, node_vectors=node_vectors), scale=0.01)
    sharp = randomise(head_of(n_trees=n_trees, node_vectors=node_vectors), scale=5.0)
    hidden, rows = draw(1, D), Rows(monkeypatch)
    for of, flat in ((head, True), (sharp, False)):
        assert isinstance(of, TreeEnsemble)
        wanted, order = of.log_prob(hidden).topk(3)
        assert pays_to_search(of.layout, hidden, 3)
        values, classes = of.topk(hidden, 3)
        torch.testing.assert_close(values, wanted)
        assert torch.equal(classes, order)
        searched, ranked, whole = rows.take()
        assert searched == [1]
        assert (whole if node_vectors == "free" else ranked) == ([1] if flat else [])


def test_a_batch_of_flat_rows_is_given_up_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(n_trees=1)
    randomise(head, scale=2.0)
    with torch.no_grad():
        for bias in (head.nodes.root_bias, head.nodes.leaf_bias):
            assert bias is not None
            bias.zero_()
    hidden, rows = draw(64, D), Rows(monkeypatch)
    for flat, searched, ranked in (
        (slice(0, 0), [4, 60], []),
        (slice(4, 6), [4, 60, 2], [2]),
        (slice(0, 3), [4], [63]),
        (slice(0, 64), [4], [64]),
    ):
        x = hidden.clone()
        x[flat] *= 1e-3
        values, classes = head.topk(x, 1)
        assert rows.take() == (searched, ranked, [])
        wanted, order = head.log_prob(x).topk(1)
        torch.testing.assert_close(values, wanted)
        assert torch.equal(classes, order)


def test_scores_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose numbers could lose digits are ranked from the log-probabilities."""
    head = randomise(head_of(n_trees=2), scale=1.0)
    hidden, rows = draw(40, D), Rows(monkeypatch)
    hidden[3] *= 100
    values, classes = head.topk(hidden, 50)
    assert rows.take() == ([], [40], [1])
    wanted, order = head.log_prob(hidden).topk(50)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(classes[3], order[3])


def test_limit() -> None:
    """Three times what is expected, in a fifth to all of the time of all classes, which is that of
    reading them for few rows."""
    layout = head_of(n_trees=2).layout
    expected = 2 * layout.mean_group
    assert layout.max_depth == 0
    for k in (1, 5, 100):
        for n, of_all in ((0, 4400), (1, 4400), (10, 800), (1000, 404)):
            assert most_scored(layout, n, k) == int(min(max(3 * k * expected, of_all / 5), of_all))
    assert pays_to_search(layout, torch.empty(1, D), 100)
    assert not pays_to_search(layout, torch.empty(100, D), 100)


def test_compiled_searches_have_no_limit() -> None:
    head = randomise(head_of(n_trees=1), scale=0.01)
    hidden = draw(3, D)
    with torch.no_grad():
        wanted, order = head.log_prob(hidden).topk(3)
        compiled = torch.compile(head.topk, fullgraph=True, backend="aot_eager")
        values, classes = compiled(hidden, 3)
        torch.testing.assert_close(values, wanted)
        assert torch.equal(classes, order)
