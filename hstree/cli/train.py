"""``hstree train``."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import add_config_arguments, config_values

_DESCRIPTION = """\
Train an LSTM language model and leave a run folder with its settings, vocabulary, metrics, learning
curve and best weights. Without arguments: the docstrings and help topics of this Python
installation, four clustered trees, about 3 minutes on two CPU cores. Ctrl-C stops the training and
keeps the best epoch so far.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("train", help="train a language model", description=_DESCRIPTION)
    add_config_arguments(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.training import TrainConfig, default_reporter, format_summary, train

    result = train(TrainConfig(**config_values(arguments)), default_reporter())
    print()
    print(format_summary(result.summary))
    print()
    print(f"{result.summary.seconds:.0f} s in all; the run is in {result.run}")
    return 0
