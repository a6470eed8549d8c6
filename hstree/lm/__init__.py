"""The reference language model: texts, models, runs, training, evaluation, the command line."""

from hstree.lm.draw import draw_tree

__all__ = ["draw_tree"]
