"""``hstree analyze``: the measurements of the literature on trained models; a file for each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import correlation, function, predictions, rank, significance, tree, words

_COMMANDS: tuple[ModuleType, ...] = (
    correlation,
    function,
    predictions,
    rank,
    significance,
    tree,
    words,
)


def add_command(commands: Any) -> None:
    """Register the command and its subcommands."""
    parser = commands.add_parser("analyze", help="measurements on trained models")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_command(subcommands)
