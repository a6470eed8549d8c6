"""Log-probabilities by level, against trees walked from the root and the operators' references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference.leaf_log_prob import leaf_log_prob_reference
from reference.path_log_prob import path_log_prob_reference
from reference.wide_log_prob import wide_log_prob_reference

from heads.support import HEADS, D, V, draw, make
from hstree.heads import TreeEnsemble
from hstree.heads.trees import level_log_probs

KINDS = [kind for kind in HEADS if kind.startswith("trees")]


@pytest.mark.parametrize("kind", KINDS)
def test_levels_add_up(kind: str) -> None:
    """To the log-probability of each tree, by the references, and to that of the head."""
    head = make(kind).double()
    assert isinstance(head, TreeEnsemble)
    target = torch.arange(V).flip(0)
    hidden = draw(V, D, dtype=torch.float64)
    log_prob, group, log_gate = level_log_probs(head, hidden, target)
    assert log_prob.shape == group.shape == (V, head.n_trees, max(t.height for t in head.trees))
    assert (log_prob <= 0).all()
    with torch.no_grad():
        blocks = {block.bias_name: block for block in head.nodes(head.layout)}
        layout, index = head.layout, head.layout.feature_index
        trees = torch.zeros(V, head.n_trees, dtype=torch.float64)
        binary, groups, at_root = (torch.zeros_like(trees) for _ in range(3))
        if "binary_bias" in blocks:
            binary, _ = path_log_prob_reference(
                hidden,
                blocks["binary_bias"].weight,
                head.nodes.binary_bias,
                target,
                layout.path_offset,
                layout.path,
                layout.leaf_position,
                index,
                layout.max_depth,
            )
        if "wide_bias" in blocks:
            groups, _ = wide_log_prob_reference(
                hidden,
                blocks["wide_bias"].weight,
                head.nodes.wide_bias,
                target,
                layout.wide_offset,
                layout.wide_path,
                layout.leaf_position,
                index,
                layout.max_width,
            )
        if "leaf_bias" in blocks:
            of_groups, _ = leaf_log_prob_reference(
                hidden,
                blocks["leaf_bias"].weight,
                head.nodes.leaf_bias,
                target,
                layout.group_offset,
                layout.group,
                layout.leaf_position,
                layout.leaf_class,
                layout.max_group,
            )
            groups += of_groups
        if "root_bias" in blocks:
            root = blocks["root_bias"]
            for t in range(head.n_trees):
                x = hidden if index is None else hidden[:, index[t].long()]
                z = F.linear(x, root.vectors()[t], root.bias[t]).log_softmax(1)
                at_root[:, t] = z[torch.arange(V), layout.root_child[t, target].long()]
    torch.testing.assert_close((log_prob * group).sum(2), groups)
    torch.testing.assert_close(log_prob.sum(2), binary + groups + at_root)
    if "root_bias" in blocks:
        torch.testing.assert_close(log_prob[:, :, 0], at_root)
    mixture = (log_prob.sum(2) + log_gate).logsumexp(1)
    torch.testing.assert_close(mixture, head(hidden, target).output)
    for t, tree in enumerate(head.trees):
        depth = tree.depth[target.numpy()]
        beyond = np.arange(log_prob.shape[2]) >= depth[:, None]
        assert (log_prob[:, t].numpy()[beyond] == 0).all()
        assert (log_prob[:, t].numpy()[~beyond] < 0).all()


def test_single_class_and_no_rows() -> None:
    from hstree.trees import Tree

    one = TreeEnsemble(3, 1, [Tree.from_nested(0)])
    found = level_log_probs(one, draw(4, 3), torch.zeros(4, dtype=torch.int64))
    assert found.log_prob.shape == (4, 1, 0)
    head = make("trees, sparse")
    assert isinstance(head, TreeEnsemble)
    none = level_log_probs(head, draw(0, D), torch.zeros(0, dtype=torch.int64))
    assert none.log_prob.shape[0] == 0
