"""Ctrl-C and SIGTERM that take effect between two steps, when the state can be saved."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

PATIENCE = 2.0  # torchrun passes on a Ctrl-C that the terminal has sent to its processes as well


class Interruption:
    """A context in which SIGINT and SIGTERM are only noted; one that comes more than two seconds
    after the first interrupts at once, wherever the program is.

    Signals that were ignored before stay so. Outside the main thread, which alone receives
    signals, nothing changes.

    Attributes:
        signal: number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._time = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > PATIENCE:
            raise KeyboardInterrupt
