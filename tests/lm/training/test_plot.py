"""Perplexities of a run as pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.axes import Axes

from hstree.lm.report import EpochRecord, against_time, learning_curve


def records(averaged: list[bool]) -> list[EpochRecord]:
    return [
        EpochRecord(epoch, epoch, 0.1, 3.0 / epoch, 3.0 / epoch, True, 1.0, 1.0, mean)
        for epoch, mean in enumerate(averaged, start=1)
    ]


@pytest.mark.parametrize(
    ("averaged", "expected"),
    [
        ([False, False, False], []),
        ([False, False, True, True], [2.5]),
        ([True], [0.5]),
    ],
)
def test_the_switch_to_averaging_is_marked(
    averaged: list[bool], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    original = Axes.axvline

    def spy(self: Axes, x: float, **options: Any) -> Any:
        lines.append((x, options["label"]))
        return original(self, x, **options)

    monkeypatch.setattr(Axes, "axvline", spy)
    assert learning_curve(records(averaged), 4.0, "a title").startswith(b"\x89PNG\r\n")
    assert lines == [(x, "averaging of the weights begins") for x in expected]


def test_time_adds_up_over_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {}
    original = Axes.plot

    def spy(self: Axes, x: list[float], y: list[float], *form: str, **options: Any) -> Any:
        curves[options["label"]] = (x, y)
        return original(self, x, y, *form, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    slow = [replace(record, seconds=120.0) for record in records([False] * 3)]
    runs = [("trees", records([False] * 2)), ("softmax", slow)]
    assert against_time(runs).startswith(b"\x89PNG\r\n")
    valid = [math.exp(3), math.exp(1.5), math.exp(1)]
    assert curves["head trees"] == (pytest.approx([1 / 60, 2 / 60]), pytest.approx(valid[:2]))
    assert curves["head softmax"] == (pytest.approx([2, 4, 6]), pytest.approx(valid))
