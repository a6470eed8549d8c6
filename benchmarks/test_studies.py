"""Studies: their records, plans and command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import large_vocabulary, randomized, trees_study
from benchmarks.studies.command import Study, parser, progress, work
from benchmarks.studies.page import results
from benchmarks.studies.plan import Contender, Run, next_run, state
from benchmarks.studies.records import Records, made_on
from hstree.lm.runs import TrainConfig

STUDIES = (trees_study.STUDY, randomized.STUDY, large_vocabulary.STUDY)


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
            settings = contender.settings | {"factor": factor}
            records.add(contender.name, settings, 1, "text", {"valid": valid})
    (found,) = results(contenders, records)  # short runs are no results
    assert (found.title, found.settings["factor"]) == ("A (sweep not finished)", 4.0)
    records.add("a", {"factor": 8.0}, 1, "text", {"valid": 6.5})
    (found,) = results(contenders, records)
    assert (found.title, found.settings["factor"]) == ("A", 4.0)


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
