"""Steps of long work, shown.

:class:`Task` and :func:`track` tell the display that is set, as the command line sets one. Without
one, work that takes longer than five seconds has a line on standard error if that is a terminal.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import Protocol, TypeVar

_Item = TypeVar("_Item")


class Display(Protocol):
    """Shows the tasks under way."""

    def update(self, task: Task) -> None: ...

    def remove(self, task: Task) -> None: ...

    def close(self) -> None: ...


DISPLAY: ContextVar[Display | None] = ContextVar("hstree_progress", default=None)


class _Line:
    """The display where none is set: a line on the terminal about a task that takes long. A task
    within another one, or beside it in another thread, has none."""

    AFTER, EVERY = 5.0, 0.1  # seconds of work before the line, and between two updates

    def __init__(self) -> None:
        self._task: Task | None = None
        self._drawn = 0.0
        self._first = threading.Timer(self.AFTER, lambda: None)

    # No lock: a process that is forked while a thread holds it would wait for ever.

    def begin(self, task: Task) -> None:
        """A thread draws the line first, because a single step may be long."""
        if self._task is None and self._is_shown():
            self._task, self._drawn = task, 0.0
            self._first = threading.Timer(self.AFTER, self.update, (task,))
            self._first.daemon = True
            self._first.start()

    def update(self, task: Task) -> None:
        if task is not self._task:
            return
        now = time.monotonic()
        if now >= max(task.begin + self.AFTER, self._drawn + self.EVERY):
            self._drawn = now
            done = f": {task.done} of {task.total}" if task.total > 1 else ""
            parts = (task.description + done, task.note, task.left)
            self._print(", ".join(part for part in parts if part))

    def remove(self, task: Task) -> None:
        if task is self._task:
            self._task = None
            self._first.cancel()
            if self._drawn:
                self._print("")

    def close(self) -> None:
        pass

    @staticmethod
    def _is_shown() -> bool:
        with suppress(AttributeError, ValueError):  # no standard error, or a closed one
            return sys.stderr.isatty()
        return False

    @staticmethod
    def _print(text: str) -> None:
        with suppress(OSError, ValueError):  # closed since
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


_LINE = _Line()


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
        if DISPLAY.get() is None:
            _LINE.begin(self)

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
        (DISPLAY.get() or _LINE).update(self)

    def close(self) -> None:
        """The work has ended, in whatever way."""
        (DISPLAY.get() or _LINE).remove(self)


def track(items: Iterable[_Item], description: str, total: int) -> Generator[_Item, None, None]:
    """The items, with progress while they are taken, to the end or until the generator is closed.

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
