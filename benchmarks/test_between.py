"""Comparison of two checkouts: ratios within a round, and the answers of a process."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from benchmarks import between


class Fake:
    """A worker with known seconds for its turns."""

    def __init__(self, names: list[str], seconds: list[float]) -> None:
        self.names, self.seconds = names, iter(seconds)

    def ask(self, what: str, *_: str) -> Any:
        return next(self.seconds) if what == "turn" else self.names if what == "list" else None


def test_ratios_are_of_after_to_before() -> None:
    """The first round is not counted; steps that one of the two does not have are skipped."""
    before: Any = Fake(["a", "gone"], [9.0, 1.0, 2.0, 4.0])
    after: Any = Fake(["new", "a"], [1.0, 2.0, 4.0, 8.0])
    (row,) = between.compare(before, after, ["heads"], rounds=3)
    assert row == ("heads: a", [2.0, 2.0, 2.0])
    before.names = []
    with pytest.raises(SystemExit, match="--contest: expected a contest of both checkouts"):
        list(between.compare(before, after, ["head"], rounds=3))


def test_a_process_answers_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [["list", "plif"], ["build", "decoding, N = 1", "softmax: top 1"], ["turn"]]
    answers = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, questions))))
    monkeypatch.setattr(sys, "stdout", answers)
    between.work()
    names, built, seconds = map(json.loads, answers.getvalue().splitlines())
    assert "hstree.ops.plif" in names
    assert "gather" not in names
    assert built is None
    assert 0 < seconds < 60
