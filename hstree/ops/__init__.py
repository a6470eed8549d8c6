"""Operators: public functions around ``torch.ops.hstree.*``, with their fake kernels and autograd
formulas."""

from hstree._checks import mark_targets
from hstree.ops.candidate_log_prob import candidate_log_prob
from hstree.ops.feature_gather import feature_gather
from hstree.ops.forest_log_prob import forest_log_prob
from hstree.ops.leaf_order import leaf_order
from hstree.ops.leaf_tree_topk import leaf_tree_topk
from hstree.ops.logit_function import LogitFunction
from hstree.ops.mixture_log_prob import default_chunk_rows, mixture_log_prob
from hstree.ops.piecewise import piecewise
from hstree.ops.plif import plif, plif_table
from hstree.ops.sample import sample
from hstree.ops.screened_topk import Screened, quantize_preview, screened_topk
from hstree.ops.sparse_adam import sparse_adam_
from hstree.ops.target_log_softmax import target_log_softmax
from hstree.ops.tree_log_softmax import tree_log_softmax
from hstree.ops.tree_op import leaf_log_prob, path_log_prob, wide_log_prob
from hstree.ops.tree_topk import tree_topk

__all__ = [
    "LogitFunction",
    "Screened",
    "candidate_log_prob",
    "default_chunk_rows",
    "feature_gather",
    "forest_log_prob",
    "leaf_log_prob",
    "leaf_order",
    "leaf_tree_topk",
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
    "wide_log_prob",
]
