"""A mixture of softmaxes over one output embedding, to which trees add vectors of clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_choice, check_int, check_probability, check_seed
from hstree._numerics import linear_scores
from hstree.heads.flat import FlatHead
from hstree.heads.resizing import ClassChange
from hstree.heads.tables import Tables, saved_tables
from hstree.heads.trees.gate import GATES
from hstree.heads.trees.shape import check_trees
from hstree.heads.tying import HasWeight
from hstree.ops import forest_log_prob
from hstree.ops.forest_log_prob import forest_log_softmax
from hstree.trees import Tree, build_ensemble

if TYPE_CHECKING:
    from typing_extensions import Self


class ForestSoftmax(Tables, FlatHead):
    r"""A mixture of T softmaxes over one output embedding; tree t adds the score of the cluster
    :math:`c_t(v)` that holds a class v.

    .. math::
        P(y \mid h) = \sum_t \pi_t(h)\,
        \mathrm{softmax}_v(W_v \cdot h + b_v + r_t(h)[c_t(v)])_y, \qquad r_t(h) = A_t h + a_t

    So class v has the vector W_v plus that of its cluster in tree t, every tree is normalized over
    all classes, and the gate :math:`\pi` mixes the trees. Its log-probabilities have a rank above
    D + 1, as those of :class:`MixtureOfSoftmaxes`, for one product with W: a tree costs a product
    with its C cluster vectors, V additions and C exponentials; see
    :func:`hstree.ops.forest_log_prob`.

    A and a start at 0, where the head is :class:`Softmax`. So :meth:`from_linear` starts exactly
    from a trained softmax.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        n_trees: number of trees, T, without ``trees``.
        clusters: number of clusters of a tree, C, at most V, without ``trees``.
        trees: trees over the V classes, from :func:`hstree.trees.build_ensemble`: the classes below
            each child of the root are a cluster; the
            roots have the same width. None: random ones with clusters of equal size.
        gate: ``"context"``: pi = softmax(G h + g), starting at 1 / T; ``"constant"``: learned, but
            the same for all contexts; ``"uniform"``: 1 / T.
        tree_dropout: probability of dropping an element of h, in training, where the trees read it.
        seed: seed of random trees.
        **options: ``bias``, ``embedding`` and ``bias_start`` of :class:`FlatHead`, and the
            arguments of :class:`Head`.

    Raises:
        TypeError: if ``trees`` are not a list of trees.
        ValueError: for an argument out of range, or trees over another number of classes.

    Example:
        >>> import torch, hstree
        >>> head = hstree.ForestSoftmax(16, 1000, clusters=32)
        >>> head(torch.randn(4, 16), torch.randint(1000, (4,))).output.shape
        torch.Size([4])
        >>> trees = hstree.trees.build_ensemble("cluster", 1000, 2, vectors=torch.randn(1000, 8),
        ...                                     root=32, levels=2, noise=0.3)
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
        trees: Sequence[Tree] | None = None,
        gate: str = "context",
        tree_dropout: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        if trees is None:
            clusters = min(check_int("clusters", clusters), n_classes)
            n_trees, seed = check_int("n_trees", n_trees), check_seed(seed)
            sizes = np.diff(np.arange(clusters + 1) * n_classes // clusters)
            built = build_ensemble("random", n_classes, n_trees, seed=seed)
            columns = [_clusters(tree.order, sizes) for tree in built]
        else:
            trees = check_trees(trees, n_classes)
            clusters = max(1, trees[0].root_width)
            columns = [_clusters(tree.order, _sizes(tree)) for tree in trees]
        self.n_trees, self.clusters = len(columns), clusters
        self.tree_dropout = check_probability("tree_dropout", tree_dropout)
        self.register_table("cluster", torch.from_numpy(np.stack(columns, 1)))
        rows = self.n_trees * self.clusters
        self.cluster_weight = nn.Parameter(torch.zeros(rows, in_features))
        self.cluster_bias = nn.Parameter(torch.zeros(rows))
        self.gate = GATES[check_choice("gate", gate, GATES)](in_features, self.n_trees)
        self.gate.reset()

    @classmethod
    def from_linear(cls, linear: HasWeight, *, tied: bool = False, **options: Any) -> Self:
        """A head that starts as the softmax of a linear layer.

        Args:
            linear: the softmax: weight [V, D], with or without a bias.
            tied: use the weight of ``linear`` itself, not a copy.
            **options: further arguments of the head, except ``embedding``, ``bias`` and
                ``bias_start``.

        Example:
            >>> import torch, hstree
            >>> linear, hidden = torch.nn.Linear(16, 1000), torch.randn(3, 16)
            >>> head = hstree.ForestSoftmax.from_linear(linear, clusters=32)
            >>> torch.allclose(head.log_prob(hidden), linear(hidden).log_softmax(-1), atol=1e-5)
            True
        """
        weight, bias = linear.weight, getattr(linear, "bias", None)
        n_classes, in_features = weight.shape
        options |= {"bias": bias is not None, "embedding": linear if tied else None}
        head = cls(in_features, n_classes, **options).to(weight.device, weight.dtype)
        with torch.no_grad():
            if not tied:
                head.weight.copy_(weight)
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.cluster_weight)
        nn.init.zeros_(self.cluster_bias)
        self.gate.reset()

    def resize_classes(self, change: ClassChange) -> None:
        """New classes join the clusters in turn."""
        super().resize_classes(change)
        added = torch.arange(change.added, dtype=torch.int32)[:, None] % self.clusters
        kept = self.cluster[: change.kept].cpu()
        self.register_table("cluster", torch.cat([kept, added.expand(-1, self.n_trees)]))

    @property
    def linear_scores(self) -> bool:
        return False

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
        log_prior, cluster_score = self._of_trees(hidden)
        return forest_log_prob(
            hidden,
            log_prior,
            cluster_score,
            self.weight,
            self.bias,
            self.cluster,
            target,
            row_weight=None
            if self.class_weight is None
            else self.target_weight(target, cluster_score.dtype),
            reduction=reduction,
        )

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        scores = linear_scores(hidden, self.weight, self.bias)
        return forest_log_softmax(scores, *self._of_trees(hidden), self.cluster)

    def sample_rows(
        self, hidden: Tensor, n: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draws a tree by the gate, then a class from that tree."""
        if temperature != 1.0 or n > 1 or not len(hidden):
            return super().sample_rows(hidden, n, temperature, generator)
        log_prior, cluster_score = self._of_trees(hidden)
        tree = torch.multinomial(log_prior.exp(), 1, generator=generator).squeeze(1)
        row = torch.arange(hidden.shape[0], device=hidden.device)
        scores = linear_scores(hidden, self.weight, self.bias)
        scores = scores + cluster_score[row, tree].gather(1, self.cluster.t()[tree].long())
        return torch.multinomial(scores.softmax(1), 1, generator=generator), None

    def config(self) -> dict[str, Any]:
        return self.decoder_config() | {
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


def _sizes(tree: Tree) -> npt.NDArray[Any]:
    """Number of classes below each child of the root; a single class has no root."""
    return np.diff(tree.boundary[: tree.root_width + 1]) if tree.root_width else np.ones(1, int)


def _clusters(order: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Cluster of each class, int32 [V]: clusters of these sizes, in this order of the classes."""
    cluster = np.zeros(len(order), np.int32)
    cluster[order] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return cluster
