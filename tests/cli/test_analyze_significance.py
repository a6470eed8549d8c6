"""``hstree analyze significance``: what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import scipy.stats
from analysis.made_up import write_run

from hstree.cli import main

SOFTMAX, MOS = (60.5, 61.25, 59.75), (55.0, 54.5, 56.5)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail with one line and leave nothing; returns the line."""
    assert main(["analyze", "significance", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert not Path("significance").exists()
    return captured.err


def seeds(head: str, tests: tuple[float, ...]) -> list[str]:
    return [
        str(write_run(Path(f"{head}-{seed}"), test=test, head=head, seed=seed))
        for seed, test in enumerate(tests)
    ]


def test_runs(capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = str(write_run(Path("unfinished"), (210.0,), None, head="gss", dropout=0.25))
    runs = [*seeds("softmax", SOFTMAX), *seeds("mos", MOS), unfinished]
    assert main(["analyze", "significance", *runs, "--output", "made/here"]) == 0
    out = capsys.readouterr().out
    assert "softmax - mos" in out
    assert "note: mos: mos, dropout=0.4" in out
    assert "note: unfinished has not finished: 1 of 3 epochs ended" in out
    folder = Path("made/here")
    data = json.loads((folder / "significance.json").read_text())
    assert [sample["values"] for sample in data["samples"]] == [list(SOFTMAX), list(MOS)]
    ((row),) = csv.DictReader((folder / "significance.csv").read_text().splitlines())
    welch = scipy.stats.ttest_ind(SOFTMAX, MOS, equal_var=False)
    student = scipy.stats.ttest_ind(SOFTMAX, MOS)
    assert float(row["welch_p"]) == float(row["welch_p_holm"]) == pytest.approx(welch.pvalue)
    assert float(row["student_p"]) == pytest.approx(student.pvalue)
    assert float(row["welch_low"]) == pytest.approx(welch.confidence_interval().low)
    assert (folder / "significance.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "significance.md").read_text()
    assert page.startswith("# Significance of differences in test perplexity\n")
    assert "![significance](significance.png)" in page


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The columns that hstree study writes, then others; an empty cell is a run without a value."""
    lines = ["model,head,seed,test_perplexity,valid_perplexity"]
    for model, values in (("a", SOFTMAX), ("b", MOS)):
        lines += [f"{model},x,{seed},{v},{v + 1}" for seed, v in enumerate(values)]
    lines.append("b,x,9,,55")
    Path("study.csv").write_text("\n".join(lines) + "\n")
    assert main(["analyze", "significance", "--table", "study.csv"]) == 0
    out = capsys.readouterr().out
    assert "a - b" in out
    assert "note: 1 line of study.csv left out: an empty cell" in out
    data = json.loads(Path("significance/significance.json").read_text())
    assert [sample["values"] for sample in data["samples"]] == [list(SOFTMAX), list(MOS)]
    more = ["--model", "seed", "--value", "valid_perplexity", "--output", "other"]
    assert main(["analyze", "significance", "--table", "study.csv", *more]) == 0
    data = json.loads(Path("other/significance.json").read_text())
    assert [sample["name"] for sample in data["samples"]] == ["0", "1", "2", "9"]
    assert "valid perplexity" in capsys.readouterr().out


def test_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    runs = seeds("softmax", SOFTMAX)
    assert "expected run folders or --table FILE, got neither" in fails(capsys)
    assert "--table: expected this or runs, got both" in fails(capsys, runs[0], "--table", "x.csv")
    assert "--model: has no effect without --table" in fails(capsys, *runs, "--model", "head")
    assert "at least two models of two or more finite values" in fails(capsys, *runs)
    assert "missing: no such run folder" in fails(capsys, *runs, "missing")
    assert "x.csv" in fails(capsys, "--table", "x.csv")
    for content, message in (
        ("", "x.csv: expected a line with the names of the columns, got an empty file"),
        ("model,value\n", "--value: expected one of the columns of x.csv (model, value), got "),
        ("model,model,test_perplexity\n", "--model: expected one of the columns of x.csv"),
        ("model,test_perplexity\n", "at least two models of two or more finite values each, got 0"),
        ("model,test_perplexity\na,1\na\n", "x.csv, line 3: expected 2 cells as in the first line"),
        (
            "model,test_perplexity\n\na,1\na,high\n",
            "x.csv, line 4: expected a number in column test_perplexity, got 'high'",
        ),
        ('model,test_perplexity\n"a,1\n', "x.csv: expected a CSV file in UTF-8"),
    ):
        Path("x.csv").write_text(content)
        assert message in fails(capsys, "--table", "x.csv")
    Path("x.csv").write_bytes(b"model,test_perplexity\n\xff,1\n")
    assert "x.csv: expected a CSV file in UTF-8" in fails(capsys, "--table", "x.csv")


def test_diverged_runs_are_words_not_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "1"), ("a", "1"), ("b", "2"), ("b", "2"), ("c", "inf"), ("c", "nan"), ("d", "4")]
    Path("x.csv").write_text("model,test_perplexity\n" + "".join(f"{a},{b}\n" for a, b in rows))
    assert main(["analyze", "significance", "--table", "x.csv"]) == 0
    out = capsys.readouterr().out
    assert "note: a and b are not tested: neither varies from seed to seed" in out
    assert "note: c is not tested: not all its values are finite" in out
    assert "note: d is not tested: it has one value, a t-test needs two" in out
    data = json.loads(Path("significance/significance.json").read_text())
    assert data["pairs"][0]["welch"]["p_value"] is None
