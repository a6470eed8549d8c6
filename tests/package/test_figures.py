"""Figures of README.md and docs/ are those of the records that they link to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#]*results/[^)#]+\.(?:md|json|csv))")
DECIMAL = re.compile(r"(?<![\w.,/])\d[\d,]*\.\d+(?![\w.]*\w)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# Computed from figures of the record, or of a page that the paragraph before links to; 0.15 is an
# argument.
DERIVED = {
    "laboratory-heads.md": {"0.63", "0.65", "0.95", "1.07", "1.11"},
    "laboratory-rank.md": {"0.17", "0.20", "0.25", "1.65"},
    "laboratory-words.md": {"0.174", "0.245", "0.252", "0.263"},
    "training.md": {"0.15"},
    "trees.md": {"106.0", "106.2"},
}


def quoted(page: Path) -> Iterator[tuple[str, str]]:
    """Each paragraph, item or table that links to records, and the text of these. The links of a
    paragraph that begins with Source belong to the table before it."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    table = ""
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        if block.startswith("|"):
            table = block
        links = LINK.findall(block)
        if links:
            shown = table if re.match(r"Sources?:|.*\. Source:", block) else block
            yield shown, "\n".join((page.parent / link).resolve().read_text() for link in links)


def of_record(figure: str, values: set[float]) -> bool:
    """Whether a figure is a value, 100 times or one over a value, rounded."""
    number, places = float(figure.replace(",", "")), len(figure.partition(".")[2])
    half = 0.5000001 * 10.0**-places
    return any(
        abs(number - other) <= half
        for value in values
        for other in (value, 100 * value, 1 / value if value else 0.0)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_of_pages_are_those_of_their_records(page: Path) -> None:
    wrong = []
    for shown, source in quoted(page):
        values = {float(number.replace(",", "")) for number in NUMBER.findall(source)}
        figures = set(DECIMAL.findall(shown)) - DERIVED.get(page.name, set())
        wrong += [f for f in figures if not of_record(f, values)]
    assert not wrong


def test_a_wrong_figure_is_found() -> None:
    values = {0.415, 1234.5, 2.2, 0.9987}
    for figure in ("0.42", "0.41", "1,234.5", "0.45", "99.9"):
        assert of_record(figure, values)
    for figure in ("0.43", "1,234.4", "0.46", "99.8", "2.21"):
        assert not of_record(figure, values)
    found = list(quoted(ROOT / "docs" / "benchmarks.md"))
    assert any("| softmax | 104.2 ± 0.2 |" in shown for shown, _ in found)
