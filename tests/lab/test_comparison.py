"""Groups, statistics, tables and the picture of several runs."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
from lm.runs.made_up import write_run

from hstree.__main__ import main
from hstree.lab import compare
from hstree.lab.comparison import Comparison, comparison_tables, run_rows, spread
from hstree.lm.config import TrainConfig

SOFTMAX = (60.5, 61.25, 59.75)
MOS = (55.0, 54.5, 56.5, 55.25)


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Three seeds of a softmax, four of a MoS with another dropout, and an unfinished GSS."""
    monkeypatch.chdir(tmp_path)
    folders = [
        *(
            write_run(Path(f"softmax-{seed}"), test=test, seed=seed)
            for seed, test in enumerate(SOFTMAX)
        ),
        *(
            write_run(
                Path(f"mos-{seed}"),
                (90.0, 80.0 + seed, 70.0 - seed),
                test,
                3,
                seed=seed,
                head="mos",
                dropout=0.3,
                head_option=["components=15"],
            )
            for seed, test in enumerate(MOS)
        ),
        write_run(Path("gss"), (150.0,), None, head="gss"),
    ]
    return compare(folders)


def test_groups(comparison: Comparison) -> None:
    assert comparison.differing == ("dropout", "head_option")
    assert {name: len(runs) for name, runs in comparison.groups.items()} == {
        "softmax, dropout=0.4, head_option=-": 3,
        "mos, dropout=0.3, head_option=components=15": 4,
        "gss, dropout=0.4, head_option=-": 1,
    }
    assert comparison.notes == ("gss has not finished: 1 of 3 epochs completed",)


def test_default_is_not_a_difference(tmp_path: Path) -> None:
    """A config.json that does not hold a setting yet has its default."""
    default = TrainConfig().clip
    old = write_run(tmp_path / "old")
    same = compare([old, write_run(tmp_path / "new", seed=2, clip=default)])
    assert (same.differing, len(same.groups)) == ((), 1)
    assert compare([old, write_run(tmp_path / "other", clip=2 * default)]).differing == ("clip",)


def test_settings_that_a_head_does_not_read_are_no_difference(tmp_path: Path) -> None:
    """``clusters`` is one of trees: runs of other heads neither differ in it nor list it."""
    softmax = [write_run(tmp_path / str(seed), seed=seed, clusters=seed) for seed in (64, 256)]
    small, large = (
        write_run(tmp_path / f"trees-{clusters}", head="trees", clusters=clusters, n_trees=3)
        for clusters in (16, 64)
    )
    alone = compare(softmax)
    assert (alone.differing, len(alone.groups)) == ((), 1)
    assert compare([*softmax, small]).differing == ()  # but the head
    both = compare([*softmax, small, large])
    assert both.differing == ("clusters",)
    assert [*both.groups] == ["softmax", "trees, clusters=16", "trees, clusters=64"]
    assert [row["clusters"] for row in run_rows(both)] == [None, None, 16, 64]
    assert "clusters" not in run_rows(alone)[0]
    # The same holds for the run from which one was fine-tuned.
    tuned = [
        write_run(tmp_path / f"tuned-{n}", seed=n, finetune=str(path), optimizer="sgd")
        for n, path in enumerate(softmax)
    ]
    assert len(compare(tuned).groups) == 1


def test_mean_and_deviation() -> None:
    assert spread(MOS) == f"{np.mean(MOS):.2f} ± {np.std(MOS, ddof=1):.2f}"
    assert spread([*MOS, None], 0) == f"{np.mean(MOS):.0f} ± {np.std(MOS, ddof=1):.1f}"
    assert (spread([]), spread([None]), spread([5.0])) == ("-", "-", "5.00")
    assert (spread([1.0, math.inf]), spread([0.1] * 7)) == ("inf", "0.10 ± 0.00")


def test_what_is_noted(tmp_path: Path) -> None:
    """Different texts, and seeds that are repeated."""
    texts = [write_run(tmp_path / str(n), seed=n, summary={"classes": n}) for n in (100, 333)]
    assert any("their perplexities are not comparable" in note for note in compare(texts).notes)
    assert compare(texts[:1]).notes == ()
    again = write_run(tmp_path / "again", seed=100, summary={"classes": 100})
    (note,) = compare([texts[0], again]).notes
    assert "softmax has runs of the same seed (100)" in note


def test_tables(comparison: Comparison) -> None:
    runs, groups = comparison_tables(comparison)
    row = dict(zip(runs.header, runs.rows[3], strict=True))
    assert row == {
        "group": "2",
        "run": "mos-0",
        "head": "mos",
        "seed": "0",
        "dropout": "0.3",
        "head option": '["components=15"]',
        "epochs": "3",
        "best epoch": "3",
        "valid perplexity": "70.00",
        "test perplexity": "55.00",
        "backbone parameters": "24.22M",
        "head parameters": "10,000",
        "seconds per epoch": "12.0",
        "tokens per second": "2,000",
    }
    unfinished = dict(zip(runs.header, runs.rows[-1], strict=True))
    assert (unfinished["epochs"], unfinished["valid perplexity"]) == ("1", "150.00")
    assert unfinished["test perplexity"] == unfinished["head parameters"] == "-"
    assert groups.rows[0] == (
        *("1", "softmax, dropout=0.4, head_option=-", "3 of 3"),
        *("120.50 ± 0.00", "60.50 ± 0.75"),
    )
    assert groups.rows[2][2:] == ("0 of 1", "-", "-")


# The command


@pytest.mark.usefixtures("comparison")
def test_tables_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    long = str(write_run(Path("r" * 60), (210.0,), None, head="gss", dropout=0.25))
    assert main(["compare", "softmax-0", "softmax-1", "mos-0", "mos-1", long]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [line.split() for line in captured.out.splitlines()]
    row = "1 softmax-0 softmax 0 0.4 [] 3 2 120.50 60.50 24.22M 10,000 12.0 2,000"
    assert row.split() in lines
    assert f"note: {long} has not finished: 1 of 3 epochs completed" in captured.out
    assert "\x1b" not in captured.out

    assert main(["compare", "softmax-0", "softmax-1", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test_perplexity"] for row in rows] == ["60.5", "61.25"]
