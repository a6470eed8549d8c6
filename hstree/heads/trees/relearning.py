"""Other trees for an ensemble during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from torch import Tensor, nn

from hstree._checks import check_int, check_number, check_seed
from hstree.heads.trees.build import several_trees
from hstree.heads.trees.fitting import fit_nodes
from hstree.heads.trees.replacement import like_shape, replace_trees
from hstree.heads.trees.state import EnsembleState
from hstree.trees import Tree

if TYPE_CHECKING:
    from hstree.heads.softmax import Softmax


class Relearning(EnsembleState):
    """Methods of :class:`hstree.heads.TreeEnsemble` that give it other trees."""

    def replace_trees(self, trees: Sequence[Tree], *, at: Tensor | None = None) -> list[str]:
        r"""Take other trees over the same classes, with ``node_vectors="leaves"``.

        The output embedding E, the biases of the classes and the gate stay. The vectors and biases
        of the nodes above the leaf groups start as the first-order expansion of the scores
        :math:`E_y \cdot h + b_{ty}` of the classes about a hidden vector :math:`h_0`; see
        :meth:`from_linear`.

        Parameters keep their identity, also where their shape changes. Optimizers must drop the
        state of the parameters named in the result. A kind of nodes that the old trees did not
        have gets new parameters, and one that the new trees do not have loses its own.
        :class:`~torch.nn.parallel.DistributedDataParallel` must be applied again.

        Args:
            trees: as many trees as the present ones, with a root of the same width.
            at: the hidden vector h_0 [D], such as the mean of some hidden vectors; None: 0.

        Returns:
            Names of the parameters that start anew.

        Raises:
            ValueError: for other ``node_vectors``, other numbers of trees, classes or children of
                the root, or parameters that are sharded or on the meta device.

        Example:
            >>> import hstree
            >>> from hstree.trees import build_ensemble
            >>> trees = build_ensemble("random", 2000, 2, root=64, levels=2)
            >>> head = hstree.TreeEnsemble(16, 2000, trees, node_vectors="leaves")
            >>> head.replace_trees(build_ensemble("random", 2000, 2, seed=1, root=64, levels=2))
            ['root_bias', 'root_weight']
        """
        return replace_trees(self, trees, at)

    def relearn(
        self,
        vectors: npt.ArrayLike | Tensor,
        *,
        at: Tensor | None = None,
        seed: int | None = None,
        frequencies: npt.ArrayLike | None = None,
        tree_options: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> list[str]:
        """:meth:`replace_trees` by trees that cluster the classes by the given vectors.

        Args:
            vectors: class vectors, real [V, F], such as those of
                :class:`hstree.trees.ContextMeans`.
            at: see :meth:`replace_trees`.
            seed: seed of the trees; None: that of the head.
            frequencies: class counts [V] that balance the clusters, such as
                ``ContextMeans.count``; None: those the head was built with, which a loaded head
                does not know.
            tree_options: see :meth:`from_corpus`.
            **shape: ``leaf`` and ``levels`` of :func:`hstree.trees.build_ensemble`; by default
                those of the present trees: their height if it is 2 or 3, and their widest group.

        Returns:
            Names of the parameters that start anew.

        Raises:
            ValueError: as in :meth:`replace_trees`, or for vectors of a wrong shape.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(
            ...     16, range(2000, 0, -1), root=64, levels=2, node_vectors="leaves")
            >>> head.relearn(torch.randn(2000, 8))
            ['root_bias', 'root_weight']
        """
        options = like_shape(self, shape)
        rows = vectors.detach().cpu().numpy() if isinstance(vectors, Tensor) else vectors
        trees = several_trees(
            "cluster",
            self.n_classes,
            self.frequencies if frequencies is None else frequencies,
            [rows],
            self.n_trees,
            self.seed if seed is None else seed,
            options=tree_options,
            **options,
        )
        return self.replace_trees(trees, at=at)

    def fit_nodes(
        self,
        hidden: Tensor,
        target: Tensor | nn.Linear | Softmax,
        *,
        epochs: int = 3,
        batch_size: int = 1024,
        learning_rate: float | None = None,
        seed: int = 0,
    ) -> None:
        r"""Fit the nodes above the leaf groups to contexts, with ``node_vectors="leaves"``.

        Minimizes the mean over the contexts and the trees of

        .. math::
            -\sum_y q(y \mid h) \sum_{n \in \mathrm{path}_t(y)} \log P_t(\text{child} \mid n, h)

        over the nodes n above the leaf groups, by Adam with a cosine schedule. The output
        embedding, the biases of the classes and the gate stay. The first-order expansion that
        :meth:`replace_trees`, :meth:`relearn` and :meth:`from_linear` start the nodes from is
        coarse: call this after them, before training continues.

        With classes as the target, q is 1 for the class that followed. With a softmax as the
        target, q is its distribution: the nodes are distilled from it, and what is minimized is, up
        to a constant, the Kullback-Leibler divergence from the softmax to each tree in the
        distribution of the leaf groups. That of the classes is the same where the leaf groups are
        exact, as after ``from_linear(softmax, tied=True)``. A step then costs the probabilities of
        all classes, which are held for a few contexts at a time.

        Args:
            hidden: context vectors, floating point [N, D], such as those of a sample of the
                training text.
            target: classes, int64 [N], in [0, V) or ``ignore_index``; or a softmax over them with a
                weight [V, D], with or without a bias, which is not changed.
            epochs: passes over the contexts, at least 1.
            batch_size: contexts of a step.
            learning_rate: of the first step; None: 0.01 for classes, 0.1 / sqrt(D) for a softmax.
                For a softmax that of the vectors is divided by the root mean square of ``hidden``,
                so that the fit does not depend on its scale.
            seed: seed of the order of the contexts.

        Raises:
            ValueError: for other ``node_vectors``, a wrong shape or a value out of range.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(
            ...     16, range(2000, 0, -1), root=64, levels=2, node_vectors="leaves")
            >>> hidden, target = torch.randn(500, 16), torch.randint(2000, (500,))
            >>> before = head(hidden, target).loss
            >>> head.fit_nodes(hidden, target)
            >>> bool(head(hidden, target).loss < before)
            True

            A softmax, and what its trees still lack:

            >>> linear = torch.nn.Linear(16, 2000)
            >>> head = hstree.TreeEnsemble.from_linear(linear, tied=True, root=64)
            >>> head.fit_nodes(hidden, linear)
            >>> log_prob, exact = head.log_prob(hidden), linear(hidden).log_softmax(-1)
            >>> bool((exact.exp() * (exact - log_prob)).sum(-1).mean() < 0.01)
            True
        """
        fit_nodes(
            self,
            hidden,
            target,
            epochs=check_int("epochs", epochs, 1),
            batch_size=check_int("batch_size", batch_size, 1),
            learning_rate=learning_rate
            if learning_rate is None
            else check_number("learning_rate", learning_rate, positive=True),
            seed=check_seed(seed),
        )
