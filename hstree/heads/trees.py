"""An ensemble of randomized hierarchical softmaxes.

A head is a gate, optionally :class:`Roots`, one softmax over the clusters of each tree, and below
them :class:`Paths`, binary nodes, or :class:`Groups`, one softmax over the classes of each cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import (
    check_bool,
    check_choice,
    check_entries,
    check_frequencies,
    check_int,
    check_seed,
    is_readable,
)
from hstree._numerics import (
    batched_product,
    batched_scores,
    is_cast,
    is_transformed,
    linear_scores,
    log_sum_exp,
    no_autocast,
    sum_dtype,
)
from hstree._progress import track
from hstree.heads.base import Head
from hstree.heads.gate import GATES, UniformGate
from hstree.heads.rows import (
    gather_marked,
    is_excluded,
    log_prob_without,
    mask_marked,
    sample_again,
    split_rows,
    tempered,
    topk_of_all,
)
from hstree.heads.state import (
    HasWeight,
    Tables,
    TyingError,
    adopt_tables,
    fill,
    saved_tables,
    weight_to_tie,
)
from hstree.ops import (
    default_chunk_rows,
    group_log_prob,
    group_topk,
    path_log_prob,
    sample,
    tree_log_softmax,
    tree_topk,
)
from hstree.ops._row_sparse import cast, with_rows
from hstree.ops.feature_gather import feature_gather
from hstree.ops.target_log_softmax import log_softmax, target_log_softmax
from hstree.trees import Tree, build_ensemble, word_vectors
from hstree.trees.ensemble_tables import ensemble_tables
from hstree.trees.tables import table_sizes
from hstree.trees.vectors import Context, count_classes

if TYPE_CHECKING:
    from typing_extensions import Self

FloatArray: TypeAlias = npt.NDArray[np.float64]

CONTEXTS: tuple[Context, ...] = ("left", "both")
MANY_CLASSES = 1 << 16
"""Beyond so many classes, word vectors have 32 features instead of 100: their time and memory grow
with V times the features."""

FLAT_CLASSES = 1024
"""Up to so many classes, the default is one tree whose root holds all of them."""

GROUPED_CLASSES = 12_000
"""Up to so many classes, trees with row-sparse gradients have groups; binary nodes beyond."""

USUAL_CLUSTERS = 256
"""Least number of clusters of a default tree, which has at most V / 4."""

FEW_CONTEXTS = 16
"""Up to so many contexts E h^T takes about half of the time of h E^T in torch."""

FEW_ROWS = 64
"""Up to so many contexts, adding E h to the scores of a root takes no more time than adding rows of
E to its vectors; a step with 512 takes a twelfth more for the root."""

SEARCHED_ROWS, SEARCHED_CLASSES = 8, 16
"""Most rows, and most classes of each, that are searched for."""

OF_A_SEARCH, READING = 10, 10
"""A product of a search takes as long as 10 of a large batch, and reading the vectors of all
classes as long as the products of 10 rows with them: measured 11, and 8 to 13, of binary nodes. Of
groups both are three to five times as many, and only the quotient matters for few rows."""

CHUNK_ROWS = 128
"""Smallest chunk of rows for which all classes are computed: each chunk reads all vectors."""

BUILD_TREES = (
    "to build trees from class counts call TreeEnsemble.from_counts(in_features, counts), from a "
    "text from_tokens, from class vectors from_vectors; the number of trees is their n_trees"
)


class Roots(nn.Module):
    """The roots of T trees, log P(c | h) = log softmax_c(w_tc . h[subset_t] + b_tc) for C clusters.

    A cluster of one class adds the class's row of E to its vector, where the trees have groups.
    Without any other cluster the roots have no vectors of their own: ``weight`` is None.

    Attributes:
        weight: vectors w of the clusters, [T, C, S].
        bias: biases b of the clusters, [T, C].
    """

    weight: Tensor | None

    def __init__(self, n_trees: int, clusters: int, n_features: int, *, vectors: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(n_trees, clusters, n_features)) if vectors else None
        self.register_parameter("weight", weight)
        self.bias = nn.Parameter(torch.empty(n_trees, clusters))

    def forward(self) -> tuple[Tensor | None, Tensor]:
        """Weight and bias. Called first by every query, for its forward pre-hooks."""
        return self.weight, self.bias

    def target_log_prob(
        self, hidden: Tensor, target: Tensor, below: Below, rows: Tensor | None
    ) -> Tensor:
        """log P(cluster of each target), [N, T]: hidden [N, D], target [N] from
        :func:`hstree.ops.mark_targets`, rows from a call of :class:`Groups`."""
        # The marks are indices too: an ignored row, -1, gets child -1, and V a child that does not
        # exist.
        if below.feature_index is not None:
            child = below.root_child[:, target].long()
            scores = self.scores(hidden, below, rows).flatten(0, 1)
            return target_log_softmax(scores, child.flatten()).view_as(child).t()
        # Row n T + t: the scores of all roots are one product, whose rows are the contexts.
        child = below.root_child.t()[target].long()
        scores = self._scores(hidden, below, rows).view(-1, self.bias.shape[1])
        return target_log_softmax(scores, child.flatten()).view_as(child)

    def log_prob(
        self, hidden: Tensor, below: Below, rows: Tensor | None, temperature: float
    ) -> Tensor:
        """Log-probabilities of all clusters [T, N, C], the scores divided by the temperature."""
        scores = self.scores(hidden, below, rows)
        return log_softmax(scores) if temperature == 1.0 else tempered(scores, temperature)

    def scores(self, hidden: Tensor, below: Below, rows: Tensor | None) -> Tensor:
        """w . h + b of all clusters, [T, N, C], in the dtype of sums: hidden [N, D]."""
        index = below.feature_index
        if index is None:
            n_trees, clusters = self.bias.shape
            return self._scores(hidden, below, rows).view(-1, n_trees, clusters).transpose(0, 1)
        own, bias = self()
        weight = self._with_rows(own, below, rows)
        x = feature_gather(hidden.to(weight.dtype), index).transpose(0, 1)
        weight = weight.float() if is_cast(weight) else weight
        return batched_product(x.to(weight.dtype), weight, bias.to(weight.dtype).unsqueeze(1))

    def _scores(self, hidden: Tensor, below: Below, rows: Tensor | None) -> Tensor:
        """The same of trees that read all features, [N, T C]."""
        # One graph for all numbers of rows, and one kernel on a GPU.
        any_number = torch.compiler.is_compiling() or hidden.device.type != "cpu"
        own, bias = self()
        bias = bias.flatten()
        if rows is None or own is None or any_number or len(hidden) > FEW_ROWS:
            weight = self._with_rows(own, below, rows).flatten(0, 1)
            return linear_scores(hidden.to(weight.dtype), weight, bias.to(weight.dtype))
        hidden = hidden.to(own.dtype)
        scores = linear_scores(hidden, own.flatten(0, 1), bias)
        of_classes = linear_scores(hidden, rows).index_select(1, below.single_source)
        return scores.index_add(1, below.single_child, of_classes)

    def _with_rows(self, own: Tensor | None, below: Below, rows: Tensor | None) -> Tensor:
        """The vectors [T, C, S] of the clusters, with the rows of E added."""
        if rows is None:
            assert own is not None
            return own
        rows = rows.index_select(0, below.single_source)
        if below.feature_index is not None:
            tree = below.single_child // self.bias.shape[1]
            rows = rows.gather(1, below.feature_index[tree].long())
        if own is None:
            return rows.view(*self.bias.shape, rows.shape[1])
        if is_cast(own):  # the sum of two vectors is not rounded to 16 bits
            own, rows = own.float(), rows.float()
        return own.flatten(0, 1).index_add(0, below.single_child, rows).view_as(own)

    def reset(self, log_mass: FloatArray) -> None:
        """Zero vectors, and the biases log_mass [T, C]."""
        if self.weight is not None:
            nn.init.zeros_(self.weight)
        fill(self.bias, log_mass)


class Below(Tables):
    """What lies below the roots of T trees: their tables, and the parameters of their nodes. The
    trees and the feature subsets are saved; the other tables follow from them.

    Args:
        trees: T trees over V classes, with roots of the same width.
        feature_index: features that each tree reads, int32 [T, S], increasing; None: all.
        groups: whether the trees are read as two levels, a root and groups of classes.

    Attributes:
        trees: the trees.
        clusters: number of children of a wide root, C; 0 for binary roots and a single class.
        root_child: int32 [T, V + 2], child of the root that holds the class. Entry V, for bad
            targets, is a child that does not exist; the last entry, for target -1, is -1.
        node, edge, leaf_edge: tables of :func:`hstree.ops.tree_topk`, padded with zeros.
        single_class: int64 [U], increasing, the classes that are clusters of their own.
        single_child, single_source: int64 [K], these clusters, as t C + child, and the positions of
            their classes in ``single_class``.
        n_vectors: number of vectors below the roots that all classes of a row score.
        mean_vectors: number of those that one class scores, on average.
    """

    root_child: Tensor
    node: Tensor
    edge: Tensor
    leaf_edge: Tensor
    single_class: Tensor
    single_child: Tensor
    single_source: Tensor
    feature_index: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    sparse: bool
    tied = False

    def __init__(
        self, trees: Sequence[Tree], feature_index: Tensor | None, *, groups: bool
    ) -> None:
        super().__init__()
        self.trees, self.groups = list(trees), groups
        self._sizes = [
            table_sizes((tree.order, tree.node_offset, tree.boundary), groups) for tree in trees
        ]
        self.clusters = self._sizes[0].root_width
        self.n_trees, self.n_classes = len(trees), trees[0].n_classes
        self.max_depth = max(of_tree.max_depth for of_tree in self._sizes)
        self.max_group = max(of_tree.max_group for of_tree in self._sizes)
        self.feature_index = None
        if feature_index is not None:
            self.register_table("feature_index", feature_index)
        self.set_tables(self.tables_device)

    def tables(self) -> dict[str, Tensor]:
        out = ensemble_tables(self.trees, self._sizes, self.groups)
        if self.clusters:
            # Marked targets are indices too: V, and -1, which is the last entry.
            out["root_child"][:, self.n_classes :] = self.clusters, -1
        return super().tables() | {name: torch.from_numpy(table) for name, table in out.items()}

    def saved_items(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().saved_items()
        for t, tree in enumerate(self.trees):
            for name, array in tree.arrays().items():
                yield f"trees.{t}.{name}", torch.tensor(array, device="cpu")

    def forward(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """What a query reads: ``weight``, and rows of it [U, D] for ``single_class``, if there are
        any. The gradient of both is one tensor. Called first by every query: the tables move to the
        device of the contexts, and forward pre-hooks, as of pruning, compute the weight."""
        if self.tables_device != device:
            self.place_tables(device)
        return self.weight, None

    def target_log_prob(
        self, hidden: Tensor, target: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | None:
        """Log-probability of each target below the root, [N, T]; None if nothing is below.

        Args:
            hidden: context vectors [N, D].
            target: int64 [N], from :func:`hstree.ops.mark_targets`.
            weight, bias: the result of a call, and ``bias``.
        """
        raise NotImplementedError


class Paths(Below):
    r"""Binary nodes below the roots: log P = sum over (n, c) on the path of log sigmoid(c z_tn),
    z_tn = w_tn . h[subset_t] + b_tn, c = 1 to the left and -1 to the right.

    Attributes:
        weight: vectors w of the nodes, [T, M, S].
        bias: biases b of the nodes, [T, M].
    """

    path_offset: Tensor
    path: Tensor
    leaf_position: Tensor

    def __init__(
        self, trees: Sequence[Tree], feature_index: Tensor | None, n_features: int, sparse: bool
    ) -> None:
        super().__init__(trees, feature_index, groups=False)
        self.sparse = sparse
        nodes = max(of_tree.n_binary for of_tree in self._sizes)
        self.n_vectors, self.mean_vectors = self.n_trees * nodes, self.n_trees * self.max_depth
        self.weight = self.bias = None
        if nodes:
            self.weight = nn.Parameter(torch.empty(self.n_trees, nodes, n_features))
            self.bias = nn.Parameter(torch.empty(self.n_trees, nodes))

    def target_log_prob(
        self, hidden: Tensor, target: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | None:
        if weight is None:
            return None
        return path_log_prob(
            hidden.to(weight.dtype),
            weight,
            bias,
            target,
            self.path_offset,
            self.path,
            self.leaf_position,
            self.feature_index,
            max_depth=self.max_depth,
            sparse=self.sparse,
        )

    def scores(self, hidden: Tensor) -> Tensor:
        """z of all nodes, [T, M, N], in the dtype of sums: hidden [N, D]."""
        assert self.weight is not None
        assert self.bias is not None
        hidden, index = hidden.to(self.weight.dtype), self.feature_index
        x = hidden.expand(self.n_trees, -1, -1)
        if index is not None:
            x = feature_gather(hidden, index).transpose(0, 1)
        return batched_scores(x, self.weight, self.bias)

    def reset(self, frequencies: FloatArray) -> None:
        """Zero vectors, and the log-odds of the masses below the nodes."""
        if self.weight is None or self.bias is None:
            return
        bias = np.zeros(self.bias.shape)
        for of_tree, tree in zip(bias, self.trees, strict=True):
            mass = np.log(tree.edge_masses(frequencies))
            left = tree.node_offset[:-1] - np.arange(tree.n_nodes)  # the edge to each left child
            left = left[tree.n_children == 2]
            of_tree[: len(left)] = mass[left] - mass[left + 1]
        nn.init.zeros_(self.weight)
        fill(self.bias, bias)


class Groups(Below):
    r"""One softmax over the classes of each cluster, with an output embedding E that all trees
    share: log P = log softmax_y(E_y . h + b_ty) among the classes of y's cluster.

    Attributes:
        weight: output embedding E, [V, D].
        bias: biases b of the classes, [T, V].
        tied: whether E belongs to another module.
    """

    order: Tensor
    begin: Tensor
    weight: Tensor

    def __init__(
        self,
        trees: Sequence[Tree],
        feature_index: Tensor | None,
        in_features: int,
        sparse: bool,
        embedding: HasWeight | None,
    ) -> None:
        super().__init__(trees, feature_index, groups=True)
        self.sparse, self.tied = sparse, embedding is not None
        n_groups = sum(tree.n_nodes for tree in trees) - self.n_trees
        self.n_vectors = self.n_classes if self.max_group else 0
        self.mean_vectors = self.n_trees * self.n_trees * self.n_classes // max(1, n_groups)
        if embedding is None:
            self.weight = nn.Parameter(torch.empty(self.n_classes, in_features))
        else:
            self.weight = weight_to_tie(embedding, self.n_classes, in_features)
        self.bias = None
        if self.max_group:
            self.bias = nn.Parameter(torch.empty(self.n_trees, self.n_classes))

    def tables(self) -> dict[str, Tensor]:
        out = super().tables()
        bounds, child = [], []
        for t, tree in enumerate(self.trees):
            begin = tree.boundary[: self.clusters + 1]
            alone = np.flatnonzero(np.diff(begin) == 1)
            bounds.append(tree.order[begin[alone]])
            child.append(t * self.clusters + alone)
        # A class that is alone in several trees has its row of E gathered once.
        unique, source = np.unique(np.concatenate(bounds), return_inverse=True)
        out["single_class"] = torch.from_numpy(unique.astype(np.int64))
        out["single_source"] = torch.from_numpy(source.astype(np.int64))
        out["single_child"] = torch.from_numpy(np.concatenate(child).astype(np.int64))
        return out

    def forward(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        weight, _ = super().forward(device)
        if not len(self.single_class):
            return weight, None
        # One gradient tensor for both uses of E: to add a second one would be a pass over [V, D].
        # Roots over all classes read all rows.
        sparse = self.sparse and self.max_group > 0
        return with_rows(self.weight, self.single_class, sparse=sparse)

    def target_log_prob(
        self, hidden: Tensor, target: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | None:
        if not self.max_group or weight is None:
            return None
        return group_log_prob(
            hidden.to(weight.dtype),
            weight,
            bias,
            target,
            self.root_child[:, : self.n_classes],
            self.order,
            self.begin,
            max_width=self.max_group,
            sparse=self.sparse,
        )

    def class_scores(self, hidden: Tensor) -> Tensor:
        """E_y . h of all classes, [N, V], in the dtype of sums; on CUDA with contexts adjacent in
        memory, as the kernel reads them."""
        few = not torch.compiler.is_compiling() and len(hidden) <= FEW_CONTEXTS
        if hidden.device.type == "cuda" or (few and not is_cast(self.weight)):
            return linear_scores(self.weight, hidden).t()
        return linear_scores(hidden, self.weight)

    def reset(self, frequencies: FloatArray) -> None:
        """Zero rows of E, unless it is tied, and the logarithms of the frequencies: only their
        differences within a group matter, and all trees have the same."""
        if not self.tied:
            nn.init.zeros_(self.weight)
        if self.bias is not None:
            fill(self.bias, np.log(frequencies) - np.log(frequencies.sum()))


class TreeEnsemble(Head):
    r"""A mixture of T hierarchical softmaxes, each with its own tree.

    .. math::
        \log P(y \mid h) = \log \sum_t \pi_t(h) P_t(c_t(y) \mid h)\, P_t(y \mid c_t(y), h)

    The first factor is a softmax over the clusters c of tree t, the second one of two shapes:

    - *groups*: a softmax over the classes of the cluster, with one output embedding E [V, D] for
      all trees and a bias for each tree and class,
    - *paths*: binary nodes, each with a sigmoid of its own vector. Each tree may read its own
      random subset of S features.

    A training step costs O(T (C + W) D) per row for groups of W classes, and O(T (C + L) S) for
    paths of L nodes, independently of the number of classes. :meth:`from_counts`,
    :meth:`from_tokens` and :meth:`from_vectors` also build the trees.

    Equivalent to, for groups::

        for t in range(T):
            log_root = (roots.weight[t] @ h + roots.bias[t]).log_softmax(0)[cluster[t, y]]
            classes = (cluster[t] == cluster[t, y]).nonzero().squeeze(1)
            log_class = (E[classes] @ h + bias[t, classes]).log_softmax(0)[classes == y]
            log_prob[t] = log_gate[t] + log_root + log_class
        log_prob.logsumexp(0)

    where a cluster of one class adds its row of E to its vector of ``roots.weight``.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        trees: T trees over V classes, at least one, with roots of the same width: trees of two
            levels, or with binary nodes below the root; see :mod:`hstree.trees`.
        subset_size: number of features that the roots and paths of each tree read, S, drawn with
            ``seed``; None: all.
        gate: weights pi of the trees: ``"context"`` (softmax of a linear layer of h, 1 / T at the
            start), ``"constant"`` (learned, the same for all contexts) or ``"uniform"``.
        groups: whether the trees are read as groups; None: if they have two levels and are not all
            binary, or an ``embedding`` is given. The vectors start at zero, so that the untrained
            head gives the distribution of ``frequencies``; a given ``embedding`` keeps its values.
        embedding: module whose weight is used as E, such as the model's input embedding or a
            softmax; None: the head gets its own.
        sparse: whether the vectors below the roots have row-sparse gradients, as with
            ``torch.nn.Embedding(sparse=True)``. A step then costs what the rows that a batch visits
            cost: few on paths, almost all of E in groups of many classes. Requires
            :class:`hstree.optim.AdamW`, or SGD or Adagrad without weight decay, and one process.
            Off by default, because torch's AdamW, torch.compile, DDP, FSDP and the trainers of
            other libraries accept only dense gradients. In float16 on a CPU torch cannot add two of
            them: there, call zero_grad() before every backward pass.
        seed: seed of the feature subsets.
        **options: further arguments of :class:`Head`.

    Raises:
        TypeError: if ``trees`` is not a list of trees.
        ValueError: for trees of different sizes, root widths or shapes, or an option out of range.

    Example:
        >>> import torch, hstree
        >>> counts = torch.arange(2000, 0, -1)
        >>> trees = hstree.trees.build_ensemble("huffman", 2000, 4, frequencies=counts,
        ...                                     clusters=256)
        >>> head = hstree.TreeEnsemble(16, 2000, trees, frequencies=counts)
        >>> output, loss = head(torch.randn(5, 16), torch.randint(2000, (5,)))
        >>> output.shape, head.sample(torch.randn(5, 16)).shape
        (torch.Size([5]), torch.Size([5]))

    Sources: Goodman, Classes for fast maximum entropy training, ICASSP 2001 (groups). Morin and
    Bengio, Hierarchical probabilistic neural network language model, 2005 (paths). The ensemble is
    hstree's own.
    """

    name = "trees"
    below: Paths | Groups
    roots: Roots | None

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        trees: Sequence[Tree] = (),
        *,
        subset_size: int | None = None,
        gate: str = "context",
        groups: bool | None = None,
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
        self.sparse = check_bool("sparse", sparse)
        if sparse and self.label_smoothing:
            raise ValueError(
                "label_smoothing: expected 0 for trees with sparse=True, as every node gets a "
                f"gradient, got {self.label_smoothing}; sparse=False takes it"
            )
        if groups is None:
            groups = embedding is not None or _have_groups(trees)
        elif not check_bool("groups", groups) and embedding is not None:
            raise TyingError(
                "embedding: expected None for trees with binary nodes, which have vectors of their "
                f"own, got {type(embedding).__name__}"
            )
        self.groups = groups
        subsets = draw_subsets(self.n_trees, in_features, self.subset_size, seed)
        if groups:
            self.below = Groups(trees, subsets, in_features, sparse, embedding)
        else:
            self.below = Paths(trees, subsets, self.subset_size, sparse)
        self.roots = None
        if self.below.clusters:
            # Roots over all classes that share E read it alone.
            own = not groups or self.below.max_group > 0
            shape = (self.n_trees, self.below.clusters, self.subset_size)
            self.roots = Roots(*shape, vectors=own)
        # The weight of one tree is 1: nothing to learn.
        self.gate: UniformGate = GATES[gate if self.n_trees > 1 else "uniform"](
            in_features, self.n_trees
        )
        self._reset_trees()

    @classmethod
    def from_counts(
        cls,
        in_features: int,
        counts: npt.ArrayLike,
        *,
        n_trees: int | None = None,
        recipe: str = "huffman",
        clusters: int | None = None,
        binary: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """An ensemble built from class counts; before training it gives their distribution.

        Args:
            in_features: number of input features, D.
            counts: number of occurrences of each class, real [V], none negative: a tensor on the
                CPU, an array or a list.
            n_trees: number of trees, T; None: 4, or 1 for at most 1,024 classes.
            recipe: ``"huffman"`` or ``"random"``. For trees that group similar classes use
                :meth:`from_tokens` or :meth:`from_vectors`.
            clusters: number of children of the roots, C; with ``binary``, 2 gives trees that are
                binary throughout. None: 256, or the smallest power of two that is at least the
                square root of V if that is more, which it is from V = 65,537; but at most V / 4,
                because trees with too wide a root would hardly differ. One tree over at most 1,024
                classes is a single softmax, which costs no more than four roots of 256 clusters.
            binary: whether the nodes below the roots are binary; None: False, groups, but True with
                ``sparse`` from V = 12,001, unless an ``embedding`` is given. There a batch reaches
                almost all rows of groups, since clusters of rare classes are large. Binary nodes
                lose 2% in perplexity.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head.

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
        n_classes, sparse = len(frequencies), _reads_few_rows(options)
        shape = TreeShape.for_classes(n_classes, sparse, n_trees, clusters, binary)
        trees = build_ensemble(
            recipe, n_classes, shape.n_trees, frequencies, None, seed, shape.clusters, shape.binary
        )
        return cls._of(in_features, trees, shape, frequencies, seed, options)

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
        clusters: int | None = None,
        binary: bool | None = None,
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
            n_trees, clusters, binary: number and shape of the trees; see :meth:`from_counts`.
            recipe: ``"cluster"``, or ``"huffman"`` or ``"random"``, which read the frequencies
                alone.
            contexts: contexts of the word vectors for clustered trees, used alternately; see
                :func:`hstree.trees.word_vectors`. The vectors have 100 features, or 32 from
                V = 65,537, where the decomposition for 100 takes minutes.
            tree_options: further options of the recipe; see :func:`hstree.trees.build_ensemble`.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head.

        Raises:
            TypeError: if the tokens are not integers.
            ValueError: if there is no token, or one is outside [0, V).

        Example:
            >>> import torch, hstree
            >>> tokens = torch.randint(1500, (20000,))
            >>> head = hstree.TreeEnsemble.from_tokens(16, 1500, tokens, n_trees=2, clusters=64)
            >>> head.log_prob(torch.randn(3, 16)).shape
            torch.Size([3, 1500])
        """
        if frequencies is None:
            frequencies = count_classes(tokens, n_classes)
        sparse = _reads_few_rows(options)
        shape = TreeShape.for_classes(n_classes, sparse, n_trees, clusters, binary)
        trees = trees_of_text(
            recipe, n_classes, shape, frequencies, tokens, contexts, tree_options, seed
        )
        return cls._of(in_features, trees, shape, frequencies, seed, options)

    @classmethod
    def from_vectors(
        cls,
        in_features: int,
        vectors: npt.ArrayLike | Tensor,
        *,
        frequencies: npt.ArrayLike | None = None,
        n_trees: int | None = None,
        clusters: int | None = None,
        binary: bool | None = None,
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
            n_trees, clusters, binary: number and shape of the trees; see :meth:`from_counts`.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head.

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
        n_classes, sparse = len(np.atleast_1d(vectors)), _reads_few_rows(options)
        shape = TreeShape.for_classes(n_classes, sparse, n_trees, clusters, binary)
        frequencies = np.ones(n_classes) if frequencies is None else frequencies
        n_trees, clusters, binary = shape
        trees = build_ensemble(
            "cluster", n_classes, n_trees, frequencies, [vectors], seed, clusters, binary
        )
        return cls._of(in_features, trees, shape, frequencies, seed, options)

    @classmethod
    def _of(
        cls,
        in_features: int,
        trees: list[Tree],
        shape: TreeShape,
        frequencies: npt.ArrayLike,
        seed: int,
        options: dict[str, Any],
    ) -> Self:
        own: dict[str, Any] = {"groups": shape.groups, "frequencies": frequencies, "seed": seed}
        return cls(in_features, trees[0].n_classes, trees, **own, **options)

    @property
    def n_vectors(self) -> int:
        """Number of vectors that all classes of a row score."""
        return self.below.n_vectors + self.n_trees * self.below.clusters

    @property
    def trees(self) -> list[Tree]:
        """The trees."""
        return self.below.trees

    @property
    def tied(self) -> bool:
        """Whether the output embedding belongs to another module."""
        return self.below.tied

    @property
    def output_embedding(self) -> Tensor:
        """The output embedding E [V, D] of trees with groups."""
        if not isinstance(self.below, Groups):
            raise AttributeError("output_embedding: expected trees with groups, got binary nodes")
        return self.below.weight

    # The distribution

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
        weight, rows = self.below(hidden.device)
        log_prob = self.below.target_log_prob(hidden, target, weight, self.below.bias)
        if self.roots is not None:
            of_root = self.roots.target_log_prob(hidden, target, self.below, rows)
            log_prob = of_root if log_prob is None else of_root + log_prob
        if log_prob is None:  # a single class: 0, with a gradient of 0
            zeros = self._zeros(hidden)
            if torch.is_grad_enabled() and not zeros.requires_grad and not is_transformed():
                zeros.requires_grad_()  # of nothing, so that a training step works
            log_prob = zeros.unsqueeze(1).expand(-1, self.n_trees)
        return log_prob

    # All classes

    def numbers_of_a_row(self, device: torch.device) -> int:
        """Scores of the roots and nodes, each kind and all of them together, and of the classes.
        Kernels for the CPU and CUDA read the products of the classes in groups where they are."""
        below = self.below
        upper = self.n_trees * below.clusters + (0 if self.groups else below.n_vectors)
        shared = below.n_vectors if self.groups else 0
        if device.type not in ("cpu", "cuda"):
            shared *= 2 * self.n_trees
        return 2 * upper + shared + self.n_classes

    def _chunk_rows(self, hidden: Tensor) -> int:
        return max(default_chunk_rows(hidden, self.numbers_of_a_row(hidden.device)), CHUNK_ROWS)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return self.tempered_log_prob(hidden, 1.0)

    def tempered_log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """On a GPU in chunks of rows, if no gradients are recorded: the scores of all nodes take
        more memory than the result."""
        if hidden.device.type == "cpu" or _records_gradients(hidden, *self.parameters()):
            return self._of_all(hidden, temperature)
        chunks = split_rows(self.numbers_of_a_row(hidden.device), hidden)
        parts = [self._of_all(x, temperature) for (x,) in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _of_all(self, hidden: Tensor, temperature: float) -> Tensor:
        return tree_log_softmax(**self._scored(hidden, temperature))

    def _scored(self, hidden: Tensor, temperature: float = 1.0) -> dict[str, Any]:
        """The arguments of :func:`hstree.ops.tree_log_softmax`, the scores of all nodes divided by
        the temperature."""
        below, dtype, log_gate = self.below, sum_dtype(hidden.dtype), self.log_gate(hidden)
        _weight, rows = below(hidden.device)

        def divided(scores: Tensor) -> Tensor:
            scores = scores.to(dtype)
            return scores if temperature == 1.0 else scores / temperature

        scores, class_score, class_bias = [], None, None
        nodes = 0
        if isinstance(below, Groups):
            if below.bias is not None:
                of_classes = hidden.to(below.weight.dtype)
                class_score = divided(below.class_scores(of_classes))
                class_bias = divided(below.bias)
        elif below.weight is not None:
            scores.append(divided(below.scores(hidden)))
            nodes = below.weight.shape[1]
        if self.roots is not None:
            scores.append(divided(self.roots.scores(hidden, below, rows).mT))
        if not scores:  # a single class: no rows, but still with the graph of hidden
            scores = [hidden.t()[:0].to(dtype).expand(self.n_trees, -1, -1)]
        return {
            "score": scores[0] if len(scores) == 1 else torch.cat(scores, 1),
            "log_gate": log_gate,
            "node": below.node,
            "edge": below.edge,
            "n_classes": self.n_classes,
            "root_begin": nodes,
            "class_score": class_score,
            "class_bias": class_bias,
        }

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """On a CPU a few classes of a few rows by best-first search, which scores few nodes if few
        classes share most of the probability (see :func:`hstree.ops.tree_topk`); all others, and
        rows whose search would take longer, from all classes."""
        most = k if excluded is None else min(k + excluded.shape[1], self.n_classes)
        if not is_readable(hidden) or not self.n_vectors:
            columns = self.numbers_of_a_row(hidden.device)
            return topk_of_all(self, columns, hidden, k, excluded)
        with torch.no_grad():
            values, classes = self._topk(hidden, most)
            if excluded is not None:
                last = is_excluded(classes, excluded).int().argsort(dim=1, stable=True)
                classes = classes.gather(1, last[:, :k])
        if excluded is not None:
            return log_prob_without(self, hidden, classes, excluded), classes
        if _records_gradients(hidden, *self.parameters()):
            return self.candidate_rows(hidden, classes, 1.0), classes
        return values, classes

    def _topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        n_rows, dtype = len(hidden), sum_dtype(hidden.dtype)
        values = hidden.new_full((n_rows, k), torch.nan, dtype=dtype)
        classes = torch.full_like(values, -1, dtype=torch.int64)
        if n_rows <= SEARCHED_ROWS and k <= SEARCHED_CLASSES:
            # Half of the time of all classes, whose vectors are read once for all rows.
            most = self.n_vectors * (n_rows + READING) // (2 * OF_A_SEARCH * max(1, n_rows))
            values, classes = tree_topk(**self._walk(hidden), k=k, most_scored=most)
        elif self.groups and self.below.n_vectors:
            chunks = torch.split(hidden, self._chunk_rows(hidden))
            parts = [group_topk(**self._scored(x), k=k) for x in chunks]
            values, classes = map(torch.cat, zip(*parts, strict=True))
        rest = (classes[:, 0] < 0).nonzero().squeeze(1)
        if len(rest):
            columns = self.numbers_of_a_row(hidden.device)
            some, classes[rest] = topk_of_all(self, columns, hidden[rest], k, None)
            values[rest] = some.to(dtype)
        return values.to(dtype), classes

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """By the ops of the training step on the rows of all candidates, or from all classes where
        that takes fewer products."""
        below = self.below
        of_candidates = candidates.numel() * below.mean_vectors
        of_all = len(hidden) * below.n_vectors
        # Only the ops of the training step have row-sparse gradients; an exported program has one
        # way for any number of rows.
        every = of_all < of_candidates and not torch.compiler.is_exporting()
        if every and not (self.sparse and _records_gradients(hidden, *self.parameters())):
            return self._gathered(hidden, candidates, temperature)
        return self._repeated(hidden, candidates, temperature)

    def _gathered(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        def chosen(hidden: Tensor, candidates: Tensor) -> Tensor:
            return gather_marked(self.tempered_log_prob(hidden, temperature), candidates)

        if _records_gradients(hidden, *self.parameters()):
            return chosen(hidden, candidates)
        size = self._chunk_rows(hidden)
        chunks = zip(torch.split(hidden, size), torch.split(candidates, size), strict=True)
        return torch.cat([chosen(*chunk) for chunk in chunks])

    def _repeated(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """The root is scored once for each row."""
        below, (n_rows, n_candidates) = self.below, candidates.shape
        log_prob = self.log_gate(hidden).unsqueeze(1)
        weight, rows = below(hidden.device)
        if weight is not None and below.n_vectors:
            contexts, bias = hidden.to(weight.dtype), below.bias
            if temperature != 1.0:  # scores are linear; quotients would be rounded in 16 bits
                assert bias is not None
                dtype = sum_dtype(hidden.dtype)
                contexts, weight = hidden.to(dtype) / temperature, cast(weight, dtype)
                bias = cast(bias, dtype) / temperature
            with no_autocast(hidden.device) if temperature != 1.0 else nullcontext():
                of_trees = below.target_log_prob(
                    contexts.repeat_interleave(n_candidates, 0), candidates.flatten(), weight, bias
                )
            assert of_trees is not None
            log_prob = log_prob + of_trees.view(n_rows, n_candidates, self.n_trees)
        if self.roots is not None:
            child = below.root_child[:, candidates].long()
            of_root = self.roots.log_prob(hidden, below, rows, temperature)
            of_root = of_root.gather(2, child.clamp(0, below.clusters - 1)).permute(1, 2, 0)
            log_prob = log_prob + of_root
        # Trees of a single class have nothing: what is left is the gate, without a dimension of
        # candidates.
        log_prob = log_prob.expand(n_rows, n_candidates, self.n_trees)
        log_prob = mask_marked(log_sum_exp(log_prob, 2), candidates, self.n_classes)
        return log_prob.to(sum_dtype(hidden.dtype))

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Ancestral sampling: a tree by the gate, then a child at each node, so that a row costs
        what its nodes cost."""
        if hidden.device.type not in ("cpu", "cuda"):
            return super().sample_rows(hidden, n, temperature, generator, excluded)
        if excluded is not None:
            return sample_again(self, hidden, n, temperature, generator, excluded)
        # The op reads it on the device: a number for the host would wait for a GPU.
        seed = torch.randint(2**63 - 1, (1,), generator=generator, device=hidden.device)
        return sample(**self._walk(hidden, temperature), seed=seed, n=n, temperature=temperature)

    @torch.no_grad()
    def _walk(self, hidden: Tensor, temperature: float = 1.0) -> dict[str, Any]:
        """The arguments of the ops that walk the trees from the root."""
        below = self.below
        weight, rows = below(hidden.device)
        x = hidden if weight is None else hidden.to(weight.dtype)
        arguments: dict[str, Tensor | None] = dict.fromkeys(
            ("weight", "bias", "class_weight", "class_bias")
        )
        if below.bias is not None:
            prefix = "class_" if self.groups else ""
            arguments |= {f"{prefix}weight": weight, f"{prefix}bias": below.bias}
        root_log_prob = None
        if self.roots is not None:
            root_log_prob = self.roots.log_prob(hidden, below, rows, temperature)
        arguments |= {
            "hidden": x,
            "root_log_prob": root_log_prob,
            "log_gate": self.log_gate(hidden).to(sum_dtype(x.dtype)),
            "feature_index": below.feature_index,
            "node": below.node,
            "edge": below.edge,
            "leaf_edge": below.leaf_edge,
        }
        return {name: None if x is None else x.detach() for name, x in arguments.items()}

    # Parameters and files

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_trees()
        self.gate.reset()

    def _reset_trees(self) -> None:
        """The vectors become 0, and the biases those that give the distribution of the
        frequencies."""
        parameters = [*self.below.parameters(), *(self.roots.parameters() if self.roots else ())]
        if any(parameter.is_meta for parameter in parameters):  # a file fills them
            return
        frequencies = np.ones(self.n_classes) if self.frequencies is None else self.frequencies
        if self.roots is not None:
            log_mass = np.zeros(self.roots.bias.shape)
            for of_tree, tree in zip(log_mass, self.trees, strict=True):
                mass = tree.edge_masses(frequencies)[: tree.root_width]
                of_tree[:] = np.log(mass) - np.log(mass.sum())
            self.roots.reset(log_mass)
        self.below.reset(frequencies)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """A tied embedding belongs to the model, whose own part of the gradient may be dense."""
        if not self.sparse or not self.below.n_vectors:
            return []
        mine = [self.below.bias] if self.tied else [self.below.weight, self.below.bias]
        return [parameter for parameter in mine if isinstance(parameter, nn.Parameter)]

    def tied_parameters(self) -> list[Tensor]:
        return [self.output_embedding] if self.tied else []

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "subset_size": self.subset_size,
            "gate": self.gate.name,
            "groups": self.groups,
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
        saved = saved_tables(tensors, "below.")
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
        adopt_tables(head.below, tensors, "below.")
        index = head.below.feature_index
        if index is not None:
            right = (index >= 0) & (index < head.in_features)
            right &= index.diff(dim=1, prepend=index.new_full((len(index), 1), -1)) > 0
            check_entries("feature_index", index, right, f"increasing in [0, {head.in_features})")
        return head

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, n_trees={self.n_trees}, subset_size={self.subset_size}, "
            f"clusters={self.below.clusters or 2}, groups={self.groups}, gate={self.gate.name!r}, "
            f"sparse={self.sparse}"
        )


