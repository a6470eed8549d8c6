"""Compiled calls of a head between others: one graph for each size."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from heads.support import FREQUENCIES, HEADS, D, V, draw, draw_targets, make
from hstree.heads import Softmax

SOME = ("softmax", "trees, groups", "sampled", "forest")
BREAKS = ("adaptive",)
"""Several graphs, because shapes in the loss depend on the targets."""


def kinds() -> list[object]:
    """Those that compile; all but a few are slow."""
    return [
        kind if kind in SOME else pytest.param(kind, marks=pytest.mark.slow)
        for kind in HEADS
        if "sparse" not in kind and kind not in BREAKS
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize("kind", kinds())
def test_calls_between_compiled_ones_make_no_graphs(kind: str) -> None:
    """Training steps without compilation, of the same size and of others."""
    torch._dynamo.reset()
    head, counter = make(kind).train(), CompileCounter()
    compiled = torch.compile(head, backend=counter, fullgraph=True, dynamic=False)
    for step in range(5):
        hidden, target = draw(7, D).requires_grad_(), draw_targets(7)
        compiled(hidden, target).loss.backward()
        assert counter.frame_count == 1, step
        for rows in (7, 3 + step):
            head(draw(rows, D).requires_grad_(), draw_targets(rows)).loss.backward()


def test_frequencies_make_no_graphs() -> None:
    """The frequencies of a head are known, and its steps are counted if anything counts them."""
    torch._dynamo.reset()
    head, counter = Softmax(D, V, frequencies=FREQUENCIES), CompileCounter()
    compiled = torch.compile(head, backend=counter, fullgraph=True, dynamic=True)
    for step in range(20):
        rows = 5 + step % 3
        compiled(draw(rows, D), draw_targets(rows)).loss.backward()
        head(draw(rows, D), draw_targets(rows)).loss.backward()
    assert counter.frame_count == 1
