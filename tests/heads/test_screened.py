"""ScreenedSoftmax against the formula of its distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.screened_topk import preview_rows
from scipy.stats import chisquare
from torch import Tensor, nn

import hstree
from hstree.heads import ScreenedSoftmax, load_head

D, V = 24, 203


def model(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor]:
    """A layer and contexts that vary in few directions, about a mean."""
    torch.manual_seed(0)
    linear = nn.Linear(D, V, bias=bias, dtype=dtype)
    strength = 3 * 0.7 ** torch.arange(D)
    mixed = torch.linalg.qr(torch.randn(D, D))[0]
    hidden = (torch.randn(800, D) * strength) @ mixed + torch.randn(D)
    with torch.no_grad():
        linear.weight.mul_(5).add_(0.3)
    return linear, hidden.to(dtype)


def made(bias: bool = True, **options: Any) -> tuple[ScreenedSoftmax, nn.Linear, Tensor]:
    linear, hidden = model(bias)
    options = {"rank": 11, "bits": 4, "exact": 20} | options
    return ScreenedSoftmax.from_linear(linear, hidden[16:], **options).eval(), linear, hidden[:16]


def log_q(
    head: ScreenedSoftmax, linear: nn.Linear, hidden: Tensor, temperature: float = 1.0
) -> Tensor:
    """In float64, from the tables of the head."""
    x = hidden.double() @ head.rotation.double().T + head.rotation_bias.double()
    x, shift = (x[:, :-1], x[:, -1:]) if head.rank < D else (hidden.double(), x)
    step = x.abs().amax(1, keepdim=True) / 127
    rows = preview_rows(head.preview, head.row_scale, V, head.rank)
    scores = head.offset[:V] + shift + (x / step).round() * step @ rows.T
    exact = nn.functional.linear(hidden, linear.weight, linear.bias).double()
    best = scores.topk(head.exact).indices
    scores = head.scale * scores.scatter(1, best, exact.gather(1, best))
    if head.soft_cap is not None:
        scores = head.soft_cap * (scores / head.soft_cap).tanh()
    return (scores / temperature).log_softmax(1).detach()


SCALES: list[dict[str, Any]] = [{"scale": 0.4}, {"scale": 0.4, "soft_cap": 3.0}]


@pytest.mark.parametrize(
    "options", [{}, {"bits": 8}, {"rank": D}, {"exact": V}, {"bias": False}, *SCALES]
)
def test_queries_are_those_of_the_formula(options: dict[str, Any]) -> None:
    head, linear, hidden = made(**options)
    expected = log_q(head, linear, hidden)
    torch.testing.assert_close(head.log_prob(hidden).double(), expected, rtol=1e-4, atol=1e-4)
    values, classes = head.topk(hidden.view(4, 4, D), 3)
    exact = nn.functional.linear(hidden, linear.weight, linear.bias)
    assert torch.equal(classes.view(16, 3)[:, 0], head.predict(hidden))
    torch.testing.assert_close(
        values.view(16, 3), head.log_prob(hidden).gather(1, classes.view(16, 3))
    )
    if head.exact == V:
        assert torch.equal(classes.view(16, 3), exact.topk(3).indices)
    candidates = torch.randint(V, (16, 5))
    candidates[:, 2] = -100
    for temperature in (1.0, 0.6):
        got = head.candidate_log_prob(hidden, candidates, temperature=temperature)
        wanted = log_q(head, linear, hidden, temperature).gather(1, candidates.clamp(min=0))
        wanted[:, 2] = 0
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=2e-4)
    output, loss = head(hidden, candidates[:, 0])
    torch.testing.assert_close(output, head.log_prob(hidden).gather(1, candidates[:, :1])[:, 0])
    torch.testing.assert_close(loss, -output.mean())


@pytest.mark.parametrize(("temperature", "options"), [(1.0, {}), (1.7, {}), (1.7, SCALES[1])])
def test_draws_have_the_distribution(temperature: float, options: dict[str, Any]) -> None:
    """Also those of the classes that have only a preview."""
    head, linear, hidden = made(exact=4, **options)
    hidden, random = hidden[:2], torch.Generator().manual_seed(1)
    classes, log_prob = head.sample(
        hidden, 20_000, temperature=temperature, generator=random, return_log_prob=True
    )
    log_p = log_q(head, linear, hidden, temperature)
    torch.testing.assert_close(log_prob.double(), log_p.gather(1, classes), rtol=1e-4, atol=2e-4)
    for drawn, p in zip(classes, log_p.exp(), strict=True):
        counts = torch.bincount(drawn, minlength=V)
        assert counts[p.topk(4).indices].sum() < 19_000
        group = torch.where(20_000 * p >= 5, torch.arange(V), V)  # one of all rare classes
        seen = torch.bincount(group, counts, minlength=V + 1)[group.unique()]
        wanted = torch.bincount(group, p, minlength=V + 1)[group.unique()]
        assert chisquare(seen, 20_000 * wanted / wanted.sum()).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chooses_the_shape_by_the_agreement(dtype: torch.dtype) -> None:
    linear, hidden = model(dtype=dtype)
    for wanted in (0.5, 0.99):
        head = ScreenedSoftmax.from_linear(linear, hidden, agreement=wanted).eval()
        held = hidden[-200:]
        exact = held.double() @ linear.weight.double().T + linear.bias.double()
        found = head._screened(held, head.exact, head.exact).classes
        share = (found == exact.argmax(1, keepdim=True)).any(1).double().mean()
        assert head.agreement == pytest.approx(float(share))
        assert share >= wanted
    plain = ScreenedSoftmax.from_linear(linear)
    assert (plain.rank, plain.bits, plain.exact, plain.agreement) == (D, 4, V, None)


def test_saved_without_the_weight(tmp_path: Path) -> None:
    head, linear, hidden = made()
    head.save(tmp_path / "whole.safetensors")
    head.save(tmp_path / "screen.safetensors", embedding=linear)
    whole = load_head(tmp_path / "whole.safetensors").eval()
    shared = load_head(tmp_path / "screen.safetensors", embedding=linear).eval()
    assert isinstance(shared, ScreenedSoftmax)
    assert shared.weight is linear.weight
    for other in (whole, shared):
        assert torch.equal(other.log_prob(hidden), head.log_prob(hidden))
        assert other.config() == head.config()
    with pytest.raises(ValueError, match="embedding: expected the module"):
        load_head(tmp_path / "screen.safetensors")


def test_casts_keep_the_preview() -> None:
    head, _, hidden = made()
    expected = head.log_prob(hidden)
    low = head.bfloat16()
    assert low.row_scale.dtype == torch.float32
    torch.testing.assert_close(low.log_prob(hidden), expected, rtol=0.05, atol=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(low.log_prob(hidden), low.log_prob(hidden.bfloat16()))


def test_life() -> None:
    head, linear, hidden = made()
    assert head.sample(hidden[:0], 3).shape == (0, 3)
    assert head.topk(hidden, V)[1].sort(1).values.tolist() == [list(range(V))] * 16
    hidden[3] = torch.nan
    assert head.topk(hidden, 2)[0].isnan().any(1).nonzero().tolist() == [[3]]
    assert head.parameter_groups(1.0) == []
    assert head.weight is linear.weight
    assert "rank=11, bits=4, exact=20, agreement=" in repr(head)
    assert "screened" not in hstree.heads.head_names()
    with pytest.raises(RuntimeError, match=r"expected evaluation mode, head\.eval"):
        head.train()(hidden, torch.zeros(16, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="resized: ScreenedSoftmax has no form"):
        head.resized(V + 1)


def test_wrong_arguments() -> None:
    linear, hidden = model()
    make = ScreenedSoftmax.from_linear
    for name, options in (
        ("rank", {"rank": D + 1}),
        ("bits", {"bits": 6}),
        ("exact", {"exact": V + 1}),
        ("scale", {"scale": 0.0}),
        ("soft_cap", {"soft_cap": -1.0}),
        ("agreement", {"agreement": 1.5}),
        ("hidden", {"hidden": hidden[:, 1:]}),
        ("hidden", {"hidden": hidden[:7]}),
        ("hidden", {"hidden": hidden / 0}),
        ("agreement", {"hidden": None, "agreement": 0.9}),
        ("rank", {"hidden": None, "rank": 8}),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            make(linear, **{"hidden": hidden} | options)
    with pytest.raises(ValueError, match=r"linear: expected a weight in float32, .* got float64"):
        make(linear.double(), hidden)
    for parameter in linear.float().parameters():
        kept = parameter.data.clone()
        parameter.data.view(-1)[0] = torch.inf
        with pytest.raises(ValueError, match="linear: expected finite numbers"):
            make(linear, hidden)
        parameter.data = kept


def test_a_class_that_never_comes(tmp_path: Path) -> None:
    """By a bias of -inf."""
    linear, hidden = model()
    linear.bias.data[7] = -torch.inf
    ScreenedSoftmax.from_linear(linear, exact=9).save(tmp_path / "head")
    log_prob = load_head(tmp_path / "head").eval().log_prob(hidden)
    assert (log_prob[:, 7] == -torch.inf).all()
    assert log_prob.isfinite().sum() == len(hidden) * (V - 1)


def test_tiny_contexts_are_as_zero() -> None:
    """127 divided by their largest number overflows; a softmax gives the same for both."""
    linear, _ = model()
    head = ScreenedSoftmax.from_linear(linear, exact=9).eval()
    hidden = torch.full((1, D), 1e-37)
    torch.testing.assert_close(head.log_prob(hidden), head.log_prob(0 * hidden))
    assert head.sample(hidden, 5).shape == (1, 5)