class TreeShape(NamedTuple):
    """Number and shape of the trees that an ensemble builds: arguments of
    :meth:`TreeEnsemble.from_counts`, with its defaults.

    Example:
        >>> from hstree.heads.trees import TreeShape
        >>> TreeShape.for_classes(1000)
        TreeShape(n_trees=1, clusters=1000, binary=False)
        >>> TreeShape.for_classes(50_000)
        TreeShape(n_trees=4, clusters=256, binary=False)
        >>> TreeShape.for_classes(50_000, sparse=True)
        TreeShape(n_trees=4, clusters=256, binary=True)
    """

    n_trees: int
    clusters: int
    binary: bool

    @classmethod
    def for_classes(
        cls,
        n_classes: int,
        sparse: bool = False,
        n_trees: int | None = None,
        clusters: int | None = None,
        binary: bool | None = None,
    ) -> TreeShape:
        """The values given, and defaults for None, which are measured in ``trees-study.md`` of the
        benchmark results."""
        flat = n_classes <= FLAT_CLASSES
        if n_trees is None:
            n_trees = 1 if flat else 4
        if clusters is None and flat and n_trees == 1 and not binary:
            clusters = n_classes
        elif clusters is None:
            square_root = 1 << ((n_classes - 1).bit_length() + 1) // 2
            clusters = max(2, min(max(USUAL_CLUSTERS, square_root), n_classes // 4))
        if binary is None:
            binary = sparse and n_classes > GROUPED_CLASSES
        return cls(n_trees, clusters, binary)

    @property
    def groups(self) -> bool | None:
        """How a head reads the trees. Small binary trees may have two levels, too."""
        return False if self.binary else None


def trees_of_text(
    recipe: str,
    n_classes: int,
    shape: TreeShape,
    frequencies: npt.ArrayLike,
    tokens: npt.ArrayLike,
    contexts: Sequence[Context],
    options: Mapping[str, Any] | None,
    seed: int,
) -> list[Tree]:
    """:func:`hstree.trees.build_ensemble` with word vectors of a text; see
    :meth:`TreeEnsemble.from_tokens`."""
    vectors = None
    if recipe == "cluster":
        n_features = 32 if n_classes > MANY_CLASSES else 100
        ids = np.asarray(tokens).reshape(-1)
        used = contexts[: shape.n_trees]
        with closing(track(used, "learning word vectors", len(used))) as progress:
            vectors = [
                word_vectors(ids, n_classes, context=context, n_features=n_features)
                for context in progress
            ]
    n_trees, clusters, binary = shape
    return build_ensemble(
        recipe, n_classes, n_trees, frequencies, vectors, seed, clusters, binary, **(options or {})
    )


def check_trees(trees: Sequence[Tree], n_classes: int) -> list[Tree]:
    """The trees as a list.

    Raises:
        TypeError: if they are not a list of trees.
        ValueError: unless they are trees over V classes with roots of the same width.
    """
    if isinstance(trees, Tree):
        raise TypeError("trees: expected a list of trees, got one Tree; pass [tree]")
    if not isinstance(trees, Sequence) or not all(isinstance(tree, Tree) for tree in trees):
        raise TypeError(
            f"trees: expected a list of hstree.trees.Tree, got {_what(trees)}; {BUILD_TREES}"
        )
    if not trees:
        raise ValueError(f"trees: expected at least one tree, got none; {BUILD_TREES}")
    for t, tree in enumerate(trees):
        if tree.n_classes != n_classes:
            raise ValueError(f"trees[{t}]: expected {n_classes} classes, got {tree.n_classes}")
        if tree.root_width != trees[0].root_width:
            raise ValueError(
                f"trees[{t}]: expected a root of {trees[0].root_width} children as in trees[0], "
                f"got {tree.root_width}"
            )
    return list(trees)


def _have_groups(trees: Sequence[Tree]) -> bool:
    """Whether trees have two levels, unless all are binary."""
    two = all(tree.height <= 2 for tree in trees) and any(tree.n_nodes > 1 for tree in trees)
    return two and not all(tree.is_binary for tree in trees)


def _reads_few_rows(options: Mapping[str, Any]) -> bool:
    """Whether a step may read only some rows of the vectors below the roots. Those of a given
    embedding are read in groups."""
    return bool(options.get("sparse")) and options.get("embedding") is None


def _what(trees: Any) -> str:
    name = type(trees).__name__
    if isinstance(trees, (list, tuple)):
        other = next(tree for tree in trees if not isinstance(tree, Tree))
        return f"a {name} with a {type(other).__name__}"
    return f"a {name}"


def draw_subsets(n_trees: int, in_features: int, subset_size: int, seed: int) -> Tensor | None:
    """Features of each tree, int32 [T, S], increasing; None if S = D.

    Raises:
        ValueError: for a size out of range.
    """
    check_int("subset_size", subset_size, 1, in_features)
    if subset_size == in_features:
        return None
    random = np.random.default_rng(seed)
    drawn = [np.sort(random.permutation(in_features)[:subset_size]) for _ in range(n_trees)]
    return torch.tensor(np.stack(drawn), dtype=torch.int32, device="cpu")


def _records_gradients(*tensors: Tensor) -> bool:
    """Whether what is computed from the tensors is differentiated."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return recorded or is_transformed()
