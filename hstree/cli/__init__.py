"""The command line: ``hstree train | evaluate | generate | tree``."""

from .app import main

__all__ = ["main"]
