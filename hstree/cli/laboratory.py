"""``hstree analyze`` and ``hstree experiment``: the measurements of the laboratory."""

from __future__ import annotations

from typing import Any

from hstree.laboratory.correlation.report import COMMAND as correlation
from hstree.laboratory.function.report import COMMAND as function
from hstree.laboratory.jacobian.report import COMMAND as jacobian
from hstree.laboratory.predictions.report import COMMAND as predictions
from hstree.laboratory.rank.report import COMMAND as rank
from hstree.laboratory.robustness.report import COMMAND as robustness
from hstree.laboratory.significance.report import COMMAND as significance
from hstree.laboratory.synthetic.report import COMMAND as synthetic
from hstree.laboratory.trees.report import COMMAND as tree
from hstree.laboratory.wins.report import COMMAND as wins
from hstree.laboratory.words.report import COMMAND as words

ANALYZE = (correlation, function, predictions, rank, significance, tree, wins, words)
EXPERIMENT = (jacobian, robustness, synthetic)


def add_command(commands: Any) -> None:
    """Register the commands and their subcommands."""
    for name, help_text, measurements in (
        ("analyze", "measurements on trained models", ANALYZE),
        ("experiment", "experiments that need no trained model", EXPERIMENT),
    ):
        parser = commands.add_parser(name, help=help_text)
        subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for measurement in measurements:
            measurement.add_command(subcommands)
