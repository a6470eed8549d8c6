"""``hstree compare``: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from lm.runs.made_up import write_run
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.lm.training import train
from lab.commands import refused

pytestmark = pytest.mark.usefixtures("elsewhere")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused(capsys, "compare", *arguments)


def seeds(head: str, tests: tuple[float, ...]) -> list[str]:
    return [
        str(write_run(Path(f"{head}-{seed}"), test=test, head=head, seed=seed))
        for seed, test in enumerate(tests)
    ]


def test_tables_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long = str(write_run(Path("r" * 60), (210.0,), None, head="gss", dropout=0.25))
    runs = [*seeds("softmax", (60.5, 61.25)), *seeds("mos", (55.0, 54.5)), long]
    assert main(["compare", *runs]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [line.split() for line in captured.out.splitlines()]
    row = "A softmax-0 softmax 0 dropout=0.4 3 2 120.50 60.50 24.22M 10,000 12.0 2,000"
    assert row.split() in lines
    assert ["C", "gss,", "dropout=0.25", "0", "of", "1", "-", "-", "-", "-"] in lines
    assert "whether groups differ by more than chance: hstree analyze significance" in captured.out
    assert f"note: {long} has not finished: 1 of 3 epochs completed" in captured.out
    assert "\x1b" not in captured.out


def test_narrow_terminal_keeps_numbers_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["compare", *seeds("softmax", (60.5, 61.25))]) == 0
    out = capsys.readouterr().out
    for cell in ("120.50", "60.50", "24.22M", "2,000", "softmax-0"):
        assert cell in out
    assert "\x1b" in out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_markdown_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    runs = seeds("softmax", (60.5, 61.25))
    assert main(["compare", *runs, "--format", "markdown"]) == 0
    assert "| A | softmax-1 | softmax | 1 | 3 | 2 | 120.50 | 61.25 |" in capsys.readouterr().out
    assert main(["compare", *runs, "--format", "csv", "--plot", "curves.svg"]) == 0
    captured = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(captured.out)))
    assert [row["test_perplexity"] for row in rows] == ["60.5", "61.25"]
    assert captured.err == "validation curves drawn in curves.svg\n"
    assert Path("curves.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two seeds of a trained model are one group with the figures of their own files; a copy of one
    without its summary is an unfinished run of the same group."""
    data = write_corpus(tmp_path / "data", sentences=100)
    results = [
        train(small_config(data, tmp_path / f"run-{seed}", seed=seed, epochs=2)) for seed in (1, 2)
    ]
    broken = shutil.copytree(results[0].run, tmp_path / "broken")
    (broken / "summary.json").unlink()
    runs = [str(result.run) for result in results]
    assert main(["compare", *runs, str(broken), "--format", "csv", "--plot", "curves.png"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["group"] for row in rows] == ["A", "A", "A"]
    for row, result in zip(rows, results, strict=False):
        summary = result.summary
        assert float(row["test_perplexity"]) == summary.test_perplexity
        assert float(row["valid_perplexity"]) == summary.valid_perplexity
        assert int(row["head_parameters"]) == summary.head_parameters
        assert int(row["backbone_parameters"]) == summary.backbone_parameters
        assert int(row["best_epoch"]) == summary.best_epoch
        seconds = sum(record.seconds for record in result.records) / 2
        assert float(row["seconds_per_epoch"]) == pytest.approx(seconds)
    assert rows[2]["test_perplexity"] == ""
    assert rows[2]["valid_perplexity"] == rows[0]["valid_perplexity"]
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *runs]) == 0
    assert " 2 of 2 " in capsys.readouterr().out


def test_config_of_an_older_version_takes_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    new = write_run(Path("new"), seed=2, bptt=35)  # 35 is the default of hstree train
    assert main(["compare", str(write_run(Path("old"))), str(new)]) == 0
    assert "settings that differ" not in capsys.readouterr().out


def test_unusable_arguments(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    run = str(write_run(Path("run")))
    (elsewhere / "empty").mkdir()
    assert "missing: no such run folder" in fails(capsys, run, "missing")
    assert "empty: not a run folder: config.json missing" in fails(capsys, run, "empty")
    assert "its subfolders are runs: name one of them" in fails(capsys, ".")
    assert "expected every run once" in fails(capsys, run, run)
    assert "the following arguments are required: RUN" in fails(capsys)
    assert "invalid choice: 'html'" in fails(capsys, run, "--format", "html")
    assert "ends in .png, .pdf or .svg, got x.gif" in fails(capsys, run, "--plot", "x.gif")
    assert "there is no folder no" in fails(capsys, run, "--plot", "no/x.png")
    (elsewhere / "run" / "metrics.jsonl").write_text(json.dumps([1]))
    assert "metrics.jsonl, line 1: expected a JSON object" in fails(capsys, run)
    young = str(write_run(Path("young"), (), None))
    assert "--plot: none of these runs has a completed epoch" in fails(
        capsys, young, "--plot", "x.png"
    )
    assert not (elsewhere / "x.png").exists()
