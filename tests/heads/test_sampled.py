"""The sampled softmax in training mode; with every class drawn once, test_head.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from heads.support import FREQUENCIES, D, V, allocations, draw, draw_targets, randomise
from hstree.heads import ForestSoftmax, SampledSoftmax, Softmax, load_head
from hstree.optim import AdamW

K, STEPS, BATCHES = 9, 1000, 300
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


NO_TARGETS = torch.empty(0, dtype=torch.int64)
SHARE = FREQUENCIES / FREQUENCIES.sum()


def draws_of(head: SampledSoftmax, seed: int) -> list[int]:
    """The classes that are drawn, without repetitions."""
    torch.manual_seed(seed)
    return head.draw_classes(NO_TARGETS)[0].tolist()


def gradients(head: SampledSoftmax, hidden: Tensor, target: Tensor) -> Tensor:
    """Of the loss in hidden, W and b, in one row."""
    loss = head(hidden, target).loss
    assert head.bias is not None
    found = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
    return torch.cat([grad.to_dense().flatten() for grad in found])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    ("sparse", "in_batch"), [(False, True), (True, True), (True, False)], ids=str
)
def test_the_loss_by_definition(sparse: bool, in_batch: bool, reduction: str, bias: bool) -> None:
    """A loop over rows and classes in float64, with ignored rows and targets that are drawn."""
    weights = torch.linspace(0.5, 2, V, dtype=torch.float64)
    options = {"sparse": sparse, "in_batch": in_batch, "reduction": reduction, "bias": bias}
    head = build(class_weight=weights, **options).double()
    hidden, target = draw(12, D, dtype=torch.float64).requires_grad_(), draw_targets(12)
    torch.manual_seed(5)
    at = (torch.arange(K) + torch.rand(K, dtype=torch.float64)) / K
    q = FREQUENCIES**0.75 / (FREQUENCIES**0.75).sum()
    m = np.bincount(np.searchsorted(q.cumsum(), at.numpy(), side="right"), minlength=V)
    c = K * q
    target[:4] = torch.tensor([-100, m.argmax(), 30, 30])
    if in_batch:
        m = m + np.bincount(target[target != -100], minlength=V)
        c = c + 10 * SHARE  # 11 rows have a target
    expected, factors = [], []
    for x, y in zip(hidden, target.tolist(), strict=True):
        if y == -100:
            expected.append(torch.zeros((), dtype=torch.float64))
            factors.append(0.0)
            continue

        def score(v: int, x: Tensor = x) -> Tensor:
            return head.weight[v] @ x + (0.0 if head.bias is None else head.bias[v])

        total = score(y).exp()
        for u in range(V):
            if u != y:
                total = total + m[u] / c[u] * score(u).exp()
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
def test_distribution_of_the_draws(name: str) -> None:
    """m = K q on average over many steps, up to its standard error, and within 2 in every step."""
    options, mass = DISTRIBUTIONS[name]
    head = SampledSoftmax(D, V, negatives=K, in_batch=False, **options)
    expected = K * mass / mass.sum()
    m = np.zeros((STEPS, V))
    torch.manual_seed(0)
    for row in m:
        classes, log_weight = (x.numpy() for x in head.draw_classes(NO_TARGETS))
        assert (np.diff(classes) > 0).all()
        row[classes] = np.exp(log_weight) * expected[classes]
    np.testing.assert_allclose(m, m.round(), atol=1e-9)
    np.testing.assert_allclose(m.sum(1), K)
    assert (np.abs(m - expected) < 2).all()
    error = (m.var(0) / STEPS) ** 0.5 + 1e-12
    assert (np.abs(m.mean(0) - expected) < 5 * error).all()


def test_one_draw_in_each_part() -> None:
    """As many parts of equal probability as draws."""
    head = SampledSoftmax(D, 1000, negatives=100, distribution="uniform", in_batch=False)
    classes, log_weight = head.draw_classes(torch.tensor([7, 7]))
    drawn = classes[log_weight > -torch.inf]
    assert torch.equal(drawn // 10, torch.arange(100))
    torch.testing.assert_close(log_weight.exp().sum().item(), 100 / 0.1)
    assert set(classes.tolist()) == {7, *drawn.tolist()}


def estimates(head: SampledSoftmax, hidden: Tensor, targets: Tensor) -> Tensor:
    """Of Z for the first row, with each row of targets [S, N], whose first number is 0."""
    assert head.bias is not None
    own = hidden[0] @ head.weight[0] + head.bias[0]
    return torch.stack([(own - head(hidden, target).output[:1]).exp() for target in targets])


@pytest.mark.parametrize("rows", [1, 2, 30])
@pytest.mark.parametrize("in_batch", [True, False], ids=["batch", "draws"])
def test_estimate_of_the_normalizer_is_unbiased(rows: int, in_batch: bool) -> None:
    """The mean of 300 estimates, for other targets from p, and its standard error, also of small
    batches; the loss is too low on average."""
    head = build(reduction="none", in_batch=in_batch).double().requires_grad_(False)
    hidden = 0.3 * draw(rows, D, dtype=torch.float64)
    random = np.random.default_rng(0)
    targets = torch.from_numpy(random.choice(V, (BATCHES, rows), p=SHARE))
    targets[:, 0] = 0
    torch.manual_seed(0)
    found = estimates(head, hidden, targets)
    exact = torch.nn.functional.linear(hidden[0], head.weight, head.bias).exp().sum()
    assert (found.mean() - exact).abs() < 4 * found.std() / BATCHES**0.5
    assert found.log().mean() < exact.log()


def test_targets_that_depend_on_each_other() -> None:
    """In a batch of one class the targets add nothing to a row's estimate, which is too low by what
    they should have added; without them it is unbiased, and with more draws the bias falls."""
    hidden = 0.3 * draw(30, D, dtype=torch.float64)
    targets = torch.zeros(BATCHES, 30, dtype=torch.int64)
    relative = []
    for options in ({"in_batch": False}, {}, {"negatives": 300}):
        head = build(reduction="none", **options).double().requires_grad_(False)
        torch.manual_seed(0)
        scores = torch.nn.functional.linear(hidden[0], head.weight, head.bias).exp()
        off = estimates(head, hidden, targets) / scores.sum() - 1
        error = 4 * off.std() / len(off) ** 0.5
        k, p = head.negatives, torch.from_numpy(SHARE)
        q = p**0.75 / (p**0.75).sum()
        found = k * q / (k * q + 29 * p) if head.in_batch else torch.ones(V)
        expected = (scores[0] + (found * scores)[1:].sum()) / scores.sum() - 1
        assert (off.mean() - expected).abs() < error
        relative.append(off.mean().abs())
    assert relative[2] < relative[1]


@pytest.mark.parametrize("correlated", [False, True], ids=["independent", "correlated"])
@pytest.mark.filterwarnings("ignore:the training loss")  # of a head that is not trained
def test_gradient_tends_to_that_of_the_softmax(correlated: bool) -> None:
    """With many draws the mean over 100 steps is close to it, also for a batch of few classes; with
    few there is a bias, which falls faster than the number of draws rises."""
    hidden, target = draw(20, D, dtype=torch.float64).requires_grad_(), draw_targets(20)
    if correlated:
        target = target[:2].repeat(10)
    exact = gradients(build().double().eval(), hidden, target)
    bias, noise = [], []
    for negatives in (20, 2000):
        head = build(negatives=negatives).double()
        torch.manual_seed(0)
        found = torch.stack([gradients(head, hidden, target) for _ in range(100)])
        bias.append((found.mean(0) - exact).norm() / exact.norm())
        noise.append(found.std(0).norm() / exact.norm())
    assert bias[1] < bias[0] / 10
    assert bias[1] < 0.05
    assert noise[1] < noise[0] / 10


def test_every_draw_is_the_target() -> None:
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
    visited = {20, 30, *draws_of(head, 1)}
    torch.manual_seed(1)
    head(hidden, target).loss.backward()
    for parameter in (head.weight, head.bias):
        assert parameter.grad.is_sparse
        assert set(parameter.grad._indices()[0].tolist()) == visited
    before = copy.deepcopy(head)
    AdamW(head.parameters(), 0.1).step()
    changed = (head.weight != before.weight).any(1) | (head.bias != before.bias)
    assert set(changed.nonzero()[:, 0].tolist()) == visited


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_all_classes_from_a_step_on(sparse: bool) -> None:
    """samples_in_training = False: the loss and the gradients of a softmax, then again a sample."""
    head, hidden, target = build(sparse=sparse), draw(3, D), draw_targets(3)
    optimizer = AdamW(head.parameters(), 0.1)
    for samples in (True, False, True):
        head.samples_in_training = samples
        own = gradients(head, hidden.requires_grad_(), target)
        weight, bias = (p.detach().clone().requires_grad_() for p in (head.weight, head.bias))
        loss = F.cross_entropy(F.linear(hidden, weight, bias), target)
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [hidden, weight, bias])])
        assert torch.allclose(own, exact, rtol=1e-4, atol=1e-5) != samples
        before = head.weight.detach().clone()
        head(hidden, target).loss.backward()
        assert head.weight.grad.is_sparse == (sparse and samples)
        optimizer.step()
        optimizer.zero_grad()
        changed = (head.weight != before).any(1)
        assert bool(changed.all()) != (sparse and samples)


def test_a_head_without_negatives_cannot_sample() -> None:
    head = ForestSoftmax(D, V, n_trees=2, clusters=4)
    assert not head.samples_in_training
    with pytest.raises(ValueError, match="samples_in_training: expected False without negatives"):
        head.samples_in_training = True


def test_an_ignored_row_adds_nothing() -> None:
    """Also not where it holds infinities: no row of the weights, no negative, no part of N."""
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
    counts = range(200_000, 0, -1)
    head = SampledSoftmax(4, 200_000, negatives=64, frequencies=counts, sparse=True)
    hidden, target = draw(50, 4).requires_grad_(), draw_targets(50, n_classes=200_000)
    largest, _ = allocations(lambda: head(hidden, target).loss.backward())
    assert largest <= 50 * (50 + 64) * 8


def test_class_frequencies_of_many_magnitudes() -> None:
    """Every class has a probability: its scores would be missing in every estimate."""
    head = SampledSoftmax(D, 3, negatives=4, frequencies=[1e20, 0, 1e-5], alpha=1.0)
    assert (torch.diff(head.cumulative, prepend=torch.tensor([0])) >= 1).all()
    classes, log_weight = head.draw_classes(torch.tensor([2, 2]))
    assert classes.tolist() == [0, 2]
    assert log_weight.isfinite().all()


def test_saved_with_its_distribution(tmp_path: Path) -> None:
    """The frequencies are not saved; conversions keep the table as it is."""
    head = build(alpha=0.5).bfloat16()
    head.save(tmp_path / "head")
    other = load_head(tmp_path / "head")
    assert isinstance(other, SampledSoftmax)
    assert other.training
    assert (other.distribution, other.alpha, other.negatives) == ("unigram", 0.5, K)
    assert other.in_batch
    target, found = draw_targets(5), []
    other_again = copy.deepcopy(other)
    other_again.reset_parameters()
    for some in (build(alpha=0.5), head, other, other_again):
        torch.manual_seed(3)
        found.append(some.draw_classes(target))
    for drawn in found:
        assert all(torch.equal(a, b) for a, b in zip(drawn, found[0], strict=True))


@pytest.mark.parametrize(
    ("rows", "n_classes", "draws"),
    [(1, 2, 1), (40, 1000, 250), (40, 4000, 512), (1025, 4000, 512), (1030, 4000, 515),
     (9000, 4000, 1000)],
)  # fmt: skip
def test_draws_follow_the_batch(rows: int, n_classes: int, draws: int, tmp_path: Path) -> None:
    """By default half of the rows, at least 512, at most a quarter of the classes; saved so."""
    options: dict[str, Any] = {"distribution": "uniform", "in_batch": False}
    head = SampledSoftmax(2, n_classes, **options)
    assert head.negatives == "batch"
    head.save(tmp_path / "head")
    fixed = SampledSoftmax(2, n_classes, negatives=draws, **options)
    target, found = draw_targets(rows, n_classes=n_classes), []
    for some in (head, fixed, load_head(tmp_path / "head")):
        assert isinstance(some, SampledSoftmax)
        torch.manual_seed(3)
        found.append(some.draw_classes(target))
    for drawn in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(drawn, found[0], strict=True))
    forest = ForestSoftmax(2, n_classes, clusters=1, negatives="batch", **options)
    assert forest.draw_classes(target)[0].shape[0] <= draws + rows
    assert "negatives='batch'" in repr(forest)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize("dynamic", [False, True])
def test_draws_that_follow_the_batch_compile(dynamic: bool) -> None:
    """One graph for a size, or for all sizes."""
    torch._dynamo.reset()
    head, counter = SampledSoftmax(D, 5000, frequencies=range(5000, 0, -1)), CompileCounter()
    compiled = torch.compile(head, backend=counter, fullgraph=True, dynamic=dynamic)
    for rows in (7, 11, 13, 1100, 1200) if dynamic else (7, 7):
        losses = []
        for some in (compiled, head):
            torch.manual_seed(1)
            losses.append(some(draw(rows, D), draw_targets(rows)).loss)
        torch.testing.assert_close(*losses)
    assert counter.frame_count == 1


@pytest.mark.slow
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
    head.samples_in_training = False
    with torch.no_grad():
        exact = head.log_prob(hidden).gather(1, target.clamp(min=0)[:, None])[:, 0]
    found = compiled(hidden, target).output
    torch.testing.assert_close(found, exact.masked_fill(target == -100, 0))
    compiled = torch.compile(build(sparse=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass sparse=False"):
        compiled(draw(3, D), draw_targets(3))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"negatives": 0}, "negatives: expected a whole number of at least 1, got 0"),
        (
            {"negatives": "half"},
            "negatives: expected a whole number of at least 1, 'batch' or None, got 'half'",
        ),
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
        (
            {"frequencies": None, "distribution": "uniform"},
            "frequencies: expected class counts of the targets for in_batch=True, got None",
        ),
        ({"in_batch": 1}, "in_batch: expected True or False, got 1"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SampledSoftmax(D, V, **UNIGRAM | options)
