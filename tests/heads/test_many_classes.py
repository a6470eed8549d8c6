"""Vocabularies of a million classes and more: sums and draws that float32 would lose."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hstree._numerics import draw_columns
from hstree.heads import (
    GSS,
    PLIF,
    ForestSoftmax,
    Head,
    Mixtape,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    SampledSoftmax,
    ScreenedSoftmax,
    Softmax,
    TreeEnsemble,
)
from hstree.lm.generate import sample_log_prob

MANY = 2**20


def _screened(n_classes: int) -> ScreenedSoftmax:
    linear = nn.Linear(1, n_classes)
    nn.init.zeros_(linear.weight)
    return ScreenedSoftmax.from_linear(linear, exact=3)


FLAT: dict[str, Callable[[int], Head]] = {
    "softmax": lambda n: Softmax(1, n),
    "gss": lambda n: GSS(1, n),
    "plif": lambda n: PLIF(1, n, intervals=50, slope_std=0.0),
    "moc": lambda n: MixtureOfContexts(1, n, components=2),
    "mos": lambda n: MixtureOfSoftmaxes(1, n, components=2),
    "mixtape": lambda n: Mixtape(1, n, own_gates=3),
    "sampled": lambda n: SampledSoftmax(1, n, negatives=5, frequencies=np.ones(n)),
    "forest": lambda n: ForestSoftmax(1, n, n_trees=2, clusters=30),
    "screened": _screened,
}


def with_biases(head: Head, bias: Tensor) -> Head:
    """The head with these biases of the classes and other parameters of 0, but for a PLIF's."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.mul_(name == "function.v")
        if isinstance(head, TreeEnsemble):
            head.roots.bias[0] = bias[head.below.root_child[0, : len(bias)].argsort()]
        else:
            head.bias.copy_(bias)
        if isinstance(head, ScreenedSoftmax):
            head.offset[: len(bias)] = bias
    return head.eval()


@pytest.mark.parametrize("kind", [*FLAT, "trees"])
def test_probabilities_sum_to_1(kind: str) -> None:
    """One class of 3/4 among a million equal ones; the loss, a temperature and the entropy agree
    with the log-probabilities."""
    made = FLAT.get(kind, lambda n: TreeEnsemble.from_counts(1, np.ones(n), n_trees=1, clusters=n))
    bias = torch.zeros(MANY)
    bias[7] = math.log(3 * MANY)
    head, hidden, target = with_biases(made(MANY), bias), torch.zeros(2, 1), torch.tensor([7, 100])
    with torch.no_grad():
        log_prob = head.log_prob(hidden).double()
        assert 0.7 < log_prob[0, 7].exp() < 0.95
        total = log_prob.exp().sum(1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=5e-6)
        chosen = target[:, None]
        output = head(hidden, target).output.double()
        # A forest adds up the equal classes of a cluster one by one.
        close = {"rtol": 1e-6, "atol": 2e-5 if kind == "forest" else 5e-6}
        torch.testing.assert_close(output, log_prob.gather(1, chosen)[:, 0], **close)
        cool = head.candidate_log_prob(hidden, chosen, temperature=0.9).double()
        expected = (log_prob / 0.9).log_softmax(1).gather(1, chosen)
        torch.testing.assert_close(cool, expected, rtol=1e-6, atol=1e-5)
        entropy = -(log_prob.exp() * log_prob).sum(1)
        torch.testing.assert_close(head.entropy(hidden).double(), entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize(("n", "rows"), [(60, 60), (900, 10)])  # by blocks, and at once
def test_rare_classes_are_drawn(kind: str, n: int, rows: int) -> None:
    """Zipf's law with a tail that stands behind the frequent classes, and the last of which
    have less than half a unit in the last place of 1."""
    classes = 2**18
    bias = -torch.arange(1, classes + 1).double().log() * 1.3
    p = bias.softmax(0)
    assert p[-1] < 2**-24
    head, hidden = with_biases(FLAT[kind](classes), bias), torch.zeros(rows, 1)
    drawn = head.sample(hidden, n, generator=torch.Generator().manual_seed(1)).flatten()
    with torch.no_grad():
        p = head.log_prob(hidden[:1])[0].double().exp()  # gss and plif have another distribution
    for begin, end in ((0, 100), (100, 2**12), (2**12, 2**16), (2**16, 2**17), (2**17, classes)):
        share = p[begin:end].sum().item()
        expected, deviation = len(drawn) * share, math.sqrt(len(drawn) * share)
        seen = int(((drawn >= begin) & (drawn < end)).sum())
        assert abs(seen - expected) < 5 * deviation + 1, (begin, seen, expected)


def test_draws_of_more_than_2_24_classes() -> None:
    head = with_biases(Softmax(1, 2**24 + 9), torch.zeros(2**24 + 9))
    classes, log_prob = head.sample(torch.zeros(2, 1), 5, return_log_prob=True)
    assert ((classes >= 0) & (classes < 2**24 + 9)).all()
    torch.testing.assert_close(log_prob, torch.full((2, 5), -math.log(2**24 + 9)))


@pytest.mark.parametrize("columns", [1, 30, 1024, 5000, 2**17 + 77])
@pytest.mark.parametrize("n", [1, 4, 5000])
def test_draws_are_those_of_the_cumulative_sum(columns: int, n: int) -> None:
    """In float64 by numpy, from the same random numbers, but for the rounding of borders."""
    random = np.random.default_rng(columns)
    weight = random.standard_normal((3, columns)).astype(np.float32) ** 8
    weight[:, random.random(columns) < 0.3] = 0.0
    weight[:, -1] = 1e-3
    drawn = draw_columns(torch.from_numpy(weight), n, torch.Generator().manual_seed(5)).numpy()
    uniform = torch.rand(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for row, classes, part in zip(weight.astype(np.float64), drawn, uniform.numpy(), strict=True):
        assert (row[classes] > 0).all()
        sums = row.cumsum()
        expected = np.searchsorted(sums, part * sums[-1], side="right")
        assert (classes != expected).mean() < 1e-3 if n > 1000 else (classes == expected).all()


def test_nothing_to_draw_from() -> None:
    for bad in (math.nan, math.inf):
        weight = torch.ones(3, 4)
        weight[1, 2] = bad
        with pytest.raises(ValueError, match=r"probabilities: expected rows .*, got .* in row 1"):
            draw_columns(weight, 2, None)
    with pytest.raises(ValueError, match=r"got 0\.0 in row 0"):
        draw_columns(torch.zeros(2, 5), 2, None)
    with pytest.raises(ValueError, match="got nan in row 0"):
        Softmax(2, 5).sample(torch.full((1, 2), math.nan))


def test_a_nucleus_of_many_classes() -> None:
    """Half of the mass is in one class: a nucleus of 0.4 is that class, one of 0.6 has more."""
    log_prob = torch.full((200, MANY), -math.log(2 * MANY))[:50]
    log_prob[:, 9] = -math.log(2)
    assert (sample_log_prob(log_prob[:1], top_p=0.4) == 9).all()
    random = torch.Generator().manual_seed(0)
    drawn = torch.cat([sample_log_prob(log_prob[:9], top_p=0.75, generator=random)] * 3)
    assert 0 < (drawn == 9).sum() < 27
