"""The references that all kernels are held against, themselves held against a walk of the trees and
against plain sums in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from hstree.trees import Tree
from reference.feature_gather import feature_gather_reference
from reference.forest_log_prob import forest_log_prob_reference
from reference.group_log_prob import group_log_prob_reference
from reference.mixture_log_prob import mixture_log_prob_reference
from reference.path_log_prob import path_log_prob_reference
from reference.piecewise import piecewise_reference
from reference.target_log_softmax import target_log_softmax_reference


@pytest.mark.parametrize("nested", [((0, 1), (2, (3, 4))), (0, (1, (2, 3)))], ids=str)
@pytest.mark.parametrize("subset", [None, [1, 4]], ids=str)
def test_paths_are_the_distribution_of_a_walk(nested: Any, subset: Any) -> None:
    tree = Tree.from_nested(nested)
    tables = tree.tables()
    random = np.random.default_rng(0)
    h = random.standard_normal(5)
    x = h if subset is None else h[subset]
    weight = random.standard_normal((tables.n_binary, len(x)))
    bias = random.standard_normal(tables.n_binary)
    prob, nodes = np.zeros(tree.n_classes), iter(range(100))

    def visit(item: Any, p: float) -> None:
        if not isinstance(item, tuple):
            prob[item] = p
            return
        node = next(nodes)
        left = 1 / (1 + np.exp(-(weight[node] @ x + bias[node])))
        visit(item[0], p * left)
        visit(item[1], p * (1 - left))

    visit(nested, 1.0)
    np.testing.assert_allclose(prob.sum(), 1)
    target = torch.arange(-1, tree.n_classes)
    index = None if subset is None else torch.tensor([subset], dtype=torch.int32)
    log_prob, score = path_log_prob_reference(
        torch.from_numpy(np.tile(h, (len(target), 1))), torch.from_numpy(weight)[None],
        torch.from_numpy(bias)[None], target, torch.tensor(tables.path_offset)[None],
        torch.tensor(tables.path), torch.tensor(tables.leaf_position)[None], index,
        tables.max_depth,
    )  # fmt: skip
    assert log_prob[0] == 0
    np.testing.assert_allclose(log_prob[1:, 0].exp(), prob, rtol=1e-12)
    assert score.shape == (len(target), 1, tables.max_depth)


def test_group_log_prob() -> None:
    random = np.random.default_rng(0)
    hidden, weight, bias = (random.standard_normal(size) for size in ((4, 3), (6, 3), (2, 6)))
    cluster, target = np.array([[0, 1, 0, 1, 1, 0], [2, 0, 0, 1, 1, 1]]), np.array([5, -1, 0, 2])
    expected = np.zeros((4, 2))
    for n in (0, 2, 3):
        for t in range(2):
            p = np.exp(weight @ hidden[n] + bias[t])
            own = cluster[t] == cluster[t, target[n]]
            expected[n, t] = np.log(p[target[n]] / p[own].sum())
    tensors = [torch.tensor(x) for x in (hidden, weight, bias, target, cluster)]
    np.testing.assert_allclose(group_log_prob_reference(*tensors), expected, rtol=1e-12, atol=1e-15)


def test_feature_gather() -> None:
    input = torch.arange(6.0).view(2, 3)
    index = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    assert feature_gather_reference(input, index).tolist() == [
        [[0.0, 2.0], [1.0, 2.0]],
        [[3.0, 5.0], [4.0, 5.0]],
    ]


def linear_table(intervals: int, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Increasing values at the K + 1 knots, and the table of the function through them."""
    random = np.random.default_rng(0)
    values = np.cumsum(random.lognormal(size=intervals + 1)) - intervals / 2
    return values, np.column_stack([values[:-1], np.diff(values)])


@pytest.mark.parametrize("intervals", [1, 2, 7, 1000])
def test_plif_goes_through_its_knots_and_on(intervals: int) -> None:
    values, table = linear_table(intervals, 3.0)
    knots = np.linspace(-3, 3, intervals + 1)
    x = np.random.default_rng(1).normal(0.0, 2.0, 500)
    slope = np.diff(values) / np.diff(knots)
    expected = np.interp(x, knots, values)
    expected += np.minimum(x + 3, 0) * slope[0] + np.maximum(x - 3, 0) * slope[-1]
    assert (abs(x) > 3).sum() > 20
    leaf = torch.tensor(x, requires_grad=True)
    output = piecewise_reference(leaf, torch.tensor(table), 3.0)
    np.testing.assert_allclose(output.detach(), expected, rtol=1e-12, atol=1e-12)
    output.sum().backward()
    at = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, intervals - 1)
    np.testing.assert_allclose(leaf.grad, slope[at], rtol=1e-9)


def test_plif_cubic() -> None:
    """Each interval's own polynomial in the share of the interval; straight beyond the ends."""
    random = np.random.default_rng(0)
    table = random.standard_normal((5, 4))
    x = random.uniform(-2, 2, 300)
    t = (np.clip(x, -2, 2) + 2) * 5 / 4
    j = t.astype(int)
    expected = [np.polyval(table[i][::-1], a - i) for a, i in zip(t, j, strict=True)]
    got = piecewise_reference(torch.tensor(x), torch.tensor(table), 2.0)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    ends = torch.tensor([-3.0, 4.0], dtype=torch.float64)  # 1.25 and 2.5 intervals outside
    below = table[0, 0] - 1.25 * table[0, 1]
    above = table[4].sum() + 2.5 * (table[4] @ [0, 1, 2, 3])
    np.testing.assert_allclose(piecewise_reference(ends, torch.tensor(table), 2.0), [below, above])


