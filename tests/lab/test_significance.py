"""t-tests against scipy's formulas and by hand, Holm's correction, degenerate groups, tables,
the picture, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats

from hstree.__main__ import main
from hstree.lab import holm, significance_tests, t_test
from hstree.lab.significance import significance_picture, significance_tables
from lab.commands import refused

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
    assert welch == pytest.approx(result)


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
        others = result._asdict() | {"difference": math.nan}
        assert all(map(math.isnan, others.values()))
    one = t_test([0.1] * 7, [0.2, 0.3], equal_variances=equal)  # scipy warns here
    assert 0 < one.p_value < 1
    assert one.low < one.difference < one.high


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
    result = significance_tests(values)
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
    result = significance_tests(
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
        "one is not tested: it has one value",
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
    significance_picture(result, "test perplexity")


@pytest.mark.parametrize(
    "values",
    [{}, {"a": SOFTMAX}, {"a": SOFTMAX, "b": (1.0,)}, {"a": SOFTMAX, "b": (1.0, math.inf)}],
)
def test_too_few_models(values: Any) -> None:
    with pytest.raises(ValueError, match="expected at least two models with two or more finite"):
        significance_tests(values)


# The command


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused(capsys, "analyze", "significance", *arguments, left="significance")


@pytest.mark.usefixtures("elsewhere")
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The columns that hstree study writes, then others; an empty cell is a run without a value."""
    lines = ["model,head,seed,test_perplexity,valid_perplexity"]
    for model, values in (("a", SOFTMAX), ("b", MOS[:3])):
        lines += [f"{model},x,{seed},{v},{v + 1}" for seed, v in enumerate(values)]
    lines.append("b,x,9,,55")
    Path("study.csv").write_text("\n".join(lines) + "\n")
    assert main(["analyze", "significance", "--table", "study.csv"]) == 0
    out = capsys.readouterr().out
    assert "a - b" in out
    assert "note: 1 line of study.csv skipped: an empty cell" in out
    data = json.loads(Path("significance/significance.json").read_text())
    assert [sample["values"] for sample in data["samples"]] == [list(SOFTMAX), list(MOS[:3])]
    (pair,) = data["pairs"]
    welch = scipy.stats.ttest_ind(SOFTMAX, MOS[:3], equal_var=False)
    student = scipy.stats.ttest_ind(SOFTMAX, MOS[:3])
    assert pair["welch"]["p_value"] == pair["welch_corrected"] == pytest.approx(welch.pvalue)
    assert pair["student"]["p_value"] == pytest.approx(student.pvalue)
    assert pair["welch"]["low"] == pytest.approx(welch.confidence_interval().low)
    assert Path("significance/significance.png").read_bytes().startswith(b"\x89PNG")
    page = Path("significance/significance.md").read_text()
    assert page.startswith("# Significance of differences in test perplexity\n")
    assert "![significance](significance.png)" in page
    more = ["--model", "seed", "--value", "valid_perplexity", "--output", "other"]
    assert main(["analyze", "significance", "--table", "study.csv", *more]) == 0
    data = json.loads(Path("other/significance.json").read_text())
    assert [sample["name"] for sample in data["samples"]] == ["0", "1", "2", "9"]
    assert "valid perplexity" in capsys.readouterr().out


@pytest.mark.usefixtures("elsewhere")
def test_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the following arguments are required: --table" in fails(capsys)
    assert "x.csv" in fails(capsys, "--table", "x.csv")
    for content, message in (
        ("", "--model: expected one of the columns of x.csv (), got model"),
        ("model,value\n", "--value: expected one of the columns of x.csv (model, value), got "),
        (
            "model,test_perplexity\n",
            "at least two models with two or more finite values each, got 0",
        ),
        (
            "model,test_perplexity\n\na,1\na,high\n",
            "x.csv, line 4: expected numbers: could not convert string to float: 'high'",
        ),
        ('model,test_perplexity\n"a,1\n', "x.csv: expected a CSV file in UTF-8"),
    ):
        Path("x.csv").write_text(content)
        assert message in fails(capsys, "--table", "x.csv")
    Path("x.csv").write_bytes(b"model,test_perplexity\n\xff,1\n")
    assert "x.csv: expected a CSV file in UTF-8" in fails(capsys, "--table", "x.csv")


@pytest.mark.usefixtures("elsewhere")
def test_diverged_runs_are_words_not_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "1"), ("a", "1"), ("b", "2"), ("b", "2"), ("c", "inf"), ("c", "nan"), ("d", "4")]
    Path("x.csv").write_text("model,test_perplexity\n" + "".join(f"{a},{b}\n" for a, b in rows))
    assert main(["analyze", "significance", "--table", "x.csv"]) == 0
    out = capsys.readouterr().out
    assert "note: a and b are not tested: neither varies from seed to seed" in out
    assert "note: c is not tested: not all its values are finite" in out
    assert "note: d is not tested: it has one value" in out
    data = json.loads(Path("significance/significance.json").read_text())
    assert data["pairs"][0]["welch"]["p_value"] is None
