"""Output layers with one interface, and a registry of them by name."""

from hstree.heads.adaptive import AdaptiveSoftmax
from hstree.heads.base import Head, HeadOutput
from hstree.heads.forest import ForestSoftmax
from hstree.heads.mixtape import Mixtape
from hstree.heads.mixture import MixtureOfContexts, MixtureOfSoftmaxes
from hstree.heads.registry import (
    build_head,
    head_class,
    head_names,
    head_options,
    load_head,
    register_head,
)
from hstree.heads.sampled import SampledSoftmax
from hstree.heads.screened import ScreenedSoftmax
from hstree.heads.softmax import GSS, PLIF, MonotonicNetwork, SigSoftmax, Softmax
from hstree.heads.trees import TreeEnsemble

__all__ = [
    "GSS",
    "PLIF",
    "AdaptiveSoftmax",
    "ForestSoftmax",
    "Head",
    "HeadOutput",
    "Mixtape",
    "MixtureOfContexts",
    "MixtureOfSoftmaxes",
    "MonotonicNetwork",
    "SampledSoftmax",
    "ScreenedSoftmax",
    "SigSoftmax",
    "Softmax",
    "TreeEnsemble",
    "build_head",
    "head_class",
    "head_names",
    "head_options",
    "load_head",
    "register_head",
]
