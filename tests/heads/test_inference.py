"""Draws and candidates of every head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from heads.support import FREQUENCIES, HEADS, SOME, D, V, draw, make
from hstree._checks import check_generator
from hstree.heads import Softmax, TreeEnsemble
from hstree.ops.mixture_log_prob import CHUNK_BYTES
from hstree.trees import huffman_tree

every_head = pytest.mark.parametrize("kind", HEADS)
some_heads = pytest.mark.parametrize("kind", SOME)
TREES = [kind for kind in HEADS if kind.startswith("trees")]


@every_head
def test_draws_with_log_probabilities(kind: str, device: torch.device) -> None:
    head, hidden = make(kind, device).eval(), draw(6, D).to(device).view(2, 3, D)
    classes, log_prob = head.sample(hidden, 4, return_log_prob=True)
    assert classes.shape == log_prob.shape == (2, 3, 4)
    assert classes.dtype == torch.int64
    assert not log_prob.requires_grad
    torch.testing.assert_close(log_prob, head.log_prob(hidden).gather(2, classes).detach())
    classes, log_prob = head.sample(hidden, return_log_prob=True)
    assert classes.shape == log_prob.shape == (2, 3)
    wanted = head.log_prob(hidden).gather(2, classes[..., None]).squeeze(2)
    torch.testing.assert_close(log_prob, wanted.detach())
    classes, log_prob = head.sample(hidden[:0], 4, return_log_prob=True)
    assert classes.shape == log_prob.shape == (0, 3, 4)


@every_head
def test_topk_in_chunks_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = make(kind, torch.device("cpu")).eval(), draw(7, D)
    wanted = head.topk(hidden, 4)
    seen: list[int] = []
    whole = head.class_log_prob
    monkeypatch.setattr(head, "class_log_prob", lambda x: seen.append(len(x)) or whole(x))
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * V // 8)
    values, classes = head.topk(hidden, 4)
    torch.testing.assert_close(values, wanted[0])
    assert torch.equal(classes, wanted[1])
    if not isinstance(head, TreeEnsemble):  # these may search instead
        assert len(seen) > 1
        assert sum(seen) == 7


@every_head
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature(kind: str, temperature: float, device: torch.device) -> None:
    """The draws follow the log-probabilities that come with them, and these sum to 1; so do those
    of one from each of many rows, which a mixture draws from one component."""
    head, hidden = make(kind, device).eval(), draw(1, D).to(device)
    count = 5000
    generator = torch.Generator(device).manual_seed(1)
    classes, log_prob = head.sample(
        hidden, count, temperature=temperature, generator=generator, return_log_prob=True
    )
    candidates = head.candidate_log_prob(hidden, classes, temperature=temperature)
    torch.testing.assert_close(log_prob, candidates.detach(), rtol=1e-4, atol=1e-5)
    everything = torch.arange(V, device=device)[None]
    mass = head.candidate_log_prob(hidden, everything, temperature=temperature).exp().sum()
    assert abs(mass.item() - 1) < 1e-5
    found = torch.full((V,), math.nan, dtype=torch.float64)
    found[classes[0].cpu()] = log_prob[0].double().cpu()
    prob = found.exp().nan_to_num(0.0).numpy()
    rare = prob * count < 10
    rest = 1 - prob[~rare].sum()
    assert rest > -1e-5
    expected = np.append(prob[~rare], max(rest, 1e-9)) * count
    rows = hidden.expand(count, -1)
    alone = head.sample(rows, temperature=temperature, generator=generator)
    for drawn in (classes[0], alone):
        observed = np.bincount(drawn.cpu(), minlength=V)
        observed = np.append(observed[~rare], observed[rare].sum())
        scaled = expected * (observed.sum() / expected.sum())
        assert scipy.stats.chisquare(observed, scaled).pvalue > 1e-4
    if kind not in TREES:
        wanted = (head.log_prob(hidden) / temperature).log_softmax(1)
        torch.testing.assert_close(log_prob, wanted.gather(1, classes).detach())


def test_temperature_of_a_flat_tree_is_that_of_a_softmax() -> None:
    linear, hidden = torch.nn.Linear(D, V), draw(3, D)
    head = TreeEnsemble(D, V, [huffman_tree(FREQUENCIES, clusters=V)])
    order = torch.from_numpy(head.trees[0].order.copy()).long()
    with torch.no_grad():
        head.roots.weight[0].copy_(linear.weight[order])
        head.roots.bias[0].copy_(linear.bias[order])
    classes, log_prob = head.sample(hidden, 20, temperature=0.4, return_log_prob=True)
    wanted = (linear(hidden) / 0.4).log_softmax(1).gather(1, classes)
    torch.testing.assert_close(log_prob, wanted.detach(), rtol=1e-5, atol=1e-5)


@every_head
def test_candidates(kind: str, device: torch.device) -> None:
    """Values and gradients are those of the log-probabilities of all classes."""
    head = make(kind, device, ignore_index=-7).eval()
    hidden = draw(6, D).to(device).view(2, 3, D).requires_grad_()
    candidates = torch.randint(V, (2, 3, 5), device=device)
    candidates[1, 1] = candidates[1, 1, 0]  # the same one five times
    candidates[0, 0, 2:] = -7
    with torch.no_grad():
        plain = head.candidate_log_prob(hidden, candidates)
    log_prob = head.candidate_log_prob(hidden, candidates)
    wanted = head.log_prob(hidden).gather(2, candidates.clamp(min=0))
    wanted = wanted.masked_fill(candidates == -7, 0.0)
    torch.testing.assert_close(plain, wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_prob, wanted, rtol=1e-5, atol=1e-5)
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    grad = torch.randn(2, 3, 5, device=device)
    got = torch.autograd.grad(log_prob, inputs, grad, allow_unused=True)
    true = torch.autograd.grad(wanted, inputs, grad, allow_unused=True)
    for value, of in zip(got, true, strict=True):
        value = torch.zeros_like(of) if value is None and of is not None else value
        if value is not None:
            value = value.to_dense() if value.is_sparse else value
            of = torch.zeros_like(value) if of is None else of.to_dense()
            torch.testing.assert_close(value, of, rtol=1e-4, atol=1e-5)


@some_heads
def test_candidates_of_zero_rows_and_of_none(kind: str) -> None:
    head = make(kind).eval()
    none = torch.empty(0, 3, dtype=torch.int64)
    assert head.candidate_log_prob(torch.empty(0, D), none).shape == (0, 3)
    none = torch.empty(2, 0, dtype=torch.int64)
    assert head.candidate_log_prob(draw(2, D), none).shape == (2, 0)


@some_heads
def test_the_ignored_candidate_can_be_chosen(kind: str) -> None:
    head = make(kind, ignore_index=5)
    hidden, candidates = draw(3, D), torch.tensor([[5, 2], [7, 5], [5, 5]])
    every = head.log_prob(hidden).gather(1, candidates)
    by_head = head.candidate_log_prob(hidden, candidates)
    torch.testing.assert_close(by_head, every.masked_fill(candidates == 5, 0.0))
    got = head.candidate_log_prob(hidden, candidates, ignore_index=-1)
    torch.testing.assert_close(got, every)
    got = head.candidate_log_prob(hidden, candidates, ignore_index=7)
    torch.testing.assert_close(got, every.masked_fill(candidates == 7, 0.0))


@pytest.mark.parametrize("kind", ["softmax", "mos"])
def test_a_bad_candidate_that_is_not_read_is_nan(kind: str) -> None:
    """Values are not read under torch.compile and on a GPU."""
    head, hidden = make(kind).eval(), draw(3, D)
    candidates = torch.tensor([[5, 2], [7, V], [-100, 5]])
    expected = head.log_prob(hidden).gather(1, candidates.clamp(0, V - 1)).detach()
    expected[1, 1], expected[2, 0] = torch.nan, 0
    compiled = torch.compile(head.candidate_log_prob, backend="eager")
    with torch.no_grad():
        got = compiled(hidden, candidates)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("k", [6, 1200])
def test_trees_compile_candidates(k: int) -> None:
    """Also where all classes are computed."""
    counts = torch.arange(1200, 0, -1)
    head = TreeEnsemble.from_counts(D, counts, n_trees=2, clusters=32, gate="context")
    hidden, candidates = draw(4, D), torch.randint(1200, (4, k))
    wanted = head.candidate_log_prob(hidden, candidates)
    compiled = torch.compile(head.candidate_log_prob, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, candidates), wanted)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, candidates), wanted.detach())


def test_trees_compile_and_export_draws() -> None:
    head = TreeEnsemble.from_counts(D, torch.arange(1200, 0, -1), n_trees=2, clusters=32).eval()
    hidden = draw(4, D)

    def draws(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return head.sample(hidden, 3, temperature=0.8, return_log_prob=True)

    torch.manual_seed(5)
    wanted = draws(hidden)
    compiled = torch.compile(draws, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    got = compiled(hidden)
    assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1])

    class Draws(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head.sample(hidden, 3)

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Draws(), (hidden,), dynamic_shapes=({0: rows},))
    assert program.module()(draw(9, D)).shape == (9, 3)


@pytest.mark.parametrize("make_head", [lambda: Softmax(D, V), lambda: make("trees")])
def test_wrong_arguments(make_head: object) -> None:
    head = make_head()  # type: ignore[operator]
    hidden = draw(2, D)
    with pytest.raises(ValueError, match="n: expected a whole number of at least 1, got 0"):
        head.sample(hidden, 0)
    for value in (0.0, -1.0, math.inf, math.nan, 1e300, 1e-300, 10**400, "warm"):
        with pytest.raises(ValueError, match="temperature: expected a number from 1e-6 to 1e6"):
            head.sample(hidden, temperature=value)
    with pytest.raises(ValueError, match="generator: expected one of the device of hidden, meta"):
        head.sample(hidden.to("meta"), generator=torch.Generator())
    with pytest.raises(TypeError, match=r"generator: expected a torch\.Generator or None, got 3"):
        head.sample(hidden, generator=3)
    candidates = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"candidates: expected shape \[2, K\] .* got \[3, 2\]"):
        head.candidate_log_prob(hidden, candidates.t())
    with pytest.raises(ValueError, match=r"candidates: expected dtype torch\.int64"):
        head.candidate_log_prob(hidden, candidates.int())
    with pytest.raises(ValueError, match=r"candidates: expected values in \[0, 37\)"):
        head.candidate_log_prob(hidden, candidates + V)


class _Elsewhere(torch.Generator):
    """A generator of a GPU, on a machine without one."""

    device = torch.device("cuda:1")


@pytest.mark.parametrize(("index", "refused"), [("cuda:0", True), ("cuda:1", False), ("cpu", True)])
def test_generators_of_another_gpu_are_refused(index: str, refused: bool) -> None:
    if not refused:
        check_generator(_Elsewhere(), torch.device(index))
        return
    message = f"generator: expected one of the device of hidden, {index}, got one of cuda:1"
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_generator(_Elsewhere(), torch.device(index))
