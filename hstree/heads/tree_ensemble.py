"""An ensemble of randomized hierarchical softmaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.heads.base import Head, ParameterGroup
from hstree.heads.tree_layout import TreeLayout, stack_node_tables, stack_tables
from hstree.heads.unigram import smoothed_frequencies
from hstree.ops import (
    feature_gather,
    leaf_order,
    monotone_log_prob,
    path_log_prob,
    tree_log_prob,
    tree_topk,
    wide_log_prob,
)
from hstree.trees import Tree, build_ensemble

if TYPE_CHECKING:
    from typing_extensions import Self

    from hstree.data.statistics import CorpusStatistics

GATES = ("uniform", "constant", "context")
DERIVED_SCALE = 3.0


def _scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x + b of every tree, [T, R, N]: x [T, N, S], weight [T, R, S], bias [T, R]."""
    if x.shape[1] > 2:
        return torch.baddbmm(bias.unsqueeze(2), weight, x.mT)
    # Few contexts are read from memory faster as rows of a product than as its columns.
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT).mT


class _TreeArrays(nn.Module):
    """The arrays of a tree as part of the state dict, which must agree with the tree when it is
    loaded."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        for name, array in tree.arrays().items():
            self.register_buffer(name, torch.tensor(array))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, own in self.named_buffers():
            came = state_dict.get(prefix + name)
            if came is None:
                missing_keys.append(prefix + name)
            elif came.shape != own.shape or not torch.equal(came.to(own), own):
                error_msgs.append(
                    f"{prefix}{name}: the weights belong to another tree than this head's; "
                    "build the head with the trees it was saved with (hstree.heads.load_head does)"
                )
                return


class TreeEnsemble(Head):
    r"""A mixture of T hierarchical softmaxes, each with its own tree and its own subset of the
    features.

    .. math::
        \log P(y \mid h) = \log \sum_t \pi_t \exp \sum_{n \in \mathrm{path}_t(y)} \log
        P_t(\text{child} \mid n, h)

    where a binary node decides by a sigmoid and a wide node by a softmax over its children. A
    training step costs O(T (C + L) S) a row, for C children of the root and L nodes on a path,
    whatever the number of classes.

    Args:
        in_features: D.
        n_classes: V.
        trees: T trees over V classes; see :mod:`hstree.trees`. Their roots have the same width.
        subset_size: S, features that each tree reads, drawn with ``seed``; None: all.
        subset_block: subsets are drawn as blocks of this many neighbouring features, each of which
            begins at a multiple of it; divides D and S. From blocks of 16 a GPU gathers the
            features in larger accesses.
        gate: weights pi of the trees: ``"uniform"``, ``"constant"`` (a learned softmax of T logits)
            or ``"context"`` (softmax(G h)).
        node_vectors: ``"free"``: every node has vectors of its own, zero at first, so that the
            untrained head is the distribution of ``frequencies``. ``"shared"``: all node vectors
            derive from one output embedding E [V, D]: s (mean of E over the left leaves - mean over
            the right ones) at a binary node, s (mean over the child's leaves) for a child of a wide
            node, means weighted by frequency, with a learned s for each row, 1 at first where only
            leaves are meant and 3 elsewhere. Needs O(T V S) a step, however many rows there are.
        embedding: with ``"shared"``, what to use as E, for example the model's input embedding.
        frequencies: counts [V], from which the biases start (log-odds); None: all equal.
        sparse: gradients of the vectors of binary and of wide nodes below the root are row-sparse,
            as with ``torch.nn.Embedding(sparse=True)``: a step then costs nothing that grows with
            V. For :class:`hstree.optim.SparseAdam`, SGD or Adagrad; not for torch.compile.
        seed: of the feature subsets.
        **options: those of :class:`Head`.

    Raises:
        ValueError: for trees of different sizes or root widths, or an option out of range.

    Equivalent to :class:`Softmax` if T = 1 and the tree is one node of V children.

    Example:
        >>> trees = hstree.trees.build_ensemble("huffman", 10000, 4, frequencies=counts, root=256)
        >>> head = TreeEnsemble(400, 10000, trees, frequencies=counts, gate="context")
        >>> output, loss = head(torch.randn(32, 400), torch.randint(10000, (32,)))
    """

    name = "trees"

    path_offset: Tensor
    path: Tensor
    wide_offset: Tensor
    wide_path: Tensor
    leaf_position: Tensor
    root_child: Tensor
    feature_index: Tensor | None
    mass: Tensor
    weight: Tensor | None
    wide_weight: Tensor | None
    root_weight: Tensor | None
    bias: Tensor | None
    wide_bias: Tensor | None
    root_bias: Tensor | None
    scale: Tensor | None
    wide_scale: Tensor | None
    root_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        trees: Sequence[Tree],
        *,
        subset_size: int | None = None,
        subset_block: int = 1,
        gate: str = "uniform",
        node_vectors: str = "free",
        embedding: nn.Embedding | None = None,
        frequencies: npt.ArrayLike | None = None,
        sparse: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        self.trees = list(trees)
        if not self.trees:
            raise ValueError("trees: expected at least one tree, got none")
        for t, tree in enumerate(self.trees):
            if tree.n_classes != n_classes:
                raise ValueError(f"trees[{t}]: expected {n_classes} classes, got {tree.n_classes}")
            if tree.root_width != self.trees[0].root_width:
                raise ValueError(
                    f"trees[{t}]: expected a root of {self.trees[0].root_width} children as in "
                    f"trees[0], got {tree.root_width}"
                )
        subset = in_features if subset_size is None else subset_size
        if not 1 <= subset <= in_features:
            raise ValueError(
                f"subset_size: expected 1 to {in_features} (in_features), got {subset_size}"
            )
        if subset_block < 1 or in_features % subset_block or subset % subset_block:
            raise ValueError(
                f"subset_block: expected a divisor of in_features ({in_features}) and of "
                f"subset_size ({subset}), got {subset_block}"
            )
        if gate not in GATES:
            raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {gate!r}")
        if node_vectors not in ("free", "shared"):
            raise ValueError(f"node_vectors: expected 'free' or 'shared', got {node_vectors!r}")
        if embedding is not None and node_vectors == "free":
            raise ValueError(
                "embedding: expected None with node_vectors='free', which are not derived from it"
            )
        if sparse and node_vectors == "shared":
            raise ValueError(
                "sparse: expected False with node_vectors='shared', whose gradients are dense"
            )
        self.gate, self.node_vectors, self.sparse, self.seed = gate, node_vectors, sparse, seed
        self.tied = embedding is not None
        self.n_trees, self.subset_size = len(self.trees), subset
        self.subset_block = subset_block

        self._layouts = [TreeLayout(tree) for tree in self.trees]
        rows = [
            max(getattr(layout, name) for layout in self._layouts)
            for name in ("n_binary", "n_wide_rows", "root_width")
        ]
        self.n_binary, self.n_wide_rows, self.root_width = rows
        self.tree_arrays = nn.ModuleList(_TreeArrays(tree) for tree in self.trees)
        tables, self.max_depth, self.max_width = stack_tables(self.trees)
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)
        index = None
        if subset < in_features:
            random = np.random.default_rng(seed)
            blocks, taken = in_features // subset_block, subset // subset_block
            drawn = [np.sort(random.permutation(blocks)[:taken]) for _ in self.trees]
            features = np.stack(drawn)[:, :, None] * subset_block + np.arange(subset_block)
            index = torch.tensor(features.reshape(len(drawn), subset), dtype=torch.int32)
        self.register_buffer("feature_index", index)

        mass = smoothed_frequencies(
            np.ones(n_classes) if frequencies is None else frequencies, n_classes
        )
        biases = [layout.log_odds(mass) for layout in self._layouts]
        for b, name in enumerate(("bias", "wide_bias", "root_bias")):
            padded = np.zeros((self.n_trees, rows[b]))
            for t, bias in enumerate(biases):
                padded[t, : len(bias[b])] = bias[b]
            self.register_parameter(
                name, nn.Parameter(torch.from_numpy(padded).float()) if rows[b] else None
            )
        if node_vectors == "free":
            for name, count in zip(("weight", "wide_weight", "root_weight"), rows, strict=True):
                weight = nn.Parameter(torch.zeros(self.n_trees, count, subset)) if count else None
                self.register_parameter(name, weight)
        else:
            self._init_shared(rows, mass, embedding)
        if self.n_trees > 1 and gate == "constant":
            self.gate_logits = nn.Parameter(torch.zeros(self.n_trees))
        if self.n_trees > 1 and gate == "context":
            self.gate_linear = nn.Linear(in_features, self.n_trees)
            nn.init.zeros_(self.gate_linear.weight)
            nn.init.zeros_(self.gate_linear.bias)
        self._tables_on: dict[torch.device, dict[str, Tensor]] = {}

    # Node vectors

    def _init_shared(
        self, rows: list[int], mass: npt.NDArray[np.float64], embedding: nn.Embedding | None
    ) -> None:
        if embedding is not None:
            expected = (self.n_classes, self.in_features)
            if tuple(embedding.weight.shape) != expected:
                raise ValueError(
                    f"embedding: expected a weight of shape {expected}, "
                    f"got {tuple(embedding.weight.shape)}"
                )
            self.output_embedding = embedding.weight
        else:
            self.output_embedding = nn.Parameter(
                torch.empty(self.n_classes, self.in_features).uniform_(-0.1, 0.1)
            )
        # In units of 2^-50, at least 1: integers, which .half() leaves alone.
        units = np.maximum(np.rint(mass / mass.sum() * 2.0**50), 1).astype(np.int64)
        self.register_buffer("mass", torch.from_numpy(units))
        for b, name in enumerate(("scale", "wide_scale", "root_scale")):
            if not rows[b]:
                self.register_parameter(name, None)
                continue
            scale = np.full((self.n_trees, rows[b]), DERIVED_SCALE)
            for t, layout in enumerate(self._layouts):
                of = layout.block == b
                inner = np.zeros(rows[b], bool)
                np.logical_or.at(inner, layout.row[of], layout.tree.edges().child_node[of] >= 0)
                scale[t, ~inner] = 1.0
            self.register_parameter(name, nn.Parameter(torch.from_numpy(scale).float()))

    def _weights(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Vectors of binary nodes, wide rows and the root's rows, [T, ., S] each, None where there
        are none."""
        if self.node_vectors == "free":
            return self.weight, self.wide_weight, self.root_weight
        trees: list[list[Tensor]] = [self._derived(t) for t in range(self.n_trees)]
        stacked = [torch.stack(block) for block in zip(*trees, strict=True)]
        scales = (self.scale, self.wide_scale, self.root_scale)
        out = [
            None if s is None else w * s.unsqueeze(-1) for w, s in zip(stacked, scales, strict=True)
        ]
        return out[0], out[1], out[2]

    def _derived(self, t: int) -> list[Tensor]:
        """Unscaled vectors of tree t's rows, padded with zeros: differences of two prefix sums in
        leaf order."""
        layout = self._layouts[t]
        edges = layout.tree.edges()
        embedding = self.output_embedding
        device = embedding.device
        if self.feature_index is not None:
            embedding = embedding[:, self.feature_index[t].long()]
        order = torch.from_numpy(layout.tree.order.astype(np.int64)).to(device)
        mass = self.mass.double()[order]
        sums = F.pad((embedding[order].double() * mass.unsqueeze(1)).cumsum(0), (0, 0, 1, 0))
        masses = F.pad(mass.cumsum(0), (1, 0))
        begin, end = (
            torch.from_numpy(a.astype(np.int64)).to(device) for a in (edges.begin, edges.end)
        )
        mean = ((sums[end] - sums[begin]) / (masses[end] - masses[begin]).unsqueeze(1)).to(
            embedding.dtype
        )
        out = []
        for b, count in enumerate((self.n_binary, self.n_wide_rows, self.root_width)):
            of = layout.block == b
            rows = mean[
                torch.from_numpy(np.flatnonzero(of & ((b > 0) | (edges.ordinal == 0)))).to(device)
            ]
            if b == 0:
                rows = (
                    rows
                    - mean[torch.from_numpy(np.flatnonzero(of & (edges.ordinal == 1))).to(device)]
                )
            out.append(F.pad(rows, (0, 0, 0, count - len(rows))))
        return out

    # Distribution

    def target_loss(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = self._target_log_prob(rows, target)
        return output, self.reduced(output, target)

    def _target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        weight, wide_weight, root_weight = self._weights()
        order = None
        if weight is not None and wide_weight is not None:
            order = leaf_order(target, self.leaf_position)
        parts = []
        if root_weight is not None:
            parts.append(self._root_target(hidden, root_weight, target))
        if wide_weight is not None:
            parts.append(
                wide_log_prob(
                    hidden,
                    wide_weight,
                    self.wide_bias,
                    target,
                    self.wide_offset,
                    self.wide_path,
                    self.leaf_position,
                    self.feature_index,
                    max_width=self.max_width,
                    sparse=self.sparse,
                    order=order,
                )
            )
        if weight is not None:
            parts.append(
                path_log_prob(
                    hidden,
                    weight,
                    self.bias,
                    target,
                    self.path_offset,
                    self.path,
                    self.leaf_position,
                    self.feature_index,
                    max_depth=self.max_depth,
                    sparse=self.sparse,
                    order=order,
                )
            )
        if not parts:
            parts.append(
                hidden.new_zeros((len(hidden), self.n_trees), dtype=self._sum_dtype(hidden))
            )
        log_prob = sum(parts[1:], parts[0])
        if self.n_trees == 1:
            return log_prob.squeeze(1)
        mixture = torch.logsumexp(log_prob + self._log_gate(hidden), 1)
        return mixture.masked_fill(target < 0, 0.0)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        tables = self._tables(hidden.device)
        return tree_log_prob(
            self._all_scores(hidden),
            self._log_gate(hidden),
            tables["node"],
            tables["edge"],
            self.n_classes,
            wide_begin=self.n_binary,
            root_begin=self.n_binary + self.n_wide_rows,
        )

    def topk_rows(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """On the CPU by best-first search, see :func:`hstree.ops.tree_topk`: the fewer classes
        share the probability, the fewer nodes are scored."""
        if hidden.device.type != "cpu":
            return super().topk_rows(hidden, k)
        with torch.no_grad():
            values, classes = self._search(hidden, k)
        if torch.is_grad_enabled() and (hidden.requires_grad or self._is_trained()):
            rows = self._in_weight_dtype(hidden).repeat_interleave(k, 0)
            values = self._target_log_prob(rows, classes.flatten()).view_as(classes)
        return values.to(self._sum_dtype(hidden)), classes

    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def _in_weight_dtype(self, hidden: Tensor) -> Tensor:
        biases = (self.bias, self.wide_bias, self.root_bias)
        return hidden.to(next((bias.dtype for bias in biases if bias is not None), hidden.dtype))

    def _search(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weight, wide_weight, root_weight = self._weights()
        tables = self._tables(hidden.device)
        x = self._in_weight_dtype(hidden)
        dtype = self._sum_dtype(x)
        root = None
        if root_weight is not None:
            root = self._root_logits(hidden, root_weight).to(dtype).log_softmax(-1)
        return tree_topk(
            x,
            weight,
            self.bias,
            wide_weight,
            self.wide_bias,
            root,
            self._log_gate(hidden).to(dtype),
            self.feature_index,
            tables["node"],
            tables["edge"],
            tables["leaf_edge"],
            k,
        )

    def sample_rows(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        """Ancestral sampling: a tree by the gate, then a child at each node; O(L) scores a row."""
        out = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        if not len(hidden):
            return out
        weights = self._weights()
        gate = self._log_gate(hidden).exp()
        chosen = torch.multinomial(gate, 1, generator=generator).squeeze(1)
        for t in range(self.n_trees):
            rows = (chosen == t).nonzero().squeeze(1)
            if len(rows):
                out[rows] = self._sample_tree(t, hidden[rows], weights, generator)
        return out

    def _sample_tree(
        self,
        t: int,
        hidden: Tensor,
        weights: tuple[Tensor | None, Tensor | None, Tensor | None],
        generator: torch.Generator | None,
    ) -> Tensor:
        tree, layout = self.trees[t], self._layouts[t]
        edges, device = tree.edges(), hidden.device
        if self.feature_index is not None:
            hidden = hidden[:, self.feature_index[t].long()]
        biases = (self.bias, self.wide_bias, self.root_bias)
        n_children = np.diff(tree.node_offset) - 1
        first_edge = tree.node_offset[:-1] - np.arange(tree.n_nodes)
        leaf = np.zeros(len(hidden), np.int64)
        node = np.full(len(hidden), 0 if tree.n_nodes else -1, np.int64)
        while (active := np.flatnonzero(node >= 0)).size:
            now = node[active]
            edge = first_edge[now]
            child = np.empty(len(active), np.int64)
            for block in range(3):
                of = np.flatnonzero(layout.block[edge] == block)
                weight, bias = weights[block], biases[block]
                if not of.size or weight is None or bias is None:
                    continue
                width = np.ones(len(of), np.int64) if block == 0 else n_children[now[of]]
                place = np.arange(int(width.max()))
                rows = torch.from_numpy(
                    layout.row[edge[of]][:, None] + np.minimum(place, width[:, None] - 1)
                ).to(device)
                x = hidden[torch.from_numpy(active[of]).to(device)]
                vectors = weight[t, rows[0]] if block == 2 else weight[t, rows]
                z = (vectors @ x.unsqueeze(-1).to(vectors.dtype)).squeeze(-1) + bias[t, rows]
                if block == 0:
                    prob = torch.cat([z, torch.zeros_like(z)], 1).softmax(1)
                else:
                    beyond = torch.from_numpy(place >= width[:, None]).to(device)
                    prob = z.masked_fill(beyond, -torch.inf).softmax(1)
                drawn = torch.multinomial(prob.float(), 1, generator=generator).squeeze(1)
                child[of] = drawn.cpu().numpy()
            edge = edge + child
            node[active] = edges.child_node[edge]
            done = edges.child_node[edge] < 0
            leaf[active[done]] = edges.begin[edge[done]]
        return torch.from_numpy(tree.order[leaf].astype(np.int64)).to(device)

    def _root_target(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """log-softmax of the root's child that holds the target [N, T]: one dense product."""
        child = self.root_child[:, target.clamp(0, self.n_classes - 1)].long()
        # No child of the root where the target is ignored or, on a GPU, out of range.
        child = torch.where((target >= 0) & (target < self.n_classes), child, target)
        logits = self._root_logits(hidden, weight)
        by_tree = self.feature_index is not None  # how they lie in memory
        if not by_tree:
            logits, child = logits.transpose(0, 1), child.t()
        rows = logits.flatten(0, 1).to(self._sum_dtype(hidden))
        log_prob = monotone_log_prob(rows, child.flatten()).view_as(child)
        return log_prob.t() if by_tree else log_prob

    def _root_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[T, N, C]."""
        assert self.root_bias is not None
        if self.feature_index is None:
            rows, bias = weight.flatten(0, 1), self.root_bias.flatten()
            logits = F.linear(hidden.to(weight.dtype), rows, bias)
            return logits.view(-1, self.n_trees, self.root_width).transpose(0, 1)
        x = self._subsets(hidden)
        return torch.baddbmm(self.root_bias.unsqueeze(1), x, weight.transpose(1, 2))

    def _all_scores(self, hidden: Tensor) -> Tensor:
        """Of all nodes, [T, R, N], as :func:`hstree.ops.tree_log_prob` takes them."""
        dtype = self._sum_dtype(hidden)
        biases = (self.bias, self.wide_bias, self.root_bias)
        blocks = [
            (weight, bias)
            for weight, bias in zip(self._weights(), biases, strict=True)
            if weight is not None and bias is not None
        ]
        if not blocks:
            return hidden.new_zeros((self.n_trees, 0, len(hidden)), dtype=dtype)
        x = self._subsets(hidden)
        parts = [_scores(x, weight, bias).to(dtype) for weight, bias in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _subsets(self, hidden: Tensor) -> Tensor:
        """Each tree's features [T, N, S], in the dtype of the weights."""
        hidden = self._in_weight_dtype(hidden)
        if self.feature_index is None:
            return hidden.expand(self.n_trees, -1, -1)
        return feature_gather(hidden, self.feature_index).transpose(0, 1)

    def _log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T]."""
        dtype = self._sum_dtype(hidden)
        if self.n_trees > 1 and self.gate == "constant":
            return self.gate_logits.to(dtype).log_softmax(0).expand(len(hidden), -1)
        if self.n_trees > 1 and self.gate == "context":
            logits: Tensor = self.gate_linear(hidden.to(self.gate_linear.weight.dtype))
            return logits.to(dtype).log_softmax(1)
        return hidden.new_full(
            (len(hidden), self.n_trees), -float(np.log(self.n_trees)), dtype=dtype
        )

    def _sum_dtype(self, hidden: Tensor) -> torch.dtype:
        return torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def _tables(self, device: torch.device) -> dict[str, Tensor]:
        if device not in self._tables_on:
            tables = stack_node_tables(self._layouts)
            self._tables_on[device] = {name: table.to(device) for name, table in tables.items()}
        return self._tables_on[device]

    # Life cycle

    def parameter_groups(self) -> list[ParameterGroup]:
        names = ("weight", "bias", "wide_weight", "wide_bias") if self.sparse else ()
        groups = {
            True: ParameterGroup([], self.learning_rate_factor, sparse=True),
            False: ParameterGroup([], self.learning_rate_factor),
        }
        for name, parameter in self.named_parameters():
            if not (self.tied and name == "output_embedding"):
                groups[name in names].params.append(parameter)
        return [group for group in groups.values() if group.params]

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "subset_size": self.subset_size,
            "subset_block": self.subset_block,
            "gate": self.gate,
            "node_vectors": self.node_vectors,
            "tied": self.tied,
            "sparse": self.sparse,
            "seed": self.seed,
            "n_trees": self.n_trees,
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: nn.Embedding | None = None,
    ) -> Self:
        options = dict(config)
        tied = options.pop("tied")
        trees = [
            Tree(
                **{
                    name: tensors[f"tree_arrays.{t}.{name}"].numpy()
                    for name in ("order", "node_offset", "boundary")
                }
            )
            for t in range(options.pop("n_trees"))
        ]
        return cls(trees=trees, embedding=embedding if tied else None, **options)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        trees: Sequence[Tree],
        *,
        at: Tensor | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        r"""An ensemble that begins as an approximation of a trained softmax.

        A node chooses among its children as the softmax does to first order about a hidden vector
        :math:`h_0`: the score of a child with the classes :math:`Y` below it is

        .. math::
            \log \sum_{y \in Y} e^{w_y \cdot h + b_y} \approx \log \sum_{y \in Y} e^{z_y}
            + \frac{\sum_y e^{z_y} w_y}{\sum_y e^{z_y}} \cdot (h - h_0), \qquad
            z_y = w_y \cdot h_0 + b_y

        exact for a child that is a class, and the closer the more the classes below a node are
        alike: for trees clustered by the rows of the weight. A root over all classes is the softmax
        itself.

        Args:
            linear: weight [V, D] and perhaps a bias.
            trees: over its V classes, for example ``build_ensemble("cluster", V, T, counts,
                [linear.weight.detach().numpy()], root=1024, leaf=64)``.
            at: h_0 [D]; None: 0, which suits a softmax with a bias; without one take the mean of
                some hidden vectors.
            seed: of the feature subsets.
            options: of the head; not ``node_vectors`` and ``embedding``.

        Example:
            >>> linear = torch.nn.Linear(400, 10000)
            >>> head = TreeEnsemble.from_linear(linear, trees, frequencies=counts)
        """
        for name in ("node_vectors", "embedding"):
            if name in options:
                raise ValueError(f"{name}: expected none, as every node gets a vector of its own")
        weight = linear.weight.detach().double().cpu()
        V, D = weight.shape
        bias = None if linear.bias is None else linear.bias.detach().double().cpu()
        if at is not None and at.shape != (D,):
            raise ValueError(f"at: expected shape [{D}], got {list(at.shape)}")
        origin = weight.new_zeros(D) if at is None else at.detach().double().cpu()
        log_mass = F.linear(origin, weight, bias)
        head = cls(D, V, trees, seed=seed, **options)
        names = ("weight", "wide_weight", "root_weight")
        with torch.no_grad():
            for t, layout in enumerate(head._layouts):
                index = head.feature_index
                subset = slice(None) if index is None else index[t].long()
                blocks = layout.expansion(weight[:, subset], log_mass)
                for name, (vectors, biases) in zip(names, blocks, strict=True):
                    own = getattr(head, name)
                    if own is not None:
                        own[t, : len(vectors)] = vectors
                        own_bias = getattr(head, name.replace("weight", "bias"))
                        own_bias[t, : len(vectors)] = biases - vectors @ origin[subset]
        return head.to(linear.weight.device)

    @classmethod
    def from_corpus(
        cls,
        in_features: int,
        n_classes: int,
        statistics: CorpusStatistics,
        *,
        embedding: nn.Embedding | None = None,
        seed: int = 0,
        n_trees: int = 4,
        recipe: str = "cluster",
        root: int = 256,
        leaf: int = 1,
        tied: bool = False,
        contexts: Sequence[str] = ("left", "both"),
        tree_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """An ensemble whose trees are built from the corpus.

        Args:
            n_trees: T.
            recipe: ``"cluster"``, ``"huffman"`` or ``"random"``.
            root, leaf: C and G of :meth:`hstree.trees.Tree.collapse`.
            tied: derive the node vectors from the model's input embedding
                (``node_vectors="shared"``).
            contexts: neighbours from which the word vectors of the clustered trees derive, taken in
                turn; see :func:`hstree.trees.word_vectors`.
            tree_options: further options of the recipe; by default ``noise=0.3`` for several
                clustered trees, so that they differ.
            options: of the head.
        """
        if tied and embedding is None:
            raise ValueError("tied: expected an embedding to tie to, got None")
        if tied:
            options.setdefault("node_vectors", "shared")
        vectors = None
        if recipe == "cluster":
            vectors = [statistics.vectors(context=context) for context in contexts[:n_trees]]
            if tree_options is None and n_trees > 1:
                tree_options = {"noise": 0.3}
        trees = build_ensemble(
            recipe,
            n_classes,
            n_trees,
            statistics.frequencies,
            vectors,
            seed,
            root,
            leaf,
            **(tree_options or {}),
        )
        return cls(
            in_features,
            n_classes,
            trees,
            embedding=embedding if tied else None,
            frequencies=statistics.frequencies,
            seed=seed,
            **options,
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, n_trees={self.n_trees}, subset_size={self.subset_size}, "
            f"root={self.root_width or 2}, binary_nodes={self.n_binary}, "
            f"wide_rows={self.n_wide_rows}, "
            f"gate={self.gate!r}, node_vectors={self.node_vectors!r}, sparse={self.sparse}"
        )
