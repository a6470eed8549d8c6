"""Groups, statistics, tables and the picture of several runs."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
from lm.runs.made_up import write_run

from hstree.lab import (
    Comparison,
    compare,
    mean_and_deviation,
    to_csv,
    to_markdown,
    validation_curves,
)
from hstree.lab.comparison.report import comparison_tables
from hstree.lm._pictures import COLOURS, picture
from hstree.lm.training import TrainConfig

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
    assert [(g.label, g.head, len(g.runs)) for g in comparison.groups] == [
        ("A", "softmax", 3),
        ("B", "mos", 4),
        ("C", "gss", 1),
    ]
    assert [len(g.finished) for g in comparison.groups] == [3, 4, 0]
    assert comparison.groups[1].description == "mos, dropout=0.3, head_option=components=15"
    assert comparison.groups[1].valid_perplexities == [70.0, 69.0, 68.0, 67.0]
    assert [comparison.label(run) for run in comparison.runs] == list("AAABBBBC")
    assert comparison.notes == ("gss has not finished: 1 of 3 epochs completed",)


def test_groups_do_not_depend_on_the_order_of_runs_and_settings(tmp_path: Path) -> None:
    a, b, c = (
        write_run(tmp_path / name, seed=seed, dropout=dropout)
        for name, seed, dropout in (("a", 1, 0.1), ("b", 2, 0.2), ("c", 3, 0.1))
    )
    text = (c / "config.json").read_text()
    (c / "config.json").write_text('{"seed": 3,' + text[1:].replace(', "seed": 3', ""))
    groups = compare([a, b, c]).groups
    assert [[run.path for run in group.runs] for group in groups] == [[a, c], [b]]


def test_default_is_not_a_difference(tmp_path: Path) -> None:
    """A config.json that does not hold a setting yet has its default."""
    default = TrainConfig().clip
    old = write_run(tmp_path / "old")
    same = compare([old, write_run(tmp_path / "new", seed=2, clip=default)])
    assert (same.differing, len(same.groups)) == ((), 1)
    assert compare([old, write_run(tmp_path / "other", clip=2 * default)]).differing == ("clip",)


def test_settings_that_a_head_does_not_read_are_no_difference(tmp_path: Path) -> None:
    """``root`` is one of trees: runs of other heads neither differ in it nor list it."""
    softmax = [write_run(tmp_path / str(seed), seed=seed, root=seed) for seed in (64, 256)]
    small, large = (
        write_run(tmp_path / f"trees-{root}", head="trees", root=root, n_trees=3)
        for root in (16, 64)
    )
    alone = compare(softmax)
    assert (alone.differing, len(alone.groups)) == ((), 1)
    assert compare([*softmax, small]).differing == ()  # but the head
    both = compare([*softmax, small, large])
    assert both.differing == ("root",)
    descriptions = [group.description for group in both.groups]
    assert descriptions == ["softmax", "trees, root=16", "trees, root=64"]
    table, _ = comparison_tables(both)
    column = table.header.index("settings that differ")
    assert [row[column] for row in table.rows] == ["", "", "root=16", "root=64"]
    assert "root=" not in to_markdown(alone)
    rows = list(csv.DictReader(io.StringIO(to_csv(both))))
    assert [row["root"] for row in rows] == ["", "", "16", "64"]
    # The same holds for the run from which one was fine-tuned.
    tuned = [
        write_run(tmp_path / f"tuned-{n}", seed=n, finetune=str(path), optimizer="sgd")
        for n, path in enumerate(softmax)
    ]
    assert len(compare(tuned).groups) == 1


def test_many_groups_have_labels_of_two_letters(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(n), dropout=n / 100) for n in range(28)]
    labels = [group.label for group in compare(paths).groups]
    assert labels[:2] + labels[25:] == ["A", "B", "Z", "AA", "AB"]


def test_mean_and_deviation() -> None:
    values = list(MOS)
    result = mean_and_deviation(values)
    assert result is not None
    assert result.n == 4
    assert result.mean == pytest.approx(np.mean(values), rel=1e-15)
    assert result.deviation == pytest.approx(np.std(values, ddof=1), rel=1e-14)
    assert mean_and_deviation([]) is None
    one = mean_and_deviation([5.0])
    assert one is not None
    assert one.mean == 5.0
    assert math.isnan(one.deviation)
    infinite = mean_and_deviation([1.0, math.inf])
    assert infinite is not None
    assert infinite.mean == math.inf
    assert math.isnan(infinite.deviation)
    equal = mean_and_deviation([0.1] * 7)
    assert equal is not None
    assert equal.deviation == 0.0


def test_different_texts_are_noted(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / str(classes), summary={"classes": classes})
        for classes in (10_000, 33_278)
    ]
    assert any("their perplexities are not comparable" in note for note in compare(paths).notes)
    assert compare(paths[:1]).notes == ()


def test_repeated_seeds_are_noted(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(n), seed=seed) for n, seed in enumerate((1, 2, 1))]
    (note,) = compare(paths).notes
    assert "group A has runs of the same seed (1)" in note


def test_unusable_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one run folder"):
        compare([])
    folder = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="expected every run once, got this folder twice"):
        compare([folder, tmp_path / "." / "run" / ".." / "run"])
    with pytest.raises(ValueError, match="no such run folder"):
        compare([folder, tmp_path / "missing"])


# Tables


def test_tables(comparison: Comparison) -> None:
    runs, groups = comparison_tables(comparison)
    row = dict(zip(runs.header, runs.rows[3], strict=True))
    assert row == {
        "group": "B",
        "run": "mos-0",
        "head": "mos",
        "seed": "0",
        "settings that differ": "dropout=0.3, head_option=components=15",
        "epochs": "3",
        "best epoch": "3",
        "valid perplexity": "70.00",
        "test perplexity": "55.00",
        "backbone parameters": "24.22M",
        "head parameters": "10,000",
        "s per epoch": "12.0",
        "tokens/s": "2,000",
    }
    unfinished = dict(zip(runs.header, runs.rows[-1], strict=True))
    assert (unfinished["epochs"], unfinished["valid perplexity"]) == ("1 of 3", "150.00")
    assert unfinished["test perplexity"] == unfinished["head parameters"] == "-"
    assert groups.rows[0] == (
        *("A", "softmax, dropout=0.4, head_option=-", "3 of 3"),
        *("120.50", "0.00", "60.50", "0.75"),
    )
    assert groups.rows[2][2:] == ("0 of 1", "-", "-", "-", "-")
    for table in (runs, groups):
        assert {len(table.header), len(table.right)} == {len(row) for row in table.rows}


def test_runs_without_seeds_have_one_table(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", tied=True)]
    (table,) = comparison_tables(compare(paths))
    assert "group" not in table.header
    cells = [row[table.header.index("settings that differ")] for row in table.rows]
    assert cells == ["tied=no", "tied=yes"]
    (single,) = comparison_tables(compare(paths[:1]))
    assert "settings that differ" not in single.header


def test_markdown(tmp_path: Path, comparison: Comparison) -> None:
    text = to_markdown(comparison)
    lines = text.splitlines()
    assert lines[0] == "**Runs**"
    assert lines[2].startswith("| group | run | head | seed |")
    assert lines[3].startswith("| --- | --- | --- | ---: |")
    assert "| A | softmax-0 | softmax | 0 |" in text
    assert "- gss has not finished: 1 of 3 epochs completed" in lines
    strange = write_run(tmp_path / "a|b")
    assert "a\\|b" in to_markdown(compare([strange]))


def test_csv(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert len(rows) == 8
    assert [float(row["test_perplexity"]) for row in rows[3:7]] == list(MOS)
    assert rows[3]["head_option"] == '["components=15"]'
    assert [row["finished"] for row in rows[6:]] == ["true", "false"]
    last = rows[-1]
    assert (last["run"], last["epochs_ended"], last["test_perplexity"]) == ("gss", "1", "")
    assert last["head_parameters"] == ""
    assert rows[0]["backbone_parameters"] == "24221600"


# The picture


@pytest.mark.parametrize(
    ("file_format", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_picture(comparison: Comparison, file_format: str, start: bytes) -> None:
    assert picture(validation_curves(comparison), file_format).startswith(start)


def test_picture_has_the_curves(comparison: Comparison) -> None:
    figure = validation_curves(comparison)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "epoch (passes over the training text)"
    assert axes.get_ylabel() == "validation perplexity per token (log scale)"
    curves = [line for line in axes.lines if line.get_linestyle() != "None"]
    assert len(curves) == 8
    assert list(curves[3].get_xdata()) == [1, 2, 3]
    assert list(curves[3].get_ydata()) == pytest.approx([90.0, 80.0, 70.0])
    assert [c.get_color() for c in curves] == [COLOURS[i] for i in (0, 0, 0, 1, 1, 1, 1, 2)]
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert [label[:2] for label in labels] == ["A:", "B:", "C:"]
    assert labels[1] == "B: mos, dropout=0.3, head_option=components=15 (4 runs)"
    averaged = [line for line in axes.lines if line.get_marker() == "D"]
    assert [list(line.get_xdata()) for line in averaged] == [[3]] * 4


def test_picture_of_awkward_runs(tmp_path: Path) -> None:
    """Names that matplotlib would read as formulas, infinite perplexities, more runs than
    colours."""
    paths = [
        write_run(tmp_path / f"_$x_{n}$", (math.inf, 90.0 + n), dropout=n / 100)
        for n in range(len(COLOURS) + 2)
    ]
    assert picture(validation_curves(compare(paths))).startswith(b"\x89PNG")


def test_picture_needs_an_epoch_and_a_format(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", (), None)
    with pytest.raises(ValueError, match="at least one completed epoch"):
        validation_curves(compare([folder]))
    with pytest.raises(ValueError, match="expected one of png, pdf, svg, got 'gif'"):
        picture(validation_curves(compare([write_run(tmp_path / "other")])), "gif")


def lightness(colour: str) -> float:
    """Relative luminance of #rrggbb in [0, 1] (sRGB, IEC 61966-2-1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_colours_stand_out_from_white() -> None:
    assert len(set(COLOURS)) == len(COLOURS)
    assert all(1.05 / (lightness(colour) + 0.05) > 2 for colour in COLOURS)
