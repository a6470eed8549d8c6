"""A measurement as a command: its flags, and where its report is written."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hstree._files import write_together
from hstree.lm._arguments import Argument
from hstree.lm._packages import optional_package
from hstree.lm._terminal import fold
from hstree.lm.print_tables import print_tables
from hstree.lm.runs import Run, TrainConfig, choose_device, load_run, run_names, set_threads
from hstree.lm.runs.flags import add_config_arguments, add_run_argument, config_values

from .report import Report

SPLIT = Argument("--split", "part of the text", "test", choices=("test", "valid"))


@dataclass(frozen=True)
class Measurement:
    """A measurement as a command.

    Attributes:
        name: name of the command, and stem of the files that it writes.
        measure: a function of the parsed arguments that returns the report. It raises ValueError
            for arguments that are not valid. With ``settings`` the arguments have ``settings``, a
            :class:`hstree.lm.runs.TrainConfig`, and ``device``, a :class:`torch.device`.
        runs: number of positional run folders (``nargs`` of argparse), which become
            ``directories``; None: the command takes none.
        settings: settings of ``hstree train`` that the command takes.
        output: default of ``--output``; "": the name.
    """

    name: str
    help: str
    description: str
    measure: Callable[[argparse.Namespace], Report]
    arguments: tuple[Argument, ...] = ()
    runs: str | None = None
    settings: tuple[str, ...] = ()
    output: str = ""

    def add_command(self, commands: Any) -> None:
        parser = commands.add_parser(self.name, help=self.help, description=self.description)
        if self.runs is not None:
            add_run_argument(parser, self.runs)
        for argument in self.arguments:
            argument.add(parser)
        add_config_arguments(parser, only=self.settings)
        Argument(
            "--output",
            "folder for the page, pictures and figures, created if it does not exist; "
            "files of the same name are replaced",
            self.output or self.name,
            metavar="FOLDER",
        ).add(parser)
        parser.set_defaults(handler=self._run)

    def _run(self, arguments: argparse.Namespace) -> int:
        if self.settings:
            arguments.settings = TrainConfig(**config_values(arguments))
            arguments.device = choose_device(arguments.settings.device)
            set_threads(arguments.settings)
        optional_package("matplotlib", self.name, "lm")  # before the work, not after it
        with output_folder(arguments.output) as folder:
            report = self.measure(arguments)
            print_tables(report.tables, report.notes)
            files = report.content(self.name, shlex.join(["hstree", *sys.argv[1:]]))
            write_together(folder, files)
        print(fold(f"written to {folder}: {', '.join(files)}", sys.stdout))
        return 0


@contextmanager
def output_folder(output: str) -> Iterator[Path]:
    """The folder of ``--output``, created before the work, so that no result is lost, and removed
    again if the work fails and leaves it empty. Raises ValueError if it cannot be written to."""
    folder = Path(output)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=folder)).rmdir()
    except OSError as error:
        raise ValueError(
            f"--output: expected a folder to write to, which may be new, got {folder}: "
            f"{error.strerror}"
        ) from None
    try:
        yield folder
    except BaseException:
        for path in made:
            with suppress(OSError):  # not empty
                path.rmdir()
        raise


def load_runs(arguments: argparse.Namespace, paths: Sequence[str] = ()) -> dict[str, Run]:
    """Load the runs of a command, or others, by name, on its device."""
    paths = paths or arguments.directories
    named = zip(run_names(paths), paths, strict=True)
    return {name: load_run(path, arguments.device) for name, path in named}
