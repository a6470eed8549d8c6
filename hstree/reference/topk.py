"""Reference of :mod:`hstree.ops.topk`: the log-probabilities of all classes, sorted."""

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_topk_reference(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wide_weight: Tensor | None,
    wide_bias: Tensor | None,
    root_log_prob: Tensor | None,
    log_gate: Tensor,
    feature_index: Tensor | None,
    node: Tensor,
    edge: Tensor,
    leaf_edge: Tensor,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, k] and classes [N, k]; arguments as for
    :func:`hstree.ops.tree_topk`. Of equally probable classes those of lower numbers are taken."""
    blocks = ((weight, bias), (wide_weight, wide_bias))
    trees = []
    for t in range(log_gate.shape[1]):
        x = input.to(log_gate.dtype)
        if feature_index is not None:
            x = x[:, feature_index[t].long()]
        log_prob = x.new_zeros(len(x), edge.shape[1])
        for block, row, first, width, above in node[t].tolist():
            if not width:
                continue  # where the table is filled up
            if block == 2:
                assert root_log_prob is not None
                children = root_log_prob[t]
            else:
                rows = slice(row, row + (1 if block == 0 else width))
                w, b = blocks[block]
                assert w is not None
                z = x @ w[t, rows].to(x.dtype).t()
                if b is not None:
                    z = z + b[t, rows].to(x.dtype)
                children = F.logsigmoid(torch.cat([z, -z], 1)) if block == 0 else z.log_softmax(1)
            here = slice(first, first + width)
            log_prob[:, here] = children + (log_prob[:, [above]] if above >= 0 else 0)
        path = log_prob[:, leaf_edge[t].long()] if edge.shape[1] else log_prob.new_zeros(len(x), 1)
        trees.append(path + log_gate[:, [t]])
    values, classes = torch.logsumexp(torch.stack(trees), 0).sort(
        dim=1, descending=True, stable=True
    )
    return values[:, :k], classes[:, :k]
