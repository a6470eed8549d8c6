"""Correlations against numpy and by hand, outliers, the picture, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from hstree.__main__ import main
from hstree.lab import correlate
from hstree.lab.correlation import correlation_picture, correlation_table, outliers, within
from hstree.lm.report import COLOURS
from lab.commands import csv_rows, refused


def test_by_hand() -> None:
    """x = 1 .. 5, y = (2, 1, 4, 3, 5): sums of squares 10 and 10, of products 8, so r = 0.8; y is
    its own rank, so Spearman's is the same. p = P(|t| > 0.8 sqrt(3 / 0.36)), 3 degrees of
    freedom."""
    fit = correlate([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]).overall
    assert fit.n == 5
    assert fit.pearson == pytest.approx(0.8)
    assert fit.spearman == pytest.approx(0.8)
    t = 0.8 * math.sqrt(3 / 0.36)
    angle = math.atan(t / math.sqrt(3))
    p = 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))  # A&S 26.7.3
    assert fit.pearson_p == pytest.approx(p)
    assert fit.spearman_p == pytest.approx(p)
    assert (fit.slope, fit.intercept) == pytest.approx((0.8, 0.6))
    reach = 1.959963984540054 / math.sqrt(2)  # of Fisher's z, deviation 1 / sqrt(n - 3)
    z = math.atanh(0.8)
    assert (fit.low, fit.high) == pytest.approx((math.tanh(z - reach), math.tanh(z + reach)))


def test_random_points() -> None:
    generator = np.random.default_rng(5)
    x = generator.normal(size=60)
    y = 0.4 * x + generator.normal(size=60)
    fit = correlate(x.tolist(), y.tolist()).overall
    assert fit.pearson == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    assert fit.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert (fit.slope, fit.intercept) == pytest.approx(tuple(np.polyfit(x, y, 1)))


def test_spearman_of_ties() -> None:
    """Equal values share their mean rank: x has ranks 1.5, 1.5, 3, 4 and y 1, 2, 3.5, 3.5."""
    fit = correlate([1, 1, 2, 3], [5, 6, 7, 7]).overall
    assert fit.spearman == pytest.approx(np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5])[0, 1])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_points_on_a_line(sign: float) -> None:
    fit = correlate([0, 1, 2, 3], [0, sign * 2, sign * 4, sign * 6]).overall
    values = (fit.pearson, fit.spearman, fit.low, fit.high, fit.slope)
    assert values == pytest.approx((sign, sign, sign, sign, 2 * sign))
    assert fit.pearson_p == pytest.approx(0, abs=1e-12)


def test_three_points_say_nothing_of_the_interval() -> None:
    fit = correlate([1, 2, 3], [2, 4, 7]).overall
    assert (fit.low, fit.high) == (-1.0, 1.0)


def test_outliers_by_tukey() -> None:
    """Quartiles of 1 .. 9 are 3 and 7, so the fences are -3 and 13."""
    values = [*range(1, 8), -3.0, 13.0]
    assert not outliers(range(1, 10)).any()
    first, third = np.quantile(values, (0.25, 0.75))
    low, high = first - 1.5 * (third - first), third + 1.5 * (third - first)
    assert list(outliers(values)) == [not low <= value <= high for value in values]
    assert list(outliers([*[1, 2, 3, 4, 5, 6, 7, 8], 100])) == [False] * 8 + [True]
    assert list(outliers([*[1, 2, 3, 4, 5, 6, 7, 8], -100])) == [False] * 8 + [True]
    # The quartiles of these nine are 2 and 4, the fences -1 and 7; on the fence is within.
    edge = [1, 2, 2, 3, 3, 3, 4, 4, 7]
    assert not outliers(edge).any()
    assert list(outliers([*edge[:-1], 7.5])) == [False] * 8 + [True]


def test_with_and_without_outliers() -> None:
    """One point in x and one in y make the correlation; without them there is none."""
    x = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 2.5, 40.0]
    y = [1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 30.0, 30.0]
    result = correlate(x, y)
    assert result.outlier == (False,) * 8 + (True, True)
    assert sum(result.outlier) == 2
    assert result.overall.n == 10
    assert result.overall.pearson == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert result.inner is not None
    assert result.inner.n == 8
    assert result.inner.pearson == pytest.approx(0.0, abs=1e-12)
    table = correlation_table(result, "press rank", "test perplexity")
    assert [row[0] for row in table.rows] == ["all points", "without 2 outliers"]
    assert table.rows[1][2] in ("+0.000", "-0.000")


def test_nothing_left_without_outliers() -> None:
    x = [1.0, 1.0, 1.0, 1.0, 2.0]
    result = correlate(x, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert sum(result.outlier) == 1
    assert result.inner is None  # x does not vary any more
    assert len(correlation_table(result, "x", "y").rows) == 1
    correlation_picture(result, "x", "y")


def test_unusable_points() -> None:
    with pytest.raises(ValueError, match="y: expected 3 values, one for each of x, got 2"):
        correlate([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="expected at least three points, got 2"):
        correlate([1, 2], [1, 2])
    with pytest.raises(ValueError, match="x: expected values that vary, got 3 times 5"):
        correlate([5, 5, 5], [1, 2, 3])
    with pytest.raises(ValueError, match=r"y: expected values that vary, got 3 times 0\.3"):
        correlate([1, 2, 3], [0.3, 0.1 + 0.2, 0.3])
    with pytest.raises(ValueError, match="y: expected values that vary, got 3 times 0"):
        correlate([1, 2, 3], [0, 0, 0])
    with pytest.raises(ValueError, match="y: expected finite numbers"):
        correlate([1, 2, 3], [1, 2, math.nan])


X, Y = [1.0, 2.0, 3.0, 4.0, 5.0, 100.0], [3.0, 2.5, 2.0, 1.0, 1.5, 0.5]


def test_picture_with_a_legend() -> None:
    result = correlate(X, Y)
    heads = ["gss", "mos", "gss", "_$mos$", "gss", "gss"]
    figure = correlation_picture(result, "press rank", "perplexity", list("abcdef"), heads)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("press rank", "perplexity")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"all 6 points: Pearson {result.overall.pearson:+.2f}",
        f"without 1 outlier (open): Pearson {result.inner.pearson:+.2f}",
        "gss",
        "mos",
        r" _\$mos\$",
    ]
    assert [text.get_text() for text in axes.texts] == list("abcdef")
    gss = axes.collections[0]
    assert gss.get_offsets().tolist() == [[1.0, 3.0], [3.0, 2.0], [5.0, 1.5], [100.0, 0.5]]
    assert [colour[3] for colour in gss.get_facecolors()] == [1, 1, 1, 0]  # the outlier is open
    assert tuple(round(255 * c) for c in gss.get_edgecolors()[0][:3]) == tuple(
        bytes.fromhex(COLOURS[0][1:])
    )
    everything, inner = axes.lines
    assert list(everything.get_xdata()) == [1.0, 100.0]
    assert list(inner.get_xdata()) == [1.0, 5.0]
    assert inner.get_ydata()[0] == pytest.approx(result.inner.intercept + result.inner.slope)


def test_picture_with_a_scale() -> None:
    result = correlate(X, Y)
    numbers = ["1.25", "1.5", "2", "2", "3", "3"]
    figure = correlation_picture(result, "x", "y", None, numbers, "k")
    axes, bar = figure.axes
    assert bar.get_ylabel() == "k"
    assert not axes.texts
    assert len(axes.collections) == 6


def test_only_outliers_of_many_points_have_labels() -> None:
    x = [*map(float, range(30)), 500.0]
    result = correlate(x, [*map(float, range(31))])
    figure = correlation_picture(result, "x", "y", [f"p{i}" for i in range(31)])
    assert [text.get_text() for text in figure.axes[0].texts] == ["p30"]


# The command

RANKS = (100, 120, 150, 210, 330, 9000)
PERPLEXITIES = (66.5, 66.0, 66.25, 65.0, 65.5, 80.0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with such a file as hstree study writes: the last run is an outlier; one has
    no rank, one diverged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    lines = ["model,head,c,k,state,test_perplexity,press_rank"]
    lines += [
        f'"gss, c={i}, k=2",gss,{i},2,finished,{perplexity},{rank}'
        for i, (rank, perplexity) in enumerate(zip(RANKS, PERPLEXITIES, strict=True))
    ]
    lines += ["mos,mos,,,finished,60.0,", "gss,gss,8,2,failed,nan,200"]
    path = Path("study.csv")
    path.write_text("\n".join(lines) + "\n")
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused(capsys, "analyze", "correlation", *arguments, left="correlation")


def test_rank_against_perplexity(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "correlation", "study.csv", "--label", "c", "--group", "head"]) == 0
    out = capsys.readouterr().out
    assert "without 1 outliers" not in out
    assert "without 1 outlier" in out
    assert "(Tukey); here 1 of 6" in out
    assert "note: 1 line of study.csv skipped: an empty cell" in out
    assert "note: 1 line of study.csv skipped: nan or infinity" in out
    folder = Path("correlation")
    data = json.loads((folder / "correlation.json").read_text())
    assert (data["x"], data["y"], data["left_out"]) == ("press_rank", "test_perplexity", 2)
    assert data["all"]["pearson"] == pytest.approx(np.corrcoef(RANKS, PERPLEXITIES)[0, 1])
    inner = np.corrcoef(RANKS[:-1], PERPLEXITIES[:-1])[0, 1]
    assert data["without_outliers"]["pearson"] == pytest.approx(inner)
    rows = csv_rows(folder / "correlation.csv")
    assert [float(row["press_rank"]) for row in rows] == list(RANKS)
    assert [row["outlier"] for row in rows] == ["false"] * 5 + ["true"]
    assert [row["label"] for row in rows] == list("012345")
    assert (folder / "correlation.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "correlation.md").read_text()
    assert page.startswith("# Press rank against test perplexity\n")
    assert "![correlation](correlation.png)" in page


def test_other_columns(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two labels are told apart by name; a group of numbers is a scale."""
    arguments = ["--x", "c", "--label", "c", "--label", "k", "--group", "k", "--output", "other"]
    assert main(["analyze", "correlation", "study.csv", *arguments]) == 0
    rows = csv_rows("other/correlation.csv")
    assert [row["label"] for row in rows] == [f"c={i}, k=2" for i in range(6)]
    assert "Correlation of test perplexity with c" in capsys.readouterr().out


