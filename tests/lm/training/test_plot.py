"""The learning curve."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.axes import Axes

from hstree.lm.runs import EpochRecord
from hstree.lm.training.plot import learning_curve


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
