"""The command ``hstree``, also as ``python -m hstree``: the commands of the reference language
model and of the laboratory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hstree.lab.commands import COMMANDS as OF_LABORATORY
from hstree.lm.cli import COMMANDS as OF_MODEL
from hstree.lm.cli import run

COMMANDS = (*OF_MODEL, *OF_LABORATORY)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hstree`` with the given arguments (default: those of the process) and return the exit
    status."""
    return run(COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
