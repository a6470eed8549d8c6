"""The command line: ``hstree train | evaluate | generate | compare | tree``."""

from .app import main

__all__ = ["main"]
