"""The studies of benchmarks: their plans, measurements, records and pages."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.training.toy import write_corpus

from benchmarks import studies
from benchmarks.studies import Contender, Records, Run, Study, results, tried
from hstree.lab.report import Report
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, CorpusStatistics, load_corpus
from hstree.lm.train import build_model

RESULTS = Path(__file__).parent / "results"
BY_NAME = {study.name: study for study in studies.STUDIES}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "toy"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return load_corpus(text)


# ---- plans and records


def run_of(name: str, seed: int = 1, **settings: Any) -> Run:
    return Run(Contender(name, name, {}), settings, seed)


def test_records_remain_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    first, second = Records(file), Records(file)
    first.add(run_of("one", x=1, y=(2, 3)), "text", {"valid": 5.0})
    second.add(run_of("two", x=2), "text", {"valid": 6.0})  # another process
    again = Records(file)
    assert [record["name"] for record in again.all()] == ["one", "two"]
    assert again.figures(run_of("", y=[2, 3], x=1)) == {"valid": 5.0}
    assert again.figures(run_of("", 2, x=1, y=(2, 3))) is again.figures(run_of("", x=1)) is None
    assert again.all()[0]["versions"]["torch"] == torch.__version__
    with pytest.raises(ValueError, match="expected the text 'text', got 'other'"):
        again.add(run_of("one", 2), "other", {"valid": 5.0})
    assert len(Records(file).all()) == 2


def test_runs_of_a_contender(tmp_path: Path) -> None:
    swept = {"rate": (0.2, 0.1), "factor": (2.0, 4.0)}
    contender = Contender("a", "A", {"factor": 8.0}, swept, {"long": True}, seeds=2)
    sweep = [(0.1, 8.0), (0.2, 8.0), (0.2, 2.0), (0.2, 4.0)]
    assert [(dict(run.settings), run.seed) for run in contender.runs] == [
        *(({"rate": rate, "factor": factor}, 1) for rate, factor in sweep),
        *(({"rate": 0.2, "factor": 2.0, "long": True}, seed) for seed in (1, 2)),
    ]
    assert contender.runs[-1].name == "a-rate=0.2-factor=2-long=1-seed=2"
    records = Records(tmp_path / "a.json")
    for run, valid in zip(contender.runs[:2], (7.0, None), strict=True):
        records.add(run, "text", {"valid": valid})
    assert tried(contender, "rate", records) == {0.1: 7.0, 0.2: None}
    assert not results([contender], records)  # short runs are no results
    records.add(contender.runs[-1], "text", {"valid": 6.0})
    (found,) = results([contender], records)
    assert (found.title, found.mean("valid")) == ("A (sweep not finished)", 6.0)


def test_finished_runs_are_not_repeated(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = Contender("a", "A", {}, {"factor": (2.0, 1.0, 4.0)}, seeds=2)
    made: list[Run] = []

    def measure(run: Run, corpus: object, given: object) -> dict[str, Any]:
        made.append(run)
        if len(made) == 3:
            raise KeyboardInterrupt
        return {"valid": abs(run.settings["factor"] - 2)}

    def report(contenders: object, records: Records) -> Report:
        return Report(f"{len(records.all())} runs", [])

    study = Study("a", [contender], measure, report, commands=["--data ptb/"])
    monkeypatch.setattr(studies, "STUDIES", (study,))
    call = ["a", "--records", str(tmp_path), "--data", str(text)]
    studies.main([*call, "--limit", "1"])
    assert len(made) == 1
    with pytest.raises(KeyboardInterrupt):
        studies.main(call)
    for _ in range(2):
        studies.main(call)
    assert [(run.settings["factor"], run.seed) for run in [*made[:2], *made[3:]]] == [
        *((factor, 1) for factor in (1.0, 2.0, 4.0)),
        (2.0, 2),
    ]
    page = (tmp_path / "a.md").read_text()
    made_by = "python -m benchmarks.studies a --data ptb/"
    assert page.startswith(f"# 4 runs\n\nMade by\n\n    {made_by}\n")
    small = replace(study, load=lambda folder: load_corpus(folder, max_vocabulary=5))
    monkeypatch.setattr(studies, "STUDIES", (small,))
    with pytest.raises(ValueError, match=r"expected the text .*, got"):
        studies.main(call)


# ---- the studies


@pytest.mark.parametrize("study", studies.STUDIES, ids=lambda study: study.name)
def test_contenders_of_a_study(study: Study) -> None:
    """They differ, and the first value of each sweep is the best one of the records."""
    names = [contender.name for contender in study.contenders]
    settings = [json.dumps([c.settings, c.final], sort_keys=True) for c in study.contenders]
    assert len({*names}) == len(names)
    assert len({*settings}) == len(settings)
    records = Records(RESULTS / f"{study.name}.json")
    for contender in study.contenders:
        for name, values in contender.sweeps.items():
            found = tried(contender, name, records)
            assert min(found, key=lambda value: found[value] or np.inf) == values[0]


@pytest.mark.parametrize("study", studies.STUDIES, ids=lambda study: study.name)
def test_committed_page_is_made_of_the_committed_records(study: Study) -> None:
    files = study.files(Records(RESULTS / f"{study.name}.json"))
    page = files.pop(f"{study.name}.md").decode()
    assert page == (RESULTS / f"{study.name}.md").read_text()
    for name, picture in files.items():
        assert picture.startswith(b"\x89PNG")
        assert f"({name})" in page
        assert (RESULTS / name).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trees-study", "large-vocabulary"])
def test_every_head_of_a_study_trains(name: str) -> None:
    classes = 6500  # more than the last cutoff
    tokens = np.random.default_rng(0).integers(classes, size=20_000)
    statistics = CorpusStatistics.from_tokens(tokens, classes)
    small = {"embedding_size": 16, "hidden_size": 16}
    done = set[str]()
    for contender in BY_NAME[name].contenders:
        settings = {**contender.settings, **contender.final, **small}
        settings.pop("seconds", None)
        kind = json.dumps({k: v for k, v in settings.items() if k not in ("n_trees", "clusters")})
        if kind in done:
            continue
        done.add(kind)
        model = build_model(TrainConfig(**settings), classes, statistics)
        words = torch.from_numpy(tokens[:80].reshape(8, 10))
        (_, loss), _, _ = model(words[:-1], words[1:])
        loss.backward()
        assert loss.detach().isfinite()


def test_a_measured_run_and_one_that_diverges(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    small = {"head": "softmax", "embedding_size": 4, "hidden_size": 4, "epochs": 2, "batch_size": 2}
    given, run = argparse.Namespace(data=text, runs=tmp_path, device="cpu"), run_of("a", **small)
    figures = studies.measure_ptb(run, corpus, given)
    assert figures["valid"] == min(figures["epochs"])
    assert figures["head_parameters"] == 5 * len(corpus.vocabulary)
    assert studies.measure_ptb(run, corpus, given) == figures  # not trained again
    wild = run_of("b", **small, clip=0.0, learning_rate=1e30, optimizer="sgd")
    figures = studies.measure_ptb(wild, corpus, given)
    assert figures["valid"] is None
    assert "learning-rate" in figures["error"]


def test_times_of_steps(corpus: Corpus) -> None:
    small = {"embedding_size": 4, "hidden_size": 4, "batch_size": 2, "bptt": 2, "device": "cpu"}
    trees = {"head": "trees", "n_trees": 8, "clusters": 4}
    heads = {"softmax": {"head": "softmax"}, "trees": trees}
    configs = {name: TrainConfig(**small, **head) for name, head in heads.items()}
    times = studies.step_times(studies.trainer_steps(configs, corpus), rounds=3)
    assert list(times["shares"]) == ["softmax", "trees"]
    assert times["shares"]["softmax"] == 1.0
    assert times["shares"]["trees"] > 1.0  # eight trees of ten classes


def test_heads_of_a_small_transformer_train(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    small = {"SUBWORDS": len(corpus.vocabulary) + 5, "WIDTH": 64, "LAYERS": 1, "WINDOW": 8}
    for name, value in (small | {"TRANSFORMER_TOKENS": 64}).items():
        monkeypatch.setattr(studies, name, value)
    unigram = np.exp(corpus.statistics().unigram_loss(corpus.valid[:65]))
    given = argparse.Namespace(device="cpu")
    trees = [c for c in studies.TRANSFORMERS if c.name == "trees-time"]
    for contender in (*studies.SHORT, *trees):
        settings = {**contender.settings, "learning_rate": 0.01, "steps": 20}
        figures = studies.measure_transformer(Run(contender, settings, 1), corpus, given)
        assert figures["valid"] < unigram, contender.name
    tails = {c.settings["head"]: c for c in studies.TRANSFORMERS if "-tail-time" in c.name}
    assert list(tails) == ["sampled", "forest"]
    for contender in tails.values():
        settings = {**contender.settings, "steps": 10}
        steps = islice(studies.transformer_steps(settings, corpus, 1), 11)
        sampled = [model.head.samples_in_training for model in steps]  # before each step
        assert sampled == 10 * [True] + [False]  # the last of the ten steps was of all classes
    assert studies.rate_at(0, 100) < studies.rate_at(4, 100) == 1.0
    assert studies.rate_at(100, 100) == pytest.approx(studies.LAST_RATE)
    window, target = next(studies.batches(np.arange(1000), 0))
    assert torch.equal(window + 1, target)


def test_copies_of_one_tree_are_one_tree(corpus: Corpus) -> None:
    small = {"embedding_size": 8, "hidden_size": 8, "epochs": 1, "batch_size": 2}
    settings = studies.SMALL | small | {studies.FACTOR: 4.0, "head": "trees", "hidden_size": 64}
    settings |= {"recipe": "random", "subset": studies.FEATURES, "gate": "uniform"}
    found = {}
    for n_trees, identical in ((1, False), (3, True), (3, False)):
        run = run_of("trees", **settings, n_trees=n_trees, identical=identical)
        found[n_trees, identical] = studies.measure_randomized(run, corpus)
    one, copies, different = found.values()
    assert copies["valid"] == pytest.approx(one["valid"], rel=1e-5)
    assert copies["head_parameters"] == 3 * one["head_parameters"]
    assert abs(different["valid"] / one["valid"] - 1) > 1e-4


def test_a_curve_at_many_classes(corpus: Corpus) -> None:
    contender = studies.LARGE_CONTENDERS[0]
    small = {"embedding_size": 4, "hidden_size": 4, "batch_size": 2, "seconds": 0.2}
    figures = studies.measure_large(Run(contender, {**contender.settings, **small}, 1), corpus)
    seconds = [point["seconds"] for point in figures["points"]]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= 1.0
    assert figures["valid"] < len(corpus.vocabulary)
    one = [(1.0, 400.0), (4.0, 100.0)]
    assert studies.perplexity_at(one, 2.0) == pytest.approx(200.0)
    assert studies.perplexity_at(one, 4.0) == pytest.approx(100.0)
    assert studies.perplexity_at(one, 5.0) is studies.perplexity_at(one, 0.5) is None
