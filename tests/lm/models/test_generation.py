"""Sampling of text: against the model's probabilities, and against slow re-statements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from heads.support import V
from lm.models.support import KINDS, language_model
from torch import Tensor

from hstree.heads import Head, TreeEnsemble
from hstree.lm.generate import generate, sample_log_prob
from hstree.lm.model import LanguageModel

DRAWS = 4000


@pytest.fixture
def model() -> LanguageModel:
    return language_model()


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def next_probabilities(model: LanguageModel, word: int) -> Tensor:
    with torch.no_grad():
        hidden, _ = model.eval().hidden(torch.tensor([[word]]))
        return model.head.log_prob(hidden[0, 0]).exp().double()


def check_shares(words: Tensor, expected: Tensor) -> None:
    """Shares of independent draws within four and a half standard deviations of ``expected``; what
    has probability 0 is never drawn."""
    share = torch.bincount(words, minlength=len(expected)) / len(words)
    deviation = (expected * (1 - expected) / len(words)).sqrt()
    assert ((share - expected).abs() <= 4.5 * deviation).all()


def truncated(
    prob: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """The definition, class by class."""
    weight = [p ** (1 / temperature) for p in prob]
    order = sorted(range(len(prob)), key=lambda c: (-weight[c], c))[:top_k]
    total = sum(weight[c] for c in order)
    kept, reached = [], 0.0
    for c in order:
        kept.append(c)
        reached += weight[c] / total
        if top_p is not None and reached >= top_p:
            break
    total = sum(weight[c] for c in kept)
    return [weight[c] / total if c in kept else 0.0 for c in range(len(prob))]


def test_the_same_seed_gives_the_same_words(model: LanguageModel) -> None:
    for options in ({}, {"temperature": 0.8}, {"top_k": 9}, {"top_p": 0.9, "avoid": 2}):
        first = generate(model, [3], 20, 2, seed=5, **options)
        assert first == generate(model, [3], 20, 2, seed=5, **options)
        assert first != generate(model, [3], 20, 2, seed=6, **options)
        assert [len(sample) for sample in first] == [20, 20]
        assert all(0 <= word < V for sample in first for word in sample)
    assert generate(model, [3], 0) == [[]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_head(kind: str) -> None:
    """The head's own sampler, and log-probabilities with every option."""
    model = language_model(kind)
    prob = next_probabilities(model, 7)
    check_shares(torch.tensor(generate(model, [7], 1, DRAWS)).flatten(), prob)
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 12, "top_p": 0.8}
    expected = torch.tensor(truncated(prob.tolist(), **options))
    assert 1 < expected.count_nonzero() < 12
    check_shares(torch.tensor(generate(model, [7], 1, DRAWS, **options)).flatten(), expected)


def test_trees_are_walked_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plain draws and for the most probable words their classes are not enumerated."""
    model = language_model("trees, sparse")
    monkeypatch.setattr("hstree.heads.trees.READING", 10**6)  # no search is given up
    monkeypatch.setattr(TreeEnsemble, "candidate_rows", TreeEnsemble._repeated)  # as of many words
    every_option: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_k": 4, "top_p": 0.9, "avoid": 2}]
    expected = [generate(model, [3], 9, 2, **options) for options in every_option]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("log-probabilities of all classes")

    monkeypatch.setattr(Head, "log_prob", refuse)
    monkeypatch.setattr(TreeEnsemble, "_of_all", refuse)
    assert [generate(model, [3], 9, 2, **options) for options in every_option] == expected
    for options in ({"temperature": 1.0}, {"top_p": 1.0}):
        with pytest.raises(AssertionError, match="all classes"):
            generate(model, [3], 1, **options)


def test_one_class_is_left() -> None:
    """The most probable words, one after the other, whatever the seed; they depend on the state."""
    model = language_model(seed=9)
    expected, state = [], None
    with torch.no_grad():
        word = torch.tensor([[3]])
        for _ in range(8):
            hidden, state = model.eval().hidden(word, state)
            word = model.head.predict(hidden)
            expected.append(int(word))
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}):
        assert generate(model, [3], 8, 2, seed=4, **options) == [expected, expected]


def test_a_class_is_avoided(model: LanguageModel) -> None:
    with torch.no_grad():
        model.head.bias[4] += 4.0
    prob = next_probabilities(model, 1)
    assert prob[4] > 0.3
    assert any(4 in sample for sample in generate(model, [1], 30, 3))
    for top_k in (None, V):
        assert not any(4 in each for each in generate(model, [1], 30, 3, avoid=4, top_k=top_k))
    prob[4] = 0.0
    known = prob / prob.sum()
    check_shares(torch.tensor(generate(model, [1], 1, DRAWS, avoid=4)).flatten(), known)
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    expected = torch.tensor(truncated(known.tolist(), **options))
    words = torch.tensor(generate(model, [1], 1, DRAWS, avoid=4, **options)).flatten()
    check_shares(words, expected)


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"temperature": 2.0}])
def test_a_class_that_is_all_but_certain_is_avoided(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    with torch.no_grad():
        model.head.bias[4] = 500.0
    assert next_probabilities(model, 1)[4] == 1.0
    assert not any(4 in sample for sample in generate(model, [1], 5, 3, avoid=4, **options))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, None), (1, None), (6, 1.0), (4, 0.6), (None, 0.5), (None, 0.51), (None, 0.01)],
)
def test_truncation(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Against the definition."""
    prob = [0.0625, 0.25, 0.5, 0.0625, 0.0, 0.125]
    log_prob = torch.tensor(prob).log().repeat(20_000, 1)
    words = sample_log_prob(log_prob, random(1), temperature=temperature, top_k=top_k, top_p=top_p)
    check_shares(words, torch.tensor(truncated(prob, temperature, top_k, top_p)))


def test_a_sum_that_meets_top_p_is_enough() -> None:
    """The first of four equal classes is a quarter, without rounding."""
    assert not sample_log_prob(torch.zeros(100, 4), random(0), top_p=0.25).any()


def test_rows_are_independent_and_need_not_be_normalised() -> None:
    log_prob = torch.full((3, 5), -1e4)
    log_prob[torch.arange(3), torch.tensor([4, 0, 2])] = -9e3
    assert sample_log_prob(log_prob, random(0)).tolist() == [4, 0, 2]
    assert sample_log_prob(log_prob[:0], random(0)).shape == (0,)
    low = sample_log_prob(log_prob.bfloat16(), random(0), top_p=0.5)
    assert low.tolist() == [4, 0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a number from 1e-6 to 1e6, got 0.0"),
        ({"temperature": math.inf}, "temperature: expected a number from 1e-6 to 1e6, got inf"),
        ({"temperature": math.nan}, "temperature: expected"),
        ({"top_k": 0}, r"top_k: expected a whole number from 1 to \d+, got 0"),
        ({"top_k": V + 1}, "top_k: expected a whole number from 1 to"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p: expected a number in \(0, 1\], got 1.1"),
    ],
)
def test_bad_input(model: LanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, [1], 3, **options)
    with pytest.raises(ValueError, match=message):
        sample_log_prob(torch.zeros(2, 5), **options)
    for prompt in ([], [V], [1, -1]):
        with pytest.raises(ValueError, match=rf"prompt: expected class ids in \[0, {V}\), got \["):
            generate(model, prompt, 3)
