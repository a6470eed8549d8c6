"""Studies: records, plans, figures, and pages made of them."""

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
from benchmarks.ptb import CpuTimes
from benchmarks.studies.command import RESULTS, Study, parser, progress, work
from benchmarks.studies.measure import band_losses, band_perplexity, rows_scored, text_name
from benchmarks.studies.page import results
from benchmarks.studies.plan import Contender, Run, next_run, state
from benchmarks.studies.records import Records, made_on
from benchmarks.studies.training import measured_run
from hstree.data import Corpus, load_corpus
from hstree.heads import AdaptiveSoftmax, Softmax, TreeEnsemble
from hstree.models import AWDLSTM, LanguageModel
from hstree.runs import TrainConfig
from hstree.training import evaluate
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


# Records


def test_records_remain_in_their_file(tmp_path: Path) -> None:
    records = Records(tmp_path / "a.json")
    records.add("one", {"x": 1, "y": (2, 3)}, 1, "text", {"valid": 5.0})
    again = Records(tmp_path / "a.json")
    assert again.figures({"y": [2, 3], "x": 1}, 1) == {"valid": 5.0}
    assert again.figures({"x": 1, "y": (2, 3)}, 2) is None
    assert again.figures({"x": 1}, 1) is None
    (record,) = again.all()
    assert record.keys() == {
        *("name", "settings", "seed", "text", "figures", "machine", "versions", "date")
    }
    assert record["versions"]["torch"] == torch.__version__
    assert record["date"] in made_on([record])


def test_records_of_two_processes_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    first, second = Records(file), Records(file)
    first.add("one", {"x": 1}, 1, "text", {"valid": 5.0})
    second.add("two", {"x": 2}, 1, "text", {"valid": 6.0})
    assert [record["name"] for record in Records(file).all()] == ["one", "two"]


def test_merged_records_keep_what_was_there(tmp_path: Path) -> None:
    own, other = Records(tmp_path / "a.json"), Records(tmp_path / "b.json")
    own.add("one", {"x": 1}, 1, "text", {"valid": 5.0})
    other.add("one", {"x": 1}, 1, "text", {"valid": 7.0})
    other.add("two", {"x": 2}, 1, "text", {"valid": 6.0})
    own.merge([other.path])
    merged = Records(own.path)
    assert merged.figures({"x": 1}, 1) == {"valid": 5.0}
    assert merged.figures({"x": 2}, 1) == {"valid": 6.0}
    with pytest.raises(ValueError, match="no such file"):
        own.merge([tmp_path / "c.json"])


def test_records_are_about_one_text(tmp_path: Path) -> None:
    records = Records(tmp_path / "a.json")
    records.add("one", {}, 1, "text", {"valid": 5.0})
    with pytest.raises(ValueError, match="expected the text 'text' as before, got 'other'"):
        records.add("one", {}, 2, "other", {"valid": 5.0})
    assert len(Records(records.path)) == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"valid": 1}')
    with pytest.raises(ValueError, match="expected a list of records"):
        Records(tmp_path / "a.json")


# Plans


def finish(records: Records, run: Run, best: float) -> None:
    """The record of a run whose perplexity is lowest at the factor ``best``."""
    loss = abs(math.log2(run.settings.get("factor", best) / best))
    records.add(run.contender.name, run.settings, run.seed, "text", {"valid": 100 + loss})


def all_runs(contenders: list[Contender], records: Records, best: float) -> list[Run]:
    made = []
    while run := next_run(contenders, records):
        finish(records, run, best)
        made.append(run)
        assert len(made) < 50
    return made


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (4.0, {2, 4, 8}),
        (2.0, {1, 2, 4, 8}),
        (32.0, {2, 4, 8, 16, 32, 64}),
        (0.5, {0.25, 0.5, 1, 2, 4, 8}),
    ],
)
def test_a_sweep_goes_on_until_the_best_lies_between_others(
    tmp_path: Path, best: float, tried: set[float]
) -> None:
    contender = Contender("a", "A", {"factor": 4.0}, {"factor": (2.0, 4.0, 8.0)}, seeds=2)
    records = Records(tmp_path / "a.json")
    runs = all_runs([contender], records, best)
    found = state(contender, [contender], records)
    assert found.tried["factor"].keys() == tried
    assert found.settings == {"factor": best}
    assert [(run.settings["factor"], run.seed) for run in runs[len(tried) :]] == [(best, 2)]


def test_a_sweep_that_only_diverges_ends(tmp_path: Path) -> None:
    contender = Contender("a", "A", {}, {"factor": (2.0, 4.0)}, seeds=1)
    records = Records(tmp_path / "a.json")
    while run := next_run([contender], records):
        assert len(records) < 20
        records.add("a", run.settings, run.seed, "text", {"valid": None, "test": None})
    assert state(contender, [contender], records).missing == ()


def test_order_of_runs(tmp_path: Path) -> None:
    first = Contender("a", "A", {}, {"factor": (1.0, 2.0, 4.0)}, final={"long": True}, seeds=1)
    later = Contender("b", "B", {"kind": "b"}, like="a", seeds=2, group=1)
    records = Records(tmp_path / "a.json")
    runs = all_runs([later, first], records, 2.0)
    assert [(run.contender.name, dict(run.settings)) for run in runs] == [
        *(("a", {"factor": factor}) for factor in (1.0, 2.0, 4.0)),
        ("a", {"factor": 2.0, "long": True}),
        *(("b", {"kind": "b", "factor": 2.0}) for _ in range(2)),
    ]
    assert [result.contender.name for result in results([first, later], records)] == ["a", "b"]


