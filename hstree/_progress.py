"""Steps of long work, which a program may show.

Nothing is printed here: :class:`Task` and :func:`track` tell the display that is set, if any; the
command line sets one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol, TypeVar

_Item = TypeVar("_Item")


class Display(Protocol):
    """Shows the tasks under way."""

    def update(self, task: Task) -> None: ...

    def remove(self, task: Task) -> None: ...

    def close(self) -> None: ...


DISPLAY: ContextVar[Display | None] = ContextVar("hstree_progress", default=None)


class Task:
    """Work whose size is known.

    Args:
        description: what is done, in a few words.
        total: number of steps.
        done: number of steps made before.
    """

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self.description = description
        self.note = ""
        self.total, self.done, self._first = total, done, done
        self.begin = time.monotonic()

    @property
    def left(self) -> str:
        """The time left, from the mean time of the steps so far."""
        made = self.done - self._first
        if made <= 0:
            return ""
        seconds = (time.monotonic() - self.begin) / made * max(self.total - self.done, 0)
        return f"{duration(seconds)} left"

    def advance(self, steps: int = 1) -> None:
        """Steps have been made."""
        self.done += steps
        display = DISPLAY.get()
        if display is not None:
            display.update(self)

    def close(self) -> None:
        """The work has ended, in whatever way."""
        display = DISPLAY.get()
        if display is not None:
            display.remove(self)


def track(items: Iterable[_Item], description: str, total: int) -> Iterator[_Item]:
    """The items, with progress while they are taken.

    Args:
        items: of any kind.
        description: what is done with them, in a few words.
        total: number of items.
    """
    task = Task(description, total)
    try:
        for item in items:
            yield item
            task.advance()
    finally:
        task.close()


def duration(seconds: float) -> str:
    """A time in words: ``40 s``, ``7 min``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
