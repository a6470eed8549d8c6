"""t-tests against scipy's formulas and by hand, Holm's correction, degenerate groups, tables, and
the picture."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats

from hstree._figures import COLOURS
from hstree.analysis import (
    compare,
    holm,
    model_perplexities,
    significance,
    significance_plot,
    significance_tables,
    t_test,
)
from hstree.analysis.table import probability

from .made_up import write_run

SOFTMAX = (60.5, 61.25, 59.75)
MOS = (55.0, 54.5, 56.5, 55.25)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 10), (10, 4), (10, 10)])
def test_t_test_equals_the_formula(n: int, m: int, equal: bool) -> None:
    """Both formulas with Student's distribution function; the interval by its quantile."""
    generator = np.random.default_rng(n + m)
    first, second = generator.normal(57.0, 0.1, n), generator.normal(56.9, 0.3, m)
    result = t_test(first.tolist(), second.tolist(), equal_variances=equal)
    variances = np.var(first, ddof=1), np.var(second, ddof=1)
    if equal:
        df = n + m - 2.0
        error = ((n - 1) * variances[0] + (m - 1) * variances[1]) / df * (1 / n + 1 / m)
    else:
        parts = variances[0] / n, variances[1] / m
        error = sum(parts)
        df = error**2 / (parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (m - 1))
    difference = first.mean() - second.mean()
    t = difference / math.sqrt(error)
    reach = scipy.special.stdtrit(df, 0.975) * math.sqrt(error)
    assert result.difference == pytest.approx(difference, rel=1e-9)
    assert result.statistic == pytest.approx(t, rel=1e-9)
    assert result.degrees_of_freedom == pytest.approx(df, rel=1e-9)
    assert result.p_value == pytest.approx(2 * scipy.special.stdtr(df, -abs(t)), rel=1e-8)
    assert result.low == pytest.approx(difference - reach, rel=1e-9)
    assert result.high == pytest.approx(difference + reach, rel=1e-9)


def test_t_test_by_hand() -> None:
    """Means 2 and 5, both variances 1, both n 3: t = -3 / sqrt(2/3), and for 4 degrees of freedom
    p = 1 - sin(a) (1 + cos(a)^2 / 2) with tan(a) = |t| / 2 (Abramowitz and Stegun 26.7.4)."""
    result = t_test([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], equal_variances=True)
    t = -3 / math.sqrt(2 / 3)
    assert result.statistic == pytest.approx(t)
    assert result.degrees_of_freedom == 4
    s = abs(t) / math.sqrt(4 + t * t)  # sin(a)
    assert result.p_value == pytest.approx(1 - s * (1 + (1 - s * s) / 2))
    assert (result.low + result.high) / 2 == pytest.approx(-3)
    welch = t_test([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])  # equal variances and n: the same test
    assert dataclasses.astuple(welch) == pytest.approx(dataclasses.astuple(result))


@pytest.mark.parametrize("equal", [False, True])
def test_t_test_of_degenerate_groups(equal: bool) -> None:
    for first, second, difference in (
        ([1.0, 1.0], [2.0, 2.0], -1.0),
        ([0.1] * 7, [0.1] * 3, 0.0),
        ([1.0, math.inf], [2.0, 3.0], math.inf),
        ([1.0, math.nan], [2.0, 3.0], math.nan),
    ):
        result = t_test(first, second, equal_variances=equal)
        assert result.difference == pytest.approx(difference, abs=1e-16, nan_ok=True)
        others = dataclasses.asdict(result) | {"difference": math.nan}
        assert all(map(math.isnan, others.values()))
    one = t_test([0.1] * 7, [0.2, 0.3], equal_variances=equal)  # scipy warns here
    assert 0 < one.p_value < 1
    assert one.low < one.difference < one.high
    with pytest.raises(ValueError, match="second: a t-test needs at least two values, got 1"):
        t_test([1.0, 2.0], [3.0], equal_variances=equal)


