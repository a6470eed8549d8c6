"""An ensemble of randomized hierarchical softmaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import check_bool, check_choice, check_seed
from hstree._dtypes import sum_dtype
from hstree._sums import log_sum_exp
from hstree._transforms import is_transformed
from hstree.heads.buffers import adopt_tables, fill, saved_tables
from hstree.heads.losses import split_rows
from hstree.heads.resizing import ClassChange
from hstree.heads.trees.blocks import (
    BLOCKS,
    Block,
    LeafBlock,
    log_odds,
    to_dtype_of,
    tree_features,
)
from hstree.heads.trees.candidates import choose_way
from hstree.heads.trees.constructors import Constructors
from hstree.heads.trees.gate import GATES
from hstree.heads.trees.layout import Layout, check_trees
from hstree.heads.trees.relearning import Relearning
from hstree.heads.trees.resizing import resize_trees
from hstree.heads.trees.search import (
    pays_to_search,
    rank_classes,
    sample_classes,
    search_classes,
)
from hstree.heads.trees.subsets import draw_subsets
from hstree.heads.trees.tree_layout import BINARY, WIDE
from hstree.heads.trees.vectors import (
    NODE_VECTORS,
    blocks_with_vectors,
    register_vectors,
    reset_vectors,
)
from hstree.heads.tying import HasWeight
from hstree.heads.unigram import smoothed_frequencies
from hstree.ops import leaf_order, tree_log_softmax
from hstree.trees import Tree

if TYPE_CHECKING:
    from typing_extensions import Self


class TreeEnsemble(Relearning, Constructors):
    r"""A mixture of T hierarchical softmaxes, each with its own tree and its own subset of the
    features.

    .. math::
        \log P(y \mid h) = \log \sum_t \pi_t \exp \sum_{n \in \mathrm{path}_t(y)} \log
        P_t(\text{child} \mid n, h)

    A binary node decides by a sigmoid, and a wide node by a softmax over its children. A training
    step costs O(T (C + L) S) per row, for C children of the root and L nodes on a path,
    independently of the number of classes. :meth:`from_counts`, :meth:`from_tokens` and
    :meth:`from_linear` also build the trees.

    Equivalent to :class:`Softmax` if T = 1 and the tree is one node with V children.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        trees: T trees over V classes, at least one, with roots of the same width; see
            :mod:`hstree.trees`.
        subset_size: number of features that each tree reads, S, drawn with ``seed``; None: all.
        subset_block: the subsets consist of blocks of this many adjacent features, which begin at
            multiples of it; a divisor of D and S. With blocks of 16 or more a GPU gathers the
            features in larger accesses.
        gate: weights pi of the trees: ``"uniform"``, ``"constant"`` (learned, the same for all
            contexts) or ``"context"`` (softmax of a linear layer of h).
        node_vectors: ``"free"``: every node has its own vectors. ``"leaves"``: the classes of a
            leaf group (a node whose children are all classes) read one output embedding E [V, D] in
            every tree, with all features, and have a bias in each tree. The nodes above have their
            own vectors; a child of a wide root that is a class adds its row of E. The trees can be
            replaced during training: :meth:`relearn`. The vectors start at zero, so that the
            untrained head gives the distribution of ``frequencies``; a given ``embedding`` keeps
            its values.
        embedding: module whose weight is used as E, such as the model's input embedding or a
            softmax; None: the head gets its own.
        frequencies: class counts [V] that initialize the biases (log-odds); None: all equal.
        sparse: whether the vectors of binary nodes and of wide nodes below the root, and E with
            ``"leaves"``, have row-sparse gradients, as with ``torch.nn.Embedding(sparse=True)``. A
            step then costs what the rows that a batch visits cost: few in binary trees and in
            groups of few classes, almost all of E in trees of two levels with many classes.
            Requires :class:`hstree.optim.AdamW`, or SGD or Adagrad without weight decay; on several
            ranks use :mod:`hstree.distributed`. Off by default, because torch's AdamW,
            torch.compile and the trainers of other libraries accept only dense gradients. In
            float16 on a CPU torch cannot add two of them: there, call zero_grad() before every
            backward pass.
        seed: seed of the feature subsets.
        **options: further arguments of :class:`Head`.

    Raises:
        TypeError: if ``trees`` is not a list of trees.
        ValueError: for trees of different sizes or root widths, or an option out of range.

    Example:
        >>> import torch, hstree
        >>> counts = torch.arange(2000, 0, -1)
        >>> trees = hstree.trees.build_ensemble("huffman", 2000, 4, frequencies=counts, root=256)
        >>> head = hstree.TreeEnsemble(16, 2000, trees, frequencies=counts, gate="context")
        >>> output, loss = head(torch.randn(5, 16), torch.randint(2000, (5,)))
        >>> output.shape, head.sample(torch.randn(5, 16)).shape
        (torch.Size([5]), torch.Size([5]))
    """

    name = "trees"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        trees: Sequence[Tree] = (),
        *,
        subset_size: int | None = None,
        subset_block: int = 1,
        gate: str = "uniform",
        node_vectors: str = "free",
        embedding: HasWeight | None = None,
        frequencies: npt.ArrayLike | None = None,
        sparse: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        trees = check_trees(trees, self.n_classes)
        self.n_trees = len(trees)
        self.subset_size = in_features if subset_size is None else subset_size
        self.subset_block, self.seed = subset_block, check_seed(seed)
        self.gate = check_choice("gate", gate, GATES)
        self.node_vectors = check_choice("node_vectors", node_vectors, NODE_VECTORS)
        self.tied, self.sparse = embedding is not None, check_bool("sparse", sparse)
        if sparse and self.label_smoothing:
            raise ValueError(
                "label_smoothing: expected 0 for trees with sparse=True, as every node gets a "
                f"gradient, got {self.label_smoothing}; sparse=False takes it"
            )
        self._gate = GATES[gate if self.n_trees > 1 else "uniform"]

        self.set_trees(trees)
        subsets = draw_subsets(self.n_trees, in_features, self.subset_size, subset_block, seed)
        self.feature_index = None
        if subsets is not None:
            self.register_table("feature_index", subsets)
        counts = np.ones(n_classes) if frequencies is None else frequencies
        self.frequencies = smoothed_frequencies(counts, n_classes)
        # The optimizer's state in saved runs depends on this order of the parameters.
        for block in BLOCKS:
            rows = self.layout.n_rows[block.kind]
            bias = nn.Parameter(torch.empty(self.n_trees, rows)) if rows else None
            self.register_parameter(f"{block.prefix}bias", bias)
        register_vectors(self, embedding)
        self._reset_nodes()
        self._gate.register(self)

    def set_trees(self, trees: list[Tree]) -> None:
        self.trees = trees
        self.layout = Layout(trees, self.n_classes, leaf_groups=self.node_vectors == "leaves")
        self.block_types = [block for block in BLOCKS if self.layout.n_rows[block.kind]]

    # The model: blocks of nodes, mixed by the gate

    def blocks(self) -> list[Block]:
        """One block for each kind of node in the trees, with the current vectors and biases."""
        return blocks_with_vectors(self)

    def log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""
        log_gate = self._gate.log_gate(self, hidden)
        return log_gate if self.block_types else log_gate + self._zeros(hidden).unsqueeze(1)

    def _zeros(self, hidden: Tensor) -> Tensor:
        """0 [N], with a gradient of 0 for hidden [N, D] and the parameters: log P of the class of
        trees without nodes."""
        dtype = sum_dtype(hidden.dtype)
        zeros = hidden[:, :0].sum(1, dtype=dtype)
        for parameter in self.parameters():
            zeros = zeros + parameter.flatten()[:0].sum(dtype=dtype)
        return zeros

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        log_prob = self.log_prob_by_tree(hidden, target)
        if self.n_trees == 1:
            return log_prob.squeeze(1)
        mixture = log_sum_exp(log_prob + self.log_gate(hidden), 1)
        return mixture.masked_fill(target == -1, 0.0)

    def log_prob_by_tree(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probability [N, T] of the targets in each tree: arguments of
        :meth:`target_log_prob`."""
        blocks = self.blocks()
        order = None
        if sum(block.visits_rows for block in blocks) > 1:
            order = leaf_order(target, self.layout.leaf_position)
        parts = [block.target_log_prob(hidden, target, order) for block in reversed(blocks)]
        if not parts:  # a single class: 0, with a gradient of 0
            zeros = self._zeros(hidden)
            if torch.is_grad_enabled() and not zeros.requires_grad and not is_transformed():
                zeros.requires_grad_()  # of nothing, so that a training step works
            parts = [zeros.unsqueeze(1).expand(-1, self.n_trees)]
        return sum(parts[1:], parts[0])

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """On a GPU in chunks of rows, if no gradients are recorded: the scores of all nodes take
        more memory than the result."""
        if hidden.device.type == "cpu" or self.records_gradients(hidden):
            return self.mixed_log_prob(hidden, self.log_gate(hidden))
        chunks = split_rows(self.numbers_of_a_row(hidden.device), hidden)
        parts = [self.mixed_log_prob(x, self.log_gate(x)) for (x,) in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mixed_log_prob(self, hidden: Tensor, log_gate: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, D], log_gate [N, T] the logarithms of
        the weights of the trees; the scores of all nodes are divided by the temperature."""
        dtype, layout = sum_dtype(hidden.dtype), self.layout
        blocks = self.blocks()
        hidden = to_dtype_of(blocks, hidden)
        x = tree_features(hidden, self.feature_index, self.n_trees)

        def divided(scores: Tensor) -> Tensor:
            scores = scores.to(dtype)
            return scores if temperature == 1.0 else scores / temperature

        scores = [divided(block.scores(x)) for block in blocks if not isinstance(block, LeafBlock)]
        if not scores:  # a single class, or leaf groups alone
            scores = [hidden.t()[:0].to(dtype).expand(self.n_trees, -1, -1)]
        leaves = [block for block in blocks if isinstance(block, LeafBlock)]
        return tree_log_softmax(
            scores[0] if len(scores) == 1 else torch.cat(scores, 1),
            log_gate,
            layout.node,
            layout.edge,
            self.n_classes,
            wide_begin=layout.n_rows[BINARY],
            root_begin=layout.n_rows[BINARY] + layout.n_rows[WIDE],
            leaf_score=divided(leaves[0].class_scores(hidden)) if leaves else None,
            leaf_bias=divided(leaves[0].bias) if leaves else None,
        )

    def topk_rows(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """By best-first search, which scores few nodes if few classes share most of the probability
        (see :func:`hstree.ops.tree_topk`), or from all classes, in chunks of rows: always on a GPU,
        for so many classes that a search would score most groups, and for rows whose search has
        scored a third of all classes."""
        search = search_classes if pays_to_search(self, hidden, k) else rank_classes
        with torch.no_grad():
            values, classes = search(self, hidden, k)
        if self.records_gradients(hidden):
            values = self.candidate_rows(hidden, classes, 1.0)
        return values.to(sum_dtype(hidden.dtype)), classes

    def sample_rows(
        self, hidden: Tensor, n: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Ancestral sampling: a tree by the gate, then a child at each node. O(T L) scores per
        row."""
        if hidden.device.type not in ("cpu", "cuda"):
            return super().sample_rows(hidden, n, temperature, generator)
        return sample_classes(self, hidden, n, temperature, generator)

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """In the cheapest of three ways: looked up row by row, by the ops of the training step, or
        from all classes."""
        way = choose_way(self, hidden, candidates, self.records_gradients(hidden), temperature)
        return way(self, hidden, candidates, temperature).to(sum_dtype(hidden.dtype))

    def records_gradients(self, hidden: Tensor) -> bool:
        leaves = chain([hidden], self.parameters())
        recorded = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        return recorded or is_transformed()

    # Life cycle

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_nodes()
        self._gate.reset(self)

    def _reset_nodes(self) -> None:
        for block, bias in zip(BLOCKS, log_odds(self.layout, self.frequencies), strict=True):
            if block in self.block_types:
                fill(getattr(self, f"{block.prefix}bias"), bias)
        reset_vectors(self)

    def place_tables(self, device: torch.device) -> None:
        super().place_tables(device)
        self.layout.place_tables(device)

    def saved_tables(self) -> dict[str, Tensor]:
        trees = {
            f"trees.{t}.{name}": torch.tensor(array, device="cpu")
            for t, tree in enumerate(self.trees)
            for name, array in tree.arrays().items()
        }
        return super().saved_tables() | trees

    def resize_classes(self, change: ClassChange) -> None:
        resize_trees(self, change)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """A tied embedding belongs to the model, whose own part of the gradient may be dense."""
        if not self.sparse:
            return []
        apart = {id(parameter) for parameter in self._apart()}
        of_blocks = [
            getattr(self, name)
            for block in self.block_types
            for name in (block.weight_name, f"{block.prefix}bias")
            if block.visits_rows
        ]
        return [parameter for parameter in of_blocks if id(parameter) not in apart]

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
        embedding: HasWeight | None = None,
    ) -> Self:
        options = dict(config)
        tied = options.pop("tied")
        saved, names = saved_tables(tensors), ("order", "node_offset", "boundary")
        trees = [
            Tree(**{name: saved[f"trees.{t}.{name}"].numpy() for name in names})
            for t in range(options.pop("n_trees"))
        ]
        head = cls(
            trees=trees,
            embedding=embedding if tied else None,
            class_weight=tensors.get("class_weight"),
            **options,
        )
        adopt_tables(head, tensors)
        return head

    def extra_repr(self) -> str:
        n_binary, n_wide, _, n_root = self.layout.n_rows
        return (
            f"{super().extra_repr()}, n_trees={self.n_trees}, subset_size={self.subset_size}, "
            f"root={n_root or 2}, binary_nodes={n_binary}, wide_rows={n_wide}, "
            f"gate={self.gate!r}, node_vectors={self.node_vectors!r}, sparse={self.sparse}"
        )
