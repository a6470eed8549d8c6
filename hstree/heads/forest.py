"""A mixture of softmaxes over one output embedding, to which trees add vectors of clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import (
    check_choice,
    check_entries,
    check_int,
    check_probability,
    check_seed,
)
from hstree._numerics import draw_columns, linear_scores
from hstree.heads.gate import GATES
from hstree.heads.rows import sample_again
from hstree.heads.sampled import SampledSoftmax
from hstree.heads.state import HasWeight, saved_tables
from hstree.heads.trees import CONTEXTS, TreeShape, check_trees, trees_of_text
from hstree.ops import forest_log_prob
from hstree.ops.forest_log_prob import forest_log_softmax
from hstree.trees import Tree, build_ensemble
from hstree.trees.vectors import Context, count_classes

if TYPE_CHECKING:
    from typing_extensions import Self


class ForestSoftmax(SampledSoftmax):
    r"""A mixture of T softmaxes over one output embedding; tree t adds the score of the cluster
    :math:`c_t(v)` that holds a class v.

    .. math::
        P(y \mid h) = \sum_t \pi_t(h)\,
        \mathrm{softmax}_v(W_v \cdot h + b_v + r_t(h)[c_t(v)])_y, \qquad r_t(h) = A_t h + a_t

    So class v has the vector W_v plus that of its cluster in tree t, every tree is normalized over
    all classes, and the gate :math:`\pi` mixes the trees. Its log-probabilities have a rank above
    D + 1, as those of :class:`MixtureOfSoftmaxes`, for one product with W: a tree costs a product
    with its C cluster vectors and, on the CPU, V additions and C exponentials; see
    :func:`hstree.ops.forest_log_prob`.

    A and a start at 0, where the head is :class:`Softmax`. So :meth:`from_linear` starts exactly
    from a trained softmax. :meth:`from_tokens` learns the clusters from a text. One tree is a
    softmax whose classes share the vector of their cluster: :meth:`fold` gives it as a linear
    layer.

    With ``negatives`` a training step takes the classes of K draws and of the targets, weighted as
    in :class:`SampledSoftmax`: each normalizer :math:`Z_t = \sum_v e^{s_v + r_t[c_t(v)]}` is
    estimated by :math:`e^{s_y + r_t[c_t(y)]} + \sum_{u \ne y} \frac{m_u}{c_u} e^{s_u +
    r_t[c_t(u)]}`. ``output`` is then an estimate in training mode, as is the loss; label smoothing
    still takes all classes. In evaluation mode everything is exact.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        n_trees: number of trees, T, without ``trees``.
        clusters: number of clusters of a tree, C, at most V, without ``trees``. None holds more
            than 4 max(sqrt(V), V / C) classes (see :meth:`hstree.trees.Tree.collapse`).
        vectors: class vectors, real [V, F], such as a word embedding: a cluster holds classes of
            similar ones, and C is at least 2. None: random clusters of equal size, which bring
            little.
        trees: trees over the V classes, from :func:`hstree.trees.build_ensemble`, in place of
            ``vectors``: the classes below each child of the root are a cluster; the roots have the
            same width.
        gate: ``"context"``: pi = softmax(G h + g), starting at 1 / T; ``"constant"``: learned, but
            the same for all contexts; ``"uniform"``: 1 / T.
        tree_dropout: probability of dropping an element of h, in training, where the trees read it.
        seed: seed of the clusters, without ``trees``.
        negatives: number of draws in a training step, K, or ``"batch"``, as in
            :class:`SampledSoftmax`; None: steps score all classes.
        in_batch, distribution, alpha, sparse: of W and b, see :class:`SampledSoftmax`.
        bias, ..., frequencies: see :class:`Softmax`.

    Raises:
        TypeError: if ``trees`` are not a list of trees.
        ValueError: for an argument out of range, or trees over another number of classes; with
            ``negatives`` as for :class:`SampledSoftmax`, without them for ``sparse``.

    Example:
        >>> import torch, hstree
        >>> head = hstree.ForestSoftmax(16, 1000, clusters=32)
        >>> head(torch.randn(4, 16), torch.randint(1000, (4,))).output.shape
        torch.Size([4])
        >>> trees = hstree.trees.build_ensemble("cluster", 1000, 2, vectors=torch.randn(1000, 8),
        ...                                     clusters=32)
        >>> hstree.ForestSoftmax(16, 1000, trees=trees).cluster.shape
        torch.Size([1000, 2])

    Source: hstree's own. Mixtures of softmaxes: Yang, Dai, Salakhutdinov and Cohen, Breaking the
    softmax bottleneck: a high-rank RNN language model, ICLR 2018.
    """

    name = "forest"
    has_normalizer = False  # every tree has its own

    cluster: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        n_trees: int = 4,
        clusters: int = 256,
        vectors: npt.ArrayLike | Tensor | None = None,
        trees: Sequence[Tree] | None = None,
        gate: str = "context",
        tree_dropout: float = 0.0,
        seed: int = 0,
        negatives: int | Literal["batch"] | None = None,
        in_batch: bool = True,
        distribution: str = "unigram",
        alpha: float = 0.75,
        sparse: bool = False,
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(
            in_features,
            n_classes,
            negatives=negatives,
            in_batch=in_batch,
            distribution=distribution,
            alpha=alpha,
            sparse=sparse,
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )
        n_trees = check_int("n_trees", n_trees)
        clusters, seed = min(check_int("clusters", clusters), n_classes), check_seed(seed)
        if vectors is not None and trees is not None:
            raise ValueError(
                f"vectors: expected None together with trees, got {type(vectors).__name__}"
            )
        if vectors is not None:
            check_int("clusters", clusters, min(2, n_classes))
            if isinstance(vectors, Tensor):
                vectors = vectors.detach().float().cpu().numpy()
            trees = build_ensemble(
                "cluster", n_classes, n_trees, self.frequencies, [vectors], seed, clusters
            )
        if trees is not None:
            cluster, clusters = _of_trees(trees, n_classes)
        else:
            sizes = np.diff(np.arange(clusters + 1) * n_classes // clusters)
            built = build_ensemble("random", n_classes, n_trees, seed=seed)
            cluster = np.stack([_clusters(tree.order, sizes) for tree in built], 1)
        self.n_trees, self.clusters = cluster.shape[1], clusters
        self.tree_dropout = check_probability("tree_dropout", tree_dropout)
        self.register_table("cluster", torch.from_numpy(cluster))
        n_rows = self.n_trees * self.clusters
        self.cluster_weight = nn.Parameter(torch.zeros(n_rows, in_features))
        self.cluster_bias = nn.Parameter(torch.zeros(n_rows))
        self.gate = GATES[check_choice("gate", gate, GATES)](in_features, self.n_trees)
        self.gate.reset()

    @classmethod
    def from_tokens(
        cls,
        in_features: int,
        n_classes: int,
        tokens: npt.ArrayLike,
        *,
        frequencies: npt.ArrayLike | None = None,
        n_trees: int = 4,
        clusters: int = 256,
        recipe: str = "cluster",
        contexts: Sequence[Context] = CONTEXTS,
        tree_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """A head whose clusters hold classes of a text with similar contexts.

        Args:
            in_features: number of input features, D.
            n_classes: number of classes, V.
            tokens: classes of the training text in order, int [...] in [0, V).
            frequencies: class counts [V]; None: those of the tokens.
            n_trees: number of trees, T.
            clusters: number of clusters of a tree, C of at least 2, at most V. None holds more than
                4 max(sqrt(V), V / C) classes: those that the text lacks are several clusters.
            recipe, contexts, tree_options: see :meth:`TreeEnsemble.from_tokens`.
            seed: seed of the trees.
            **options: further arguments of the head.

        Raises:
            TypeError: if the tokens are not integers.
            ValueError: if there is no token, or one is outside [0, V).

        Example:
            >>> import torch, hstree
            >>> tokens = torch.randint(1500, (20000,))
            >>> head = hstree.ForestSoftmax.from_tokens(16, 1500, tokens, clusters=32, negatives=64)
            >>> head(torch.randn(3, 16), tokens[:3]).loss.backward()
        """
        if frequencies is None:
            frequencies = count_classes(tokens, n_classes)
        clusters = min(check_int("clusters", clusters, 2), n_classes)
        shape = TreeShape(check_int("n_trees", n_trees), clusters, binary=False)
        trees = trees_of_text(
            recipe, n_classes, shape, frequencies, tokens, contexts, tree_options, seed
        )
        return cls(in_features, n_classes, trees=trees, frequencies=frequencies, **options)

    @classmethod
    def from_linear(cls, linear: HasWeight, *, tied: bool = False, **options: Any) -> Self:
        """:meth:`Softmax.from_linear`, by default with clusters of the rows of the weight."""
        if options.get("trees") is None:
            options = {"vectors": linear.weight} | options
        return super().from_linear(linear, tied=tied, **options)

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The head as a linear layer with weight W_v + A[c(v)] and bias b_v + a[c(v)].

        Raises:
            ValueError: for more than one tree, a mixture that no linear layer gives.

        Example:
            >>> import torch, hstree
            >>> head, hidden = hstree.ForestSoftmax(16, 1000, n_trees=1), torch.randn(3, 16)
            >>> linear = head.fold()
            >>> torch.allclose(head.log_prob(hidden), linear(hidden).log_softmax(-1), atol=1e-5)
            True
        """
        if self.n_trees > 1:
            raise ValueError(f"fold: expected a head with one tree, got {self.n_trees}")
        rows, bias = self._rows(), self.bias
        linear = nn.Linear(
            self.in_features, self.n_classes, device=self.weight.device, dtype=self.weight.dtype
        )
        linear.weight.copy_(self.weight + self.cluster_weight[rows])
        of_cluster = self.cluster_bias[rows]
        linear.bias.copy_(of_cluster if bias is None else bias + of_cluster)
        return linear

    def _rows(self) -> Tensor:
        """Rows of A for the classes in each tree, int64 [T V]."""
        self.place_tables(self.cluster_weight.device)
        first = self.clusters * torch.arange(self.n_trees, device=self.cluster.device)
        return (self.cluster.t() + first[:, None]).flatten()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.cluster_weight)
        nn.init.zeros_(self.cluster_bias)
        self.gate.reset()

    def check_tables(self) -> None:
        super().check_tables()
        right = (self.cluster >= 0) & (self.cluster < self.clusters)
        check_entries("cluster", self.cluster, right, f"a cluster in [0, {self.clusters})")

    def resize_tables(self, old: int, counts: npt.NDArray[np.float64] | None) -> None:
        super().resize_tables(old, counts)
        if self.n_classes < self.clusters:
            raise ValueError(
                f"num_classes: expected at least {self.clusters}, the number of clusters, got "
                f"{self.n_classes}"
            )
        cluster = self.cluster[: self.n_classes].cpu()
        sizes = torch.stack([column.bincount(minlength=self.clusters) for column in cluster.t()])
        rows = [cluster]
        for _ in range(old, self.n_classes):
            smallest = sizes.argmin(1, keepdim=True)
            sizes.scatter_add_(1, smallest, torch.ones_like(smallest))
            rows.append(smallest.t().int())
        self.register_table("cluster", torch.cat(rows))

    def _of_trees(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-weights of the trees [N, T], and scores of their clusters [N, T, C]."""
        dropped = F.dropout(hidden, self.tree_dropout, self.training)
        # The rows of a cluster side by side, as the operator reads them.
        scores = linear_scores(self.cluster_weight, dropped) + self.cluster_bias[:, None]
        scores = scores.view(self.n_trees, self.clusters, hidden.shape[0])
        return self.gate(hidden), scores.permute(2, 0, 1)

    def _log_prob_and_loss(
        self, hidden: Tensor, target: Tensor, reduction: str
    ) -> tuple[Tensor, Tensor]:
        step = self._step(target)
        return forest_log_prob(
            hidden,
            *self._of_trees(hidden),
            step.weight,
            step.bias,
            self.cluster if step.classes is None else self.cluster[step.classes],
            step.target,
            offset=step.offset,
            row_weight=self._row_weight(hidden, target),
            reduction=reduction,
        )

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        trees = self._of_trees(hidden)
        return forest_log_softmax(hidden, *trees, self.weight, self.bias, self.cluster)

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Draws a tree by the gate, then a class from that tree."""
        if temperature != 1.0 or n > 1 or not len(hidden):
            return super().sample_rows(hidden, n, temperature, generator, excluded)
        if excluded is not None:
            return sample_again(self, hidden, n, temperature, generator, excluded)
        log_prior, cluster_score = self._of_trees(hidden)
        tree = draw_columns(log_prior.exp(), 1, generator).squeeze(1)
        row = torch.arange(hidden.shape[0], device=hidden.device)
        scores = linear_scores(hidden, self.weight, self.bias)
        scores = scores + cluster_score[row, tree].gather(1, self.cluster.t()[tree].long())
        return draw_columns(scores.softmax(1), 1, generator), None

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "n_trees": self.n_trees,
            "clusters": self.clusters,
            "gate": self.gate.name,
            "tree_dropout": self.tree_dropout,
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: HasWeight | None = None,
    ) -> Self:
        trees = saved_tables(tensors)["cluster"].shape[1]  # not a number that takes memory
        return super().from_config(config | {"n_trees": trees}, tensors, embedding)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, n_trees={self.n_trees}, clusters={self.clusters}, "
            f"gate={self.gate.name!r}"
        )


def _of_trees(trees: Sequence[Tree], n_classes: int) -> tuple[npt.NDArray[np.int32], int]:
    """Cluster of each class in each tree, int32 [V, T]: the child of the root that holds it; and
    the number of clusters. A single class has no root."""
    checked = check_trees(trees, n_classes)
    width = checked[0].root_width
    columns = [
        _clusters(tree.order, np.diff(tree.boundary[: width + 1]) if width else np.ones(1, int))
        for tree in checked
    ]
    return np.stack(columns, 1), max(1, width)


def _clusters(order: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Cluster of each class, int32 [V]: clusters of these sizes, in this order of the classes."""
    cluster = np.zeros(len(order), np.int32)
    cluster[order] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return cluster