def test_one_group_without_variance_has_the_freedom_of_the_other() -> None:
    """Welch's test is then that of one sample against a number."""
    values = [60.5, 61.25, 59.75, 60.0]
    result = t_test(values, [59.0] * 3)
    reference = scipy.stats.ttest_1samp(values, 59.0)
    assert result.degrees_of_freedom == pytest.approx(3)
    assert result.p_value == pytest.approx(reference.pvalue)


def test_holm_by_hand() -> None:
    """m = 4: 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04 * 1, which must not fall below 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9, 0.7]) == [1.0, 1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
    values = holm([0.01, math.nan, 0.02])  # nan is no test
    assert [values[0], values[2]] == [0.02, 0.02]
    assert math.isnan(values[1])


def test_holm_rejects_what_the_steps_reject() -> None:
    """Holm's own rule: reject the smallest p-values while p_(i) <= alpha / (m - i + 1)."""
    generator = np.random.default_rng(3)
    for _ in range(50):
        p = generator.uniform(size=8) ** 4
        corrected = holm(p.tolist())
        for alpha in (0.01, 0.05, 0.3):
            rejected = set()
            for step, i in enumerate(np.argsort(p)):
                if p[i] > alpha / (8 - step):
                    break
                rejected.add(int(i))
            assert rejected == {i for i, value in enumerate(corrected) if value <= alpha}


def test_significance_of_three_models() -> None:
    values = {"softmax": SOFTMAX, "mos": MOS, "gss": (60.0, 60.75)}
    result = significance(values)
    assert [(p.first, p.second) for p in result.pairs] == [
        ("softmax", "mos"),
        ("softmax", "gss"),
        ("mos", "gss"),
    ]
    for pair in result.pairs:
        groups = values[pair.first], values[pair.second]
        for test, equal in ((pair.welch, False), (pair.student, True)):
            reference = scipy.stats.ttest_ind(*groups, equal_var=equal)
            assert test.p_value == pytest.approx(reference.pvalue)
            assert test.statistic == pytest.approx(reference.statistic)
    corrected = [pair.welch_corrected for pair in result.pairs]
    assert corrected == holm([pair.welch.p_value for pair in result.pairs])
    sample = result.samples[1]
    error = np.std(MOS, ddof=1) / 2
    assert sample.mean == pytest.approx(np.mean(MOS))
    assert sample.deviation == pytest.approx(np.std(MOS, ddof=1))
    assert (sample.high - sample.low) / 2 == pytest.approx(3.182446305284263 * error)  # t, 3 df
    assert result.notes == ()


def test_degenerate_models_are_named() -> None:
    result = significance(
        {
            "softmax": SOFTMAX,
            "one": (60.0,),
            "diverged": (61.0, math.inf),
            "lost": (61.0, math.nan),
            "fixed": (5.0, 5.0),
            "also fixed": (6.0, 6.0, 6.0),
        }
    )
    assert result.notes == (
        "one is not tested: it has one value, a t-test needs two",
        "diverged is not tested: not all its values are finite",
        "lost is not tested: not all its values are finite",
        "fixed and also fixed are not tested: neither varies from seed to seed",
    )
    assert len(result.pairs) == 3
    assert len(result.samples) == 6
    assert math.isnan(result.pairs[-1].welch_corrected)
    assert result.pairs[-1].welch.difference == -1.0
    # Two tests took place, so the smaller p-value is doubled, not trebled.
    p = sorted(pair.welch.p_value for pair in result.pairs[:2])
    assert min(pair.welch_corrected for pair in result.pairs[:2]) == pytest.approx(2 * p[0])
    samples, pairs, matrix = significance_tables(result, "test perplexity")
    assert [row[0] for row in samples.rows] == [sample.name for sample in result.samples]
    assert samples.rows[1][1:5] == ("1", "60.000", "-", "-")
    assert samples.rows[2][1:5] == ("2", "inf", "-", "-")
    assert pairs.rows[-1][:3] == ("fixed - also fixed", "-1.000", "-")
    assert set(pairs.rows[-1][3:]) == {"-"}
    assert pairs.title.endswith("corrected for 2 tests")
    assert matrix.header == ("model", "softmax", "fixed", "also fixed")
    assert significance_plot(result, "test perplexity").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "values",
    [{}, {"a": SOFTMAX}, {"a": SOFTMAX, "b": (1.0,)}, {"a": SOFTMAX, "b": (1.0, math.inf)}],
)
def test_too_few_models(values: Any) -> None:
    with pytest.raises(ValueError, match="expected at least two models of two or more finite"):
        significance(values)


