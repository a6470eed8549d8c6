"""Planned studies: their records, plans and command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.toy import write_corpus

from benchmarks.planned import (
    Contender,
    PlannedRun,
    PlannedStudy,
    Records,
    planned_runs,
    results,
    state,
)
from hstree.lab.report import Report, made_on
from hstree.lm.data import load_corpus

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
        *("name", "settings", "seed", "text", "figures"),
        *("machine", "threads", "versions", "date"),
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


def finish(records: Records, run: PlannedRun, best: float) -> None:
    """The record of a run whose perplexity is lowest at the factor ``best``."""
    loss = abs(math.log2(run.settings.get("factor", best) / best))
    records.add(run.model.name, run.settings, run.seed, "text", {"valid": 100 + loss})


def next_run(
    contenders: list[Contender], records: Records, only: Sequence[str] = ()
) -> PlannedRun | None:
    """The first run that has not finished."""
    runs = planned_runs(contenders, records, only)
    return next((run for run in runs if run.state == "waiting"), None)


def all_runs(contenders: list[Contender], records: Records, best: float) -> list[PlannedRun]:
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
    assert all(run.figures for run in state(contender, [contender], records).runs)


def test_order_of_runs(tmp_path: Path) -> None:
    first = Contender("a", "A", {}, {"factor": (1.0, 2.0, 4.0)}, final={"long": True}, seeds=1)
    later = Contender("b", "B", {"kind": "b"}, like="a", seeds=2, group=1)
    records = Records(tmp_path / "a.json")
    runs = all_runs([later, first], records, 2.0)
    assert [(run.model.name, dict(run.settings)) for run in runs] == [
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
        made.append(run.model.name)
    assert made == ["a", "b"]  # b takes over the factor of a


def test_finished_runs_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contender = Contender("a", "A", {"factor": 1.0}, {"factor": (1.0, 2.0, 4.0)}, seeds=2)
    made: list[PlannedRun] = []

    def measure(run: PlannedRun, corpus: object, given: object) -> dict[str, Any]:
        made.append(run)
        if len(made) == 3:
            raise KeyboardInterrupt
        return {"valid": abs(run.settings["factor"] - 2)}

    study = PlannedStudy(
        "a", [contender], measure, lambda _, records: Report(f"{len(records)} runs", []), ["make a"]
    )
    write_corpus(tmp_path / "text")
    flags = ["--save", str(tmp_path / "a"), "--data", str(tmp_path / "text")]
    study.main(None, tmp_path, [*flags, "--limit", "1"])
    assert len(made) == 1
    with pytest.raises(SystemExit, match="2 of 3 runs are finished; run the same command"):
        study.main(None, tmp_path, flags)
    for _ in range(2):
        study.main(None, tmp_path, flags)
    assert [(run.settings["factor"], run.seed) for run in [*made[:2], *made[3:]]] == [
        *((factor, 1) for factor in (1.0, 2.0, 4.0)),
        (2.0, 2),
    ]
    page = (tmp_path / "a.md").read_text()
    assert page.startswith("# 4 runs\n\nMade by\n\n    make a\n")
    capsys.readouterr()
    study.main(None, tmp_path, [*flags[:2], "--dry-run"])
    shown = capsys.readouterr().out
    assert shown.count("finished") == 4
    assert "a-factor=2-seed=2" in shown
    with pytest.raises(SystemExit):  # a text is needed
        study.main(None, tmp_path, flags[:2])
    other = PlannedStudy("a", [contender], measure, study.report, [], lambda _: small)
    small = load_corpus(tmp_path / "text", max_vocabulary=5)
    with pytest.raises(ValueError, match=r"expected the text .* as before, got"):
        other.main(None, tmp_path, flags)
