"""Ctrl-C and SIGTERM that take effect between two steps, where the state can be saved."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

PATIENCE = 2.0  # seconds; after a Ctrl-C, processes of torchrun receive the signal twice


class Interruption:
    """A context in which SIGINT and SIGTERM are only recorded. A second signal more than two
    seconds after the first interrupts the program immediately. Signals that were ignored before are
    still ignored. Outside the main thread, which alone receives signals, nothing changes."""

    def __init__(self) -> None:
        self.signal: int | None = None  # number of the received signal
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
