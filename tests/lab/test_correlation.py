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
from hstree.lab.correlation import correlation_picture, outliers, within


def test_by_hand() -> None:
    """x = 1 .. 5, y = (2, 1, 4, 3, 5): sums of squares 10 and 10, of products 8, so r = 0.8; y is
    its own rank, so Spearman's is the same. p = P(|t| > 0.8 sqrt(3 / 0.36)), 3 degrees of
    freedom."""
    (fit,) = correlate([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert (fit["points"], fit["n"]) == ("all points", 5)
    assert [fit[key] for key in ("Pearson", "Spearman", "slope")] == pytest.approx([0.8] * 3)
    t = 0.8 * math.sqrt(3 / 0.36)
    angle = math.atan(t / math.sqrt(3))
    p = 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))  # A&S 26.7.3
    assert [fit["Pearson p"], fit["Spearman p"]] == pytest.approx([p, p])
    reach = 1.959963984540054 / math.sqrt(2)  # of Fisher's z, deviation 1 / sqrt(n - 3)
    z = math.atanh(0.8)
    assert fit["95% interval"] == pytest.approx((math.tanh(z - reach), math.tanh(z + reach)))


def test_random_points() -> None:
    generator = np.random.default_rng(5)
    x = generator.normal(size=60)
    y = 0.4 * x + generator.normal(size=60)
    fit = correlate(x.tolist(), y.tolist())[0]
    assert fit["Pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    assert fit["Spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert fit["slope"] == pytest.approx(np.polyfit(x, y, 1)[0])


def test_spearman_of_ties() -> None:
    """Equal values share their mean rank: x has ranks 1.5, 1.5, 3, 4 and y 1, 2, 3.5, 3.5."""
    expected = np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5])[0, 1]
    assert correlate([1, 1, 2, 3], [5, 6, 7, 7])[0]["Spearman"] == pytest.approx(expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_points_on_a_line(sign: float) -> None:
    (fit,) = correlate([0, 1, 2, 3], [0, sign * 2, sign * 4, sign * 6])
    values = (fit["Pearson"], fit["Spearman"], *fit["95% interval"], fit["slope"])
    assert values == pytest.approx((sign, sign, sign, sign, 2 * sign))
    assert fit["Pearson p"] == pytest.approx(0, abs=1e-12)


def test_three_points_say_nothing_of_the_interval() -> None:
    assert correlate([1, 2, 3], [2, 4, 7])[0]["95% interval"] == (-1.0, 1.0)


def test_outliers_by_tukey() -> None:
    """Quartiles of 1 .. 9 are 3 and 7, so the fences are -3 and 13."""
    assert not outliers(range(1, 10)).any()
    for far in (100, -100):
        assert outliers([1, 2, 3, 4, 5, 6, 7, 8, far]).tolist() == [False] * 8 + [True]
    # The quartiles of these nine are 2 and 4, the fences -1 and 7; on the fence is within.
    assert outliers([-1.0, 2, 2, 2, 3, 4, 4, 4, 7.001]).tolist() == [False] * 8 + [True]


def test_correlation_without_outliers() -> None:
    """Two far points make a correlation of what has none; each is far in one coordinate."""
    x = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 2.5, 40.0]
    y = [1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 30.0, 30.0]
    assert outliers(x, y).tolist() == [False] * 8 + [True, True]
    every, inner = correlate(x, y)
    assert (every["n"], inner["n"], inner["points"]) == (10, 8, "without 2 outliers")
    assert every["Pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert inner["Pearson"] == pytest.approx(0.0, abs=1e-12)
    # Without its outlier, this x does not vary any more.
    assert len(correlate([1.0, 1.0, 1.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0])) == 1


def test_unusable_points() -> None:
    for x, y, message in (
        ([1, 2, 3], [1, 2], "expected at least 3 points, got 3 and 2"),
        ([1, 2], [1, 2], "expected at least 3 points, got 2 and 2"),
        ([5, 5, 5], [1, 2, 3], "x: expected values that vary, got 3 times 5"),
        ([1, 2, 3], [0.3, 0.1 + 0.2, 0.3], r"y: expected values that vary, got 3 times 0\.3"),
        ([1, 2, 3], [0, 0, 0], "y: expected values that vary, got 3 times 0"),
        ([1, 2, 3], [1, 2, math.nan], "y: expected finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            correlate(x, y)
    with pytest.raises(ValueError, match="expected at least 5 points, got 4 and 4"):
        correlate([1, 2, 3, 4], [1, 3, 2, 4], groups=3)


def test_picture() -> None:
    """Open markers are the outliers; the lines end where their points do, with their fit."""
    points = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 100.0], [3.0, 2.5, 2.0, 1.0, 1.5, 0.5]])
    found = correlate(*points)
    (axes,) = correlation_picture(points, found).axes
    (drawn,) = axes.collections
    assert drawn.get_offsets().tolist() == points.T.tolist()
    assert [colour[3] for colour in drawn.get_facecolors()] == [1] * 5 + [0]
    for line, end, count in zip(axes.lines, (100.0, 5.0), (6, 5), strict=True):
        assert list(line.get_xdata()) == [1.0, end]
        expected = np.polyval(np.polyfit(*points[:, :count], 1), [1.0, end])
        np.testing.assert_allclose(line.get_ydata(), expected)


