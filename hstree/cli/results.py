"""What an analysis or an experiment leaves: a page, its pictures, its figures in full digits."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .printing import print_tables

if TYPE_CHECKING:
    from hstree.analysis import Table


def add_output_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """The flag ``--output``; ``default``: name of the folder for those who do not say one."""
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        default=default,
        help="folder for the page, pictures and figures, made if it is not there; files of the "
        f"same name are replaced (default: {default})",
    )


def results_folder(arguments: argparse.Namespace) -> Path:
    """The folder of ``--output``, made with its parents: before the work, so that nothing is
    computed in vain.

    Raises:
        ValueError: it is not a folder, or cannot be made.
    """
    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output: expected a folder that exists or can be made, got {folder}: "
            f"{error.strerror}"
        ) from None
    return folder


def publish(
    folder: Path,
    name: str,
    title: str,
    tables: Sequence[Table],
    data: Any,
    pictures: Mapping[str, bytes],
    notes: Sequence[str] = (),
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Print tables and notes, and write them and everything else to the folder, file by file in one
    step each.

    Args:
        folder: of :func:`results_folder`.
        name: stem of the files: NAME.md, the page, with the command, tables, notes and pictures;
            NAME.json, ``data``; NAME.csv, ``rows``.
        title: heading of the page.
        tables: to show.
        data: everything in full digits; JSON-able, nan and infinity become null.
        pictures: PNG files by file name, in the order in which they are shown; the part of the name
            behind NAME-, without .png, describes them.
        notes: what a reader must know beside the figures, a sentence each.
        rows: the same keys in each.
    """
    from hstree._files import write_atomic
    from hstree.analysis import csv_text, markdown

    print_tables(tables, notes)
    files: dict[str, bytes] = dict(pictures)
    files[f"{name}.json"] = (json.dumps(_finite(data), indent=1) + "\n").encode()
    if rows is not None:
        files[f"{name}.csv"] = csv_text(rows).encode()
    shown = [f"![{Path(file).stem.replace('-', ' ')}]({file})" for file in pictures]
    command = f"    {shlex.join(['hstree', *sys.argv[1:]])}"
    parts = [f"# {title}", markdown(tables, notes).strip(), *shown, "Made by", command, machine()]
    files[f"{name}.md"] = ("\n\n".join(parts) + "\n").encode()
    for file, content in files.items():
        write_atomic(folder / file, content)
    print(f"written to {folder}: {', '.join(files)}")


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def machine() -> str:
    """Device, threads, versions and date in a line."""
    import torch

    device = _processor()
    if torch.cuda.is_available():
        device += f", {torch.cuda.get_device_name()}"
    return (
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {date.today()}."
    )


def _processor() -> str:
    """The processor's name, where the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
