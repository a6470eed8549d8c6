"""The figures of README.md and docs/ are those of the records."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import FIGURES, PAGES, PLACE, RESULTS, filled, named, tables

FIGURE = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)? ?%|(?<![\w.,/-])\d[\d,]*\.\d+(?![\w.]*\w)")
VERSION = re.compile(r"\b(?:torch|Python|CUDA|transformers|TRL|presets) \d+(?:[., or and]+\d+)*")
# Numbers with a point that are no measurements of this project: settings, versions, thresholds,
# what others published, and examples.
OTHER = {
    "benchmarks.md": "0.01 0.1 40%",
    "decoding.md": "0.998",
    "gpu.md": "8.0",
    "guarantees.md": "0.01 3.13",
    "heads.md": "0.1 0.01 0.3 0.02",
    "laboratory.md": "95% 0.5 0.24 57.00 57.08 0.1 0.01",
    "platforms.md": "3.10 3.11 3.12 3.13 3.14 2.11 2.13 2.15 13.0 5.24 8.0 7.2",
    "start.md": "69.5",
    "training.md": "90% 5% 17.5 0.03",
    "transformers.md": "5.24",
    "recommenders.md": "0.75",
    "trees.md": "0.3",
}


def prose(text: str) -> str:
    """A page without what the command fills, code and links."""
    text = re.sub(r"```.*?```", "", PLACE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|^ {4}.*$", "", text, flags=re.MULTILINE)
    return VERSION.sub("", text)


def test_every_place_shows_its_figure() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == filled(text), f"{page.name}: run python -m benchmarks.figures"


def test_every_figure_has_one_place() -> None:
    found = [name for page in PAGES for name, _ in PLACE.findall(page.read_text(encoding="utf-8"))]
    assert Counter(found) == dict.fromkeys(FIGURES, 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_stands_outside_of_a_place(page: Path) -> None:
    found = set(FIGURE.findall(prose(page.read_text(encoding="utf-8"))))
    assert found - set(OTHER.get(page.name, "").split()) == set()


def test_figures_are_found_in_prose() -> None:
    text = (
        "A step is 1.43 times as long (`0.5`), [a](b-2.5.md) <!-- x: begin -->9.9<!-- x: end -->."
    )
    assert FIGURE.findall(prose(text)) == ["1.43"]
    assert FIGURE.findall(prose("12 % and 99.9% of 1,234.5; v0.1, torch 2.11")) == [
        *("12 %", "99.9%", "1,234.5")
    ]


# ---- the command


def test_places_keep_what_is_around_them() -> None:
    places = {"one": lambda old: "2", "table": lambda old: f"{old.strip()}|\n"}
    text = (
        "a <!-- one: begin -->1<!-- one: end --> b\n<!-- table: begin -->\n|\n<!-- table: end -->\n"
    )
    once = filled(text, places)
    assert once == text.replace("-->1<", "-->2<").replace("\n|\n", "\n||\n")
    assert filled("<!-- one: begin --> no end", places) == "<!-- one: begin --> no end"
    with pytest.raises(KeyError, match="two"):
        filled("<!-- two: begin --><!-- two: end -->", places)


def test_tables_are_those_of_the_page() -> None:
    table = named("transformer-study.md", "After 10,000 steps")
    text = (RESULTS / "transformer-study.md").read_text(encoding="utf-8")
    assert f"**{table.title}**\n\n{table}\n" in text
    assert table.part("head | seeds").header == ["head", "seeds"]
    assert len(tables("transformer-study.md")) == 4
    with pytest.raises(ValueError, match="unpack"):
        table.row("no such head")


def test_settings_that_most_rows_share_are_left_out() -> None:
    columns, rows = "head | valid", (f"{figures.FOREST}, weight decay 0.1", figures.TREES)
    shown = figures.study("trees-study.md", "Results", columns, rows)("").splitlines()
    first = [line.split(" | ")[0].strip("| ") for line in shown]
    assert first == [
        "head",
        "---",
        "`ForestSoftmax`, 4 trees, 512 negatives",
        "`TreeEnsemble`, 4 trees",
    ]


def test_rows_of_heads_get_the_figures_of_their_record() -> None:
    row = "| `{}` | {} | f(l) |".format
    old = [row("PLIF`, `plif", "9 | 9 | 9 M"), row("X`, `no-such-head", "1 | 2 | 3 M")]
    pages = "cpu.md", "cpu-avx2.md"
    times = [named(page, "heads").row("plif")["time"].partition(" ")[0] for page in pages]
    memory = figures.times_of("heads", "plif", figures.FLAT, "peak_bytes")
    parameters = named("cpu.md", "heads").row("plif")["parameters"]
    new = f"{' / '.join(times)} | {memory:.2f} | {parameters}"
    assert figures.heads("\n".join(old)) == f"{row('PLIF`, `plif', new)}\n{old[1]}"