def test_plif_nan_infinity_and_dtypes() -> None:
    table = torch.tensor([[0.0, 3.0], [3.0, -1.0]])
    x = torch.tensor([math.nan, -math.inf, math.inf, 0.5, 0.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        output = piecewise_reference(x.to(dtype), table, 1.0)
        assert output.dtype == dtype
        assert output[0].isnan()
        assert output[1:].tolist() == [-math.inf, -math.inf, 2.5, 3.0]


def monotone(x: np.ndarray, c: float, k: float) -> np.ndarray:
    return k * (x - c) + c - (k - 1) * np.logaddexp(0.0, x - c)  # as published


@pytest.mark.parametrize(("c", "k"), [(0.0, 1.0), (0.0, 2.0), (-1.5, 2.5), (1.0, 0.25)])
def test_target_log_softmax(c: float, k: float) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0.0, 3.0, (6, 9))
    logits[2, 4] = 700.0
    target = np.array([3, 0, 4, -1, 8, 8])
    score = monotone(logits, c, k)
    expected = score[np.arange(6), target] - logsumexp(score, axis=1)
    expected[3] = 0
    leaf = torch.tensor(logits, requires_grad=True)
    got = target_log_softmax_reference(leaf, torch.tensor(target), c, k)
    np.testing.assert_allclose(got.detach(), expected, rtol=1e-12, atol=1e-12)
    got.sum().backward()
    assert not leaf.grad[3].any()
    if k == 1:
        chosen = np.eye(9)[target] - np.exp(logits - logsumexp(logits, axis=1, keepdims=True))
        chosen[3] = 0
        np.testing.assert_allclose(leaf.grad, chosen, rtol=1e-12, atol=1e-15)


def test_sigsoftmax() -> None:
    """exp(x) sigmoid(x), normalised: f is as published."""
    x = np.random.default_rng(0).normal(0.0, 2.0, 7)
    p = np.exp(x) / (1 + np.exp(-x))
    every = torch.tensor(x).expand(7, 7)
    got = target_log_softmax_reference(every, torch.arange(7), 0.0, 2.0)
    np.testing.assert_allclose(got.exp(), p / p.sum(), rtol=1e-12)


def test_target_log_softmax_of_a_table() -> None:
    values, table = linear_table(8, 4.0)
    logits = np.random.default_rng(1).uniform(-4, 4, (5, 6))
    score = np.interp(logits, np.linspace(-4, 4, 9), values)
    target = np.array([0, 5, 3, 3, 1])
    expected = score[np.arange(5), target] - logsumexp(score, axis=1)
    got = target_log_softmax_reference(
        torch.tensor(logits), torch.tensor(target), table=torch.tensor(table), radius=4.0
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"k": 2.0}, {"k": 0.5}, {"table": [[1.0, 0.0]]}], ids=str)
def test_classes_at_minus_infinity_are_not_there(options: dict[str, Any]) -> None:
    if "table" in options:
        options = {"table": torch.tensor(options["table"], dtype=torch.float64)}
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 2, -1, 1])
    expected = target_log_softmax_reference(logits, target, **options)
    more = torch.cat([logits, torch.full((4, 2), -math.inf, dtype=torch.float64)], 1)
    got = target_log_softmax_reference(more.requires_grad_(), target, **options)
    torch.testing.assert_close(got.detach(), expected)
    got.sum().backward()
    assert (more.grad[:, 5:] == 0).all()
    assert more.grad.isfinite().all()


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("prior", [True, False], ids=["prior", "no prior"])
def test_mixture_log_prob(components: int, prior: bool) -> None:
    random = np.random.default_rng(0)
    latent = random.standard_normal((4, components, 3))
    weight, bias = random.standard_normal((6, 3)), random.standard_normal(6)
    log_prior = random.standard_normal((4, components))
    log_prior -= logsumexp(log_prior, axis=1, keepdims=True)
    target = np.array([5, -1, 0, 2])
    score = monotone(latent @ weight.T + bias, -0.5, 2.5)
    p = np.exp(score - logsumexp(score, axis=2, keepdims=True))
    share = np.exp(log_prior) if prior else np.full((4, components), 1 / components)
    expected = np.log((share[:, :, None] * p).sum(1)[np.arange(4), target])
    expected[1] = 0
    tensors = [torch.tensor(x, requires_grad=True) for x in (latent, log_prior, weight, bias)]
    got = mixture_log_prob_reference(
        tensors[0], tensors[1] if prior else None, *tensors[2:], torch.tensor(target), -0.5, 2.5
    )
    np.testing.assert_allclose(got.detach(), expected, rtol=1e-12)
    got.sum().backward()
    assert not tensors[0].grad[1].any()


def test_forest_log_prob() -> None:
    random = np.random.default_rng(0)
    hidden, weight, bias = (random.standard_normal(size) for size in ((4, 3), (6, 3), 6))
    r, share = random.standard_normal((4, 2, 5)), random.dirichlet([1, 1], 4)
    cluster, target = random.integers(0, 5, (6, 2)), np.array([5, -1, 0, 2])
    expected = np.zeros(4)
    for n in (0, 2, 3):
        for t in range(2):
            p = np.exp(weight @ hidden[n] + bias + r[n, t, cluster[:, t]])
            expected[n] += share[n, t] * p[target[n]] / p.sum()
        expected[n] = np.log(expected[n])
    tensors = [torch.tensor(x) for x in (hidden, np.log(share), r, weight, bias, cluster, target)]
    np.testing.assert_allclose(forest_log_prob_reference(*tensors), expected, rtol=1e-12)
