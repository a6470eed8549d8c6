"""The commands of the laboratory in tests: what they refuse, and what they write."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hstree.__main__ import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, left: str | None = None) -> str:
    """The one line on stderr of a command that must fail, with nothing on stdout, and without the
    folder ``left``."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("hstree")
    assert left is None or not Path(left).exists()
    return captured.err


def csv_rows(file: Path | str) -> list[dict[str, str]]:
    """The rows of a CSV file with a header."""
    with Path(file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
