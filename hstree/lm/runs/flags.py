"""Flags from the fields of TrainConfig, and the argument that names a run."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from hstree.heads import head_names

from .config import TrainConfig
from .device import choose_device, set_threads
from .reader import Run, load_run
from .settings import field_types, flag_name


def add_config_arguments(
    parser: argparse.ArgumentParser, *, only: tuple[str, ...] | None = None
) -> None:
    """Add a flag for each field of :class:`TrainConfig`, or for those of ``only``; a flag that is
    not given sets no attribute."""
    groups: dict[str, Any] = {}
    types = field_types(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        if only is not None and field.name not in only:
            continue
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        kind, optional, item = types[field.name]
        help_text = field.metadata["help"].replace("{heads}", ", ".join(head_names()))
        help_text = help_text.replace("%", "%%")
        if not optional and kind is not tuple:
            default = ("yes" if field.default else "no") if kind is bool else field.default
            help_text += f" (default: {default})"
        options: dict[str, Any] = {
            "help": help_text,
            "default": argparse.SUPPRESS,
            "dest": field.name,
        }
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = item or kind
            if field.metadata["choices"]:
                options["choices"] = field.metadata["choices"]
            else:
                options["metavar"] = field.metadata["metavar"] or {int: "N", float: "X"}.get(
                    kind, "NAME"
                )
            if item is str:
                options["action"] = "append"
        groups[name].add_argument(f"--{flag_name(field.name)}", **options)


def config_values(arguments: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(TrainConfig):
        if hasattr(arguments, field.name):
            value = getattr(arguments, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def open_run(arguments: argparse.Namespace) -> tuple[Run, TrainConfig]:
    """The run of :func:`add_run_argument`, on the device and with the threads that were given, and
    all settings that were given."""
    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    return load_run(arguments.directory, choose_device(settings.device)), settings


def add_run_argument(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The positional argument RUN, as ``directory``; with ``nargs`` several, as ``directories``."""
    if nargs is None:
        parser.add_argument("directory", metavar="RUN", help="run folder of hstree train")
    else:
        name, text = "directories", "run folders of hstree train"
        parser.add_argument(name, metavar="RUN", nargs=nargs, help=text)
