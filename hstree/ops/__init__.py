"""Operators: public functions over ``torch.ops.hstree.*`` with their fake kernels and autograd
formulas."""

from hstree.ops.feature_gather import feature_gather
from hstree.ops.path import path_log_prob
from hstree.ops.wide import wide_log_prob

__all__ = ["feature_gather", "path_log_prob", "wide_log_prob"]
