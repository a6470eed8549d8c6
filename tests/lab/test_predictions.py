"""Next words of several models: log-probabilities, ranks, tables, command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.training.toy import small_config

from hstree.__main__ import main
from hstree.heads import MixtureOfSoftmaxes
from hstree.lab import prediction
from hstree.lab.predictions import Prediction, next_log_prob, prediction_tables
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.report import markdown
from hstree.lm.run import load_run
from hstree.lm.train import train

WORDS = ("the", "cat", "<unk>", "runs", "<eos>")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    backbone = AWDLSTM(20, 8, 12, layers=2, context_size=8, dropout=0.5, weight_dropout=0.5)
    with torch.no_grad():
        backbone.embedding.weight.normal_()
    return LanguageModel(backbone, MixtureOfSoftmaxes(8, 20, components=3))


def test_next_log_prob_is_of_the_last_word(model: LanguageModel) -> None:
    """In evaluation mode, over a text of several windows."""
    tokens = np.random.default_rng(0).integers(0, 20, 300).astype(np.int32)
    model.train()
    found = next_log_prob(model, tokens)
    assert model.training
    model.eval()
    hidden, _ = model.hidden(torch.from_numpy(tokens.astype(np.int64))[:, None])
    torch.testing.assert_close(found, model.head.log_prob(hidden[-1])[0], rtol=1e-5, atol=1e-6)
    assert not found.requires_grad


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


def test_equal_probabilities_share_the_best_rank() -> None:
    log_prob = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2]).log()
    assert [prediction(log_prob, WORDS, 1, word).true_rank for word in WORDS] == [1] * 5


def test_tables() -> None:
    sure = Prediction(("cat", "<unk>"), (0.9, 0.05), "cat", 0.9, 1)
    lost = Prediction(("<eos>", "the"), (0.5, 0.25), "cat", 0.000123, 1234)
    blind = Prediction(("<eos>", "the"), (0.5, 0.25))
    found = [("the <unk>", "cat", (sure, lost)), ("runs", None, (blind, blind))]
    found.append(("the", "cat", (sure, blind)))
    keys = ("context", "true_word", "predictions")
    tables = prediction_tables([dict(zip(keys, of, strict=True)) for of in found], ["one", "two"])
    titles = ["1. the <unk> [cat]", "2. runs ?", "3. the [cat]"]
    assert [each.title for each in tables[:3]] == titles
    assert tables[0].header == ("rank", "one", "two")
    assert tables[0].rows == (
        ("1", "[cat] 90.0%", "<eos> 50.0%"),
        ("2", "<unk> 5.0%", "the 25.0%"),
        ("true word", "90.0%, rank 1", "0.012%, rank 1,234"),
    )
    assert len(tables[1].rows) == 2
    assert tables[3].rows == (
        ("1", "cat", "90.0%, rank 1", "0.012%, rank 1,234"),
        ("3", "cat", "90.0%, rank 1", "not in the vocabulary"),
    )
    # A bare <unk> would vanish as HTML.
    assert "| 2 | \\<unk> 5.0% | the 25.0% |" in markdown(tables)


# The command


def figures(output: Path, *arguments: str) -> dict[str, Any]:
    assert main(["analyze", "predictions", *arguments, "--output", str(output)]) == 0
    found: dict[str, Any] = json.loads((output / "predictions.json").read_text())
    return found


@pytest.mark.usefixtures("runs")
def test_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contexts = ["--context", "the OLD | cat", "--context", "zebra"]
    data = figures(tmp_path, "softmax", "trees", *contexts, "--top-k", "3")
    printed = " ".join(capsys.readouterr().out.split())
    first, second = data["contexts"]
    assert (first["context"], first["true_word"]) == ("the OLD", "cat")
    for name, found in zip(data["models"], first["predictions"], strict=True):
        run = load_run(name)
        words = ["<eos>", "the", "old"]
        hidden, _ = run.model.hidden(torch.tensor(run.vocabulary.encode(words))[:, None])
        probabilities = run.model.head.log_prob(hidden[-1, 0]).detach().exp()
        order = probabilities.argsort(descending=True).tolist()
        assert found["words"] == run.vocabulary.decode(order[:3])
        assert found["probabilities"] == pytest.approx(probabilities[order[:3]].tolist(), rel=1e-4)
        truth = run.vocabulary["cat"]
        assert found["true_rank"] == 1 + order.index(truth)
        assert found["true_probability"] == pytest.approx(float(probabilities[truth]), rel=1e-4)
        assert f"{100 * probabilities[truth]:.1f}%, rank {found['true_rank']}" in printed
    assert second["true_word"] is None
    assert "context 2: softmax reads as <unk>: zebra" in printed
    page = (tmp_path / "predictions.md").read_text()
    assert "**1. the OLD [cat]**" in page
    assert "| rank | softmax | trees |" in page


@pytest.mark.usefixtures("runs")
def test_other_vocabularies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A word may be known to one model only; one with subwords predicts the first that it adds."""
    pytest.importorskip("tokenizers")
    narrow, subwords = (str(tmp_path / name) for name in ("narrow", "subwords"))
    options = {"head": "softmax", "epochs": 1}
    train(small_config(Path("data"), narrow, max_vocabulary=9, **options))
    train(small_config(Path("data"), subwords, tokenizer="bpe", max_vocabulary=280, **options))
    assert "town" not in load_run(narrow).vocabulary
    data = figures(tmp_path, "softmax", narrow, subwords, "--context", "runs to | town")
    known, unknown, first = data["contexts"][0]["predictions"]
    assert known["true_rank"] is not None
    assert unknown["true_rank"] is None
    assert "not in the vocabulary" in capsys.readouterr().out
    tokenizer = load_run(subwords).tokenizer
    tokens = tokenizer.split("runs to town")
    assert first["true_word"] == tokens[len(tokenizer.split("runs to"))]
