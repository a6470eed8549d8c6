"""Ensembles from counts, from a text, from a trained softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from torch import Tensor, nn

from hstree._checks import check_frequencies
from hstree.heads.trees.build import corpus_trees, ensemble_shape, several_trees
from hstree.heads.trees.conversion import copy_softmax
from hstree.heads.trees.state import EnsembleState
from hstree.trees import Tree

if TYPE_CHECKING:
    from typing_extensions import Self

    from hstree.data.statistics import CorpusStatistics


class Constructors(EnsembleState):
    """The ways to a :class:`hstree.heads.TreeEnsemble` that build its trees.

    Where T (``n_trees``) and C (``root``) are not given, up to V = 1,024 classes are one node, a
    softmax, which costs no more than four roots of 256 children. Beyond that there are four trees,
    with 256 children of the root or, from V = 65,537, the power of two that is at least the square
    root of V: `what was measured <benchmarks/results/ptb-reduced.md>`_.
    """

    if TYPE_CHECKING:

        def __init__(
            self, in_features: int, n_classes: int, trees: Sequence[Tree], **options: Any
        ) -> None: ...

    @classmethod
    def from_counts(
        cls,
        in_features: int,
        counts: npt.ArrayLike,
        *,
        n_trees: int | None = None,
        recipe: str = "huffman",
        root: int | None = None,
        leaf: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """An ensemble over as many classes as there are counts, which untrained is their
        distribution.

        Args:
            in_features: D.
            counts: how often each class occurs, real [V], none negative. A tensor on the CPU, an
                array or a list.
            n_trees: T; None: 4, or 1 up to V = 1,024.
            recipe: ``"huffman"`` or ``"random"``. Trees that cluster alike classes need more than
                counts: :meth:`from_tokens`, :meth:`from_linear`.
            root: C of :meth:`hstree.trees.Tree.collapse`; None: 256, or the power of two that is at
                least the square root of V; V for one tree of at most 1,024 classes.
            leaf: G of :meth:`hstree.trees.Tree.collapse`.
            seed: of the trees and of the feature subsets.
            options: of the head.

        Raises:
            TypeError: counts that are not real numbers.
            ValueError: counts that are not a 1-D array, or one of them negative or not finite.

        Example:
            >>> head = TreeEnsemble.from_counts(400, counts, gate="context")
        """
        frequencies = check_frequencies(counts, name="counts")
        n_classes = len(frequencies)
        n_trees, root = ensemble_shape(n_classes, n_trees, root)
        trees = several_trees(recipe, n_classes, frequencies, None, n_trees, seed, root, leaf)
        return cls(in_features, n_classes, trees, frequencies=frequencies, seed=seed, **options)

    @classmethod
    def from_tokens(
        cls, in_features: int, n_classes: int, tokens: npt.ArrayLike, **options: Any
    ) -> Self:
        """An ensemble whose trees cluster the classes of a text by the company they keep.

        Args:
            in_features: D.
            n_classes: V.
            tokens: classes of the training text in order, int [...] in [0, V): a tensor on the CPU,
                an array, a memory map or a list.
            options: those of :meth:`from_corpus`, and of the head.

        Raises:
            TypeError: tokens that are not integers.
            ValueError: no token, or one outside [0, V).

        Example:
            >>> head = TreeEnsemble.from_tokens(400, 10000, tokens, gate="context")
        """
        from hstree.data.statistics import CorpusStatistics

        statistics = CorpusStatistics.from_tokens(tokens, n_classes)
        return cls.from_corpus(in_features, n_classes, statistics, **options)

    @classmethod
    def from_corpus(
        cls,
        in_features: int,
        n_classes: int,
        statistics: CorpusStatistics,
        *,
        embedding: nn.Embedding | None = None,
        seed: int = 0,
        n_trees: int | None = None,
        recipe: str = "cluster",
        root: int | None = None,
        leaf: int = 1,
        tied: bool = False,
        contexts: Sequence[str] = ("left", "both"),
        tree_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """An ensemble whose trees are built from the corpus.

        Args:
            n_trees, root, leaf: T, C and G as for :meth:`from_counts`.
            recipe: ``"cluster"``, ``"huffman"`` or ``"random"``.
            tied: derive the node vectors from the model's input embedding
                (``node_vectors="shared"``).
            contexts: neighbours from which the word vectors of the clustered trees derive, taken in
                turn; see :func:`hstree.trees.word_vectors`. They have 100 features, and 32 from
                V = 65,537, where the decomposition of 100 takes minutes.
            tree_options: further options of the recipe; by default ``noise=0.3`` for several
                clustered trees, so that they differ.
            options: of the head.
        """
        if tied and embedding is None:
            raise ValueError("tied: expected an embedding to tie to, got None")
        if tied:
            options.setdefault("node_vectors", "shared")
        n_trees, root = ensemble_shape(n_classes, n_trees, root)
        trees = corpus_trees(
            statistics, n_classes, n_trees, recipe, seed, root, leaf, contexts, tree_options
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

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        trees: Sequence[Tree] | None = None,
        *,
        at: Tensor | None = None,
        n_trees: int | None = None,
        root: int | None = None,
        leaf: int | None = None,
        frequencies: npt.ArrayLike | None = None,
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
        alike. A root over all classes is the softmax itself.

        Args:
            linear: weight [V, D] and perhaps a bias.
            trees: over its V classes; None: clustered by the rows of the weight.
            at: h_0 [D]; None: 0, which suits a softmax with a bias; without one take the mean of
                some hidden vectors.
            n_trees: T of the clustered trees; None: 1, as many parameters as the softmax. Four give
                a perplexity 3% lower (benchmarks/results/conversion.md).
            root: their C; None: 1,024, or the power of two that is at least the square root of V;
                so that up to 1,024 classes are the softmax itself.
            leaf: their G; None: 64.
            frequencies: counts [V] by which the clusters are balanced; None: all equal.
            seed: of the trees and of the feature subsets.
            options: of the head; not ``node_vectors`` and ``embedding``.

        Example:
            >>> linear = torch.nn.Linear(400, 10000)
            >>> head = TreeEnsemble.from_linear(linear, frequencies=counts)
        """
        for name in ("node_vectors", "embedding"):
            if name in options:
                raise ValueError(f"{name}: expected none, as every node gets a vector of its own")
        n_classes, in_features = linear.weight.shape
        if at is not None and at.shape != (in_features,):
            raise ValueError(f"at: expected shape [{in_features}], got {list(at.shape)}")
        if trees is None:
            n_trees, root = ensemble_shape(n_classes, n_trees or 1, root, usual_root=1024)
            rows = linear.weight.detach().float().cpu().numpy()
            leaf = 64 if leaf is None else leaf
            trees = several_trees(
                "cluster", n_classes, frequencies, [rows], n_trees, seed, root, leaf
            )
        else:
            for name, value in (("n_trees", n_trees), ("root", root), ("leaf", leaf)):
                if value is not None:
                    raise ValueError(f"{name}: expected None together with trees, got {value!r}")
        head = cls(in_features, n_classes, trees, frequencies=frequencies, seed=seed, **options)
        copy_softmax(head, linear, at)
        return head.to(linear.weight.device)
