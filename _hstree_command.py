"""The command ``hstree``. It lies outside of the package, because Ctrl-C may come while the package
and torch are imported, and importing hstree leaves the signals of a program as they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


def main() -> int:
    """Run ``hstree`` with the arguments of the process and return the exit status."""
    with _interruptible():
        from hstree.__main__ import main as run
    return run()


@contextmanager
def _interruptible() -> Iterator[None]:
    """A context in which Ctrl-C or SIGTERM ends the process at once, with one line: a partly
    imported module could handle KeyboardInterrupt in any way."""
    default: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    # A signal that is ignored, as Ctrl-C is in a command that a script starts with &, stays so.
    replaced = {number: by for number, by in default.items() if signal.getsignal(number) is by}

    def end(number: int, _: object) -> NoReturn:
        os.write(2, b"hstree: interrupted\n")
        os._exit(128 + number)

    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, by in replaced.items():
            signal.signal(number, by)
