"""The studies of benchmarks: their plans, measurements, records and pages."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm.training.toy import write_corpus

from benchmarks import studies
from benchmarks.studies import Contender, PlannedRun, Records, Study, planned_runs, results, state
from hstree.heads import AdaptiveSoftmax, SampledSoftmax, Softmax, TreeEnsemble
from hstree.lab.report import Report
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, CorpusStatistics, load_corpus
from hstree.lm.train import build_model
from hstree.trees import build_ensemble

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


def run_of(name: str, seed: int = 1, **settings: Any) -> PlannedRun:
    return PlannedRun(Contender(name, name, {}), settings, seed)


def test_records_remain_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    first, second = Records(file), Records(file)
    first.add(run_of("one", x=1, y=(2, 3)), "text", {"valid": 5.0})
    second.add(run_of("two", x=2), "text", {"valid": 6.0})  # another process
    again = Records(file)
    assert [record["name"] for record in again.all()] == ["one", "two"]
    assert again.figures({"y": [2, 3], "x": 1}, 1) == {"valid": 5.0}
    assert again.figures({"x": 1, "y": (2, 3)}, 2) is again.figures({"x": 1}, 1) is None
    assert again.all()[0]["versions"]["torch"] == torch.__version__
    with pytest.raises(ValueError, match="expected the text 'text', got 'other'"):
        again.add(run_of("one", 2), "other", {"valid": 5.0})
    assert len(Records(file).all()) == 2


def finish_all(contenders: Sequence[Contender], records: Records, best: float) -> list[PlannedRun]:
    """Make all runs; the perplexity is lowest at the factor ``best``."""
    made: list[PlannedRun] = []
    while left := [run for run in planned_runs(contenders, records) if run.figures is None]:
        loss = abs(math.log2(left[0].settings.get("factor", best) / best))
        records.add(left[0], "text", {"valid": 100 + loss})
        made.append(left[0])
        assert len(made) < 50
    return made


def test_sweeps_come_first_and_others_take_over_their_values(tmp_path: Path) -> None:
    first = Contender("a", "A", {}, {"factor": (1.0, 2.0, 4.0)}, final={"long": True}, seeds=1)
    later = Contender("b", "B", {"kind": "b"}, like="a", seeds=2)
    records = Records(tmp_path / "a.json")
    runs = finish_all([later, first], records, 2.0)
    assert [(run.model.name, dict(run.settings), run.seed) for run in runs] == [
        *(("a", {"factor": factor}, 1) for factor in (1.0, 2.0, 4.0)),
        *(("b", {"kind": "b", "factor": 2.0}, seed) for seed in (1, 2)),
        ("a", {"factor": 2.0, "long": True}, 1),
    ]
    assert runs[-1].name == "a-factor=2-long=1-seed=1"
    assert [result.contender.name for result in results([first, later], records)] == ["a", "b"]


def test_one_sweep_after_another(tmp_path: Path) -> None:
    swept = {"factor": (1.0, 2.0), "rate": (0.1, 0.2)}
    contender = Contender("a", "A", {"rate": 0.1}, swept, seeds=1)
    records = Records(tmp_path / "a.json")
    for factor, rate, valid in ((1.0, 0.1, 7.0), (2.0, 0.1, 6.0), (2.0, 0.2, None)):
        records.add(run_of("a", rate=rate, factor=factor), "text", {"valid": valid})
    found = state(contender, [contender], records)
    assert found.complete
    assert found.settings == {"factor": 2.0, "rate": 0.1}
    assert found.tried == {"factor": {1.0: 7.0, 2.0: 6.0}, "rate": {0.1: 6.0, 0.2: math.inf}}


def test_results_of_a_sweep_that_goes_on(tmp_path: Path) -> None:
    swept = {"factor": (2.0, 4.0, 8.0)}
    contenders = [
        Contender("a", "A", {}, swept),
        Contender("b", "B", {"kind": "b"}, swept, final={"long": True}),
    ]
    records = Records(tmp_path / "a.json")
    assert not results(contenders, records)
    for contender in contenders:
        for factor, valid in ((2.0, 7.0), (4.0, 6.0)):
            settings = {**contender.settings, "factor": factor}
            records.add(PlannedRun(contender, settings, 1), "text", {"valid": valid})
    (found,) = results(contenders, records)  # short runs are no results
    assert (found.title, found.settings["factor"]) == ("A (sweep not finished)", 4.0)
    records.add(run_of("a", factor=8.0), "text", {"valid": 6.5})
    (found,) = results(contenders, records)
    assert (found.title, found.settings["factor"]) == ("A", 4.0)


def test_finished_runs_are_not_repeated(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender = Contender("a", "A", {"factor": 1.0}, {"factor": (1.0, 2.0, 4.0)}, seeds=2)
    made: list[PlannedRun] = []

    def measure(run: PlannedRun, corpus: object, given: object) -> dict[str, Any]:
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
def test_contenders_of_a_study_differ(study: Study) -> None:
    names = [contender.name for contender in study.contenders]
    settings = [
        json.dumps([dict(c.settings), dict(c.final)], sort_keys=True) for c in study.contenders
    ]
    assert len({*names}) == len(names)
    assert len({*settings}) == len(settings)
    for contender in study.contenders:
        assert contender.like is None or contender.like in names
        assert contender.settings.keys() >= contender.sweeps.keys()


@pytest.mark.parametrize("study", studies.STUDIES, ids=lambda study: study.name)
def test_committed_page_is_made_of_the_committed_records(study: Study) -> None:
    files = study.files(Records(RESULTS / f"{study.name}.json"))
    page = files.pop(f"{study.name}.md").decode()
    assert page == (RESULTS / f"{study.name}.md").read_text()
    assert files
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
    tried = set[str]()
    for contender in BY_NAME[name].contenders:
        settings = {**contender.settings, **contender.final, **small}
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
        assert 0 < studies.rows_scored(model.head, statistics.frequencies) <= classes


def test_rows_of_trees_are_those_on_the_paths() -> None:
    frequencies = np.arange(1, 301)
    trees = build_ensemble("huffman", 300, 2, frequencies, root=16, leaf=8)
    expected = 0.0
    for tree in trees:
        width = tree.n_children
        for label, times in enumerate(frequencies):
            nodes = [node for node, _ in tree.path(label)]
            expected += times * sum(1 if width[n] == 2 else width[n] for n in nodes)
    rows = studies.rows_scored(TreeEnsemble(4, 300, trees), frequencies)
    assert rows == pytest.approx(expected / frequencies.sum())


def test_rows_of_softmaxes() -> None:
    frequencies = np.array([5, 1, 1, 1, 1, 1])
    assert studies.rows_scored(Softmax(4, 6), frequencies) == 6
    adaptive = AdaptiveSoftmax(16, 6, cutoffs=[1, 3], div_value=2.0)
    assert studies.rows_scored(adaptive, frequencies) == pytest.approx(1 + 2 + 0.2 * 2 + 0.3 * 3)
    head = SampledSoftmax(4, 6, negatives=2, frequencies=frequencies)
    assert studies.rows_scored(head, frequencies, 1) == pytest.approx(2 + 1)
    assert studies.rows_scored(head, frequencies, 2) == pytest.approx(2 + 1 + 0.7)


def test_a_measured_run_and_one_that_diverges(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        data=str(text), run=str(tmp_path / "run"), head="softmax", embedding_size=4,
        hidden_size=4, epochs=2, batch_size=2, threads=1, device="cpu",
    )  # fmt: skip
    figures = studies.measured_run(config, corpus)
    assert figures["valid"] == min(figures["epochs"])
    assert figures["rows"] == len(corpus.vocabulary)
    assert figures["head_parameters"] == 5 * len(corpus.vocabulary)
    assert studies.measured_run(config, corpus)["epochs"] == figures["epochs"]  # not trained again
    wild = {"run": str(tmp_path / "wild"), "clip": 0.0, "learning_rate": 1e30, "optimizer": "sgd"}
    figures = studies.measured_run(replace(config, **wild), corpus)
    assert figures["valid"] is None
    assert "learning-rate" in figures["error"]


def test_times_of_steps(corpus: Corpus) -> None:
    small = {"embedding_size": 4, "hidden_size": 4, "batch_size": 2, "bptt": 2, "device": "cpu"}
    trees = {"head": "trees", "n_trees": 8, "root": 4}
    configs = {
        name: TrainConfig(**small, **head)
        for name, head in (("softmax", {"head": "softmax"}), ("trees", trees))
    }
    times = studies.in_turns(studies.turns_of(configs, corpus), rounds=3)
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
    for contender in studies.SHORT:
        settings = {**contender.settings, "learning_rate": 0.01, "steps": 20}
        figures = studies.measure_transformer(PlannedRun(contender, settings, 1), corpus, given)
        assert figures["valid"] < unigram, contender.name
    tails = [c for c in studies.TRANSFORMERS if "tail" in c.settings]
    assert len(tails) == len(studies.TAILS)
    for contender in tails:
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
    run = PlannedRun(contender, {**contender.settings, **small}, 1)
    figures = studies.measure_large(run, corpus)
    seconds = [point["seconds"] for point in figures["points"]]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= 1.0
    assert figures["bytes"] is None  # as in a run that tries a rate
    assert figures["valid"] < len(corpus.vocabulary)
    one = [(1.0, 400.0), (4.0, 100.0)]
    assert studies.perplexity_at(one, 2.0) == pytest.approx(200.0)
    assert studies.perplexity_at(one, 4.0) == pytest.approx(100.0)
    assert studies.perplexity_at(one, 5.0) is studies.perplexity_at(one, 0.5) is None
