"""The command line: ``hstree train | evaluate | generate | compare | tree``."""

from hstree._extension import interruptible_imports

with interruptible_imports():
    from hstree.cli.app import main

__all__ = ["main"]
