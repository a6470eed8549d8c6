"""The command line: ``hstree train | evaluate | generate | compare | tree``."""

from hstree.cli.app import main

__all__ = ["main"]
