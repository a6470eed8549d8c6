"""The commands of the laboratory: ``hstree compare | study | analyze | experiment``."""

from __future__ import annotations

from typing import Any

from hstree.lab import (
    comparison,
    correlation,
    ensemble,
    function,
    jacobian,
    predictions,
    rank,
    robustness,
    significance,
    study,
    synthetic,
    words,
)

ANALYZE = (
    correlation,
    function,
    predictions,
    rank,
    significance,
    ensemble,
    words,
)
EXPERIMENT = (jacobian, robustness, synthetic)


def add_measurements(commands: Any) -> None:
    for name, help_text, measurements in (
        ("analyze", "measurements on trained models", ANALYZE),
        ("experiment", "experiments that need no trained model", EXPERIMENT),
    ):
        parser = commands.add_parser(name, help=help_text)
        subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for measurement in measurements:
            measurement.COMMAND.add_command(subcommands)


COMMANDS = (comparison.add_command, study.add_command, add_measurements)
"""Each registers a command of the laboratory."""
