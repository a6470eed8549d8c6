"""Names that moved to :mod:`hstree.runs`, for commands that still ask here."""

from hstree.runs.config import DEVICES

__all__ = ["DEVICES"]
