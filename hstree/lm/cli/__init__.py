"""The command line: what every command shares, and ``hstree train | evaluate | generate |
tree``."""

from . import evaluate, generate, train, tree
from .app import AddCommand, build_parser, run

COMMANDS: tuple[AddCommand, ...] = (
    train.add_command,
    evaluate.add_command,
    generate.add_command,
    tree.add_command,
)
"""Each registers a command of the reference language model."""

__all__ = ["COMMANDS", "build_parser", "run"]
