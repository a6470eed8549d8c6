"""The neural cache against the formula word by word, in Python's own numbers."""

from __future__ import annotations

import copy
import math
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from heads.support import V
from lm.evaluation.support import KINDS, language_model, text
from torch import Tensor

from hstree.lm.evaluation import NeuralCache, evaluate_stream
from hstree.lm.models import LanguageModel


@torch.no_grad()
def reference(
    model: LanguageModel, tokens: Any, window: int, weight: float, theta: float
) -> list[float]:
    """log P of every token but the first."""
    model = copy.deepcopy(model).eval()
    memory: deque[tuple[Tensor, int]] = deque(maxlen=window)
    result, state = [], None
    for now, following in pairwise(tokens):
        hidden, state = model.hidden(torch.tensor([[int(now)]]), state)
        p = math.exp(model.head.log_prob(hidden)[0, 0, int(following)])
        h = hidden[0, 0, -model.backbone.context_size :].double()
        if memory:
            scores = [theta * float(h @ before) for before, _ in memory]
            largest = max(scores)
            shares = [math.exp(score - largest) for score in scores]
            same = [
                share for share, (_, word) in zip(shares, memory, strict=True) if word == following
            ]
            p = (1 - weight) * p + weight * sum(same) / sum(shares)
        result.append(math.log(p))
        memory.append((h, int(following)))
    return result


@torch.no_grad()
def published(
    model: LanguageModel, tokens: Any, window: int, weight: float, theta: float, block: int
) -> float:
    """The loss of AWD-LSTM's pointer.py, which mixes a cache in where more than ``window`` words
    of what it kept and of the current block precede."""
    model = copy.deepcopy(model).eval()
    state, total = None, 0.0
    history: list[tuple[Tensor, int]] = []
    for begin in range(0, len(tokens) - 1, block):
        end, kept = min(begin + block, len(tokens) - 1), len(history)
        now = torch.tensor(np.asarray(tokens[begin:end], np.int64))[:, None]
        hidden, state = model.hidden(now, state)
        history += [
            (h[0].double(), int(y)) for h, y in zip(hidden, tokens[begin + 1 :], strict=False)
        ]
        for i, (h, word) in enumerate(history[kept:]):
            p = math.exp(model.head.log_prob(hidden[i])[0, word])
            if kept + i > window:
                seen = history[kept + i - window : kept + i]
                attention = (theta * torch.stack([key for key, _ in seen]) @ h).softmax(0)
                same = torch.tensor([y == word for _, y in seen])
                p = weight * float(attention[same].sum()) + (1 - weight) * p
            total -= math.log(p)
        history = history[-window:]
    return total / (len(tokens) - 1)


def test_a_waiting_cache_is_the_published_one() -> None:
    """Up to the one step of each block where the published code leaves the cache out."""
    model, tokens = language_model(), text(60)
    weight, theta, window = 0.3, 0.7, 25
    loss = evaluate_stream(model, tokens, NeuralCache(window, weight, theta, wait=True), length=9)
    alone = [-x for x in reference(model, tokens, 1, 0.0, 0.0)]
    mixed = [-x for x in reference(model, tokens, window, weight, theta)]
    assert loss == pytest.approx(sum(alone[:window] + mixed[window:]) / 59, rel=1e-5)
    one_block = sum(alone[: window + 1] + mixed[window + 1 :]) / 59
    assert published(model, tokens, window, weight, theta, 59) == pytest.approx(one_block, rel=1e-5)
    left_out = [alone[i] if i <= window or i % 30 == 0 else mixed[i] for i in range(59)]
    two_blocks = published(model, tokens, window, weight, theta, 30)
    assert two_blocks == pytest.approx(sum(left_out) / 59, rel=1e-5)
    eager = evaluate_stream(model, tokens, NeuralCache(window, weight, theta))
    assert eager != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("window", [59, 60])
def test_a_cache_that_is_never_full_waits_to_the_end(window: int) -> None:
    model, tokens = language_model(), text(60)
    cache = NeuralCache(window, 0.5, wait=True)
    alone = evaluate_stream(model, tokens)
    for length in (7, 200):
        assert evaluate_stream(model, tokens, cache, length=length) == pytest.approx(alone, 1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "softmax, really tied"])
def test_word_by_word(kind: str) -> None:
    model, tokens = language_model(kind), text(60)
    expected = reference(model, tokens, 25, 0.3, 0.7)
    loss = evaluate_stream(model, tokens, NeuralCache(25, 0.3, 0.7), length=9)
    assert loss == pytest.approx(-sum(expected) / 59, rel=1e-5)
    assert model.training
    alone = evaluate_stream(model, tokens)
    assert alone == pytest.approx(-sum(reference(model, tokens, 1, 0.0, 0.0)) / 59, rel=1e-5)
    assert loss != pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("window", [1, 2, 7, 59, 60, 500])
def test_windows_shorter_and_longer_than_the_blocks(window: int) -> None:
    model, tokens = language_model(), text(60)
    expected = -sum(reference(model, tokens, window, 0.5, 0.3)) / 59
    for length in (1, 7, 59, 200):
        loss = evaluate_stream(model, tokens, NeuralCache(window, 0.5, 0.3), length=length)
        assert loss == pytest.approx(expected, rel=1e-5)