def test_no_values() -> None:
    with pytest.raises(ValueError, match="empty: expected at least one value, got none"):
        significance({"a": SOFTMAX, "b": MOS, "empty": ()})


def test_tables() -> None:
    result = significance({"softmax": SOFTMAX, "mos": MOS, "gss": (60.0, 60.75)})
    samples, pairs, matrix = significance_tables(result, "test perplexity")
    assert samples.title == "Test perplexity of each model over its seeds"
    assert samples.rows[0][:4] == ("softmax", "3", "60.500", "0.750")
    assert samples.rows[0][5:] == ("59.750", "61.250")
    assert pairs.rows[0][:2] == ("softmax - mos", "+5.188")
    assert pairs.title.endswith("corrected for 3 tests")
    cells = {row[0]: row[1:] for row in matrix.rows}
    first = result.pairs[0]
    assert cells["softmax"][1] == probability(first.welch_corrected)
    assert cells["mos"][0] == probability(first.welch.p_value)
    assert [cells[name][i] for i, name in enumerate(matrix.header[1:])] == ["-", "-", "-"]
    for table in (samples, pairs, matrix):
        assert {len(table.header), len(table.right)} == {len(row) for row in table.rows}


def test_perplexities_of_runs(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{head}-{dropout}-{seed}", test=test + seed, seed=seed, head=head)
        if dropout is None
        else write_run(
            tmp_path / f"{head}-{dropout}-{seed}",
            test=test + seed,
            seed=seed,
            head=head,
            dropout=dropout,
        )
        for head, dropout, test in (("softmax", None, 60.0), ("mos", 0.2, 55.0), ("mos", 0.3, 50.0))
        for seed in (1, 2)
    ]
    folders.append(write_run(tmp_path / "unfinished", (150.0,), None, head="gss"))
    assert model_perplexities(compare(folders)) == {
        "softmax": [61.0, 62.0],
        "B: mos": [56.0, 57.0],
        "C: mos": [51.0, 52.0],
    }


def test_different_texts_are_refused(tmp_path: Path) -> None:
    paths = [
        write_run(
            tmp_path / f"{classes}-{seed}", summary={"classes": classes}, head=head, seed=seed
        )
        for head, classes in (("softmax", 10_000), ("mos", 33_278))
        for seed in (1, 2)
    ]
    with pytest.raises(ValueError, match="on different texts or vocabularies"):
        model_perplexities(compare(paths))


def test_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.figure

    figures = []

    def keep(figure: matplotlib.figure.Figure, *_: object, **__: object) -> None:
        figures.append(figure)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    result = significance({"softmax": SOFTMAX, "_a$": (55.0, math.inf), "mos": MOS})
    significance_plot(result, "test perplexity")
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "test perplexity"
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "softmax (3)",
        r" _a\$ (2)",
        "mos (4)",
    ]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [list(SOFTMAX), [55.0], list(MOS)]
    assert [line.get_color() for line in dots] == list(COLOURS[:3])
    means = [line for line in axes.lines if line.get_marker() == "D"]
    assert [line.get_xdata()[0] for line in means] == [
        result.samples[0].mean,
        result.samples[2].mean,
    ]
    intervals = [line for line in axes.lines if line.get_marker() == "|"]
    assert list(intervals[1].get_xdata()) == [result.samples[2].low, result.samples[2].high]
