"""The sampled softmax in training mode; with every class drawn once, test_head.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
import torch
from torch import Tensor

from heads.support import FREQUENCIES, D, V, allocations, draw, draw_targets, randomise
from hstree.heads import SampledSoftmax, Softmax, load_head
from hstree.optim import AdamW

K, STEPS = 9, 2000
UNIGRAM: dict[str, Any] = {"negatives": K, "frequencies": FREQUENCIES}
RANKS = np.argsort(np.argsort(-FREQUENCIES, kind="stable"))
LOG_UNIFORM = np.log((np.arange(V) + 2) / (np.arange(V) + 1)) / np.log(V + 1)
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], npt.NDArray[np.float64]]] = {
    "unigram": ({"frequencies": FREQUENCIES}, FREQUENCIES**0.75),
    "alpha 1": ({"frequencies": FREQUENCIES, "alpha": 1.0}, FREQUENCIES * 1.0),
    "alpha 0": ({"frequencies": FREQUENCIES, "alpha": 0}, np.ones(V)),
    "log-uniform": ({"distribution": "log-uniform"}, LOG_UNIFORM),
    "log-uniform by rank": (
        {"distribution": "log-uniform", "frequencies": FREQUENCIES},
        LOG_UNIFORM[RANKS],
    ),
    "uniform": ({"distribution": "uniform", "frequencies": FREQUENCIES}, np.ones(V)),
}
"""Options, and numbers proportional to q."""


def build(**options: Any) -> SampledSoftmax:
    head = randomise(SampledSoftmax(D, V, **UNIGRAM | options))
    assert isinstance(head, SampledSoftmax)
    return head


def negatives_of(head: SampledSoftmax, seed: int) -> list[int]:
    torch.manual_seed(seed)
    return head.draw_negatives()[0].tolist()


def gradients(head: SampledSoftmax, hidden: Tensor, target: Tensor) -> Tensor:
    """Of the loss in hidden, W and b, in one row."""
    loss = head(hidden, target).loss
    assert head.bias is not None
    found = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
    return torch.cat([grad.to_dense().flatten() for grad in found])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_the_loss_by_definition(sparse: bool, reduction: str, bias: bool) -> None:
    """A loop over rows and negatives in float64, with accidental hits and ignored rows."""
    weights = torch.linspace(0.5, 2, V, dtype=torch.float64)
    head = build(sparse=sparse, reduction=reduction, bias=bias, class_weight=weights).double()
    hidden, target = draw(12, D, dtype=torch.float64).requires_grad_(), draw_targets(12)
    negatives = negatives_of(head, 5)
    target[:3] = torch.tensor([-100, negatives[0], negatives[-1]])
    q = FREQUENCIES**0.75 / (FREQUENCIES**0.75).sum()
    expected, factors = [], []
    for x, y in zip(hidden, target.tolist(), strict=True):
        if y == -100:
            expected.append(torch.zeros((), dtype=torch.float64))
            factors.append(0.0)
            continue

        def score(v: int, x: Tensor = x) -> Tensor:
            return head.weight[v] @ x + (0.0 if head.bias is None else head.bias[v])

        total = score(y).exp()
        for v in negatives:
            if v != y:
                total = total + score(v).exp() / (K * q[v])
        expected.append(score(y) - total.log())
        factors.append(head.class_weight[y].item())
    factor = torch.tensor(factors, dtype=torch.float64)
    wanted = -factor * torch.stack(expected)
    if reduction != "none":
        wanted = wanted.sum() / (factor.sum() if reduction == "mean" else 1.0)
    torch.manual_seed(5)
    output, loss = head(hidden, target)
    torch.testing.assert_close(output, torch.stack(expected), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=1e-11)
    upstream = torch.linspace(-1, 2, loss.numel()).to(loss)
    leaves = [hidden, *head.parameters()]
    for got, grad in zip(
        torch.autograd.grad((loss.flatten() * upstream).sum(), leaves),
        torch.autograd.grad((wanted.flatten() * upstream).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got.to_dense(), grad, rtol=1e-10, atol=1e-11)


def test_exact_in_evaluation_mode() -> None:
    """The softmax with the same weights, gradients included."""
    head, softmax = build().eval(), randomise(Softmax(D, V))
    hidden, target = draw(12, D).requires_grad_(), draw_targets(12)
    target[3] = -100
    assert torch.equal(head(hidden, target).output, softmax(hidden, target).output)
    results = [
        torch.autograd.grad(some(hidden, target).loss, [hidden, *some.parameters()])
        for some in (head, softmax)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    before = torch.get_rng_state()
    head(hidden, target)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn
    head.train()
    assert torch.equal(head.log_prob(hidden), softmax.log_prob(hidden))
    assert not torch.equal(head(hidden, target).output, softmax(hidden, target).output)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_of_negatives(name: str) -> None:
    """Chi-square of one negative of each of many steps, of a part that is chosen at random."""
    options, mass = DISTRIBUTIONS[name]
    head = SampledSoftmax(D, V, negatives=K, **options)
    q = mass / mass.sum()
    torch.manual_seed(0)
    steps = [head.draw_negatives() for _ in range(STEPS)]
    drawn = torch.stack([classes for classes, _ in steps]).numpy()
    logs = torch.stack([log_count for _, log_count in steps]).numpy()
    np.testing.assert_allclose(logs, np.log(K * q)[drawn], rtol=0, atol=1e-12)
    chosen = drawn[np.arange(STEPS), np.random.default_rng(0).integers(K, size=STEPS)]
    observed, expected = np.bincount(chosen, minlength=V), STEPS * q
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert scipy.stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3
    counts = np.stack([np.bincount(row, minlength=V) for row in drawn])
    assert (np.abs(counts - K * q) < 2).all()  # in every step


def test_one_negative_in_each_part() -> None:
    """As many parts of equal probability as negatives."""
    head = SampledSoftmax(D, 1000, negatives=100, distribution="uniform")
    classes, log_count = head.draw_negatives()
    assert torch.equal(classes // 10, torch.arange(100))
    torch.testing.assert_close(log_count, torch.full((100,), 0.1, dtype=torch.float64).log())


def test_estimate_of_the_normalizer_is_unbiased() -> None:
    """The mean of 1,000 estimates of Z and its standard error; the loss is too low on average."""
    head = build(reduction="none").double().requires_grad_(False)
    hidden, target = 0.3 * draw(4, D, dtype=torch.float64), torch.tensor([0, 1, 17, 36])
    scores = torch.nn.functional.linear(hidden, head.weight, head.bias)
    own = scores.gather(1, target[:, None])[:, 0]
    torch.manual_seed(0)
    outputs = torch.stack([head(hidden, target).output for _ in range(1000)])
    normalizer = (own - outputs).exp()
    error = normalizer.std(0) / 1000**0.5
    assert ((normalizer.mean(0) - scores.exp().sum(1)).abs() < 4 * error).all()
    exact = head.eval()(hidden, target).output
    assert (outputs.mean(0) > exact).all()


def test_gradient_tends_to_that_of_the_softmax() -> None:
    """With many negatives the mean over 200 draws differs by its standard error; with few there is
    a bias. The noise falls faster than that of independent draws, by a tenth."""
    hidden, target = draw(20, D, dtype=torch.float64).requires_grad_(), draw_targets(20)
    exact = gradients(build().double().eval(), hidden, target)
    bias, noise = [], []
    for negatives in (20, 2000):
        head = build(negatives=negatives).double()
        torch.manual_seed(0)
        found = torch.stack([gradients(head, hidden, target) for _ in range(200)])
        off = found.mean(0) - exact
        bias.append(off.norm().item())
        noise.append(found.std(0).norm().item())
    assert (off.abs() <= 5 * found.std(0) / 200**0.5).all()
    assert bias[1] < bias[0] / 100
    assert noise[1] < noise[0] / 20


def test_every_negative_is_an_accidental_hit() -> None:
    head = SampledSoftmax(D, 1, negatives=3, frequencies=[7])
    hidden = draw(2, D).requires_grad_()
    output, loss = head(hidden, torch.zeros(2, dtype=torch.int64))
    assert not output.any()
    loss.backward()
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_row_sparse_gradients(tied: bool) -> None:
    """Rows of targets and negatives alone; the steps of AdamW leave all other rows as they are."""
    embedding = torch.nn.Embedding(V, D, sparse=True) if tied else None
    head = build(sparse=True, embedding=embedding)
    assert (embedding is not None) == (tied and head.weight is embedding.weight)
    assert head.bias is not None
    hidden, target = draw(3, D), torch.tensor([20, -100, 30])
    visited = {20, 30, *negatives_of(head, 1)}
    torch.manual_seed(1)
    head(hidden, target).loss.backward()
    for parameter in (head.weight, head.bias):
        assert parameter.grad.is_sparse
        assert set(parameter.grad._indices()[0].tolist()) == visited
    before = copy.deepcopy(head)
    AdamW(head.parameters(), 0.1).step()
    changed = (head.weight != before.weight).any(1) | (head.bias != before.bias)
    assert set(changed.nonzero()[:, 0].tolist()) == visited


def test_an_ignored_row_adds_nothing() -> None:
    """Also not where it holds infinities, and no row of the weights for it."""
    hidden, target = draw(3, D), torch.tensor([20, 30, 31])
    results = []
    for ignored in (False, True):
        head = build(sparse=True, reduction="sum")
        if ignored:
            hidden = torch.cat([hidden, torch.full((1, D), torch.inf)])
            target = torch.cat([target, torch.tensor([-100])])
        torch.manual_seed(1)
        head(hidden, target).loss.backward()
        results.append(head.weight.grad.coalesce())
    assert torch.equal(results[0].indices(), results[1].indices())
    torch.testing.assert_close(results[0].values(), results[1].values())


def test_nothing_of_the_size_of_the_classes() -> None:
    """A training step with row-sparse gradients: time and memory do not depend on V."""
    head = SampledSoftmax(4, 200_000, negatives=64, distribution="log-uniform", sparse=True)
    hidden, target = draw(50, 4).requires_grad_(), draw_targets(50, n_classes=200_000)
    largest, _ = allocations(lambda: head(hidden, target).loss.backward())
    assert largest <= 50 * 64 * 8


def test_class_frequencies_of_many_magnitudes() -> None:
    """Every class has a probability: its scores would be missing in every estimate."""
    head = SampledSoftmax(D, 3, negatives=4, frequencies=[1e20, 0, 1e-5], alpha=1.0)
    assert (torch.diff(head.cumulative, prepend=torch.tensor([0])) >= 1).all()
    assert head.draw_negatives()[0].tolist() == [0, 0, 0, 0]


def test_saved_with_its_distribution(tmp_path: Path) -> None:
    """The frequencies are not saved; conversions keep the table as it is."""
    head = build(alpha=0.5).bfloat16()
    head.save(tmp_path / "head")
    other = load_head(tmp_path / "head")
    assert isinstance(other, SampledSoftmax)
    assert other.training
    assert (other.distribution, other.alpha, other.negatives) == ("unigram", 0.5, K)
    expected = negatives_of(build(alpha=0.5), 3)
    assert negatives_of(head, 3) == negatives_of(other, 3) == expected
    other.reset_parameters()
    assert negatives_of(other, 3) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
def test_compile() -> None:
    """One graph, the same negatives; row-sparse gradients are refused."""
    torch._dynamo.reset()
    head = build()
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 12):
        results = []
        for some in (head, compiled):
            hidden, target = draw(rows, D).requires_grad_(), draw_targets(rows)
            target[1] = -100
            torch.manual_seed(2)
            loss = some(hidden, target).loss
            results.append([loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])])
        torch.testing.assert_close(*results)
    compiled = torch.compile(build(sparse=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass sparse=False"):
        compiled(draw(3, D), draw_targets(3))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"negatives": 0}, "negatives: expected a whole number of at least 1, got 0"),
        ({"alpha": -0.5}, r"alpha: expected a number of at least 0, got -0\.5"),
        ({"alpha": float("nan")}, "alpha: expected a finite number, got nan"),
        (
            {"distribution": "zipf"},
            "distribution: expected one of unigram, log-uniform, uniform, got 'zipf'",
        ),
        (
            {"frequencies": None},
            "frequencies: expected class counts for negatives from the distribution 'unigram'",
        ),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SampledSoftmax(D, V, **UNIGRAM | options)