def steps(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors [n, 4], the words after them, and log-probabilities of these."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 4, generator=random)
    return hidden, torch.randint(3, (n,), generator=random), -3 * torch.rand(n, generator=random)


def test_probabilities_sum_to_one() -> None:
    cache = NeuralCache(6, 0.4, 2.0)
    cache.mix(*steps(10))
    hidden = torch.randn(1, 4, generator=torch.Generator().manual_seed(9))
    model = torch.tensor([0.2, 0.5, 0.3]).log()
    mixed = [
        copy.deepcopy(cache).mix(hidden, torch.tensor([word]), model[word, None])
        for word in range(3)
    ]
    assert torch.cat(mixed).exp().sum() == pytest.approx(1.0, abs=1e-6)


def test_a_step_does_not_see_its_own_word_or_later_ones() -> None:
    hidden, target, log_prob = steps(12)
    before = NeuralCache(8).mix(hidden, target, log_prob)
    hidden[7:] += 1.0
    target[7:] = (target[7:] + 1) % 3
    after = NeuralCache(8).mix(hidden, target, log_prob)
    torch.testing.assert_close(after[:7], before[:7], rtol=0, atol=0)
    assert not torch.equal(after[7:], before[7:])


def test_the_first_step_is_the_model_alone() -> None:
    hidden, target, log_prob = steps(1)
    assert torch.equal(NeuralCache().mix(hidden, target, log_prob), log_prob)
    assert evaluate_stream(language_model(), text(2), NeuralCache()) == evaluate_stream(
        language_model(), text(2)
    )


def test_weight_zero_and_theta_zero() -> None:
    hidden, target, log_prob = steps(10)
    assert torch.equal(NeuralCache(weight=0.0).mix(hidden, target, log_prob), log_prob)
    flat = NeuralCache(weight=0.5, theta=0.0).mix(hidden, target, log_prob)
    share = (target[:9] == target[9]).double().mean()
    assert flat[9] == pytest.approx(math.log(0.5 * math.exp(log_prob[9]) + 0.5 * share), rel=1e-5)


def test_scores_far_beyond_the_range_of_exp() -> None:
    """theta h . h of thousands; only the nearest step counts."""
    hidden = torch.tensor([[50.0, 0.0], [0.0, 60.0], [40.0, 0.0]])
    target, log_prob = torch.tensor([1, 2, 1]), torch.full((3,), -200.0)
    mixed = NeuralCache(weight=0.25, theta=3.0).mix(hidden, target, log_prob)
    torch.testing.assert_close(mixed[2], torch.tensor(0.25).log())
    torch.testing.assert_close(mixed[1], torch.tensor(-200.0 + math.log(0.75)))
    impossible = NeuralCache(weight=0.25, theta=3.0).mix(hidden, target, log_prob - torch.inf)
    torch.testing.assert_close(
        impossible,
        torch.tensor([-torch.inf, -torch.inf, 0.25]).where(
            torch.tensor([True, True, False]), torch.tensor(0.25).log()
        ),
    )


def test_low_precision_is_mixed_in_float32() -> None:
    hidden, target, log_prob = steps(40)
    hidden = hidden.bfloat16()
    low = NeuralCache().mix(hidden, target, log_prob)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, NeuralCache().mix(hidden.float(), target, log_prob))


def test_a_stream_begins_with_an_empty_cache() -> None:
    model, tokens, cache = language_model(), text(40), NeuralCache(20, 0.3)
    first = evaluate_stream(model, tokens, cache)
    assert evaluate_stream(model, tokens, cache) == first


def test_words_that_come_again_are_worth_a_cache() -> None:
    model = language_model()
    tokens = [int(word) for word in torch.randperm(V)[:8]] * 12
    cached = evaluate_stream(model, tokens, NeuralCache(20, 0.5, 1.0))
    assert cached < evaluate_stream(model, tokens) - 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: expected at least 1, got 0"),
        ({"weight": 1.0}, r"weight: expected a number in \[0, 1\), got 1.0"),
        ({"weight": -0.1}, r"weight: expected a number in \[0, 1\), got -0.1"),
        ({"weight": math.nan}, "weight: expected"),
        ({"theta": -1.0}, "theta: expected a number from 0 to 1e6, got -1.0"),
        ({"theta": 1e300}, "theta: expected a number from 0 to 1e6, got 1e[+]300"),
        ({"theta": 10**400}, "theta: expected a number from 0 to 1e6, got 1000"),
        ({"theta": math.inf}, "theta: expected"),
        ({"wait": 1}, "wait: expected True or False, got 1"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeuralCache(**options)


def test_bad_input() -> None:
    hidden, target, log_prob = steps(5)
    cache = NeuralCache()
    with pytest.raises(ValueError, match=r"expected shapes .* got \(5, 4\), \(4,\), \(5,\)"):
        cache.mix(hidden, target[:4], log_prob)
    cache.mix(hidden, target, log_prob)
    with pytest.raises(ValueError, match="hidden: expected 4 features as before, got 3"):
        cache.mix(hidden[:, :3], target, log_prob)
    cache.clear()
    cache.mix(hidden[:, :3], target, log_prob)
    with pytest.raises(ValueError, match="tokens: expected at least 2, got 1"):
        evaluate_stream(language_model(), text(1))
    with pytest.raises(ValueError, match="length: expected at least 1"):
        evaluate_stream(language_model(), text(9), length=0)
