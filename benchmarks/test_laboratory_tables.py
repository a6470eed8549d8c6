"""The tables of docs/laboratory-*.md agree with the records of their runs."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "laboratory"
PAGES = sorted((ROOT / "docs").glob("laboratory-*.md"))
DOCS = "".join(page.read_text(encoding="utf-8") for page in PAGES)

Runs = Sequence[dict[str, str]]


def runs(name: str, **values: object) -> Runs:
    """The runs of a study with these values: numbers are compared as numbers."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [row for row in rows if all(same(row[key], values[key]) for key in values)]
    assert found, (name, values)
    return found


def same(cell: str, value: object) -> bool:
    return float(cell or "nan") == value if isinstance(value, float) else cell == value


def spread(rows: Runs, column: str = "test_perplexity") -> str:
    """Mean and standard deviation over the seeds."""
    values = [float(row[column]) for row in rows]
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def middle(rows: Runs, column: str) -> str:
    return f"{statistics.median(float(row[column]) for row in rows):,.0f}"


def table(first: str) -> dict[str, list[str]]:
    """The rows of the table of docs/laboratory-*.md whose first line starts with ``first``, by the
    first cell, without bold face; the header is one of them."""
    start = DOCS.index(f"\n| {first}") + 1
    lines = DOCS[start:].partition("\n\n")[0].splitlines()
    assert re.fullmatch(r"[|\-: ]+", lines.pop(1))
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_rates() -> None:
    head, *_ = (rows := table("test perplexity, rate of the output layer"))
    factors = [float(cell) for cell in rows.pop(head)]
    names = {"softmax": "softmax", "sigsoftmax": "sigsoftmax", "GSS, c = -1.5, k = 2.5": "gss"}
    assert rows.keys() == names.keys()
    for name, cells in rows.items():
        expected = [
            spread(runs("rates", head=names[name], head_learning_rate_factor=factor))
            for factor in factors
        ]
        assert cells == expected, name


def test_best_rates_are_those_of_ten_seeds() -> None:
    for head in ("softmax", "sigsoftmax", "gss"):
        factors = {row["head_learning_rate_factor"] for row in runs("rates", head=head)}
        best = min(
            map(float, factors),
            key=lambda factor: statistics.mean(
                float(row["test_perplexity"])
                for row in runs("rates", head=head, head_learning_rate_factor=factor)
            ),
        )
        assert {float(r["head_learning_rate_factor"]) for r in runs("seeds-tuned", head=head)} == {
            best
        }


def test_rank_of_plif() -> None:
    header = "| slopes | network |"
    lines = DOCS[DOCS.index(header) :].partition("\n\n")[0].splitlines()
    found = json.loads((RESULTS / "plif-rank.json").read_text())
    fresh = {str(row["intervals"]): row["press_rank"] for row in found["fresh"]}
    kinds = [("", fresh), *found["trained"].items()]
    for line, (kind, ranks) in zip(lines[2:], kinds, strict=True):
        *_, first, second, third, moved = (cell.strip() for cell in line.strip("|").split("|"))
        expected = [f"{ranks[key]:,}" for key in ("1000", "10000", "100000")]
        assert [first, second, third] == expected, kind
        if kind:
            change = found["moved"][
                f"{kind.replace(', ', '-').replace(' ', '-')}-intervals=100000-seed=1"
            ]
            assert float(moved) == pytest.approx(change, rel=0.1), kind


def test_rank_of_fresh_slopes_on_a_larger_softmax() -> None:
    found = json.loads((RESULTS / "plif-rank.json").read_text())["larger"]
    ranks = [f"{row['press_rank']:,}" for row in found["fresh"]]
    assert [row["intervals"] for row in found["fresh"]] == [10_000, 100_000, 1_000_000]
    words = " ".join(DOCS.split())
    assert f"d = {found['features']}, {found['classes']:,} words" in words
    assert f"{found['rows']:,} contexts, rank {found['softmax']}) fresh slopes give rank " in words
    assert f"fresh slopes give rank {ranks[0]}, {ranks[1]} and {ranks[2]} for K" in words


def test_start_of_the_bias() -> None:
    rows = table("| bias from frequencies")
    names = {
        "softmax": "softmax",
        "sigsoftmax": "sigsoftmax",
        "GSS, c = -1.5, k = 2.5": "gss",
        "PLIF, K = 100,000": "plif",
    }
    assert rows.keys() - {""} == names.keys()
    for name, head in names.items():
        expected = []
        for start in ("unigram", "zero"):
            of = runs("bias-start", head=head, bias_start=start)
            ranks = [middle(of, f"effective_rank_{epsilon}") for epsilon in ("0.0001", "1e-05")]
            expected += [spread(of), " / ".join(ranks)]
        assert rows[name] == expected, name


def test_start_of_plif() -> None:
    rows = table("| test perplexity |\n| --- | ---: |\n| softmax")
    models = {
        "softmax": "softmax",
        "PLIF": "plif, slope_std=1.0",
        "PLIF, slopes equal at the start": "plif, slope_std=0.0",
        "PLIF, frozen": "plif-frozen",
    }
    assert rows == {"": ["test perplexity"]} | {
        name: [spread(runs("plif-start", model=model))] for name, model in models.items()
    }


@pytest.mark.parametrize(("folder", "sign"), [("", 1), ("significance-tuned/", -1)])
def test_differences_of_ten_seeds(folder: str, sign: int) -> None:
    """At one rate the first head of a pair is above the second, at the best rates below."""
    words = " ".join(DOCS.split())
    pairs = json.loads((RESULTS / f"{folder}significance.json").read_text())["pairs"]
    assert len(pairs) == 3
    for welch in (pair["welch"] for pair in pairs):
        low, high = sorted(sign * welch[end] for end in ("low", "high"))
        difference = f"{sign * welch['difference']:.2f}"
        interval = rf"(95% interval )?{low:.2f} to {high:.2f}"
        assert re.search(rf"{difference} [^.(]*\({interval}", words), interval


def test_correlation_within_seeds() -> None:
    fit = json.loads((RESULTS / "gss-rates" / "correlation.json").read_text())["all"]
    interval = f"(95% interval {fit['low']:.2f} to {fit['high']:.2f};"
    assert f"**{fit['pearson']:+.2f}** {interval}" in " ".join(DOCS.split())


def test_heads() -> None:
    rows = table("| train | valid | test | p |")
    header = rows.pop("")
    assert len(rows) == 7
    for name, cells in rows.items():
        of = runs("study-heads", head=name.partition(",")[0])
        shown = dict(zip(header, cells, strict=True))
        for text in ("train", "valid", "test"):
            assert shown[text] == spread(of, f"{text}_perplexity"), name
        assert shown["Press rank of at most 1000"] == middle(of, "press_rank"), name
        assert shown["rank, 0.0001"] == middle(of, "effective_rank_0.0001"), name


@pytest.mark.parametrize(
    ("study", "first", "key"),
    [
        ("study-components", "K | 1 ", "components"),
        ("study-latent-dropout", "latent dropout |", "latent_dropout"),
    ],
)
def test_mixtures(study: str, first: str, key: str) -> None:
    rows = table(first)
    groups = [runs(study, **{key: float(cell)}) for cell in rows[first.partition(" |")[0]]]
    assert rows["test perplexity"] == [spread(group) for group in groups]
    assert rows["Press rank of at most 500"] == [middle(group, "press_rank") for group in groups]
