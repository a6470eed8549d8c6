"""Next words of several models: log-probabilities in a stream, ranks, draws, tables, command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.heads import MixtureOfSoftmaxes
from hstree.lab import log_prob_at, prediction, random_positions
from hstree.lab.predictions import (
    ContextPredictions,
    Prediction,
    prediction_rows,
    prediction_tables,
)
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.report import markdown
from hstree.lm.run import load_run
from hstree.lm.train import train
from lab.commands import csv_rows, refused

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
    with pytest.raises(
        ValueError, match=r"one text with the same tokens for all models, got \[39, 40\]"
    ):
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
    rows = list(prediction_rows(contexts(), ["one", "two"]))
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


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts ``data`` and ``other``, and runs ``trees`` and ``softmax`` on the first, ``narrow``
    with fewer words, ``stranger`` on the other text, ``double`` on one as long as the first."""
    folder = tmp_path_factory.mktemp("predictions")
    data = write_corpus(folder / "data")
    other = write_corpus(folder / "other", seed=1)
    for head in ("trees", "softmax"):
        train(small_config(data, folder / head, head=head))
    train(small_config(data, folder / "narrow", max_vocabulary=9, epochs=1, root=1))
    train(small_config(other, folder / "stranger", epochs=1))
    # As many tokens in the same places, but other words.
    (folder / "same length").mkdir()
    for part in ("train", "valid", "test"):
        lines = (data / f"{part}.txt").read_text().replace("cat", "dog")
        (folder / "same length" / f"{part}.txt").write_text(lines)
    train(small_config(folder / "same length", folder / "double", epochs=1))
    return folder


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def figures(output: Path, *arguments: str) -> dict[str, Any]:
    assert main(["analyze", "predictions", *arguments, "--output", str(output)]) == 0
    result: dict[str, Any] = json.loads((output / "predictions.json").read_text())
    return result


@pytest.mark.usefixtures("inside")
def test_given_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--context", "the OLD | cat", "--context", "the zebra", "--top-k", "3"]
    data = figures(tmp_path, "softmax", "trees", *options)
    printed = capsys.readouterr().out
    assert data["models"] == ["softmax", "trees"]
    first, second = data["contexts"]
    assert (first["context"], first["true_word"], first["position"]) == ("the OLD", "cat", None)
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
        assert f"[cat] {100 * float(probabilities[truth]):.1f}%" in printed
    assert second["true_word"] is None
    assert "context 2: softmax reads as <unk>: zebra" in printed
    page = (tmp_path / "predictions.md").read_text()
    assert "**1. the OLD [cat]**" in page
    assert "| rank | softmax | trees |" in page
    rows = csv_rows(tmp_path / "predictions.csv")
    assert [row["model"] for row in rows[:6]] == ["softmax"] * 3 + ["trees"] * 3


@pytest.mark.usefixtures("inside")
def test_drawn_contexts(tmp_path: Path) -> None:
    options = ["--random", "4", "--seed", "3", "--preceding", "6"]
    data = figures(tmp_path, "softmax", "trees", *options)
    run = load_run("softmax")
    text = run.corpus().test
    assert len(data["contexts"]) == 4
    with torch.no_grad():
        hidden, _ = run.model.hidden(torch.from_numpy(text.astype("int64"))[:, None])
        log_prob = run.model.head.log_prob(hidden[:, 0])
    for found in data["contexts"]:
        position = found["position"]
        words = run.vocabulary.decode(text[max(0, position - 6) : position].tolist())
        assert found["context"].removeprefix("\N{HORIZONTAL ELLIPSIS} ") == " ".join(words)
        assert found["true_word"] == run.vocabulary.words[text[position]]
        expected = math.exp(float(log_prob[position - 1, text[position]]))
        assert found["predictions"][0]["true_probability"] == pytest.approx(expected, rel=1e-4)
    again = figures(tmp_path, "softmax", "trees", *options, "--data", "data")
    assert again == data
    assert figures(tmp_path, "softmax", "--random", "4")["contexts"] != data["contexts"]


@pytest.mark.usefixtures("inside")
def test_other_vocabularies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words are drawn among those that both know; a given word may be known to one only."""
    narrow = load_run("narrow")
    data = figures(tmp_path, "softmax", "narrow", "--random", "60")
    for found in data["contexts"]:
        assert found["true_word"] in narrow.vocabulary
        assert all(each["true_rank"] is not None for each in found["predictions"])
    assert "town" not in narrow.vocabulary
    data = figures(tmp_path, "softmax", "narrow", "--context", "runs to | town")
    ranks = [each["true_rank"] for each in data["contexts"][0]["predictions"]]
    assert ranks[0] is not None
    assert ranks[1] is None
    assert "not in the vocabulary" in capsys.readouterr().out
    data = figures(tmp_path, "softmax", "stranger", "--random", "3", "--data", "other")
    assert len(data["contexts"]) == 3


@pytest.mark.usefixtures("inside")
def test_subwords(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    run = tmp_path / "bytes"
    options = {"tokenizer": "bpe", "max_vocabulary": 280, "epochs": 1}
    train(small_config(Path("data"), run, **options))
    capsys.readouterr()
    context = ["--context", "the old | cat"]
    data = figures(tmp_path / "out", "softmax", str(run), *context)
    truths = [each["true_word"] for each in data["contexts"][0]["predictions"]]
    tokenizer = load_run(run).tokenizer
    assert tokenizer is not None
    tokens = tokenizer.split("the old cat")
    assert truths == ["cat", tokens[len(tokenizer.split("the old"))]]
    assert main(["analyze", "predictions", "softmax", str(run), "--random", "2"]) == 2
    assert "the same tokens for all runs" in capsys.readouterr().err
    data = figures(tmp_path / "out", str(run), "--random", "2", "--preceding", "4")
    assert all(each["predictions"][0]["true_rank"] for each in data["contexts"])


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["softmax"], "--context: expected at least one, or --random N, got neither"),
        (["softmax", "--context", " "], "--context: expected words, or words | true word, got ' '"),
        (["softmax", "--context", "the | "], "--context: expected words, or words | true word"),
        (["softmax", "--context", "the | big cat"], "--context: expected one word after | "),
        (["softmax", "--context", "the", "--data", "data"], "--data: has no effect without"),
        (["softmax", "--random", "0"], "--random: expected at least 1, got 0"),
        (["softmax", "--random", "99999"], "n: expected 1 to"),
        (["softmax", "--random", "1", "--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["softmax", "--context", "the", "--top-k", "99"], "--top-k: expected at most"),
        (["softmax", "stranger", "--random", "2"], "those of softmax and stranger differ"),
        (["trees", "softmax", "double", "--random", "40"], "those of trees and double differ"),
        (["softmax", "./softmax", "--random", "2"], "expected every run and file once"),
        (["nowhere", "--random", "2"], "nowhere: no such run folder"),
    ],
)
def test_bad_arguments(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "output")
    error = refused(capsys, "analyze", "predictions", *options, "--output", output, left=output)
    assert message in error
