"""``hstree experiment``: what needs no trained model, a file for each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import jacobian, robustness, synthetic

_COMMANDS: tuple[ModuleType, ...] = (jacobian, robustness, synthetic)


def add_command(commands: Any) -> None:
    """Register the command and its subcommands."""
    parser = commands.add_parser("experiment", help="experiments that need no trained model")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_command(subcommands)
