"""The commands of benchmarks that make a page of their own, as reports of hstree.lab."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hstree._files import write_together
from hstree.lab.report import Report


def page_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the flag ``--output``, described by the docstring of a module."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for the page and its figures"
    )
    return parser


def publish(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Report],
    argv: Sequence[str] | None = None,
) -> None:
    """Run benchmarks.NAME on one thread: print its page, NAME.md, and write its files to the folder
    of ``--output``, if there is one."""
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    report = measure(options)
    files = report.content(name, shlex.join(["python", "-m", f"benchmarks.{name}", *given]))
    page = files[f"{name}.md"]
    assert isinstance(page, bytes)
    print(page.decode())
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        write_together(options.output, files)


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call, which other processes change little."""
    start = time.process_time()
    call()
    return time.process_time() - start
