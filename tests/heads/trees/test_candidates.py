"""The ways to compute the log-probabilities of candidates, and the choice among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.support import HEADS, D, V, draw, make, parts, randomise
from hstree.heads import TreeEnsemble
from hstree.heads.trees import queries
from hstree.heads.trees.queries import (
    all_candidates,
    choose_way,
    composed_candidates,
    count_groups,
    looked_up_candidates,
)
from hstree.ops.mixture_log_prob import CHUNK_BYTES

TREES = [kind for kind in HEADS if kind.startswith("trees")]


def candidates_of(rows: int, n: int, n_classes: int = V) -> Tensor:
    candidates = torch.randint(
        n_classes, (rows, n), generator=torch.Generator().manual_seed(rows + n)
    )
    candidates[0, 1:3] = -1
    candidates[-1] = candidates[-1, 0]
    return candidates


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", TREES)
def test_ways_agree(kind: str, temperature: float) -> None:
    """In values and gradients, in float64, at a temperature too."""
    head = make(kind).eval().double()
    assert isinstance(head, TreeEnsemble)
    hidden, candidates = draw(6, D, dtype=torch.float64).requires_grad_(), candidates_of(6, 9)
    wanted = composed_candidates(*parts(head, hidden), candidates, temperature)
    log_prob = all_candidates(*parts(head, hidden), candidates, temperature)
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(log_prob, wanted, **close)
    with torch.no_grad():
        of_lookup = looked_up_candidates(*parts(head, hidden), candidates, temperature)
        in_chunks = all_candidates(*parts(head, hidden), candidates, temperature)
    torch.testing.assert_close(of_lookup, wanted.detach(), **close)
    torch.testing.assert_close(in_chunks, wanted.detach(), **close)
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    grad = draw(6, 9, seed=8, dtype=torch.float64)
    of_all = torch.autograd.grad(log_prob, inputs, grad, allow_unused=True)
    composed = torch.autograd.grad(wanted, inputs, grad, allow_unused=True)
    for got, true in zip(of_all, composed, strict=True):
        assert (got is None) == (true is None)
        if got is not None and true is not None:
            torch.testing.assert_close(got.to_dense(), true.to_dense(), **close)


def large(**options: object) -> TreeEnsemble:
    counts = torch.arange(1200, 0, -1)
    return randomise(TreeEnsemble.from_counts(D, counts, n_trees=2, root=32, **options))  # type: ignore[arg-type, return-value]


def test_choice() -> None:
    """Few candidates and those that share groups are looked up, many are taken from all classes."""
    head, hidden = large(), draw(30, D)
    few, some = candidates_of(4, 2, 1200), candidates_of(30, 5, 1200)
    every = torch.arange(1200).expand(30, -1)
    alike = torch.arange(3, 4).expand(30, 20)
    for candidates, plain, differentiable in (
        (few, looked_up_candidates, composed_candidates),
        (some, composed_candidates, composed_candidates),
        (alike, looked_up_candidates, all_candidates),
        (every, all_candidates, all_candidates),
    ):
        x = hidden[: len(candidates)]
        assert choose_way(*parts(head, x), candidates) is differentiable
        with torch.no_grad():
            assert choose_way(*parts(head, x), candidates) is plain
        wanted = head.log_prob(x).gather(1, candidates.clamp(min=0))
        wanted = wanted.masked_fill(candidates == -1, 0.0)
        torch.testing.assert_close(head.candidate_log_prob(x, mark(candidates)), wanted)
        with torch.no_grad():
            torch.testing.assert_close(head.candidate_log_prob(x, mark(candidates)), wanted)


def mark(candidates: Tensor) -> Tensor:
    return candidates.masked_fill(candidates == -1, -100)


def test_row_sparse_gradients_stay_row_sparse() -> None:
    head, hidden = large(sparse=True), draw(3, D)
    every = torch.arange(1200).expand(3, -1)
    assert choose_way(*parts(head, hidden), every) is composed_candidates
    head.candidate_log_prob(hidden, every).sum().backward()
    assert head.output_embedding.grad is not None
    assert head.output_embedding.grad.is_sparse


def test_groups_are_counted_once_for_a_row() -> None:
    head = large()
    node = head.layout.edge[:, :, 0].gather(1, head.layout.leaf_edge.long())
    candidates = candidates_of(8, 40, 1200)
    groups = sum(
        len(set(node[t, row.clamp(min=0)].tolist())) for t in range(2) for row in candidates
    )
    assert count_groups(head.layout, candidates) == groups


@pytest.mark.parametrize("k", [6, 1200])
def test_compiled(k: int) -> None:
    """Also where all classes are computed."""
    head, hidden, candidates = large(), draw(4, D), candidates_of(4, k, 1200).clamp(min=0)
    wanted = head.candidate_log_prob(hidden, candidates)
    compiled = torch.compile(head.candidate_log_prob, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, candidates), wanted)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, candidates), wanted.detach())


def test_all_classes_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, candidates = large(), draw(7, D), candidates_of(7, 5, 1200)
    seen: list[int] = []
    whole = queries.all_log_prob
    monkeypatch.setattr(
        queries,
        "all_log_prob",
        lambda blocks, layout, x, *more: seen.append(len(x)) or whole(blocks, layout, x, *more),
    )
    monkeypatch.setattr("hstree.heads.trees.queries.CHUNK_ROWS", 3)
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 1)
    wanted = all_candidates(*parts(head, hidden), candidates)
    assert seen == [7]
    with torch.no_grad():
        torch.testing.assert_close(
            all_candidates(*parts(head, hidden), candidates), wanted.detach()
        )
    assert seen == [7, 3, 3, 1]
