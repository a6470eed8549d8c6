"""Tables of README.md and docs/."""

from __future__ import annotations

import re

import pytest

from benchmarks.front import (
    PAGES,
    decoding_costs,
    pages,
    quotes,
    replaced,
    with_head_figures,
)
from benchmarks.table import HEAD_TABLES

BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"


def test_pages_show_the_committed_figures() -> None:
    for page, text in pages().items():
        assert page.read_text() == text


def test_readme_says_what_the_records_say() -> None:
    """Every figure of its text, beside sizes and versions, is in a phrase that is made of them."""
    text = " ".join(PAGES[0].read_text(encoding="utf-8").split())
    for quote in quotes():
        assert quote in text
        text = text.replace(quote, "")
    prose = text.partition("# hstree")[2].partition("```python")[0]
    prose += text.partition("## When not to use trees")[2].partition("## Install")[0]
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    assert re.findall(r"\d+\.\d+|\d+%|1/\d+|\d+x", prose) == []


def test_rows_of_heads_get_the_figures_of_their_record() -> None:
    flat = {"seconds": [2.0, 4.0], "peak_bytes": 100, "parameters": 4_000_000}
    plif = {"seconds": [3.0, 6.0], "peak_bytes": 25, "parameters": 4_100_000}
    contest = {"contestants": {"F.linear + F.cross_entropy": flat, "plif": plif}}
    record = {"cpu": {name: {"contestants": {}} for name in HEAD_TABLES} | {"heads": contest}}
    text = "| `{}` | f(l) | {} |\n".format
    old = text("PLIF`, `plif", "9 | 9 | 9 M") + text("MixtureOfSoftmaxes`, `mos", "1 | 2 | 3 M")
    new = text("PLIF`, `plif", "1.50 | 0.25 | 4.10 M")
    new += text("MixtureOfSoftmaxes`, `mos", "1 | 2 | 3 M")
    assert with_head_figures(old, record) == new
    first = text("F.linear`, `F.cross_entropy", "9 | 9 | 9 M")
    assert with_head_figures(first, record).endswith("| 1.00 | 1.00 | 4.00 M |\n")


def test_replaced_keeps_the_rest() -> None:
    text = f"a\n{BEGIN}\nold\n{END}\nb\n"
    once = replaced(text, "costs", "new")
    assert once == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    assert replaced(once, "costs", "new") == once


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}"])
def test_replaced_names_missing_markers(text: str) -> None:
    with pytest.raises(ValueError, match=f"expected one {BEGIN}"):
        replaced(text, "costs", "new")


def test_costs_are_those_of_the_record() -> None:
    lines = decoding_costs().splitlines()
    assert lines[2].startswith("| softmax | 1.00 |")
    assert len(lines) == 8
