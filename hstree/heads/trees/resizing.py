"""Another number of classes for the trees of an ensemble: the trees, which of their edges are those
of the old ones, and the parameters of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.heads.resizing import ClassChange
from hstree.heads.trees.layout import BINARY, LEAF, ROOT, IntArray, Layout, TreeLayout
from hstree.heads.trees.nodes import BLOCKS, NODE_BLOCKS, Block, FloatArray, LeafBlock, Nodes
from hstree.heads.tying import weight_to_tie
from hstree.trees import Tree


@dataclass(frozen=True)
class ChangedTree:
    """A tree made from an old one.

    Attributes:
        tree: the tree.
        edge: for each edge, the edge of the old tree that its score was learned for, or -1, [E].
        log_share: what is added to that score, [E].
    """

    tree: Tree
    edge: IntArray
    log_share: FloatArray


def changed_trees(
    trees: Sequence[Tree], change: ClassChange, bias: Sequence[FloatArray]
) -> list[ChangedTree]:
    """The trees over the other classes; ``bias``: the scores of their edges where all vectors are
    zero."""
    if change.added:
        subtrees = subtrees_like(trees, change.added)
        return [grown(tree, subtrees) for tree in trees]
    changed = [pruned(tree, change.new) for tree in trees]
    width = max(each.tree.root_width for each in changed)
    return [widened(each, width, of_tree) for each, of_tree in zip(changed, bias, strict=True)]


def grown(tree: Tree, subtrees: Sequence[Tree]) -> ChangedTree:
    """The tree with more classes: its leaves keep their order, and all its nodes stay.

    The subtrees, each over new classes from 0 on, become further children of the root, from left to
    right. Beside a binary root over inner nodes they become its sibling, below a new root: there is
    one of them.
    """
    old = tree.n_classes
    ends = old + np.cumsum([subtree.n_classes for subtree in subtrees])
    starts = np.append(old, ends[:-1])
    at_root = tree.root_width != 2 or tree.n_nodes == 1
    bounds = np.split(tree.boundary, tree.node_offset[1:-1])
    edges = [np.arange(tree.n_edges), np.full(sum(s.n_edges for s in subtrees), -1)]
    if at_root:
        root = bounds[0] if tree.n_nodes else np.array([0, 1])
        # The edges of the root come first: the new ones follow those of its old children.
        bounds[:1] = [np.append(root, ends)]
        width = max(tree.root_width, 1)  # of one class: an edge without a score
        kept = np.arange(width) if tree.n_nodes else np.full(1, -1)
        edges[0] = np.concatenate([kept, np.full(len(subtrees), -1), edges[0][width:]])
    else:
        # A new root, with the old tree as its left child: every old node is one level deeper.
        bounds.insert(0, np.array([0, old, ends[-1]]))
        edges.insert(0, np.full(2, -1))
    for subtree, start in zip(subtrees, starts, strict=True):
        if subtree.n_nodes:
            bounds += np.split(subtree.boundary + start, subtree.node_offset[1:-1])
    order = [tree.order, *(s.order + start for s, start in zip(subtrees, starts, strict=True))]
    edge = np.concatenate(edges)
    return ChangedTree(_tree(np.concatenate(order), bounds), edge, np.zeros(len(edge)))


def pruned(tree: Tree, n_classes: int) -> ChangedTree:
    """The tree of the classes below ``n_classes``. A node with one child left is replaced by it."""
    kept = tree.order < n_classes
    # Leaf position i becomes begin[i].
    begin = np.append(0, np.cumsum(kept))
    bounds, edges = [], [np.empty(0, np.int64)]
    for m, node in enumerate(np.split(tree.boundary, tree.node_offset[1:-1])):
        position = begin[node] if tree.n_nodes else np.zeros(1)
        alive = np.diff(position) > 0
        if alive.sum() > 1:
            bounds.append(np.append(position[0], position[1:][alive]))
            edges.append(tree.node_offset[m] - m + np.flatnonzero(alive))
    edge = np.concatenate(edges)
    return ChangedTree(_tree(tree.order[kept], bounds), edge, np.zeros(len(edge)))


def widened(changed: ChangedTree, width: int, bias: FloatArray) -> ChangedTree:
    """The tree with a root of this width: the last children of the smallest nodes below the root
    move up to it, with the share that they have where all scores are ``bias``, those of the edges
    of the old tree."""
    tree, edge, share = changed.tree, changed.edge, changed.log_share
    while tree.n_nodes and tree.root_width < width:
        edges = tree.edges()
        of_root = slice(tree.root_width)
        size = (edges.end - edges.begin)[of_root]
        above = int(np.argmin(np.where(edges.child_node[of_root] >= 0, size, tree.n_classes)))
        node = int(edges.child_node[above])
        first, end = (int(tree.node_offset[m]) - m for m in (node, node + 1))
        score = bias[edge[first:end]] + share[first:end]
        log_share = score - np.logaddexp.reduce(score)
        bounds = np.split(tree.boundary, tree.node_offset[1:-1])
        # The last child of a node begins at its last boundary but one, which becomes one of the
        # root.
        bounds[0] = np.insert(bounds[0], above + 1, bounds[node][-2])
        bounds[node] = bounds[node][:-1]
        gone = [end - 1]
        # A node with one child left is replaced by it.
        if len(bounds[node]) == 2:
            del bounds[node]
            gone.append(first)
        # What is above the node splits: the child that moved up takes its share, the rest stays.
        share = np.insert(np.delete(share, gone), above + 1, share[above] + log_share[-1])
        share[above] += np.logaddexp.reduce(log_share[:-1])
        edge = np.insert(np.delete(edge, gone), above + 1, edge[above])
        tree = _tree(tree.order, bounds)
    return ChangedTree(tree, edge, share)


def subtrees_like(trees: Sequence[Tree], added: int) -> list[Tree]:
    """Trees over ``added`` classes in all, of the shape that the trees have below their roots."""
    height = max(tree.height for tree in trees)
    if height <= 1:
        return [Tree.from_nested(0)] * added
    widest, inner_wide = 2, False
    for tree in trees:
        edges = tree.edges()
        above_inner = np.zeros(tree.n_nodes, bool)
        above_inner[edges.node[edges.child_node >= 0]] = True
        widest = max(widest, int(tree.n_children[~above_inner].max(initial=0)))
        inner_wide |= bool((tree.n_children[1:][above_inner[1:]] > 2).any())
    groups = [list(part) for part in np.array_split(np.arange(added), -(-added // widest))]
    binary_root = trees[0].root_width == 2
    if height == 2 and not binary_root:
        if added <= 2:
            groups = [[c] for c in range(added)]
        return [_nested_tree([list(range(len(group)))]) for group in groups]
    return [_nested_tree(groups, wide=inner_wide)]


def _nested_tree(groups: Sequence[Sequence[int]], wide: bool = False) -> Tree:
    """A tree over groups of classes: one node with all of them as its children, or a balanced
    binary tree."""
    parts: list[Any] = [tuple(map(int, g)) if len(g) > 1 else int(g[0]) for g in groups]
    if wide and len(parts) > 1:
        return Tree.from_nested(tuple(parts))

    def halved(parts: list[Any]) -> Any:
        middle = (len(parts) + 1) // 2
        return parts[0] if len(parts) == 1 else (halved(parts[:middle]), halved(parts[middle:]))

    return Tree.from_nested(halved(parts))


def _tree(order: npt.NDArray[Any], bounds: Sequence[npt.NDArray[Any]]) -> Tree:
    """The tree with the boundaries of each node."""
    offset = np.append(0, np.cumsum([len(node) for node in bounds])).astype(np.int64)
    boundary = np.concatenate([np.empty(0, np.int32), *bounds])
    return Tree(order.astype(np.int32), offset, boundary.astype(np.int32))


class OldNodes:
    """What the nodes of the changed trees read of the old ones.

    Args:
        nodes: the old nodes.
        layout: their layout.
        like: a tensor with the device and dtype of the head.

    Attributes:
        bias: for each tree, the scores of its edges where all vectors are zero.
    """

    def __init__(self, nodes: Nodes, layout: Layout, like: Tensor) -> None:
        self.layouts, self.leaf_groups, self.like = layout.trees, layout.leaf_groups, like
        self.parameters = dict(nodes.named_parameters(recurse=False))
        self.in_features = nodes.in_features
        trained = [parameter.requires_grad for parameter in self.parameters.values()]
        self.trained = not trained or any(trained)
        self.bias = [self._bias_of_edges(t) for t in range(layout.n_trees)]
        self.embedding = self.parameters.get("output_embedding")
        subsets = layout.feature_index
        self.subset = None if subsets is None else subsets.long()

    def named(self, name: str, values: Tensor) -> nn.Parameter:
        """The values as the parameter of this name, trained if the old one is."""
        old = self.parameters.get(name)
        trained = self.trained if old is None else old.requires_grad
        return nn.Parameter(values.to(self.like), requires_grad=trained)

    def rows_of(self, t: int, name: str) -> Tensor | None:
        """Values [R, ...] of a parameter of the nodes in tree t."""
        parameter = self.parameters.get(name)
        return None if parameter is None else parameter[t]

    def _bias_of_edges(self, t: int) -> FloatArray:
        """Scores of the edges of tree t where all vectors are zero; 0 for the right child of a
        binary node."""
        layout = self.layouts[t]
        out = np.zeros(layout.tree.n_edges)
        for block in BLOCKS:
            edge, bias = layout.edge[block.kind], self.rows_of(t, block.bias_name)
            if bias is not None:
                values = bias.detach().double().cpu().numpy()
                row = layout.leaf_classes if block is LeafBlock else np.arange(len(edge))
                out[edge] = values[row]
        return out

    def new_bias(
        self, t: int, changed: ChangedTree, log_shares: FloatArray, change: ClassChange
    ) -> FloatArray:
        """The same for the edges of the changed tree: where vectors are zero, new classes have
        their share of the old ones."""
        old = changed.edge >= 0
        bias = np.zeros(changed.tree.n_edges)
        bias[old] = self.bias[t][changed.edge[old]] + changed.log_share[old]
        if change.added:
            mass = np.ones(change.new)
            mass[change.old :] = np.exp(log_shares)
            of_edge = np.log(changed.tree.edge_masses(mass))
            of_edge[_above_old(changed, change)] = 0.0
            root = self.bias[t][: self.layouts[t].tree.root_width]
            at_root = changed.tree.edges().node == 0
            if old[at_root].any():
                of_edge[at_root] += np.logaddexp.reduce(root)
            bias[~old] = of_edge[~old]
        return bias


def _above_old(changed: ChangedTree, change: ClassChange) -> npt.NDArray[np.bool_]:
    """Edges without an old score to all old classes: their mass is 1."""
    edges = changed.tree.edges()
    whole = (edges.begin == 0) & (edges.end == change.old)
    return np.asarray((changed.edge < 0) & whole)


def resized_parameters(
    old: OldNodes,
    layout: Layout,
    changed: Sequence[ChangedTree],
    change: ClassChange,
    log_shares: FloatArray,
) -> dict[str, Tensor | None]:
    """The parameters of :class:`Nodes` for the changed trees, by name.

    Args:
        old: the nodes before.
        layout: layout of the changed trees.
        changed: the changed trees.
        change: the change.
        log_shares: logarithm of the share of each new class relative to all old ones.
    """
    embedding: Tensor | None = old.embedding
    if old.embedding is not None:
        if change.embedding is None:
            embedding = change.parameter(change.rows(old.embedding), old.embedding)
        else:
            embedding = weight_to_tie(change.embedding, change.new, old.in_features)
    out: dict[str, Tensor | None] = {"output_embedding": embedding}
    biases = [old.new_bias(t, each, log_shares, change) for t, each in enumerate(changed)]
    for block in BLOCKS:
        name, rows = block.bias_name, layout.n_rows[block.kind]
        if not rows:
            out[name] = None
            continue
        values = np.zeros((layout.n_trees, rows))
        if block is LeafBlock:
            before = old.parameters.get(name)
            if before is not None:
                kept = before.detach().double().cpu().numpy()[:, : change.kept]
                values[:, : change.kept] = kept
            values[:, change.old :] = log_shares
        for t, (of_tree, bias) in enumerate(zip(layout.trees, biases, strict=True)):
            edge = of_tree.edge[block.kind]
            row = of_tree.leaf_classes if block is LeafBlock else np.arange(len(edge))
            values[t, row] = block.of_edges(bias, edge)
        out[name] = old.named(name, torch.from_numpy(values))
    # Roots over all classes read E alone.
    with_vectors = not layout.leaf_groups or bool(layout.n_rows[LEAF])
    of_trees = [
        _TreeVectors(old, t, each, layout, embedding)
        for t, each in enumerate(changed)
        if with_vectors
    ]
    for block in NODE_BLOCKS:
        name, rows = block.weight_name, layout.n_rows[block.kind]
        if not rows or not with_vectors:
            out[name] = None
            continue
        weight = old.like.new_zeros(layout.n_trees, rows, of_trees[0].subset_size)
        for t, of_tree in enumerate(layout.trees):
            weight[t, : len(of_tree.edge[block.kind])] = of_trees[t].rows(block)
        out[name] = old.named(name, weight)
    return out


class _TreeVectors:
    """Vectors of the edges of a changed tree: w of the left child of a binary node and 0 of the
    right one; elsewhere that of each child, where a class below a wide root adds its row of E. New
    children of a wide root start with the mean vector of its children, and other new nodes with
    0."""

    def __init__(
        self,
        old: OldNodes,
        t: int,
        changed: ChangedTree,
        layout: Layout,
        embedding: Tensor | None,
    ) -> None:
        self.layout, self.new_embedding = layout.trees[t], embedding
        self.subset = slice(None) if old.subset is None else old.subset[t]
        self.subset_size = old.in_features if old.subset is None else old.subset.shape[1]
        before, leaves = old.layouts[t], old.leaf_groups
        table = [old.like.new_zeros(1, self.subset_size)]
        # The edge before a new one is -1: the last entry, which is that of the zero vector.
        row = np.zeros(before.tree.n_edges + 1, np.int64)  # in the table, of each old edge
        for block in NODE_BLOCKS:
            own, edge = old.rows_of(t, block.weight_name), before.edge[block.kind]
            if own is not None and len(edge):
                row[edge] = sum(map(len, table)) + np.arange(len(edge))
                table.append(own[: len(edge)])
        self.embedding = old.embedding
        read = np.full(before.tree.n_edges + 1, -1)
        if leaves:
            read[:-1] = _class_read(before, (LEAF, ROOT))
        root = np.arange(before.tree.root_width)
        is_new = (changed.edge < 0) & (changed.tree.edges().node == 0)
        of_new = row[changed.edge]
        if changed.tree.root_width > 2 and is_new.any() and len(root):
            vectors = torch.cat(table)[row[root]]
            with_class = root[read[root] >= 0]
            if len(with_class):
                assert old.embedding is not None
                vectors[with_class] += self._classes(old.embedding, read[with_class])
            of_new[is_new] = sum(map(len, table))
            table.append(vectors.mean(0, keepdim=True))
        self.table, self.row = torch.cat(table), of_new
        self.old_class = read[changed.edge]
        self.new_class = np.full(changed.tree.n_edges, -1)
        if leaves:
            self.new_class = _class_read(self.layout, (ROOT,))

    def _classes(self, embedding: Tensor, classes: IntArray) -> Tensor:
        rows = embedding[torch.from_numpy(classes).to(embedding.device)]
        return rows[:, self.subset]

    def rows(self, block: type[Block]) -> Tensor:
        """Vectors [R, S] of the nodes of one kind."""
        edge = self.layout.edge[block.kind]
        values = self._of(edge)
        return values - self._of(edge + 1) if block.kind == BINARY else values

    def _of(self, edge: npt.NDArray[np.int32]) -> Tensor:
        values = self.table[torch.from_numpy(self.row[edge]).to(self.table.device)]
        before, after = self.old_class[edge], self.new_class[edge]
        # An edge that stops reading E keeps the sum of both vectors. One that reads E from here
        # on gets the difference, to which each step adds E.
        for classes, embedding, sign in (
            (before, self.embedding, 1),
            (after, self.new_embedding, -1),
        ):
            at = np.flatnonzero((classes >= 0) & (before != after))
            if len(at):
                assert embedding is not None
                index = torch.from_numpy(at).to(values.device)
                values[index] += sign * self._classes(embedding, classes[at])
        return values


def _class_read(layout: TreeLayout, kinds: tuple[int, ...]) -> IntArray:
    """For each edge, the class whose row of E it reads at nodes of these kinds, or -1."""
    edges, out = layout.tree.edges(), np.full(layout.tree.n_edges, -1)
    for kind in kinds:
        edge = layout.edge[kind]
        edge = edge[edges.child_node[edge] < 0]
        out[edge] = layout.tree.order[edges.begin[edge]]
    return out
