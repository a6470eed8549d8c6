"""A readable PyTorch implementation of every op: the specification that the tests compare the
kernels with."""

from reference.candidate_log_prob import candidate_log_prob_reference
from reference.feature_gather import feature_gather_reference
from reference.leaf_log_prob import leaf_log_prob_reference
from reference.leaf_order import leaf_order_reference
from reference.mixture_log_prob import mixture_log_prob_reference
from reference.path_log_prob import path_log_prob_reference
from reference.piecewise import piecewise_reference
from reference.sample import sample_reference
from reference.sparse_adam import sparse_adam_reference
from reference.target_log_softmax import target_log_softmax_reference
from reference.tree_log_softmax import tree_log_softmax_reference
from reference.tree_topk import tree_topk_reference
from reference.wide_log_prob import wide_log_prob_reference

__all__ = [
    "candidate_log_prob_reference",
    "feature_gather_reference",
    "leaf_log_prob_reference",
    "leaf_order_reference",
    "mixture_log_prob_reference",
    "path_log_prob_reference",
    "piecewise_reference",
    "sample_reference",
    "sparse_adam_reference",
    "target_log_softmax_reference",
    "tree_log_softmax_reference",
    "tree_topk_reference",
    "wide_log_prob_reference",
]
