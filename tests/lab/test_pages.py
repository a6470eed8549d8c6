"""Committed pages whose records are committed too: the commands on them make the same tables."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hstree.__main__ import main

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "laboratory"


def tables(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(("|", "**", "- "))]


@pytest.mark.parametrize("name", ["correlation", "significance-tuned/significance"])
def test_tables_come_out_equal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    (command,) = (line for line in page.splitlines() if line.startswith("    hstree analyze"))
    arguments = shlex.split(command)[1:]
    monkeypatch.chdir(RESULTS)
    assert main([*arguments[: arguments.index("--output")], "--output", str(tmp_path)]) == 0
    made = (tmp_path / Path(f"{name}.md").name).read_text(encoding="utf-8")
    assert tables(made) == tables(page)
    assert len(tables(page)) > 3
