"""The command ``hstree``, also as ``python -m hstree``: the commands of the reference language
model and of the laboratory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hstree.lab.commands import COMMANDS as OF_LABORATORY
from hstree.lm.cli import COMMANDS as OF_LANGUAGE_MODEL
from hstree.lm.cli import run

COMMANDS = (*OF_LANGUAGE_MODEL, *OF_LABORATORY)
DESCRIPTION = """\
Small language models with the output layers of hstree, and experiments with
these layers.

  hstree train                              on the docstrings of this Python,
                                            a few minutes on two CPU cores
  hstree train --data FOLDER_OR_FILE        on a text of your own
  hstree train --preset ptb-mos --data PTB  with published settings
  hstree train --resume RUN                 resume a run that was stopped
  hstree train --finetune RUN               averaged SGD from its best weights
  hstree evaluate RUN                       perplexity of a trained model
  hstree generate RUN --prompt "the value"  text from a trained model
  hstree compare RUN RUN                    runs side by side, means over seeds
  hstree study FILE                         a grid of runs in one table
  hstree tree draw RUN                      a picture of its trees
  hstree analyze rank RUN RUN               one of several measurements
  hstree experiment synthetic               experiments without a trained model

COMMAND --help describes a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hstree`` with the given arguments (default: those of the process) and return the exit
    status."""
    return run(COMMANDS, DESCRIPTION, argv)


if __name__ == "__main__":
    sys.exit(main())
