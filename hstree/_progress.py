"""Progress of long work on standard error: a bar with the time left on a terminal, elsewhere a line
every ten seconds.

Progress is shown within :func:`shown` only, which every command of ``hstree`` enters. In a program
that imports hstree, :class:`Task` and :func:`track` print nothing.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar

from hstree._terminal import visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_AFTER = 2.0  # seconds of work before a bar appears: short work shows none
LINE_EVERY = 10.0  # seconds between two lines where there is no terminal
_REDRAW = 0.1  # seconds between two updates of the bars

_Item = TypeVar("_Item")


class _Display(Protocol):
    """Shows the tasks under way."""

    def update(self, task: Task) -> None: ...

    def remove(self, task: Task) -> None: ...

    def close(self) -> None: ...


_display: ContextVar[_Display | None] = ContextVar("hstree_progress", default=None)


class Task:
    """Work whose size is known.

    Args:
        description: what is done, in a few words.
        total: number of steps.
        done: number of steps made before.
    """

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self.description = visible(description)
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
        display = _display.get()
        if display is not None:
            display.update(self)

    def close(self) -> None:
        """The work has ended, in whatever way."""
        display = _display.get()
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


@contextmanager
def shown() -> Iterator[None]:
    """A context in which progress is shown on standard error."""
    if _display.get() is not None:
        yield
        return
    display: _Display = _Bars() if sys.stderr.isatty() else _Lines()
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)
        display.close()


def duration(seconds: float) -> str:
    """A time in words: ``40 s``, ``7 min``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class _Lines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def update(self, task: Task) -> None:
        now = time.monotonic()
        if now - max(self._printed, task.begin) >= LINE_EVERY:
            self._printed = now
            share = f"{min(task.done / max(task.total, 1), 1):.0%}"
            parts = (task.description, share, task.note, task.left)
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    def remove(self, task: Task) -> None:
        pass

    def close(self) -> None:
        pass


class _Bars:
    """A bar for each task that has taken more than two seconds."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._ids: dict[Task, TaskID] = {}
        self._updated = 0.0

    def update(self, task: Task) -> None:
        now = time.monotonic()
        if now - max(task.begin + BAR_AFTER - _REDRAW, self._updated) < _REDRAW:
            return
        self._updated = now
        progress = self._start()
        if task not in self._ids:
            self._ids[task] = progress.add_task("", total=task.total, note="", left="")
        progress.update(
            self._ids[task],
            description=task.description,
            completed=task.done,
            note=task.note,
            left=task.left,
        )

    def _start(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[note]}", markup=False),
                TextColumn("{task.fields[left]}", markup=False),
                console=Console(stderr=True),
                expand=True,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # lines appear above the bars
            )
            self._progress.start()
        return self._progress

    def remove(self, task: Task) -> None:
        number = self._ids.pop(task, None)
        if number is not None and self._progress is not None:
            self._progress.remove_task(number)
            if not self._ids:
                self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._ids.clear()
