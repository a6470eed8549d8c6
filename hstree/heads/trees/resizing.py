"""Another number of classes for an ensemble."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.heads.resizing import ClassChange
from hstree.heads.trees.blocks import BLOCKS, Block, LeafBlock
from hstree.heads.trees.changed_trees import ChangedTree, grown, pruned, subtrees_like, widened
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import BINARY, LEAF, ROOT, IntArray, TreeLayout
from hstree.heads.trees.vectors import NODE_BLOCKS
from hstree.heads.tying import weight_to_tie

FloatArray = npt.NDArray[np.float64]


def resize_trees(head: EnsembleState, change: ClassChange) -> None:
    """See :meth:`hstree.heads.Head.resized`: the trees, their tables and all parameters but those
    of the gate."""
    old = _Old(head)
    log_shares = _log_shares(head, change)
    changed = _changed_trees(head, change, old)
    _resize_classes(head, change, old)
    head.n_classes = change.new
    head.set_trees([each.tree for each in changed])
    head.place_tables(old.like.device)
    biases = [old.new_bias(t, each, log_shares, change) for t, each in enumerate(changed)]
    _set_biases(head, change, old, biases, log_shares)
    if head.node_vectors == "free" or head.layout.n_rows[LEAF]:
        _set_vectors(head, old, changed)
    else:  # roots over all classes read E alone
        for block in NODE_BLOCKS:
            head.register_parameter(block.weight_name, None)


class _Old:
    """What the resized head reads of the old one."""

    def __init__(self, head: EnsembleState) -> None:
        self.layouts = head.layout.trees
        self.parameters = dict(head.named_parameters(recurse=False))
        self.trained = not self.parameters or any(p.requires_grad for p in head.parameters())
        self.bias = [self._bias_of_edges(t) for t in range(head.n_trees)]
        self.embedding = self.parameters.get("output_embedding")
        subsets = head.feature_index
        self.subset = None if subsets is None else subsets.long()
        self.like = next(iter(self.parameters.values()), torch.empty(0))

    def named(self, name: str, values: Tensor) -> nn.Parameter:
        """The values as the parameter of this name."""
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
            edge, bias = layout.edge[block.kind], self.rows_of(t, f"{block.prefix}bias")
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


def _log_shares(head: EnsembleState, change: ClassChange) -> FloatArray:
    """Logarithm of the share of each new class relative to all old ones: of its frequency, or the
    geometric mean of the shares of the old ones where the hidden vector is zero."""
    given = change.log_shares()
    if given is not None or not change.added:
        return np.empty(0) if given is None else np.asarray(given.numpy())
    like = next(head.parameters(), torch.empty(0))
    log_prob = head.class_log_prob(like.new_zeros(1, head.in_features))[0].double().cpu()
    return np.full(change.added, float(log_prob[log_prob.isfinite()].mean()))


def _changed_trees(head: EnsembleState, change: ClassChange, old: _Old) -> list[ChangedTree]:
    if change.added:
        subtrees = subtrees_like(head.trees, change.added)
        return [grown(tree, subtrees) for tree in head.trees]
    changed = [pruned(tree, change.new) for tree in head.trees]
    width = max(each.tree.root_width for each in changed)
    return [widened(each, width, bias) for each, bias in zip(changed, old.bias, strict=True)]


def _resize_classes(head: EnsembleState, change: ClassChange, old: _Old) -> None:
    """The output embedding, and the frequencies of the classes."""
    head.frequencies = change.counts(head.frequencies)
    if old.embedding is not None:
        if change.embedding is None:
            rows = change.rows(old.embedding)
            head.output_embedding = change.parameter(rows, old.embedding)
        else:
            head.output_embedding = weight_to_tie(change.embedding, change.new, head.in_features)
        head.tied = change.embedding is not None


def _set_biases(
    head: EnsembleState,
    change: ClassChange,
    old: _Old,
    biases: list[FloatArray],
    log_shares: FloatArray,
) -> None:
    for block in BLOCKS:
        name, rows = f"{block.prefix}bias", head.layout.n_rows[block.kind]
        if not rows:
            head.register_parameter(name, None)
            continue
        values = np.zeros((head.n_trees, rows))
        if block is LeafBlock:
            before = old.parameters.get(name)
            if before is not None:
                kept = before.detach().double().cpu().numpy()[:, : change.kept]
                values[:, : change.kept] = kept
            values[:, change.old :] = log_shares
        for t, (layout, bias) in enumerate(zip(head.layout.trees, biases, strict=True)):
            edge = layout.edge[block.kind]
            row = layout.leaf_classes if block is LeafBlock else np.arange(len(edge))
            values[t, row] = block.of_edges(bias, edge)
        head.register_parameter(name, old.named(name, torch.from_numpy(values)))


def _set_vectors(head: EnsembleState, old: _Old, changed: list[ChangedTree]) -> None:
    """Vectors of the nodes that have some of their own. New children of a wide root start with the
    mean vector of its children, and other new nodes with 0."""
    of_trees = [_TreeVectors(head, old, t, each) for t, each in enumerate(changed)]
    for block in NODE_BLOCKS:
        rows = head.layout.n_rows[block.kind]
        if not rows:
            head.register_parameter(block.weight_name, None)
            continue
        values = old.like.new_zeros(head.n_trees, rows, head.subset_size)
        for t, layout in enumerate(head.layout.trees):
            values[t, : len(layout.edge[block.kind])] = of_trees[t].rows(block)
        head.register_parameter(block.weight_name, old.named(block.weight_name, values))


class _TreeVectors:
    """Vectors of the edges of a changed tree: w of the left child of a binary node and 0 of the
    right one; elsewhere that of each child, where a class below a wide root adds its row of E."""

    def __init__(self, head: EnsembleState, old: _Old, t: int, changed: ChangedTree) -> None:
        self.head, self.changed, self.layout = head, changed, head.layout.trees[t]
        self.subset = slice(None) if old.subset is None else old.subset[t]
        before, leaves = old.layouts[t], head.node_vectors == "leaves"
        table = [old.like.new_zeros(1, head.subset_size)]
        row = np.zeros(before.tree.n_edges + 1, np.int64)  # in the table, of each old edge
        for block in NODE_BLOCKS:
            own, edge = old.rows_of(t, block.weight_name), before.edge[block.kind]
            if own is not None and len(edge):
                row[edge] = sum(map(len, table)) + np.arange(len(edge))
                table.append(own[: len(edge)])
        self.adds, self.class_of, self.embedding = None, None, old.embedding
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

    def _of(self, edge: IntArray) -> Tensor:
        values = self.table[torch.from_numpy(self.row[edge]).to(self.table.device)]
        before, after = self.old_class[edge], self.new_class[edge]
        for classes, embedding, sign in (
            (before, self.embedding, 1),
            (after, self.head._parameters.get("output_embedding"), -1),
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
