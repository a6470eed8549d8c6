"""The tables of benchmarks/classification.py, from what the example prints."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from benchmarks import classification

PRINTED = """\
| head | parameters | ms a step |
| --- | ---: | ---: |
| {head} | 1,234 | 5.6 |

Of the peak, torch and the data take 300 MiB.
"""


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append(command)
        printed = PRINTED.format(head=command[command.index("--heads") + 1])
        return subprocess.CompletedProcess(command, 0, printed)

    monkeypatch.setattr(subprocess, "run", run)
    found, said = classification.compared("title", ["--seconds", "1"], "0.02")
    assert found.header == ("head", "parameters", "ms a step")
    assert found.rows == tuple((head, "1,234", "5.6") for head in classification.HEADS)
    assert found.right == (False, True, True)
    assert said == "Of the peak, torch and the data take 300 MiB."
    assert [call[-2:] == ["--lr", "0.02"] for call in calls] == [True, *[False] * 6]
