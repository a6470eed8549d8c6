"""Progress of long work on standard error: a bar with the time left on a terminal, elsewhere a line
every ten seconds.

This is for the commands of ``hstree``, which all enter :func:`shown`. A program that imports hstree
has the line of :mod:`hstree._progress`, on a terminal only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hstree._progress import DISPLAY, Display, Task
from hstree.lm._terminal import visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_AFTER = 2.0  # seconds of work before a bar appears: short work shows none
LINE_EVERY = 10.0  # seconds between two lines where there is no terminal
_REDRAW = 0.1  # seconds between two updates of the bars


@contextmanager
def shown() -> Iterator[None]:
    """A context in which progress is shown on standard error."""
    if DISPLAY.get() is not None:
        yield
        return
    bars = sys.stderr.isatty() and find_spec("rich") is not None
    display: Display = _Bars() if bars else _Lines()
    token = DISPLAY.set(display)
    try:
        yield
    finally:
        DISPLAY.reset(token)
        display.close()


class _Lines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def update(self, task: Task) -> None:
        now = time.monotonic()
        if now - max(self._printed, task.begin) >= LINE_EVERY:
            self._printed = now
            share = f"{min(task.done / max(task.total, 1), 1):.0%}"
            parts = (visible(task.description), share, task.note, task.left)
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
            description=visible(task.description),
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
