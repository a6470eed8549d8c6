"""Operators: public functions over ``torch.ops.hstree.*`` with their fake kernels and autograd
formulas."""

import hstree._extension

hstree._extension.load()

from hstree.ops.feature_gather import feature_gather  # noqa: E402
from hstree.ops.path import path_log_prob  # noqa: E402
from hstree.ops.wide import wide_log_prob  # noqa: E402

__all__ = ["feature_gather", "path_log_prob", "wide_log_prob"]