def test_only_some_contenders(tmp_path: Path) -> None:
    contenders = [
        Contender("a", "A", {}, {"factor": (1.0,)}, seeds=1),
        Contender("b", "B", {"kind": "b"}, like="a", seeds=1, group=1),
        Contender("c", "C", {"kind": "c"}, seeds=1, group=1),
    ]
    records = Records(tmp_path / "a.json")
    made = []
    while run := next_run(contenders, records, only=["b"]):
        finish(records, run, 1.0)
        made.append(run.contender.name)
    assert made == ["a", "b"]  # b takes over the factor of a


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_contenders_of_a_study_differ(study: Study) -> None:
    names = [contender.name for contender in study.contenders]
    settings = [json.dumps(dict(c.settings), sort_keys=True) for c in study.contenders]
    assert len({*names}) == len(names)
    assert len({*settings}) == len(settings)
    for contender in study.contenders:
        assert contender.like is None or contender.like in names
        assert contender.settings.keys() >= contender.sweeps.keys()


def test_trees_study_runs_what_the_trainer_accepts() -> None:
    for contender in trees_study.CONTENDERS:
        settings = {k: v for k, v in contender.settings.items() if k != "relearn_trees"}
        TrainConfig(**settings, **trees_study.ELSEWHERE)


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
    assert figures["epoch_seconds"] > 0
    assert not any(tmp_path.iterdir())  # only the figures remain


def test_an_interrupted_run_goes_on(
    corpus: Corpus, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(
        data=str(text), run=str(tmp_path / "run"), head="softmax", embedding_size=4,
        hidden_size=4, epochs=2, batch_size=2, bptt=5, threads=1, device="cpu",
    )  # fmt: skip
    whole = measured_run(replace(config, run=str(tmp_path / "whole")), corpus)
    step, made = CpuTimes.step, []

    def interrupted(times: CpuTimes, epoch: int, loss: float, tokens: int) -> None:
        step(times, epoch, loss, tokens)
        made.append(epoch)
        if made.count(2) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CpuTimes, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measured_run(config, corpus)
    with pytest.raises(ValueError, match="expected a run with the settings"):
        measured_run(replace(config, learning_rate=0.1), corpus)
    figures = measured_run(config, corpus)
    assert figures["epochs"] == whole["epochs"]
    assert figures["test"] == whole["test"]
    assert figures["epoch_seconds"] > 0  # of the first epoch


def test_a_run_that_diverges_is_recorded(corpus: Corpus, text: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        data=str(text), run=str(tmp_path / "run"), head="softmax", embedding_size=4, clip=0.0,
        hidden_size=4, epochs=1, batch_size=2, learning_rate=1e30, optimizer="sgd", threads=1,
    )  # fmt: skip
    figures = measured_run(config, corpus)
    assert figures["valid"] is None
    assert "learning-rate" in figures["error"]


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    contender = Contender("a", "A", {"factor": 1.0}, {"factor": (1.0, 2.0, 4.0)}, seeds=2)
    study = Study("a", [contender], lambda _, records: f"{len(records)} runs\n", lambda *_: {})
    made: list[Run] = []

    def measure(run: Run) -> dict[str, Any]:
        made.append(run)
        return {"valid": abs(run.settings["factor"] - 2)}

    flags = ["--save", str(tmp_path / "a")]
    arguments = parser(None, study).parse_args(flags)
    work(study, parser(None, study).parse_args([*flags, "--minutes", "0"]), lambda: ("", measure))
    assert not made
    for _ in range(2):
        work(study, arguments, lambda: ("", measure))
    assert [(run.settings["factor"], run.seed) for run in made] == [
        *((factor, 1) for factor in (1.0, 2.0, 4.0)),
        (2.0, 2),
    ]
    assert (tmp_path / "a.md").read_text() == "4 runs\n"
    assert progress(study, Records(tmp_path / "a.json")) == [f"{'a':<24} 2 of 2 seeds, factor 2"]


# The studies


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
    assert perplexity_at(points, 100.0) == points[-1]["valid"]
    assert perplexity_at(points, -1.0) is None
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
            figures | {"bands": bands, "points": points},
        )
    return records


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_page_and_pictures(study: Study, tmp_path: Path) -> None:
    empty = Records(tmp_path / "none.json")
    assert "No run has finished yet." in study.page(study.contenders, empty)
    assert study.pictures(study.contenders, empty) == {}
    records = _filled(study, tmp_path / f"{study.name}.json")
    study.write(records)
    page = (tmp_path / f"{study.name}.md").read_text()
    for contender in study.contenders[:6]:
        assert f"| {contender.title} |" in page
    assert (tmp_path / f"{study.name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"({study.name}.png)" in page


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_committed_page_is_made_of_the_committed_records(study: Study) -> None:
    file = RESULTS / f"{study.name}.json"
    page = file.with_suffix(".md")
    assert page.is_file() == file.is_file()
    if file.is_file():
        assert page.read_text() == study.page(study.contenders, Records(file))


def test_name_of_a_text(corpus: Corpus) -> None:
    assert f"{len(corpus.train):,} training tokens" in text_name(corpus)
