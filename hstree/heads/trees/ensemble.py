"""An ensemble of randomized hierarchical softmaxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import (
    check_bool,
    check_choice,
    check_entries,
    check_frequencies,
    check_seed,
)
from hstree._numerics import is_readable, is_transformed, log_sum_exp, sum_dtype
from hstree.heads.base import Head
from hstree.heads.rows import is_excluded, split_rows
from hstree.heads.state import HasWeight, adopt_tables, saved_tables
from hstree.heads.trees.gate import GATES, UniformGate
from hstree.heads.trees.layout import LEAF, Layout
from hstree.heads.trees.nodes import Nodes
from hstree.heads.trees.queries import (
    all_log_prob,
    choose_way,
    found_classes,
    pays_to_search,
    ranked_classes,
    records_gradients,
    sample_classes,
    search_classes,
)
from hstree.heads.trees.shape import CONTEXTS, TreeShape, check_trees, draw_subsets
from hstree.ops import leaf_order
from hstree.trees import Tree
from hstree.trees.vectors import Context, count_classes

if TYPE_CHECKING:
    from typing_extensions import Self


NODE_VECTORS = ("free", "leaves")


class TreeEnsemble(Head):
    r"""A mixture of T hierarchical softmaxes, each with its own tree and its own subset of the
    features.

    .. math::
        \log P(y \mid h) = \log \sum_t \pi_t \exp \sum_{n \in \mathrm{path}_t(y)} \log
        P_t(\text{child} \mid n, h)

    A binary node decides by a sigmoid, and a wide node by a softmax over its children. A training
    step costs O(T (C + L) S) per row, for C children of the root and L nodes on a path,
    independently of the number of classes. :meth:`from_counts`, :meth:`from_tokens` and
    :meth:`from_vectors` also build the trees.

    Equivalent to :class:`Softmax` if T = 1 and the tree is one node with V children.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        trees: T trees over V classes, at least one, with roots of the same width; see
            :mod:`hstree.trees`.
        subset_size: number of features that each tree reads, S, drawn with ``seed``; None: all.
        gate: weights pi of the trees: ``"context"`` (softmax of a linear layer of h, 1 / T at the
            start), ``"constant"`` (learned, the same for all contexts) or ``"uniform"``.
        node_vectors: ``"free"``: every node has its own vectors. ``"leaves"``: the classes of a
            leaf group (a node whose children are all classes) read one output embedding E [V, D] in
            every tree, with all features, and have a bias in each tree. The nodes above have their
            own vectors; a child of a wide root that is a class adds its row of E. The vectors start
            at zero, so that the untrained head gives the distribution of ``frequencies``; a given
            ``embedding`` keeps its values.
        embedding: module whose weight is used as E, such as the model's input embedding or a
            softmax; None: the head gets its own.
        sparse: whether the vectors of binary nodes and of wide nodes below the root, and E with
            ``"leaves"``, have row-sparse gradients, as with ``torch.nn.Embedding(sparse=True)``. A
            step then costs what the rows that a batch visits cost: few in binary trees and in
            groups of few classes, almost all of E in trees of two levels with many classes.
            Requires :class:`hstree.optim.AdamW`, or SGD or Adagrad without weight decay, and one
            process. Off by default, because torch's AdamW, torch.compile, DDP, FSDP and the
            trainers of other libraries accept only dense gradients. In float16 on a CPU torch
            cannot add two of them: there, call zero_grad() before every backward pass.
        seed: seed of the feature subsets.
        **options: further arguments of :class:`Head`.

    Raises:
        TypeError: if ``trees`` is not a list of trees.
        ValueError: for trees of different sizes or root widths, or an option out of range.

    Example:
        >>> import torch, hstree
        >>> counts = torch.arange(2000, 0, -1)
        >>> trees = hstree.trees.build_ensemble("huffman", 2000, 4, frequencies=counts, root=256)
        >>> head = hstree.TreeEnsemble(16, 2000, trees, frequencies=counts)
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
        gate: str = "context",
        node_vectors: str = "free",
        embedding: HasWeight | None = None,
        sparse: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        trees = check_trees(trees, self.n_classes)
        self.n_trees = len(trees)
        self.subset_size = in_features if subset_size is None else subset_size
        self.seed = check_seed(seed)
        check_choice("gate", gate, GATES)
        self.node_vectors = check_choice("node_vectors", node_vectors, NODE_VECTORS)
        self.sparse = check_bool("sparse", sparse)
        if sparse and self.label_smoothing:
            raise ValueError(
                "label_smoothing: expected 0 for trees with sparse=True, as every node gets a "
                f"gradient, got {self.label_smoothing}; sparse=False takes it"
            )
        subsets = draw_subsets(self.n_trees, in_features, self.subset_size, seed)
        layout = Layout(trees, leaf_groups=node_vectors == "leaves", feature_index=subsets)
        self.nodes = Nodes(layout, in_features, embedding=embedding, sparse=sparse)
        self.layout = layout
        # The weight of one tree is 1: nothing to learn.
        self.gate: UniformGate = GATES[gate if self.n_trees > 1 else "uniform"](
            in_features, self.n_trees
        )
        self._reset_nodes()

    @classmethod
    def from_counts(
        cls,
        in_features: int,
        counts: npt.ArrayLike,
        *,
        n_trees: int | None = None,
        recipe: str = "huffman",
        root: int | None = None,
        leaf: int | None = None,
        levels: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """An ensemble built from class counts; before training it gives their distribution.

        Args:
            in_features: number of input features, D.
            counts: number of occurrences of each class, real [V], none negative: a tensor on the
                CPU, an array or a list.
            recipe: ``"huffman"`` or ``"random"``. For trees that group similar classes use
                :meth:`from_tokens` or :meth:`from_vectors`.
            n_trees, root, leaf, levels: number and shape of the trees; None: the defaults of
                :meth:`hstree.heads.TreeShape.for_classes`.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head. ``node_vectors`` is ``"free"`` for trees that
                are binary down to the classes and for a root over all classes, otherwise, and with
                an ``embedding``, ``"leaves"``.

        Raises:
            TypeError: if the counts are not real numbers.
            ValueError: if the counts are not a 1-D array, or one is negative or not finite.

        Example:
            >>> import torch, hstree
            >>> counts = torch.arange(5000, 0, -1)
            >>> head = hstree.TreeEnsemble.from_counts(16, counts)
            >>> head.n_trees, head.trees[0].root_width
            (4, 256)
            >>> head(torch.randn(3, 16), torch.tensor([0, 1, 4999])).loss.shape
            torch.Size([])
        """
        frequencies = check_frequencies(counts, name="counts")
        n_classes = len(frequencies)
        shape = TreeShape.for_classes(
            n_classes,
            bool(options.get("sparse")),
            n_trees=n_trees,
            root=root,
            leaf=leaf,
            levels=levels,
        )
        trees = shape.build(recipe, n_classes, frequencies, None, seed)
        return cls._of_shape(shape, trees, in_features, frequencies, seed, options)

    @classmethod
    def from_tokens(
        cls,
        in_features: int,
        n_classes: int,
        tokens: npt.ArrayLike,
        *,
        frequencies: npt.ArrayLike | None = None,
        n_trees: int | None = None,
        recipe: str = "cluster",
        root: int | None = None,
        leaf: int | None = None,
        levels: int | None = None,
        contexts: Sequence[Context] = CONTEXTS,
        tree_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """An ensemble whose trees cluster the classes of a text by their contexts.

        Args:
            in_features: number of input features, D.
            n_classes: number of classes, V.
            tokens: classes of the training text in order, int [...] in [0, V): a tensor on the CPU,
                an array, a memory map or a list.
            frequencies: class counts [V]; None: those of the tokens.
            recipe: ``"cluster"``, or ``"huffman"`` or ``"random"``, which read the frequencies
                alone.
            n_trees, root, leaf, levels: number and shape of the trees; see :meth:`from_counts`.
            contexts: contexts of the word vectors for clustered trees, used alternately; see
                :func:`hstree.trees.word_vectors`. The vectors have 100 features, or 32 from
                V = 65,537, where the decomposition for 100 takes minutes.
            tree_options: further options of the recipe; None: ``noise=0.3`` for several clustered
                trees, so that they differ.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head; ``node_vectors`` as in :meth:`from_counts`.

        Raises:
            TypeError: if the tokens are not integers.
            ValueError: if there is no token, or one is outside [0, V).

        Example:
            >>> import torch, hstree
            >>> tokens = torch.randint(1500, (20000,))
            >>> head = hstree.TreeEnsemble.from_tokens(16, 1500, tokens, n_trees=2, root=64)
            >>> head.log_prob(torch.randn(3, 16)).shape
            torch.Size([3, 1500])
        """
        if frequencies is None:
            frequencies = count_classes(tokens, n_classes)
        shape = TreeShape.for_classes(
            n_classes,
            bool(options.get("sparse")),
            n_trees=n_trees,
            root=root,
            leaf=leaf,
            levels=levels,
        )
        trees = shape.build_from_tokens(
            recipe, n_classes, frequencies, tokens, contexts, seed, tree_options
        )
        return cls._of_shape(shape, trees, in_features, frequencies, seed, options)

    @classmethod
    def from_vectors(
        cls,
        in_features: int,
        vectors: npt.ArrayLike | Tensor,
        *,
        frequencies: npt.ArrayLike | None = None,
        n_trees: int | None = None,
        root: int | None = None,
        leaf: int | None = None,
        levels: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """An ensemble whose trees cluster classes by vectors of any kind, such as word vectors, the
        rows of a trained softmax, or for classification with many labels
        :func:`hstree.trees.label_means`.

        Args:
            in_features: number of input features, D.
            vectors: class vectors, real [V, F] with any F.
            frequencies: class counts [V], which balance the clusters, and whose distribution the
                head gives before training; None: all equal.
            n_trees, root, leaf, levels: number and shape of the trees; see :meth:`from_counts`.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head; ``node_vectors`` as in :meth:`from_counts`.

        Raises:
            TypeError: if the vectors or the counts are not real numbers.
            ValueError: for another shape, or a number that is not finite.

        Example:
            >>> import torch, hstree
            >>> features, labels = torch.randn(500, 8), torch.randint(2000, (500, 3))
            >>> vectors, counts = hstree.trees.label_means(features, labels, 2000)
            >>> head = hstree.TreeEnsemble.from_vectors(16, vectors, frequencies=counts)
            >>> head.predict(torch.randn(5, 16)).shape
            torch.Size([5])
        """
        if isinstance(vectors, Tensor):
            vectors = vectors.detach().float().cpu().numpy()
        n_classes = len(np.atleast_1d(vectors))
        shape = TreeShape.for_classes(
            n_classes,
            bool(options.get("sparse")),
            n_trees=n_trees,
            root=root,
            leaf=leaf,
            levels=levels,
        )
        frequencies = np.ones(n_classes) if frequencies is None else frequencies
        trees = shape.build("cluster", n_classes, frequencies, [vectors], seed)
        return cls._of_shape(shape, trees, in_features, frequencies, seed, options)

    @classmethod
    def _of_shape(
        cls,
        shape: TreeShape,
        trees: Sequence[Tree],
        in_features: int,
        frequencies: npt.ArrayLike,
        seed: int,
        options: dict[str, Any],
    ) -> Self:
        n_classes = trees[0].n_classes
        tied = options.get("embedding") is not None
        options.setdefault("node_vectors", shape.node_vectors(n_classes, tied))
        return cls(in_features, n_classes, trees, frequencies=frequencies, seed=seed, **options)

    @property
    def trees(self) -> list[Tree]:
        """The trees."""
        return [layout.tree for layout in self.layout.trees]

    @property
    def tied(self) -> bool:
        """Whether the output embedding belongs to another module."""
        return self.nodes.tied

    @property
    def output_embedding(self) -> Tensor:
        """The output embedding E [V, D], with ``node_vectors="leaves"``."""
        if self.nodes.output_embedding is None:
            raise AttributeError("output_embedding: expected node_vectors='leaves', got 'free'")
        return self.nodes.output_embedding

    # The model: the blocks of the nodes, mixed by the gate

    def encode(self, hidden: Tensor) -> Tensor:
        """``hidden`` itself, and the tables on its device."""
        if self.layout.tables_device != hidden.device:
            self.layout.place_tables(hidden.device)
        return hidden

    def log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""
        log_gate: Tensor = self.gate(hidden)
        if self.n_classes > 1:
            return log_gate
        return log_gate + self._zeros(hidden).unsqueeze(1)

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
        # Ignored rows are 0 in every tree, but the weights of the trees add up to 1 with rounding
        # errors.
        mixture = log_sum_exp(log_prob + self.log_gate(hidden), 1)
        return mixture.masked_fill(target == -1, 0.0)

    def log_prob_by_tree(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probability [N, T] of the targets in each tree: arguments of
        :meth:`target_log_prob`."""
        blocks = self.nodes(self.layout)
        order = None
        if sum(block.visits_rows for block in blocks) > 1:
            order = leaf_order(target, self.layout.leaf_position)
        parts = [block.target_log_prob(hidden, target, order) for block in reversed(blocks)]
        if not parts:  # a single class: 0, with a gradient of 0
            zeros = self._zeros(hidden)
            if torch.is_grad_enabled() and not zeros.requires_grad and not is_transformed():
                zeros.requires_grad_()  # of nothing, so that a training step works
            parts = [zeros.unsqueeze(1).expand(-1, self.n_trees)]
        log_prob: Tensor = sum(parts[1:], parts[0])
        return log_prob

    def numbers_of_a_row(self, device: torch.device) -> int:
        return self.layout.numbers_of_a_row(device)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return self.tempered_log_prob(hidden, 1.0)

    def tempered_log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """On a GPU in chunks of rows, if no gradients are recorded: the scores of all nodes take
        more memory than the result."""
        if hidden.device.type == "cpu" or records_gradients(hidden, *self.parameters()):
            return self.mixed_log_prob(hidden, self.log_gate(hidden), temperature)
        chunks = split_rows(self.numbers_of_a_row(hidden.device), hidden)
        parts = [self.mixed_log_prob(x, self.log_gate(x), temperature) for (x,) in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mixed_log_prob(self, hidden: Tensor, log_gate: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, D], log_gate [N, T] the logarithms of
        the weights of the trees."""
        return all_log_prob(self.nodes(self.layout), self.layout, hidden, log_gate, temperature)

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """On a CPU by best-first search, which scores few nodes if few classes share most of the
        probability (see :func:`hstree.ops.tree_topk`), and the rows whose search is given up from
        all classes, in chunks of rows. On a GPU always from all classes."""
        if excluded is not None:
            return self._topk_without(hidden, k, excluded)
        with torch.no_grad():
            values, classes = self._topk(hidden, k)
        if records_gradients(hidden, *self.parameters()):
            values = self.candidate_rows(hidden, classes, 1.0)
        return values.to(sum_dtype(hidden.dtype)), classes

    def _topk_without(self, hidden: Tensor, k: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
        """The first k of as many more classes as are excluded, where they are searched for."""
        most = min(k + excluded.shape[1], self.n_classes)
        if not is_readable(hidden) or not pays_to_search(self.layout, hidden, most):
            return super().topk_rows(hidden, k, excluded)
        with torch.no_grad():
            _, classes = self._topk(hidden, most)
            last = is_excluded(classes, excluded).int().argsort(dim=1, stable=True)
            classes = classes.gather(1, last[:, :k])
        return self.log_prob_without(hidden, classes, excluded), classes

    def _topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if hidden.device.type != "cpu":
            return super().topk_rows(hidden, k)
        searched = pays_to_search(self.layout, hidden, k)
        unread = torch.compiler.is_compiling() or is_transformed()  # values must not be read
        ways = [found_classes] * searched + [ranked_classes] * bool(self.layout.n_rows[LEAF])
        if not searched and (unread or not ways):
            return super().topk_rows(hidden, k)
        blocks, log_gate = self.nodes(self.layout), self.log_gate(hidden)
        if unread:
            return search_classes(blocks, self.layout, hidden, log_gate, k)
        values, classes = ways[0](blocks, self.layout, hidden, log_gate, k)
        for way in (*ways[1:], None):
            rest = (classes[:, 0] < 0).nonzero().squeeze(1)
            if not len(rest):
                break
            if way is None:
                some, ranked = super().topk_rows(hidden[rest], k)
            else:
                some, ranked = way(blocks, self.layout, hidden[rest], log_gate[rest], k)
            values[rest], classes[rest] = some.to(values.dtype), ranked
        return values, classes

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Ancestral sampling: a tree by the gate, then a child at each node. O(T L) scores per
        row."""
        if hidden.device.type not in ("cpu", "cuda"):
            return super().sample_rows(hidden, n, temperature, generator, excluded)
        if excluded is not None:
            return self.sample_again(hidden, n, temperature, generator, excluded)
        blocks, log_gate = self.nodes(self.layout), self.log_gate(hidden)
        return sample_classes(blocks, self.layout, hidden, log_gate, n, temperature, generator)

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """In the cheapest of three ways: looked up row by row, by the ops of the training step, or
        from all classes."""
        blocks, log_gate = self.nodes(self.layout), self.log_gate(hidden)
        arguments = (blocks, self.layout, hidden, log_gate, candidates, temperature)
        return choose_way(*arguments)(*arguments).to(sum_dtype(hidden.dtype))

    # Other trees

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_nodes()
        self.gate.reset()

    def _reset_nodes(self) -> None:
        if self.nodes.on_meta:  # a file fills them, or reset_parameters
            return
        frequencies = np.ones(self.n_classes) if self.frequencies is None else self.frequencies
        self.nodes.reset(self.layout, frequencies)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """A tied embedding belongs to the model, whose own part of the gradient may be dense."""
        return self.nodes.sparse_parameters()

    def tied_parameters(self) -> list[Tensor]:
        return [self.output_embedding] if self.tied else []

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "subset_size": self.subset_size,
            "gate": self.gate.name,
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
        saved = saved_tables(tensors, "layout.")
        names = ("order", "node_offset", "boundary")
        trees = [
            Tree(*(saved[f"trees.{t}.{name}"].numpy() for name in names), copy=False)
            for t in range(options.pop("n_trees"))
        ]
        head = cls(
            trees=trees,
            embedding=embedding if tied else None,
            class_weight=tensors.get("class_weight"),
            **options,
        )
        adopt_tables(head.layout, tensors, "layout.")
        index = head.layout.feature_index
        if index is not None:
            right = (index >= 0) & (index < head.in_features)
            right &= index.diff(dim=1, prepend=index.new_full((len(index), 1), -1)) > 0
            check_entries("feature_index", index, right, f"increasing in [0, {head.in_features})")
        return head

    def extra_repr(self) -> str:
        n_binary, n_wide, _, n_root = self.layout.n_rows
        return (
            f"{super().extra_repr()}, n_trees={self.n_trees}, subset_size={self.subset_size}, "
            f"root={n_root or 2}, binary_nodes={n_binary}, wide_rows={n_wide}, "
            f"gate={self.gate.name!r}, node_vectors={self.node_vectors!r}, sparse={self.sparse}"
        )
