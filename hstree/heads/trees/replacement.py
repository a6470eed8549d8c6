"""Other trees for an ensemble whose leaf groups share one output embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hstree.heads.trees.conversion import expand_nodes
from hstree.heads.trees.layout import check_trees
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.vectors import NODE_BLOCKS
from hstree.trees import Tree


@torch.no_grad()
def replace_trees(head: EnsembleState, trees: Sequence[Tree], at: Tensor | None) -> list[str]:
    """Names of the parameters that start anew. See
    :meth:`hstree.heads.TreeEnsemble.replace_trees`."""
    trees = _checked(head, trees)
    if at is not None and at.shape != (head.in_features,):
        raise ValueError(f"at: expected shape [{head.in_features}], got {list(at.shape)}")
    bias = _class_bias(head)
    head.set_trees(trees)
    head.place_tables(head.output_embedding.device)
    names = _resize(head)
    if head.leaf_bias is not None:
        head.leaf_bias.copy_(bias)
    expand_nodes(head, head.output_embedding, bias, at)
    return names


def _checked(head: EnsembleState, trees: Sequence[Tree]) -> list[Tree]:
    if head.node_vectors != "leaves":
        raise ValueError(
            "trees: expected a head with node_vectors='leaves', whose output embedding outlives "
            f"its trees, got {head.node_vectors!r}"
        )
    if any(parameter.is_meta for parameter in head.parameters()):
        raise ValueError("trees: expected a head with data, got one on the meta device")
    if any(hasattr(parameter, "device_mesh") for parameter in head.parameters()):
        raise ValueError(
            "trees: expected a head with whole parameters, got DTensor; replace the trees before "
            "fully_shard"
        )
    checked = check_trees(trees, head.n_classes)
    if len(checked) != head.n_trees:
        raise ValueError(f"trees: expected {head.n_trees} trees, got {len(checked)}")
    root_width = head.trees[0].root_width
    if checked[0].root_width != root_width:
        raise ValueError(
            f"trees: expected roots of {root_width} children, got {checked[0].root_width}"
        )
    return checked


def _class_bias(head: EnsembleState) -> Tensor:
    """Bias b [T, V] of each class in each tree, float64 on the CPU: that of its leaf group or, for
    a child of a wide root, that of the root's row."""
    shape = (head.n_trees, head.n_classes)
    leaf_bias = head.leaf_bias
    bias = torch.zeros(shape).double() if leaf_bias is None else leaf_bias.double().cpu().clone()
    if head.root_bias is not None:
        root_bias = head.root_bias.double().cpu()
        for t, layout in enumerate(head.layout.trees):
            row, classes = layout.root_classes()
            bias[t, classes.astype(np.int64)] = root_bias[t, row]
    return bias


def _resize(head: EnsembleState) -> list[str]:
    """Give the parameters of the nodes above the leaf groups the shapes of the new trees, and
    return their names."""
    names = []
    for block in NODE_BLOCKS:
        rows = head.layout.n_rows[block.kind]
        bias_shape: tuple[int, ...] = (head.n_trees, rows)
        shapes = {f"{block.prefix}bias": bias_shape}
        if head.leaf_bias is not None:  # otherwise the root is over all classes
            shapes[block.weight_name] = (*bias_shape, head.subset_size)
        for name, shape in shapes.items():
            parameter: nn.Parameter | None = getattr(head, name)
            if not rows:
                head.register_parameter(name, None)
                continue
            if parameter is None:
                empty = head.output_embedding.new_empty(shape)
                head.register_parameter(name, nn.Parameter(empty))
            elif parameter.shape != shape:
                _set_shape(parameter, shape)
            getattr(head, name).zero_()
            getattr(head, name).grad = None
            names.append(name)
    return names


def _set_shape(parameter: nn.Parameter, shape: tuple[int, ...]) -> None:
    """Give a parameter uninitialized data of another shape."""
    data = parameter.new_empty(shape)
    # The last loss may still hold the node that accumulates its gradient, which expects the old
    # shape. Data of another dtype makes the parameter drop that node.
    other = torch.float64 if parameter.dtype != torch.float64 else torch.float32
    parameter.data = parameter.new_empty(0, dtype=other)
    parameter.data = data


def like_shape(head: EnsembleState, shape: dict[str, Any]) -> dict[str, Any]:
    """Arguments ``root``, ``leaf`` and ``levels`` of :func:`hstree.trees.build_ensemble`: those
    given, and for the others what the present trees look like. With ``leaf`` alone, binary nodes
    over groups of this size."""
    height = max(tree.height for tree in head.trees)
    levels = height if height in (2, 3) and "leaf" not in shape else None
    shape = {"root": head.trees[0].root_width, "levels": levels} | shape
    widest = 1 if shape["levels"] == 2 else max(1, head.layout.max_group)
    return {"leaf": widest} | shape
