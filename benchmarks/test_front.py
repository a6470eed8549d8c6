"""The table of README.md."""

from __future__ import annotations

import pytest

from benchmarks.front import BEGIN, END, pages, replaced


def test_pages_show_the_committed_figures() -> None:
    for page, text in pages().items():
        assert page.read_text() == text


def test_replaced_keeps_the_rest() -> None:
    text = f"a\n{BEGIN}\nold\n{END}\nb\n"
    once = replaced(text, "new")
    assert once == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    assert replaced(once, "new") == once


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}"])
def test_replaced_names_missing_markers(text: str) -> None:
    with pytest.raises(ValueError, match=f"expected one {BEGIN}"):
        replaced(text, "new")
