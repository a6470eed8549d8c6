"""``hstree evaluate``: what it prints, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.cli.support import fails
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.lm.data import load_corpus
from hstree.lm.model import LanguageModel, read_contexts
from hstree.lm.run import load_run
from hstree.lm.train import evaluate, train

PARTS = ("valid", "test")


def evaluated(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> dict[str, Any]:
    assert main(["evaluate", str(run), "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("head", ["trees", "softmax"])
def test_agrees_with_training(head: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluated(capsys, runs / head)
    summary = json.loads((runs / head / "summary.json").read_text())
    assert result["valid"]["perplexity"] == summary["valid_perplexity"]
    assert result["test"]["perplexity"] == summary["test_perplexity"]
    unigram = summary["unigram_test_perplexity"]
    assert result["test"]["unigram_perplexity"] == pytest.approx(unigram, rel=1e-12)
    assert main(["evaluate", str(runs / head)]) == 0
    out = capsys.readouterr().out
    assert f"{summary['test_perplexity']:.2f}" in out


@pytest.mark.slow
def test_a_changed_text_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_corpus(tmp_path / "data")
    train(small_config(data, tmp_path / "run", epochs=1))
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == ""
    with (data / "valid.txt").open("a") as file:
        file.write("the cat sleeps .\n")
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    said = "hstree: data has changed since this run was trained on it\n"
    assert capsys.readouterr().err == said
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(data)]) == 0
    assert capsys.readouterr().err == ""


def test_other_text(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_corpus(tmp_path / "other", seed=9)
    (other / "test.txt").write_text("the zebra sleeps .\n")
    result = evaluated(capsys, runs / "softmax", "--data", str(other))
    assert result["test"]["tokens"] == 4
    assert result["test"]["unknown_share"] == pytest.approx(0.2)
    run = load_run(runs / "softmax")
    tokens = run.vocabulary.encode(["the", "zebra", "sleeps", ".", "<eos>"])
    assert result["test"]["loss"] == evaluate(run.model, np.array(tokens))


def only(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of the only part."""
    assert result.keys() == {"run", "corpus", "text"}
    figures: dict[str, Any] = result["text"]
    return figures


def test_all_of_a_file_is_scored(
    runs: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the run was tokenized: the test text of the run has the perplexity that it has as a
    part of the folder, in one figure."""
    own = evaluated(capsys, runs / "softmax")["test"]
    path = data / "test.txt"
    assert only(evaluated(capsys, runs / "softmax", "--data", str(path))) == own
    text = path.read_text()
    bits = own["loss"] * (own["tokens"] + 1) / np.log(2)
    assert own["bits_per_character"] == pytest.approx(bits / len(text))
    assert own["bits_per_byte"] == own["bits_per_character"]
    short = tmp_path / "short.txt"
    short.write_text("the  cat Runs\u2014\n", encoding="utf-8")
    result = only(evaluated(capsys, runs / "softmax", "--data", str(short)))
    run = load_run(runs / "softmax")
    tokens = run.vocabulary.encode(["the", "cat", "Runs\u2014", "<eos>"])
    assert result["loss"] == evaluate(run.model, np.array(tokens))
    bits = result["loss"] * 4 / np.log(2)
    assert result["bits_per_character"] == pytest.approx(bits / 15)
    assert result["bits_per_byte"] == pytest.approx(bits / 17)
    assert main(["evaluate", str(runs / "softmax"), "--data", str(short)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["text", f"{bits / 15:.4f}", f"{bits / 17:.4f}"] in lines


@pytest.mark.parametrize("names", [("test.txt",), ("ptb.valid.txt", "ptb.test.txt")])
def test_a_folder_needs_only_what_is_scored(
    names: tuple[str, ...],
    runs: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = evaluated(capsys, runs / "softmax")
    kinds = ["test" if "test" in name else "valid" for name in names]
    for name, kind in zip(names, kinds, strict=True):
        (tmp_path / name).write_bytes((data / f"{kind}.txt").read_bytes())
    result = evaluated(capsys, runs / "softmax", "--data", str(tmp_path))
    assert [key for key in result if key in PARTS] == kinds
    for kind in kinds:
        assert result[kind] == own[kind]


def test_nothing_to_score(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.txt").write_text("the cat\n")
    command = ["evaluate", str(runs / "softmax"), "--data"]
    error = fails(capsys, *command, str(tmp_path))
    assert "expected the parts valid.txt or test.txt, missing valid.txt, test.txt" in error
    assert "no such" in fails(capsys, *command, str(tmp_path / "absent"))


def test_a_run_on_a_file_splits_any_text_into_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the text was moved."""
    data = write_corpus(tmp_path / "data")
    book = tmp_path / "book.txt"
    book.write_bytes((data / "train.txt").read_bytes())
    train(small_config(book, tmp_path / "run"))
    capsys.readouterr()
    result = evaluated(capsys, tmp_path / "run")
    assert result["test"]["bits_per_character"] is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "test.txt").write_text("The cat sleeps.\n\nThe dog eats fish.\n")
    for place in (tmp_path / "moved", tmp_path / "again"):
        result = evaluated(capsys, tmp_path / "run", "--data", str(tmp_path / "other"))
        assert result["test"]["tokens"] == 10
        assert result["test"]["unknown_share"] == 0
        book = book.rename(place)


def stream_loss(model: LanguageModel, tokens: Any) -> float:
    """Of one stream, from the probabilities of all classes."""
    losses = []
    with torch.no_grad():
        for hidden, target in read_contexts(model, tokens):
            log_prob = model.head.log_prob(hidden)
            losses.append(-log_prob.gather(1, target[:, None]).double())
    return float(torch.cat(losses).mean())


def test_streams(runs: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(runs / "softmax")
    corpus = load_corpus(str(data), vocabulary=run.vocabulary)
    for option, numbers in (("3", (3, 3)), ("10,1", (10, 1))):
        result = evaluated(capsys, runs / "softmax", "--streams", option)
        for split, number in zip(PARTS, numbers, strict=True):
            assert result[split]["loss"] == evaluate(run.model, getattr(corpus, split), number)
    alone = stream_loss(run.model, corpus.test)
    assert result["test"]["loss"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("loss", [float("nan"), 705.0])
def test_perplexities_that_are_not_finite_are_refused(
    loss: float,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hstree.lm.cli.evaluate", lambda *_: loss)
    error = fails(capsys, "evaluate", str(runs / "softmax"), "--json")
    assert error.startswith("hstree: expected a finite perplexity, got ")
