"""Memory traffic of a step over binary trees, counted from its targets and paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TILE_ROWS = 16
"""Rows of a tile and of a group of the kernels (csrc/kernels/tile.cuh, row_group.cuh)."""
SECTOR = 32
"""Bytes of a sector, the unit of memory access of a GPU."""
PATH_TABLES = ("path_offset", "path", "leaf_position")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step over binary trees.

    `compulsory`: every input row, visited weight row, score, and gradient once, for any
    implementation. `kernels`: bytes that the kernels request from the caches: a weight row for each
    tile or group that needs it, and the sectors of an input row in which a tree has features;
    without the workspace.
    """

    visits: int  # nodes on the paths of all rows
    visited: int  # weight rows
    tile_nodes: int  # nodes of all tiles of 16 rows in leaf order
    group_nodes: int  # the same of tiles that are in the first tree's leaf order in all trees
    compulsory: Mapping[str, int]
    kernels: Mapping[str, int]


def traffic(
    target: Array,
    tables: Mapping[str, Array],
    feature_index: Array | None,
    in_features: int,
    features: int,
    max_depth: int,
    itemsize: int,
) -> Traffic:
    """Count the bytes of a batch, forward and backward with row-sparse gradients.

    Args:
        target: classes, [N], none ignored.
        tables: path_offset [T, V + 1], path [P], leaf_position [T, V].
        feature_index: features of each tree, [T, S]; None: every tree reads all features.
        itemsize: bytes of an element of input and weight.
    """
    offset, path, position = (tables[name] for name in PATH_TABLES)
    n_trees, rows = len(offset), len(target)
    visits = visited = tile_nodes = group_nodes = sectors = 0

    def paths(tree: int, order: Array) -> tuple[Array, int]:
        """Nodes on the paths of the rows in an order, and the number of nodes in all its tiles."""
        ordered = target[order]
        length = offset[tree, ordered + 1] - offset[tree, ordered]
        row = np.repeat(np.arange(rows), length)
        entry = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        node = path[offset[tree, ordered][row] + entry] >> 1
        return node, np.unique(np.stack([row // TILE_ROWS, node]), axis=1).shape[1]

    orders = [np.argsort(position[t, target], kind="stable") for t in range(n_trees)]
    for t in range(n_trees):
        node, in_tiles = paths(t, orders[t])
        visits += len(node)
        visited += len(np.unique(node))
        tile_nodes += in_tiles
        group_nodes += paths(t, orders[0])[1]
        index = np.arange(in_features) if feature_index is None else feature_index[t]
        sectors += len(np.unique(index.astype(np.int64) * itemsize // SECTOR))
    inputs = rows * in_features * itemsize
    weights = visited * features * itemsize
    gathered = rows * sectors * SECTOR
    scores = 4 * rows * n_trees * (max_depth + 1)  # and log-probabilities
    place = 16 * visited  # the two indices of a row of the gradient
    gradient = visited * (features + 1) * itemsize + place
    return Traffic(
        visits,
        visited,
        tile_nodes,
        group_nodes,
        compulsory={
            "forward": inputs + weights + scores,
            "backward": 2 * inputs + weights + scores + gradient,
        },
        kernels={
            "path_log_prob_kernel": gathered + tile_nodes * features * itemsize + scores,
            "path_log_prob_backward_hidden_kernel": group_nodes * features * itemsize
            + inputs
            + scores,
            "path_log_prob_backward_weight_kernel": gathered + scores + gradient - place,
        },
    )
