"""The studies of benchmarks: their plans, measurements and pages."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.training.toy import write_corpus

from benchmarks import (
    large_vocabulary,
    randomized,
    step_times,
    transformer_study,
    trees_page,
    trees_study,
)
from benchmarks.large_vocabulary_page import perplexity_at
from benchmarks.planned import PlannedRun, PlannedStudy, Records, planned_runs
from benchmarks.study_figures import rows_scored
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, CorpusStatistics, load_corpus
from hstree.lm.train import build_model

STUDIES = (trees_study.STUDY, randomized.STUDY, large_vocabulary.STUDY, transformer_study.STUDY)
RESULTS = Path(__file__).parent / "results"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A tiny text."""
    folder = tmp_path_factory.mktemp("text") / "toy"
    write_corpus(folder)
    return load_corpus(folder)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_contenders_of_a_study_differ(study: PlannedStudy) -> None:
    names = [contender.name for contender in study.contenders]
    settings = [
        json.dumps([dict(c.settings), dict(c.final)], sort_keys=True) for c in study.contenders
    ]
    assert len({*names}) == len(names)
    assert len({*settings}) == len(settings)
    for contender in study.contenders:
        assert contender.like is None or contender.like in names
        assert contender.settings.keys() >= contender.sweeps.keys()


def test_trees_study_runs_what_the_trainer_accepts() -> None:
    for contender in trees_study.CONTENDERS:
        TrainConfig(**contender.settings | contender.final | trees_study.ELSEWHERE)


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


def test_heads_of_a_small_transformer_train(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    small = {"CLASSES": len(corpus.vocabulary) + 5, "WIDTH": 64, "LAYERS": 1, "WINDOW": 8}
    for name, value in small.items():
        monkeypatch.setattr(transformer_study, name, value)
    monkeypatch.setattr(transformer_study, "VALID_TOKENS", 64)
    unigram = np.exp(corpus.statistics().unigram_loss(corpus.valid[:65]))
    given = argparse.Namespace(device="cpu")
    for contender in transformer_study.SHORT:
        settings = dict(contender.settings) | {"learning_rate": 0.01, "steps": 20}
        figures = transformer_study.measure(PlannedRun(contender, settings, 1), corpus, given)
        assert figures["valid"] < unigram, contender.name
    tails = [c for c in transformer_study.CONTENDERS if "tail" in c.settings]
    assert len(tails) == len(transformer_study.TAILS)
    for contender in tails:
        settings = dict(contender.settings) | {"steps": 10}
        steps = islice(transformer_study.training(settings, corpus, 1), 11)
        sampled = [model.head.samples_in_training for model in steps]  # before each step
        assert sampled == 10 * [True] + [False]  # the last of the ten steps was of all classes
    assert transformer_study.rate_at(0, 100) < transformer_study.rate_at(4, 100) == 1.0
    assert transformer_study.rate_at(100, 100) == pytest.approx(transformer_study.LAST)
    window, target = next(transformer_study.batches(np.arange(1000), 0))
    assert torch.equal(window + 1, target)


def test_copies_of_one_tree_are_one_tree(corpus: Corpus) -> None:
    small = {"embedding_size": 8, "hidden_size": 8, "epochs": 1, "batch_size": 2}
    settings = randomized.TRAINING | small | {randomized.FACTOR: 4.0, "head": "trees"}
    settings |= {"recipe": "random", "subset": randomized.FEATURES, "gate": "uniform"}
    found = {}
    for n_trees, identical in ((1, False), (3, True), (3, False)):
        shape = {"n_trees": n_trees, "identical": identical}
        run = PlannedRun(randomized.CONTENDERS[0], settings | shape | {"hidden_size": 64}, 1)
        found[n_trees, identical] = randomized.measure(run, corpus)
    one, copies, different = found.values()
    assert copies["valid"] == pytest.approx(one["valid"], rel=1e-5)
    assert copies["head_parameters"] == 3 * one["head_parameters"]
    assert abs(different["valid"] / one["valid"] - 1) > 1e-4


def test_a_curve_at_many_classes(corpus: Corpus) -> None:
    contender = large_vocabulary.CONTENDERS[0]
    small = {"embedding_size": 4, "hidden_size": 4, "batch_size": 2, "seconds": 0.2}
    figures = large_vocabulary.measure(PlannedRun(contender, contender.settings | small, 1), corpus)
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


def _filled(study: PlannedStudy, file: Path) -> Records:
    """Records of all runs of a study, with invented figures."""
    records = Records(file)
    numbers = ("rows", "head_parameters", "seconds", "rank", "bytes")
    bands = [{"from": 10, "tokens": 60, "loss": 4.0}, {"from": 0, "tokens": 40, "loss": 5.0}]
    for number in range(400):
        runs = planned_runs(study.contenders[:8], records)
        run = next((run for run in runs if run.figures is None), None)
        if run is None:
            break
        valid = 100.0 + number % 7
        figures: dict[str, Any] = dict.fromkeys(numbers, 1e3) | {"valid": valid, "test": 99.0}
        figures["points"] = [
            {"seconds": 60.0 * n, "tokens": 1000 * n, "valid": valid - n} for n in (1, 60)
        ]
        figures |= {"bands": bands, "epochs": [120.0, valid]}
        records.add(run.model.name, run.settings, run.seed, "text", figures)
    return records


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_page_and_pictures(study: PlannedStudy, tmp_path: Path) -> None:
    (page,) = study.files(Records(tmp_path / "none.json")).values()
    assert "No run has finished yet." in page.decode()
    records = _filled(study, tmp_path / f"{study.name}.json")
    timed = trees_page.TIMED if study is trees_study.STUDY else [c.name for c in study.contenders]
    shares = dict.fromkeys(timed, 0.5)
    made = {key: value for key, value in records.all()[0].items() if key != "figures"}
    step_times.save({"shares": shares, "heads": shares, **made}, records.path)
    files = study.files(records)
    page = files.pop(f"{study.name}.md").decode()
    for contender in study.contenders[:6]:
        assert f"| {contender.title} |" in page
    assert files
    for name, picture in files.items():
        assert picture.startswith(b"\x89PNG")
        assert f"({name})" in page


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_committed_page_is_made_of_the_committed_records(study: PlannedStudy) -> None:
    records = Records(RESULTS / f"{study.name}.json")
    assert len(records)
    page = study.files(records)[f"{study.name}.md"].decode()
    assert records.path.with_suffix(".md").read_text() == page
