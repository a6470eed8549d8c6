"""Correlations against numpy and by hand, outliers, and the picture."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hstree._figures import COLOURS
from hstree.analysis import correlation, correlation_plot, correlation_table, outliers


def test_by_hand() -> None:
    """x = 1 .. 5, y = (2, 1, 4, 3, 5): sums of squares 10 and 10, of products 8, so r = 0.8; y is
    its own rank, so Spearman's is the same. p = P(|t| > 0.8 sqrt(3 / 0.36)), 3 degrees of
    freedom."""
    fit = correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]).overall
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
    fit = correlation(x.tolist(), y.tolist()).overall
    assert fit.pearson == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    assert fit.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert (fit.slope, fit.intercept) == pytest.approx(tuple(np.polyfit(x, y, 1)))


def test_spearman_of_ties() -> None:
    """Equal values share their mean rank: x has ranks 1.5, 1.5, 3, 4 and y 1, 2, 3.5, 3.5."""
    fit = correlation([1, 1, 2, 3], [5, 6, 7, 7]).overall
    assert fit.spearman == pytest.approx(np.corrcoef([1.5, 1.5, 3, 4], [1, 2, 3.5, 3.5])[0, 1])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_points_on_a_line(sign: float) -> None:
    fit = correlation([0, 1, 2, 3], [0, sign * 2, sign * 4, sign * 6]).overall
    values = (fit.pearson, fit.spearman, fit.low, fit.high, fit.slope)
    assert values == pytest.approx((sign, sign, sign, sign, 2 * sign))
    assert fit.pearson_p == pytest.approx(0, abs=1e-12)


def test_three_points_say_nothing_of_the_interval() -> None:
    fit = correlation([1, 2, 3], [2, 4, 7]).overall
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
    result = correlation(x, y)
    assert result.outlier == (False,) * 8 + (True, True)
    assert result.outliers == 2
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
    result = correlation(x, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.outliers == 1
    assert result.inner is None  # x does not vary any more
    assert len(correlation_table(result, "x", "y").rows) == 1
    assert correlation_plot(result, "x", "y").startswith(b"\x89PNG")


def test_unusable_points() -> None:
    with pytest.raises(ValueError, match="y: expected 3 values, one for each of x, got 2"):
        correlation([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="needs at least three points, got 2"):
        correlation([1, 2], [1, 2])
    with pytest.raises(ValueError, match="x: expected values that vary, got 3 times 5"):
        correlation([5, 5, 5], [1, 2, 3])
    with pytest.raises(ValueError, match=r"y: expected values that vary, got 3 times 0\.3"):
        correlation([1, 2, 3], [0.3, 0.1 + 0.2, 0.3])
    with pytest.raises(ValueError, match="y: expected values that vary, got 3 times 0"):
        correlation([1, 2, 3], [0, 0, 0])
    with pytest.raises(ValueError, match="y: expected finite numbers"):
        correlation([1, 2, 3], [1, 2, math.nan])


def figure_of(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    import matplotlib.figure

    figures = []

    def keep(figure: matplotlib.figure.Figure, *_: object, **__: object) -> None:
        figures.append(figure)

    with monkeypatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", keep)
        correlation_plot(*arguments)  # type: ignore[arg-type]
    return figures[0]


X, Y = [1.0, 2.0, 3.0, 4.0, 5.0, 100.0], [3.0, 2.5, 2.0, 1.0, 1.5, 0.5]


def test_picture_with_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    result = correlation(X, Y)
    heads = ["gss", "mos", "gss", "_$mos$", "gss", "gss"]
    figure = figure_of(monkeypatch, result, "press rank", "perplexity", list("abcdef"), heads)
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


def test_picture_with_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    result = correlation(X, Y)
    numbers = ["1.25", "1.5", "2", "2", "3", "3"]
    figure = figure_of(monkeypatch, result, "x", "y", None, numbers, "k")
    axes, bar = figure.axes
    assert bar.get_ylabel() == "k"
    assert not axes.texts
    assert len(axes.collections) == 6


def test_only_outliers_of_many_points_have_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [*map(float, range(30)), 500.0]
    result = correlation(x, [*map(float, range(31))])
    figure = figure_of(monkeypatch, result, "x", "y", [f"p{i}" for i in range(31)])
    assert [text.get_text() for text in figure.axes[0].texts] == ["p30"]


def test_picture_needs_a_label_and_group_for_each_point() -> None:
    result = correlation(X, Y)
    with pytest.raises(ValueError, match="labels: expected 6, one a point, got 1"):
        correlation_plot(result, "x", "y", ["a"])
    with pytest.raises(ValueError, match="groups: expected 6, one a point, got 2"):
        correlation_plot(result, "x", "y", None, ["a", "b"])
