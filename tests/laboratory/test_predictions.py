"""Next words of several models: log-probabilities in a stream, ranks, draws, tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hstree.analysis import (
    ContextPredictions,
    Prediction,
    log_prob_at,
    markdown,
    prediction,
    prediction_rows,
    prediction_tables,
    random_positions,
)
from hstree.heads import MixtureOfSoftmaxes
from hstree.models import AWDLSTM, LanguageModel

WORDS = ("the", "cat", "<unk>", "runs", "<eos>")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    backbone = AWDLSTM(20, 8, 12, layers=2, context_size=8, dropout=0.5, weight_dropout=0.5)
    with torch.no_grad():
        backbone.embedding.weight.normal_()
    return LanguageModel(backbone, MixtureOfSoftmaxes(8, 20, components=3))


def test_log_prob_at_reads_the_whole_text_before(model: LanguageModel) -> None:
    tokens = np.random.default_rng(0).integers(0, 20, 300).astype(np.int32)
    positions = [200, 1, 128, 129, 300, 200, 257]
    model.train()
    found = log_prob_at(model, tokens, positions)
    assert model.training
    model.eval()
    assert found.shape == (7, 20)
    assert not found.requires_grad
    for row, position in zip(found, positions, strict=True):
        text = torch.from_numpy(tokens[:position].astype(np.int64))[:, None]
        hidden, _ = model.hidden(text)
        torch.testing.assert_close(row, model.head.log_prob(hidden[-1])[0], rtol=1e-5, atol=1e-6)
    # The first word matters 199 words later still, if little: dropout is off, so this is it.
    changed = log_prob_at(model, np.concatenate([[(tokens[0] + 1) % 20], tokens[1:]]), [3])
    assert not torch.equal(changed, log_prob_at(model, tokens, [3]))


@pytest.mark.parametrize("positions", [[], [0], [4], [2, -1]])
def test_log_prob_at_out_of_range(positions: list[int], model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="positions: expected at least one, all from 1 to 3"):
        log_prob_at(model, [1, 2, 3], positions)


def test_prediction() -> None:
    log_prob = torch.tensor([0.2, 0.1, 0.4, 0.25, 0.05]).log()
    found = prediction(log_prob, WORDS, 3, "cat")
    assert found.words == ("<unk>", "runs", "the")
    assert found.probabilities == pytest.approx((0.4, 0.25, 0.2))
    assert (found.true_word, found.true_rank) == ("cat", 4)
    assert found.true_probability == pytest.approx(0.1)
    for truth in (None, "zebra"):
        found = prediction(log_prob, WORDS, 1, truth)
        assert found == Prediction(("<unk>",), found.probabilities)
    for k in (0, 6):
        with pytest.raises(ValueError, match="k: expected 1 to 5"):
            prediction(log_prob, WORDS, k)
    with pytest.raises(ValueError, match=r"log_prob: expected shape \[5\], got \(4,\)"):
        prediction(log_prob[:4], WORDS)


def test_equal_probabilities_share_the_best_rank() -> None:
    log_prob = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2]).log()
    assert [prediction(log_prob, WORDS, 1, word).true_rank for word in WORDS] == [1] * 5


def test_random_positions() -> None:
    first, second = np.arange(40) % 4, np.arange(40) % 5
    found = random_positions([first, second], [3, 0], 24)
    # Of 40 positions, a quarter is unknown to the first model, a fifth to the second.
    assert found == [p for p in range(40) if p % 4 != 3 and p % 5 != 0]
    some = random_positions([first, second], [3, 0], 6, seed=1)
    assert some == random_positions([first, second], [3, 0], 6, seed=1)
    assert some == sorted(set(some))
    assert set(some) < set(found)
    assert some != random_positions([first, second], [3, 0], 6, seed=2)
    assert 0 not in random_positions([first], [3], 29)
    with pytest.raises(ValueError, match=r"n: expected 1 to 24 \(positions with a known word\)"):
        random_positions([first, second], [3, 0], 25)
    with pytest.raises(ValueError, match=r"one text, split alike for all models, got \[39, 40\]"):
        random_positions([first, second[:-1]], [3, 0], 5)


def contexts() -> list[ContextPredictions]:
    sure = Prediction(("cat", "<unk>"), (0.9, 0.05), "cat", 0.9, 1)
    lost = Prediction(("<eos>", "the"), (0.5, 0.25), "cat", 0.000123, 1234)
    blind = Prediction(("<eos>", "the"), (0.5, 0.25))
    return [
        ContextPredictions("the <unk>", "cat", 7, (sure, lost)),
        ContextPredictions("runs", None, None, (blind, blind)),
        ContextPredictions("the", "cat", None, (sure, blind)),
    ]


def test_tables() -> None:
    tables = prediction_tables(contexts(), ["one", "two"])
    assert [each.title for each in tables] == [
        "1. the <unk> [cat]",
        "2. runs ?",
        "3. the [cat]",
        "Probability of the true word, and its rank",
    ]
    assert tables[0].header == ("rank", "one", "two")
    assert tables[0].rows == (
        ("1", "[cat] 90.0%", "<eos> 50.0%"),
        ("2", "<unk> 5.0%", "the 25.0%"),
        ("true word", "90.0%, rank 1", "0.012%, rank 1,234"),
    )
    assert len(tables[1].rows) == 2
    assert tables[2].rows[2] == ("true word", "90.0%, rank 1", "not in the vocabulary")
    assert tables[3].rows == (
        ("1", "cat", "90.0%, rank 1", "0.012%, rank 1,234"),
        ("3", "cat", "90.0%, rank 1", "not in the vocabulary"),
    )
    page = markdown(tables)
    assert "| 2 | \\<unk> 5.0% | the 25.0% |" in page  # a bare <unk> would vanish as HTML
    assert "**1. the \\<unk> [cat]**" in page


def test_rows() -> None:
    rows = prediction_rows(contexts(), ["one", "two"])
    assert len(rows) == 3 * 4 + 1
    assert rows[0] == {
        "context": 1,
        "model": "one",
        "rank": 1,
        "word": "cat",
        "probability": 0.9,
        "true": True,
    }
    assert rows[4] == {
        "context": 1,
        "model": "two",
        "rank": 1234,
        "word": "cat",
        "probability": 0.000123,
        "true": True,
    }
    assert math.isclose(sum(row["probability"] for row in rows if row["context"] == 2), 1.5)