def test_effect_of_the_seed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within each seed y falls by 1 as x rises by 1; the seeds hide it."""
    monkeypatch.chdir(tmp_path)
    lines = ["seed,press_rank,test_perplexity"]
    lines += [f"{s},{i + 10 * s},{20 * s - i}" for s in range(3) for i in range(4)]
    Path("runs.csv").write_text("\n".join(lines) + "\n")
    found = {}
    for arguments in ([], ["--within", "seed"]):
        command = ["analyze", "correlation", "runs.csv", "--output", "out", *arguments]
        assert main(command) == 0
        found[len(arguments)] = json.loads(Path("out/correlation.json").read_text())
    assert found[0]["all"]["pearson"] > 0.9
    assert found[2]["all"]["pearson"] == pytest.approx(-1.0)
    assert found[2]["all"]["slope"] == pytest.approx(-1.0)
    assert found[2]["within"] == "seed"
    assert found[2]["groups"] == 3
    note = "equal seed, in 3 groups: 2 degrees of freedom less in the interval and the p-values"
    assert note in Path("out/correlation.md").read_text()
    means = within([1.0, 2.0, 10.0], ["a", "a", "b"])  # 1.5 and 10 become 13 / 3
    assert means == pytest.approx([13 / 3 - 0.5, 13 / 3 + 0.5, 13 / 3])


def test_removed_groups_take_degrees_of_freedom() -> None:
    """The t-test of the slope in a regression with a term for each of three groups: p is that of
    ``correlate`` on what :func:`within` leaves, and the interval that of n - 2 points."""
    generator = np.random.default_rng(11)
    names = np.repeat(["a", "b", "c"], 8)
    offsets = {"a": 0.0, "b": 5.0, "c": -3.0}
    x = generator.normal(size=24) + [offsets[name] for name in names]
    y = 0.5 * x + generator.normal(size=24) - [2 * offsets[name] for name in names]
    fit = correlate(within(x, names), within(y, names), groups=3).overall
    design = np.column_stack([x, *(names == name for name in "abc")])
    solution, squares, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = squares[0] / (24 - 4) * np.linalg.inv(design.T @ design)[0, 0]
    t = solution[0] / math.sqrt(variance)
    assert fit.slope == pytest.approx(solution[0])
    assert fit.pearson_p == pytest.approx(2 * scipy.stats.t.sf(abs(t), 20))
    reach = 1.959963984540054 / math.sqrt(24 - 3 - 2)
    z = math.atanh(fit.pearson)
    assert (fit.low, fit.high) == pytest.approx((math.tanh(z - reach), math.tanh(z + reach)))
    independent = correlate(within(x, names), within(y, names)).overall
    assert independent.low > fit.low
    assert independent.pearson_p < fit.pearson_p


def test_too_few_points_for_the_groups() -> None:
    with pytest.raises(ValueError, match="expected at least 5 points for 3 groups, got 4"):
        correlate([1, 2, 3, 4], [1, 3, 2, 4], groups=3)


def test_unusable_arguments(capsys: pytest.CaptureFixture[str], table: Path) -> None:
    listed = "(model, head, c, k, state, test_perplexity, press_rank)"
    assert fails(capsys, "study.csv", "--x", "rank").endswith(
        f"--x: expected one of the columns of study.csv {listed}, got rank\n"
    )
    assert "--group: expected one of" in fails(capsys, "study.csv", "--group", "size")
    assert "--label size: expected one of" in fails(capsys, "study.csv", "--label", "size")
    message = "study.csv, line 2: expected a number in column state, got 'finished'"
    assert message in fails(capsys, "study.csv", "--y", "state")
    assert "missing.csv" in fails(capsys, "missing.csv")
    message = "study.csv, x = press_rank, y = k: y: expected values that vary, got 7 times 2"
    assert message in fails(capsys, "study.csv", "--y", "k")
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:3]))
    assert "expected at least three points, got 2" in fails(capsys, "study.csv")
