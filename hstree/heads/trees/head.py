"""An ensemble of randomized hierarchical softmaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import check_choice
from hstree._dtypes import sum_dtype
from hstree._transforms import is_transformed
from hstree.heads.buffers import fill
from hstree.heads.trees.blocks import BLOCKS, Block, log_odds, to_dtype_of, tree_features
from hstree.heads.trees.constructors import Constructors
from hstree.heads.trees.gate import GATES
from hstree.heads.trees.layout import Layout, TreeArrays, check_trees
from hstree.heads.trees.sampling import sample_classes
from hstree.heads.trees.search import search_classes
from hstree.heads.trees.subsets import draw_subsets
from hstree.heads.trees.vectors import NODE_VECTORS
from hstree.heads.unigram import smoothed_frequencies
from hstree.ops import leaf_order, tree_log_prob
from hstree.trees import Tree

if TYPE_CHECKING:
    from typing_extensions import Self


class TreeEnsemble(Constructors):
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
            V. For :class:`hstree.optim.AdamW`, and SGD and Adagrad without weight decay; on several
            ranks with :mod:`hstree.distributed`. Off by default, as torch's AdamW, torch.compile
            and the trainers of others take dense gradients alone; at V = 100,000 a training step
            then takes 10 times as long.
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
    no_z_loss = "every node of a tree has a normaliser of its own"

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
        self.trees = check_trees(trees, self.n_classes)
        self.n_trees = len(self.trees)
        self.subset_size = in_features if subset_size is None else subset_size
        self.subset_block, self.seed = subset_block, seed
        self.gate = check_choice("gate", gate, GATES)
        self.node_vectors = check_choice("node_vectors", node_vectors, NODE_VECTORS)
        self.tied, self.sparse = embedding is not None, sparse
        if sparse and self.label_smoothing:
            raise ValueError(
                "label_smoothing: expected 0 for trees with sparse=True, as every node gets a "
                f"gradient, got {self.label_smoothing}; sparse=False takes it"
            )
        self._gate = GATES[gate if self.n_trees > 1 else "uniform"]
        self._vectors = NODE_VECTORS[node_vectors]

        self.layout = Layout(self.trees, n_classes, bounds=self._vectors.needs_bounds)
        self.tree_arrays = nn.ModuleList(TreeArrays(tree) for tree in self.trees)
        subsets = draw_subsets(self.n_trees, in_features, self.subset_size, subset_block, seed)
        self.register_constant("feature_index", subsets)
        counts = np.ones(n_classes) if frequencies is None else frequencies
        self.frequencies = smoothed_frequencies(counts, n_classes)
        self.block_types = [block for block in BLOCKS if self.layout.n_rows[block.kind]]
        # The order of the parameters is that of the optimiser's state in saved runs.
        for block in BLOCKS:
            rows = self.layout.n_rows[block.kind]
            bias = nn.Parameter(torch.empty(self.n_trees, rows)) if rows else None
            self.register_parameter(f"{block.prefix}bias", bias)
        self._vectors.register(self, None if embedding is None else embedding.weight)
        self._reset_nodes()
        self._gate.register(self)

    # The model: blocks of nodes, mixed by the gate

    def blocks(self) -> list[Block]:
        """Vectors and biases of the kinds of nodes that the trees have, as they are now."""
        return self._vectors.blocks(self)

    def log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""
        return self._gate.log_gate(self, hidden)

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        log_prob = self.log_prob_by_tree(hidden, target)
        if self.n_trees == 1:
            return log_prob.squeeze(1)
        mixture = torch.logsumexp(log_prob + self.log_gate(hidden), 1)
        return mixture.masked_fill(target == -1, 0.0)

    def log_prob_by_tree(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probability [N, T] of the targets in each tree: arguments of
        :meth:`target_log_prob`."""
        blocks = self.blocks()
        order = None
        if sum(block.visits_rows for block in blocks) > 1:
            order = leaf_order(target, self.layout.leaf_position)
        parts = [block.target_log_prob(hidden, target, order) for block in reversed(blocks)]
        if not parts:  # a single class
            parts = [hidden.new_zeros(hidden.shape[0], self.n_trees, dtype=sum_dtype(hidden.dtype))]
        return sum(parts[1:], parts[0])

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return self.mixed_log_prob(hidden, self.log_gate(hidden))

    def mixed_log_prob(self, hidden: Tensor, log_gate: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes in the mixture of the trees by weights whose
        logarithms are log_gate [N, T]: hidden [N, D]."""
        dtype, blocks, layout = sum_dtype(hidden.dtype), self.blocks(), self.layout
        x = tree_features(to_dtype_of(blocks, hidden), self.feature_index, self.n_trees)
        scores = [block.scores(x).to(dtype) for block in blocks]
        if not scores:  # a single class
            scores = [hidden.new_zeros(self.n_trees, 0, hidden.shape[0], dtype=dtype)]
        n_binary, n_wide, _ = layout.n_rows
        return tree_log_prob(
            scores[0] if len(scores) == 1 else torch.cat(scores, 1),
            log_gate,
            layout.node,
            layout.edge,
            self.n_classes,
            wide_begin=n_binary,
            root_begin=n_binary + n_wide,
        )

    def topk_rows(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """On the CPU by best-first search, see :func:`hstree.ops.tree_topk`: the fewer classes
        share the probability, the fewer nodes are scored."""
        if hidden.device.type != "cpu":
            return super().topk_rows(hidden, k)
        with torch.no_grad():
            blocks = self.blocks()
            values, classes = search_classes(self, blocks, hidden, k)
        leaves = chain([hidden], self.parameters())
        recorded = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        if recorded or is_transformed():
            contexts = to_dtype_of(blocks, hidden).repeat_interleave(k, 0)
            values = self.target_log_prob(contexts, classes.flatten()).view_as(classes)
        return values.to(sum_dtype(hidden.dtype)), classes

    def sample_rows(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        """Ancestral sampling: a tree by the gate, then a child at each node; O(L) scores a row."""
        return sample_classes(self, hidden, generator)

    # Life cycle

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_nodes()
        self._gate.reset(self)

    def _reset_nodes(self) -> None:
        for block, bias in zip(BLOCKS, log_odds(self.layout, self.frequencies), strict=True):
            if block in self.block_types:
                fill(getattr(self, f"{block.prefix}bias"), bias)
        self._vectors.reset(self)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        parameter = next(self.parameters(recurse=False), None)
        if parameter is not None and not parameter.is_meta:  # assigned, perhaps on another device
            self.layout.to(parameter.device)
            self.tree_arrays.to(parameter.device)

    def sparse_parameters(self) -> list[nn.Parameter]:
        return [
            getattr(self, f"{block.prefix}{name}")
            for block in self.block_types
            for name in ("weight", "bias")
            if self.sparse and block.visits_rows
        ]

    def _apart(self) -> list[Tensor]:
        return [self.output_embedding] if self.tied else []

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
            TreeArrays.tree_of(tensors, f"tree_arrays.{t}.") for t in range(options.pop("n_trees"))
        ]
        return cls(
            trees=trees,
            embedding=embedding if tied else None,
            class_weight=tensors.get("class_weight"),
            **options,
        )

    def extra_repr(self) -> str:
        n_binary, n_wide, n_root = self.layout.n_rows
        return (
            f"{super().extra_repr()}, n_trees={self.n_trees}, subset_size={self.subset_size}, "
            f"root={n_root or 2}, binary_nodes={n_binary}, wide_rows={n_wide}, "
            f"gate={self.gate!r}, node_vectors={self.node_vectors!r}, sparse={self.sparse}"
        )
