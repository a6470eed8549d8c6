"""Studies: the figures of their runs, and pages made of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import large_vocabulary, randomized, trees_study
from benchmarks.large_vocabulary_page import perplexity_at
from benchmarks.studies import times as times_of
from benchmarks.studies.command import RESULTS, Study
from benchmarks.studies.measure import band_losses, band_perplexity, rows_scored, text_name
from benchmarks.studies.plan import Run, next_run
from benchmarks.studies.records import Records
from benchmarks.studies.training import measured_run
from hstree.heads import AdaptiveSoftmax, Softmax, TreeEnsemble
from hstree.lm.data import Corpus, CorpusStatistics, load_corpus
from hstree.lm.models import AWDLSTM, LanguageModel
from hstree.lm.runs import TrainConfig
from hstree.lm.training import ConsoleReporter, build_model, evaluate
from hstree.trees import build_ensemble

STUDIES = (trees_study.STUDY, randomized.STUDY, large_vocabulary.STUDY)
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


# Figures


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
    assert not any(tmp_path.iterdir())  # only the figures remain


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
    with pytest.raises(ValueError, match="expected a run with the settings"):
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
    times = times_of.measure(configs, corpus, rounds=3)
    assert list(times["shares"]) == ["softmax", "trees"]
    assert times["shares"]["softmax"] == 1.0
    assert times["shares"]["trees"] > 1.0  # eight trees of ten classes
    assert times_of.load(tmp_path / "study.json") is None
    times_of.save(times, tmp_path / "study.json")
    assert times_of.load(tmp_path / "study.json") == times
    assert [file.name for file in tmp_path.iterdir()] == ["study-times.json"]


# The studies


@pytest.mark.slow
@pytest.mark.parametrize("study", [trees_study, large_vocabulary], ids=lambda s: s.STUDY.name)
def test_every_head_of_a_study_trains(study: Any) -> None:
    classes = 6500  # more than the last cutoff
    tokens = np.random.default_rng(0).integers(classes, size=20_000)
    statistics = CorpusStatistics.from_tokens(tokens, classes)
    small = {"embedding_size": 16, "hidden_size": 16}
    tried = set[str]()
    for contender in study.CONTENDERS:
        settings = dict(contender.settings) | small
        settings.pop("seconds", None)
        kind = json.dumps({k: v for k, v in settings.items() if k not in ("n_trees", "root")})
        if kind in tried:
            continue
        tried.add(kind)
        model = build_model(TrainConfig(**settings), classes, statistics)
        words = torch.from_numpy(tokens[:80].reshape(8, 10))
        (_, loss), _, _ = model(words[:-1], words[1:])
        loss.backward()
        assert loss.detach().isfinite()
        assert 0 < rows_scored(model.head, statistics.frequencies) <= classes


def test_copies_of_one_tree_are_one_tree(corpus: Corpus) -> None:
    small = {"embedding_size": 8, "hidden_size": 8, "epochs": 1, "batch_size": 2}
    settings = randomized.TRAINING | small | {randomized.FACTOR: 4.0, "head": "trees"}
    settings |= {"recipe": "random", "subset": randomized.FEATURES, "gate": "uniform"}
    found = {}
    for n_trees, identical in ((1, False), (3, True), (3, False)):
        shape = {"n_trees": n_trees, "identical": identical}
        run = Run(randomized.CONTENDERS[0], settings | shape | {"hidden_size": 64}, 1)
        found[n_trees, identical] = randomized.measure(run, corpus)
    one, copies, different = found.values()
    assert copies["valid"] == pytest.approx(one["valid"], rel=1e-5)
    assert copies["head_parameters"] == 3 * one["head_parameters"]
    assert abs(different["valid"] / one["valid"] - 1) > 1e-4


def test_a_curve_at_many_classes(corpus: Corpus) -> None:
    contender = large_vocabulary.CONTENDERS[0]
    small = {"embedding_size": 4, "hidden_size": 4, "batch_size": 2, "seconds": 0.2}
    figures = large_vocabulary.measure(Run(contender, contender.settings | small, 1), corpus)
    points = figures["points"]
    seconds = [point["seconds"] for point in points]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= 1.0
    assert figures["bytes"] is None  # as in a run that tries a rate
    one = [(1.0, 400.0), (4.0, 100.0)]
    assert perplexity_at(one, 2.0) == pytest.approx(200.0)
    assert perplexity_at(one, 4.0) == pytest.approx(100.0)
    assert perplexity_at(one, 5.0) is perplexity_at(one, 0.5) is None
    assert figures["valid"] < len(corpus.vocabulary)


def _filled(study: Study, file: Path) -> Records:
    """Records of all runs of a study, with invented figures."""
    records = Records(file)
    for number in range(400):
        run = next_run(study.contenders[:8], records)
        if run is None:
            break
        bands = [{"from": 10, "tokens": 60, "loss": 4.0}, {"from": 0, "tokens": 40, "loss": 5.0}]
        valid = 100.0 + number % 7
        points = [{"seconds": 60.0 * n, "tokens": 1000 * n, "valid": valid - n} for n in (1, 60)]
        numbers = ("rows", "head_parameters", "head_step", "flat_step", "seconds", "rank", "bytes")
        figures: dict[str, Any] = dict.fromkeys(numbers, 1e3) | {"valid": valid, "test": 99.0}
        records.add(
            run.contender.name,
            run.settings,
            run.seed,
            "text",
            figures | {"bands": bands, "points": points, "epochs": [120.0, valid]},
        )
    return records


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_page_and_pictures(study: Study, tmp_path: Path) -> None:
    empty = Records(tmp_path / "none.json")
    assert "No run has finished yet." in study.page(study.contenders, empty)
    assert study.pictures(study.contenders, empty) == {}
    records = _filled(study, tmp_path / f"{study.name}.json")
    shares = dict.fromkeys(study.timed, 0.5)
    made = {key: value for key, value in records.all()[0].items() if key != "figures"}
    times_of.save({"shares": shares, **made}, records.path)
    study.write(records)
    page = (tmp_path / f"{study.name}.md").read_text()
    for contender in study.contenders[:6]:
        assert f"| {contender.title} |" in page
    for picture in study.pictures(study.contenders, records):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
        assert f"({picture})" in page


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_committed_page_is_made_of_the_committed_records(study: Study) -> None:
    file = RESULTS / f"{study.name}.json"
    page = file.with_suffix(".md")
    assert page.is_file() == file.is_file()
    if file.is_file():
        assert page.read_text() == study.page(study.contenders, Records(file))


def test_name_of_a_text(corpus: Corpus) -> None:
    assert f"{len(corpus.train):,} training tokens" in text_name(corpus)
