"""Planned studies: the figures of their runs, and times of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import step_times
from benchmarks.planned import text_name
from benchmarks.study_figures import band_losses, measured_run, rows_scored
from hstree.heads import AdaptiveSoftmax, SampledSoftmax, Softmax, TreeEnsemble
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, load_corpus
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.report import ConsoleReporter
from hstree.lm.train import evaluate
from hstree.trees import build_ensemble

CLASSES = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny text of at most CLASSES types."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for part, lines in (("train", 80), ("valid", 30), ("test", 30)):
        rows, word = [], 0
        for _ in range(lines):
            row = []
            for noise in random.integers(3, size=9):
                word = (3 * word + int(noise)) % (CLASSES - 2)
                row.append(f"w{word}")
            rows.append(" ".join(row) + "\n")
        (folder / f"{part}.txt").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return load_corpus(text)


def test_rows_of_trees_are_those_on_the_paths() -> None:
    frequencies = np.arange(1, 301)
    trees = build_ensemble("huffman", 300, 2, frequencies, root=16, leaf=8)
    head = TreeEnsemble(4, 300, trees)
    expected = 0.0
    for tree in trees:
        width = tree.n_children
        for label, count in enumerate(frequencies):
            nodes = [node for node, _ in tree.path(label)]
            expected += count * sum(1 if width[n] == 2 else width[n] for n in nodes)
    assert rows_scored(head, frequencies) == pytest.approx(expected / frequencies.sum())


def test_rows_of_softmaxes() -> None:
    frequencies = np.array([5, 1, 1, 1, 1, 1])
    assert rows_scored(Softmax(4, 6), frequencies) == 6
    head = AdaptiveSoftmax(16, 6, cutoffs=[1, 3], div_value=2.0)
    assert rows_scored(head, frequencies) == pytest.approx(1 + 2 + 0.2 * 2 + 0.3 * 3)
    head = SampledSoftmax(4, 6, negatives=2, frequencies=frequencies)
    assert rows_scored(head, frequencies, 1) == pytest.approx(2 + 1)
    assert rows_scored(head, frequencies, 2) == pytest.approx(2 + 1 + 0.7)


def band_perplexity(bands: Sequence[dict[str, float]]) -> float:
    """The perplexity of the text whose losses by band these are."""
    tokens = sum(band["tokens"] for band in bands)
    return math.exp(sum(band["loss"] * band["tokens"] for band in bands) / tokens)


def test_losses_by_band_add_up_to_the_perplexity(corpus: Corpus) -> None:
    classes = len(corpus.vocabulary)
    model = LanguageModel(AWDLSTM(classes, 4, 4), Softmax(4, classes))
    frequencies = corpus.statistics().frequencies
    bands = band_losses(model, corpus.valid, frequencies)
    perplexity = math.exp(evaluate(model, corpus.valid))
    assert band_perplexity(bands) == pytest.approx(perplexity, rel=1e-6)
    counts = frequencies[np.asarray(corpus.valid[1:])]
    assert [band["tokens"] for band in bands] == [
        0,
        0,
        int((counts >= 100).sum()),
        int(((counts >= 10) & (counts < 100)).sum()),
        int((counts < 10).sum()),
    ]


def test_a_measured_run(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        data=str(text), run=str(tmp_path / "run"), head="softmax", embedding_size=4,
        hidden_size=4, epochs=2, batch_size=2, threads=1, device="cpu",
    )  # fmt: skip
    figures = measured_run(config, corpus)
    assert figures["valid"] == min(figures["epochs"])
    assert figures["rows"] == len(corpus.vocabulary)
    assert figures["head_parameters"] == 5 * len(corpus.vocabulary)
    assert band_perplexity(figures["bands"]) == pytest.approx(figures["valid"], rel=1e-5)
    assert measured_run(config, corpus)["epochs"] == figures["epochs"]  # not trained again


def test_an_interrupted_run_goes_on(
    corpus: Corpus, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(
        data=str(text), run=str(tmp_path / "run"), head="softmax", embedding_size=4,
        hidden_size=4, epochs=2, batch_size=2, bptt=5, threads=1, device="cpu",
    )  # fmt: skip
    whole = measured_run(replace(config, run=str(tmp_path / "whole")), corpus)
    step, made = ConsoleReporter.step, []

    def interrupted(reporter: ConsoleReporter, epoch: int, loss: float, tokens: int) -> None:
        step(reporter, epoch, loss, tokens)
        made.append(epoch)
        if made.count(2) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleReporter, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measured_run(config, corpus)
    with pytest.raises(ValueError, match="this run was made with learning_rate = "):
        measured_run(replace(config, learning_rate=0.1), corpus)
    figures = measured_run(config, corpus)
    assert figures["epochs"] == whole["epochs"]
    assert figures["test"] == whole["test"]


def test_a_run_that_diverges_is_recorded(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        data=str(text), run=str(tmp_path / "run"), head="softmax", embedding_size=4, clip=0.0,
        hidden_size=4, epochs=1, batch_size=2, learning_rate=1e30, optimizer="sgd", threads=1,
    )  # fmt: skip
    figures = measured_run(config, corpus)
    assert figures["valid"] is None
    assert "learning-rate" in figures["error"]


def test_times_of_steps(corpus: Corpus, tmp_path: Path) -> None:
    small = {"embedding_size": 4, "hidden_size": 4, "batch_size": 2, "bptt": 2}
    trees = {"head": "trees", "n_trees": 8, "root": 4}
    configs = {
        name: TrainConfig(device="cpu", **small, **head)
        for name, head in (("softmax", {"head": "softmax"}), ("trees", trees))
    }
    times = step_times.measure(configs, corpus, rounds=3)
    assert list(times["shares"]) == ["softmax", "trees"]
    assert times["shares"]["softmax"] == 1.0
    assert times["shares"]["trees"] > 1.0  # eight trees of ten classes
    assert step_times.load(tmp_path / "study.json") is None
    step_times.save(times, tmp_path / "study.json")
    assert step_times.load(tmp_path / "study.json") == times
    assert [file.name for file in tmp_path.iterdir()] == ["study-times.json"]


def test_name_of_a_text(corpus: Corpus) -> None:
    assert f"{len(corpus.train):,} training tokens" in text_name(corpus)
