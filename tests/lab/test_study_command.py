"""``hstree study``: a small study from its first run to its table, stopped in the middle."""

from __future__ import annotations

import json
import re
import signal
import statistics
from pathlib import Path

import pytest
from lm.training.toy import write_corpus

import hstree.lab.study
from hstree.__main__ import main
from hstree.lab import log_prob_rank
from hstree.lm.config import TrainConfig
from hstree.lm.report import Reporter
from hstree.lm.run import load_run
from lab.commands import csv_rows

STUDY = """\
seeds = [1, 2]
baseline = "softmax"
rank = { rows = 100 }

[settings]
data = "data"
embedding_size = 8
hidden_size = 8
batch_size = 8
bptt = 10
learning_rate = 0.01
warmup = 5
epochs = 1
device = "cpu"

[[models]]
head = "softmax"
[[models]]
head = "gss"
head_options = { k = [1.5, 2.5] }
"""
NAMES = [
    f"{model}-seed={seed}" for seed in (1, 2) for model in ("softmax", "gss-k=1.5", "gss-k=2.5")
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder that holds a small text and a study of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    write_corpus(tmp_path / "data", sentences=100)
    Path("toy.toml").write_text(STUDY)
    return tmp_path


class Stopper(Reporter):
    """Sends this process a signal when the run of some name has made five steps."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.steps, self.here = name, number, 0, False

    def message(self, text: str) -> None:
        self.here = self.here or f": {self.name}" in text

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.steps += 1
        if self.here and self.steps == 5:
            signal.raise_signal(self.number)


def rows() -> list[dict[str, str]]:
    return csv_rows("studies/toy/study.csv")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The one line on stderr of a command that must fail."""
    assert main(["study", *arguments]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_study_that_is_stopped_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["study", "toy.toml", "--dry-run"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[4:10]] == [
        [name, "waiting"] for name in NAMES
    ]
    assert not Path("studies").exists()

    assert main(["study", "toy.toml", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "run 1 of 6: softmax-seed=1\n" in out
    assert "note: 5 of 6 runs have not finished" in out
    assert "written to studies/toy: study.md, study.tex, study.csv" in out
    assert [row["state"] for row in rows()] == ["finished"] + ["waiting"] * 5

    for number, name in ((signal.SIGINT, NAMES[1]), (signal.SIGTERM, NAMES[3])):
        with monkeypatch.context() as patch:
            patch.setattr(
                hstree.lab.study,
                "ConsoleReporter",
                lambda name=name, number=number: Stopper(name, number),
            )
            error = fails(capsys, "toy.toml", status=128 + number)
        done = NAMES.index(name)
        assert error == (
            f"hstree: interrupted: {done} of 6 runs are finished; "
            "run the same command to continue\n"
        )
        assert [row["state"] for row in rows()][done] == "interrupted"
        assert main(["study", "toy.toml", "--dry-run"]) == 0
        assert f"{name}" + " interrupted" in " ".join(capsys.readouterr().out.split())

    assert main(["study", "toy.toml"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"run 4 of 6: {NAMES[3]}, about \d+ s of training left", out)
    assert "resuming studies/toy/runs/softmax-seed=2 in epoch 1, after step 5" in out
    assert "not finished" not in out

    found = rows()
    assert [row["state"] for row in found] == ["finished"] * 6
    assert [row["k"] for row in found] == ["", "1.5", "2.5"] * 2
    for row, name in zip(found, NAMES, strict=True):
        run = load_run(Path("studies/toy/runs") / name)
        assert run.config.seed == int(row["seed"])
        assert run.config.head_option == (() if row["k"] == "" else (f"k={row['k']}",))
        summary = json.loads((run.path / "summary.json").read_text())
        assert float(row["test_perplexity"]) == summary["test_perplexity"]
        ranks = log_prob_rank(run.model, run.corpus().test, rows=100)
        assert int(row["press_rank"]) == ranks.press_rank
        assert int(row["effective_rank_0.001"]) == ranks.effective_ranks[1e-3]
    tests = [float(row["test_perplexity"]) for row in found if row["k"] == "2.5"]
    cell = f"{statistics.mean(tests):.2f} ± {statistics.stdev(tests):.2f}"
    page = Path("studies/toy/study.md").read_text(encoding="utf-8")
    assert page.startswith("# toy\n")
    assert f" {cell} |" in page
    assert STUDY.strip() in page
    tex = Path("studies/toy/study.tex").read_text(encoding="utf-8")
    assert f" {cell} &".replace("±", r"$\pm$") in tex

    # Nothing is left to do, and nothing is done; what has changed is noticed.
    before = {path: path.stat().st_mtime_ns for path in Path("studies/toy/runs").rglob("*")}
    assert main(["study", "toy.toml"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    capsys.readouterr()
    Path("toy.toml").write_text(STUDY.replace("warmup = 5", "warmup = 6"))
    error = fails(capsys, "toy.toml")
    assert "softmax-seed=1: this run was made with warmup = 5, but the file now has 6" in error


@pytest.mark.slow
def test_a_large_study_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without work that grows with the runs beyond a look at their folders."""
    made: list[int] = []
    original = TrainConfig.__post_init__

    def counted(config: TrainConfig) -> None:
        made.append(1)
        original(config)

    monkeypatch.setattr(TrainConfig, "__post_init__", counted)
    Path("toy.toml").write_text(STUDY.replace("[1, 2]", str(list(range(200_000)))))
    assert main(["study", "toy.toml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "and 599,000 more runs: 599,000 waiting" in " ".join(out.split())
    assert len(out.splitlines()) < 1100
    assert len(made) < 100
    Path("toy.toml").write_text(STUDY.replace("[1, 2]", "[1, -1]"))
    assert "seeds: expected at least 0, got -1" in fails(capsys, "toy.toml", "--dry-run")


def test_a_run_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    text = STUDY.replace(
        '[[models]]\nhead = "gss"', '[[models]]\nhead = "mos"\nlearning_rate = 1e9'
    )
    text = text.replace("k = [1.5, 2.5]", "components = 2")
    Path("toy.toml").write_text(text.replace("[1, 2]", "1").replace("{ rows = 100 }", "false"))
    for _ in range(2):  # it is not tried again
        assert main(["study", "toy.toml", "--output", "studies/toy"]) == 1
        captured = capsys.readouterr()
        assert captured.err == ""
        assert "note: mos-seed=1 failed: " in captured.out
    assert "run 2 of 2" not in captured.out
    assert [row["state"] for row in rows()] == ["finished", "failed"]
    assert "learning_rate" in rows()[0]


def test_unusable_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no.toml: No such file" in fails(capsys, "no.toml")
    assert "expected at least 1, got 0" in fails(capsys, "toy.toml", "--limit", "0")
    Path("file").write_text("")
    assert "--output: expected a folder" in fails(capsys, "toy.toml", "--output", "file")
    Path("toy.toml").write_text(STUDY.replace('"data"', '"nothing"'))
    error = fails(capsys, "toy.toml")
    assert error == "hstree: model 'softmax': nothing: no such file or folder\n"
    Path("toy.toml").write_text(STUDY.replace("rows = 100", "rows = 1000"))
    error = fails(capsys, "toy.toml", "--limit", "1")
    assert "rank.rows: expected at most 123, the contexts of the test text of softmax-" in error
    assert rows()[0]["state"] == "without ranks"
    Path("toy.toml").write_text(STUDY.replace("{ k =", "{ q ="))
    assert "model 'gss': head_options: the head 'gss' has no option q" in fails(capsys, "toy.toml")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "expected a single process" in fails(capsys, "toy.toml")
