"""Output layers for language models from ensembles of randomized hierarchical softmaxes.

``loss = F.cross_entropy(linear(hidden), target)`` becomes ``loss = head(hidden, target).loss``.
Importing the package registers the operators ``torch.ops.hstree.*`` with their autograd formulas.
"""

from hstree._extension import BuildInfo, build_info, load

load()  # registers the operators that the others need
from hstree import heads, ops, optim, trees  # noqa: E402
from hstree.deferred import defer_logits, undefer  # noqa: E402
from hstree.heads import (  # noqa: E402
    DOC,
    GSS,
    PLIF,
    AdaptiveSoftmax,
    ForestSoftmax,
    Head,
    HeadOutput,
    Mixtape,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    MonotonicNetwork,
    SampledSoftmax,
    ScreenedSoftmax,
    SigSoftmax,
    Softmax,
    TreeEnsemble,
    load_head,
)

__version__ = build_info().version

__all__ = [
    "DOC",
    "GSS",
    "PLIF",
    "AdaptiveSoftmax",
    "BuildInfo",
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
    "__version__",
    "build_info",
    "defer_logits",
    "heads",
    "load_head",
    "ops",
    "optim",
    "trees",
    "undefer",
]
