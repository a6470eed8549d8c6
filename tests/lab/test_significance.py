"""t-tests against formulas and by hand, Holm's correction, degenerate groups, and the command."""

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

SOFTMAX = (60.5, 61.25, 59.75)
MOS = (55.0, 54.5, 56.5, 55.25)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 10)])
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
    p = 2 * scipy.special.stdtr(df, -abs(t))
    expected = (t, df, p, difference, difference - reach, difference + reach)
    assert result == pytest.approx(expected, rel=1e-8)


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


def test_holm_by_hand() -> None:
    """m = 4: 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04 * 1, which must not fall below 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9, 0.7]) == [1.0, 1.0, 1.0]
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
    samples, pairs = significance_tests(values)
    couples = [("softmax", "mos"), ("softmax", "gss"), ("mos", "gss")]
    assert [pair["models"] for pair in pairs] == [" - ".join(couple) for couple in couples]
    for name, equal in (("Welch", False), ("Student", True)):
        for pair, (first, second) in zip(pairs, couples, strict=True):
            reference = scipy.stats.ttest_ind(values[first], values[second], equal_var=equal)
            assert pair[f"{name} p"] == pytest.approx(reference.pvalue)
            assert pair[f"{name} t"] == pytest.approx(reference.statistic)
        assert [p[f"{name} p, Holm"] for p in pairs] == holm([p[f"{name} p"] for p in pairs])
    sample = samples[1]
    error = np.std(MOS, ddof=1) / 2
    assert (sample["n"], sample["least"], sample["greatest"]) == (4, 54.5, 56.5)
    assert sample["mean"] == pytest.approx(np.mean(MOS))
    assert sample["SD"] == pytest.approx(np.std(MOS, ddof=1))
    low, high = sample["95% interval"]
    assert (high - low) / 2 == pytest.approx(3.182446305284263 * error)  # t, 3 df


@pytest.mark.parametrize(
    "values",
    [{}, {"a": SOFTMAX}, {"a": SOFTMAX, "b": (1.0,)}, {"a": SOFTMAX, "b": (1.0, math.inf)}],
)
def test_too_few_models(values: Any) -> None:
    with pytest.raises(ValueError, match="expected at least two models with two or more finite"):
        significance_tests(values)


# The command


def table(rows: dict[str, list[Any]]) -> None:
    """A file with the columns that hstree study writes."""
    lines = ["model,head,seed,test_perplexity"]
    lines += [f"{m},x,{n},{value}" for m, of in rows.items() for n, value in enumerate(of)]
    Path("study.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.usefixtures("elsewhere")
def test_page_figures_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    table({"a": [*SOFTMAX], "b": [*MOS, ""]})  # an empty cell is a run without a value
    assert main(["analyze", "significance", "--table", "study.csv"]) == 0
    assert "note: 1 line of study.csv skipped: an empty cell" in capsys.readouterr().out
    data = json.loads(Path("significance/significance.json").read_text())
    assert data["values"] == {"a": [*SOFTMAX], "b": [*MOS]}
    welch = scipy.stats.ttest_ind(SOFTMAX, MOS, equal_var=False)
    (pair,) = data[
        "Unpaired two-sided t-tests of equal mean test perplexity; Holm: corrected for 1 test"
    ]
    assert pair["Welch p"] == pair["Welch p, Holm"] == pytest.approx(welch.pvalue)
    assert pair["95% interval"] == pytest.approx([*welch.confidence_interval()])
    assert Path("significance/significance.png").read_bytes().startswith(b"\x89PNG")
    page = Path("significance/significance.md").read_text()
    assert page.startswith("# Significance of differences in test perplexity\n")
    assert "| a - b | +5.188 |" in page
    assert "![significance](significance.png)" in page
    by_seed = ["--model", "seed", "--output", "other"]
    assert main(["analyze", "significance", "--table", "study.csv", *by_seed]) == 0
    assert [*json.loads(Path("other/significance.json").read_text())["values"]] == [*"0123"]


@pytest.mark.usefixtures("elsewhere")
def test_models_that_are_not_tested_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"softmax": [*SOFTMAX], "one": [60.0], "lost": [61.0, "nan"], "diverged": [61.0, "inf"]}
    table(rows | {"fixed": [5.0, 5.0], "also fixed": [6.0, 6.0]})
    assert main(["analyze", "significance", "--table", "study.csv"]) == 0
    page = Path("significance/significance.md").read_text()
    for line in (
        "- one is not tested: it has one value",
        "- diverged is not tested: not all its values are finite",
        "- lost is not tested: not all its values are finite",
        "- fixed and also fixed are not tested: neither varies from seed to seed",
        "| one | 1 | 60.000 | - | - | 60.000 | 60.000 |",
        "| diverged | 2 | inf | - | - | 61.000 | inf |",
        "| fixed - also fixed | -1.000 | - | - | - | - | - | - | - | - | - |",
        "| model | softmax | fixed | also fixed |",
    ):
        assert line + "\n" in page
    assert "Holm: corrected for 2 tests" in page  # so the smaller p-value is doubled
