"""The command line: what every command shares, and ``hstree train | evaluate | generate | convert |
tree``."""

from functools import partial

from . import convert, evaluate, generate, train, tree
from .app import AddCommand, build_parser, run


def commands(suggest: train.Suggest) -> tuple[AddCommand, ...]:
    """Each registers a command of the reference language model; ``hstree train`` suggests further
    commands by ``suggest``."""
    return (
        partial(train.add_command, suggest=suggest),
        evaluate.add_command,
        generate.add_command,
        convert.add_command,
        tree.add_command,
    )


__all__ = ["build_parser", "commands", "run"]
