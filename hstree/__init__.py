"""Output layers for language models from ensembles of randomized hierarchical softmaxes.

    loss = F.cross_entropy(linear(hidden), target)    becomes    loss = head(hidden, target).loss

Importing the package registers the operators ``torch.ops.hstree.*`` with their autograd formulas.
"""

from hstree._extension import BuildInfo, build_info, interruptible_imports, load

with interruptible_imports():
    load()
    from hstree import heads, ops, optim, trees  # they need the operators that load() registers

__version__ = build_info().version

__all__ = ["BuildInfo", "__version__", "build_info", "heads", "ops", "optim", "trees"]
