"""Output layers behind one interface, and a registry of them by name."""

from hstree.heads.adaptive import AdaptiveSoftmax
from hstree.heads.base import Head, HeadOutput, ParameterGroup
from hstree.heads.registry import head_class, head_names, load_head, register_head
from hstree.heads.softmax import Softmax
from hstree.heads.tree_ensemble import TreeEnsemble

__all__ = [
    "AdaptiveSoftmax",
    "Head",
    "HeadOutput",
    "ParameterGroup",
    "Softmax",
    "TreeEnsemble",
    "head_class",
    "head_names",
    "load_head",
    "register_head",
]
