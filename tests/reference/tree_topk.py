"""Reference of :func:`hstree.ops.tree_topk`: the log-probabilities of all classes, sorted."""

from typing import Any

from torch import Tensor

from reference.tree_mixture import all_log_probs


def tree_topk_reference(*vectors: Any, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, k] and classes [N, k]; arguments of :func:`hstree.ops.tree_topk`. Of
    equally probable classes it takes those with lower numbers."""
    values, classes = all_log_probs(*vectors).sort(dim=1, descending=True, stable=True)
    return values[:, :k], classes[:, :k]
