"""The commands of the laboratory: ``hstree compare | study | analyze | experiment``."""

from __future__ import annotations

from typing import Any

from hstree.lab import comparison
from hstree.lab.correlation import COMMAND as correlation
from hstree.lab.ensemble import COMMAND as tree
from hstree.lab.function import COMMAND as function
from hstree.lab.jacobian import COMMAND as jacobian
from hstree.lab.predictions import COMMAND as predictions
from hstree.lab.rank import COMMAND as rank
from hstree.lab.robustness import COMMAND as robustness
from hstree.lab.significance import COMMAND as significance
from hstree.lab.study import command as study
from hstree.lab.synthetic import COMMAND as synthetic
from hstree.lab.words import COMMAND as words

ANALYZE = (
    correlation,
    function,
    predictions,
    rank,
    significance,
    tree,
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
            measurement.add_command(subcommands)


COMMANDS = (comparison.add_command, study.add_command, add_measurements)
"""Each registers a command of the laboratory."""
