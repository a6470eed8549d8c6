"""The parser of ``hstree`` and what every command shares: progress, errors as one line, exit
statuses.

Exit status: 0 success; 1 training failed, memory ran out, or an error inside hstree; 2 an argument,
file or setting is not valid, or a file cannot be written; 130 interrupted by Ctrl-C, 143 by
SIGTERM. ``HSTREE_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import platform
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import torch

import hstree
from hstree._extension import describe_cuda
from hstree._memory import ran_out
from hstree.lm._messages import meant, shortened
from hstree.lm._progress import shown
from hstree.lm._terminal import fold
from hstree.lm.runs import perplexity
from hstree.lm.training import TrainingError, TrainingInterrupted, is_main_process

_LONGEST = 2000  # characters of a message, whatever it quotes
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, folded on a terminal, with what may have been meant. An
    unknown argument is an error of the command that it was given to."""

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        found, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = meant(unknown[0].partition("=")[0], flags)
            self.error(f"unrecognized arguments: {shortened(' '.join(unknown), _LONGEST)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if choice:
            message += meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        line = f"{self.prog}: error: {shortened(message, _LONGEST)} (see {self.prog} --help)"
        self.exit(2, f"{fold(line, sys.stderr)}\n")


AddCommand: TypeAlias = Callable[[Any], None]
"""Registers a command with its subcommands on what ``add_subparsers`` returns. Each command sets
``handler``, a function of the parsed arguments that returns the exit status."""


def build_parser(commands: Iterable[AddCommand], description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hstree",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    version = fold(f"hstree {hstree.__version__} ({versions}), {describe_cuda()}", sys.stdout)
    parser.add_argument(
        "--version", action="version", version=version, help="show versions and exit"
    )
    added = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for add_command in commands:
        add_command(added)
    return parser


def run(commands: Iterable[AddCommand], description: str, argv: Sequence[str] | None = None) -> int:
    """Run one of the commands with the given arguments (default: those of the process) and return
    the exit status. Characters that a terminal cannot show are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            arguments = build_parser(commands, description).parse_args(argv)
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else 2
        with _terminable(), shown():
            status: int = arguments.handler(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except OSError as error:
        full = error.errno in _FULL and error.filename is None  # of print; other errors name a file
        message = f"cannot write the output: {error.strerror}" if full else str(error)
        return _fail(error, message, 2)
    except ValueError as error:
        return _fail(error, str(error), 2)
    except Exception as error:
        if isinstance(error, TrainingError):
            return _fail(error, str(error), 1)
        if ran_out(error):
            return _fail(error, f"memory ran out: {error}", 1)
        message = f"unexpected {type(error).__name__}: {error} (HSTREE_DEBUG=1 shows where)"
        return _fail(error, message, 1)


class _Terminated(KeyboardInterrupt):
    signal = signal.SIGTERM


@contextmanager
def _terminable() -> Iterator[None]:
    """A context in which SIGTERM does what Ctrl-C does, unless it is ignored."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return

    def end(*_: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    status: int = 128 + (getattr(interrupt, "signal", None) or signal.SIGINT)
    return _fail(interrupt, f"interrupted{_kept(interrupt)}", status)


def _kept(interrupt: KeyboardInterrupt) -> str:
    if not isinstance(interrupt, TrainingInterrupted):
        return f": {interrupt}" if str(interrupt) else ""
    if interrupt.run is None:
        return " before training began; nothing was written"
    best = interrupt.best
    kept = " before the first epoch ended"
    if best is not None:
        value = perplexity(best.valid_loss)
        kept = (
            f"; epoch {best.epoch} (validation perplexity {value:.1f}) is kept in {interrupt.run}"
        )
    return f"{kept}; resume with hstree train --resume {interrupt.run}"


def _fail(error: BaseException, message: str, status: int) -> int:
    if os.environ.get("HSTREE_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    line = shortened(" ".join(message.split()), _LONGEST)
    if is_main_process():  # the others end for the same reason
        print(fold(f"hstree: {line}", sys.stderr), file=sys.stderr)
    return status
