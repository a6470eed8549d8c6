"""Optimisers over the operators of the library."""

from hstree.optim.sparse_adam import SparseAdam

__all__ = ["SparseAdam"]
