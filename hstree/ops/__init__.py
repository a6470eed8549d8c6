"""Operators: public functions around ``torch.ops.hstree.*``, with their fake kernels and autograd
formulas."""

from hstree._checks import mark_targets
from hstree.ops.feature_gather import feature_gather
from hstree.ops.forest_log_prob import forest_log_prob
from hstree.ops.group_log_prob import group_log_prob
from hstree.ops.logit_function import LogitFunction
from hstree.ops.mixture_log_prob import default_chunk_rows, mixture_log_prob
from hstree.ops.path_log_prob import path_log_prob
from hstree.ops.piecewise import piecewise
from hstree.ops.plif import plif, plif_table
from hstree.ops.screened_topk import Screened, quantize_preview, screened_topk
from hstree.ops.sparse_adam import sparse_adam_
from hstree.ops.target_log_softmax import target_log_softmax
from hstree.ops.tree_queries import group_topk, sample, tree_log_softmax, tree_topk

__all__ = [
    "LogitFunction",
    "Screened",
    "default_chunk_rows",
    "feature_gather",
    "forest_log_prob",
    "group_log_prob",
    "group_topk",
    "mark_targets",
    "mixture_log_prob",
    "path_log_prob",
    "piecewise",
    "plif",
    "plif_table",
    "quantize_preview",
    "sample",
    "screened_topk",
    "sparse_adam_",
    "target_log_softmax",
    "tree_log_softmax",
    "tree_topk",
]