def test_removed_groups_take_degrees_of_freedom() -> None:
    """The t-test of the slope in a regression with a term for each of three groups: p is that of
    ``correlate`` on what :func:`within` leaves, and the interval that of n - 2 points."""
    generator = np.random.default_rng(11)
    names = np.repeat(["a", "b", "c"], 8)
    offsets = {"a": 0.0, "b": 5.0, "c": -3.0}
    x = generator.normal(size=24) + [offsets[name] for name in names]
    y = 0.5 * x + generator.normal(size=24) - [2 * offsets[name] for name in names]
    fit = correlate(within(x, names), within(y, names), groups=3)[0]
    design = np.column_stack([x, *(names == name for name in "abc")])
    solution, squares, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = squares[0] / (24 - 4) * np.linalg.inv(design.T @ design)[0, 0]
    t = solution[0] / math.sqrt(variance)
    assert fit["slope"] == pytest.approx(solution[0])
    assert fit["Pearson p"] == pytest.approx(2 * scipy.stats.t.sf(abs(t), 20))
    reach = 1.959963984540054 / math.sqrt(24 - 3 - 2)
    z = math.atanh(fit["Pearson"])
    assert fit["95% interval"] == pytest.approx((math.tanh(z - reach), math.tanh(z + reach)))
    means = within([1.0, 2.0, 10.0], ["a", "a", "b"])  # 1.5 and 10 become 13 / 3
    assert means == pytest.approx([13 / 3 - 0.5, 13 / 3 + 0.5, 13 / 3])


# The command

RANKS = (100, 120, 150, 210, 330, 9000)
PERPLEXITIES = (66.5, 66.0, 66.25, 65.0, 65.5, 80.0)


@pytest.fixture
def table(elsewhere: Path) -> Path:
    """Such a file as hstree study writes: the last run is an outlier; one has no rank, one
    diverged."""
    lines = ["model,seed,k,state,test_perplexity,press_rank"]
    pairs = zip(PERPLEXITIES, RANKS, strict=True)
    lines += [f'"gss, k=2",{i % 2},2,finished,{y},{x}' for i, (y, x) in enumerate(pairs)]
    lines += ["mos,1,,finished,60.0,", "gss,1,2,failed,nan,200"]
    path = elsewhere / "study.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.usefixtures("table")
def test_page_figures_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "correlation", "study.csv"]) == 0
    out = capsys.readouterr().out
    assert "(Tukey); here 1 of 6" in out
    assert "note: 1 line of study.csv skipped: an empty cell" in out
    assert "note: 1 line of study.csv skipped: nan or infinity" in out
    folder = Path("correlation")
    data = json.loads((folder / "correlation.json").read_text())
    every, inner = data["Correlation of test perplexity with Press rank"]
    assert every["Pearson"] == pytest.approx(np.corrcoef(RANKS, PERPLEXITIES)[0, 1])
    assert inner["points"] == "without 1 outlier"
    assert inner["Pearson"] == pytest.approx(np.corrcoef(RANKS[:-1], PERPLEXITIES[:-1])[0, 1])
    assert (data["x"], data["y"]) == ([*RANKS], [*PERPLEXITIES])
    assert data["outlier"] == [False] * 5 + [True]
    assert (folder / "correlation.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "correlation.md").read_text()
    assert page.startswith("# Press rank against test perplexity\n")
    assert "![correlation](correlation.png)" in page


@pytest.mark.usefixtures("elsewhere")
def test_effect_of_the_seed_is_removed() -> None:
    """Within each seed y falls by 1 as x rises by 1; the seeds hide it."""
    lines = ["seed,rank,test_perplexity"]
    lines += [f"{s},{i + 10 * s},{20 * s - i}" for s in range(3) for i in range(4)]
    Path("runs.csv").write_text("\n".join(lines) + "\n")
    command = ["analyze", "correlation", "runs.csv", "--x", "rank", "--output", "out"]
    for arguments, expected in (([], 0.97), (["--within", "seed"], -1.0)):
        assert main([*command, *arguments]) == 0
        found = json.loads(Path("out/correlation.json").read_text())
        (fit,) = found["Correlation of test perplexity with rank"]
        assert fit["Pearson"] == pytest.approx(expected, abs=0.02)
    note = "equal seed, in 3 groups: 2 degrees of freedom less in the interval and the p-values"
    assert note in Path("out/correlation.md").read_text()
