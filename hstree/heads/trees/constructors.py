"""Ensembles from class counts, from a text, and from a trained softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from torch import Tensor, nn

from hstree._checks import check_choice, check_frequencies
from hstree.heads.trees.build import (
    corpus_trees,
    ensemble_shape,
    several_trees,
    shape_below,
    usual_vectors,
)
from hstree.heads.trees.conversion import copy_softmax
from hstree.heads.trees.state import EnsembleState
from hstree.trees import Tree

if TYPE_CHECKING:
    from typing_extensions import Self

    from hstree.heads.softmax import Softmax
    from hstree.lm.data.statistics import CorpusStatistics


class Constructors(EnsembleState):
    """Constructors of :class:`hstree.heads.TreeEnsemble` that also build its trees.

    Default shape: up to V = 1,024 classes, one node over all classes. It is a softmax, and costs no
    more than four roots of 256 children. Beyond that, T = 4 trees (``n_trees``) of two levels: a
    root with C = 256 children (``root``) or, from V = 65,537, the smallest power of two that is at
    least the square root of V, and below each of them one softmax over its classes. The classes
    share one output embedding in all trees, ``node_vectors="leaves"``. The measurements are in
    ``trees-study.md`` of the benchmark results.

    With ``sparse=True`` and more than 16,384 classes there are binary nodes below the root, down to
    groups of at most G = 16 classes, each of them one softmax. Otherwise the row-sparse gradient
    would have almost all rows, because clusters of rare classes are large.
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
            n_trees: number of trees, T; None: 4, or 1 for at most 1,024 classes.
            recipe: ``"huffman"`` or ``"random"``. For trees that group similar classes use
                :meth:`from_tokens` or :meth:`from_linear`.
            root: width of the root, C of :meth:`hstree.trees.Tree.collapse`; None: 256, or the
                smallest power of two that is at least the square root of V if that is more, but at
                most V / 4; V for one tree over at most 1,024 classes.
            leaf: size of the leaf groups, G of :meth:`hstree.trees.Tree.collapse`; None: 16 with
                three levels, and from V = 16,385 with ``sparse=True`` unless the root is binary,
                otherwise 1.
            levels: number of levels of :meth:`hstree.trees.Tree.collapse`, 2 or 3; None: 2. If
                ``leaf`` is given or the root is binary, and from V = 16,385 with ``sparse=True``,
                None is any number of binary nodes between the root and the leaf groups.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head. ``node_vectors`` is ``"free"`` for trees that
                are binary down to the classes and for a root over all classes, otherwise
                ``"leaves"``.

        Raises:
            TypeError: if the counts are not real numbers.
            ValueError: if the counts are not a 1-D array, or one is negative or not finite.

        Example:
            >>> import torch, hstree
            >>> counts = torch.arange(5000, 0, -1)
            >>> head = hstree.TreeEnsemble.from_counts(16, counts, gate="context")
            >>> head.n_trees, head.trees[0].root_width
            (4, 256)
            >>> head(torch.randn(3, 16), torch.tensor([0, 1, 4999])).loss.shape
            torch.Size([])
        """
        _check_names("from_counts", options, frequencies="counts")
        frequencies = check_frequencies(counts, name="counts")
        n_classes = len(frequencies)
        n_trees, root = ensemble_shape(n_classes, n_trees, root)
        leaf, levels = shape_below(n_classes, root, leaf, levels, bool(options.get("sparse")))
        options.setdefault("node_vectors", usual_vectors(n_classes, root, leaf, levels))
        trees = several_trees(
            recipe, n_classes, frequencies, None, n_trees, seed, root, leaf, levels
        )
        return cls(in_features, n_classes, trees, frequencies=frequencies, seed=seed, **options)

    @classmethod
    def from_tokens(
        cls, in_features: int, n_classes: int, tokens: npt.ArrayLike, **options: Any
    ) -> Self:
        """An ensemble whose trees cluster the classes of a text by their contexts.

        Args:
            in_features: number of input features, D.
            n_classes: number of classes, V.
            tokens: classes of the training text in order, int [...] in [0, V): a tensor on the CPU,
                an array, a memory map or a list.
            **options: arguments of :meth:`from_corpus` and of the head.

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
        from hstree.lm.data.statistics import CorpusStatistics

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
        leaf: int | None = None,
        levels: int | None = None,
        tied: bool = False,
        contexts: Sequence[str] = ("left", "both"),
        tree_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """An ensemble whose trees are built from a corpus.

        Args:
            in_features: number of input features, D.
            n_classes: number of classes, V.
            statistics: class frequencies and word vectors of the corpus.
            embedding: the model's input embedding, for ``tied``.
            seed: seed of the trees and of the feature subsets.
            n_trees: number of trees, T; see :meth:`from_counts`.
            recipe: ``"cluster"``, ``"huffman"`` or ``"random"``.
            root: width of the root, C; see :meth:`from_counts`.
            leaf: size of the leaf groups, G; see :meth:`from_counts`.
            levels: number of levels; see :meth:`from_counts`.
            tied: use the weight of ``embedding`` as the output embedding, with
                ``node_vectors="leaves"``.
            contexts: contexts of the word vectors for clustered trees, used alternately; see
                :func:`hstree.trees.word_vectors`. The vectors have 100 features, or 32 from
                V = 65,537, where the decomposition for 100 takes minutes.
            tree_options: further options of the recipe; None: ``noise=0.3`` for several clustered
                trees, so that they differ.
            **options: further arguments of the head; ``node_vectors`` as in :meth:`from_counts`.

        Raises:
            ValueError: if ``tied`` is set without an embedding, or a value is out of range.
        """
        _check_names("from_corpus", options, frequencies="the statistics")
        if tied and embedding is None:
            raise ValueError("tied: expected an embedding to tie to, got None")
        n_trees, root = ensemble_shape(n_classes, n_trees, root)
        leaf, levels = shape_below(n_classes, root, leaf, levels, bool(options.get("sparse")))
        options.setdefault("node_vectors", usual_vectors(n_classes, root, leaf, levels, tied))
        trees = corpus_trees(
            statistics, n_classes, n_trees, recipe, seed, root, leaf, levels, contexts, tree_options
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
        linear: nn.Linear | Softmax,
        trees: Sequence[Tree] | None = None,
        *,
        tied: bool = False,
        vectors: npt.ArrayLike | Tensor | None = None,
        at: Tensor | None = None,
        n_trees: int | None = None,
        root: int | None = None,
        leaf: int | None = None,
        levels: int | None = None,
        frequencies: npt.ArrayLike | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        r"""An ensemble that starts as an approximation of a trained softmax.

        The scores at each node are those of the softmax to first order about a hidden vector
        :math:`h_0`. The score of a child with the classes :math:`Y` below it is

        .. math::
            \log \sum_{y \in Y} e^{w_y \cdot h + b_y} \approx \log \sum_{y \in Y} e^{z_y}
            + \frac{\sum_y e^{z_y} w_y}{\sum_y e^{z_y}} \cdot (h - h_0), \qquad
            z_y = w_y \cdot h_0 + b_y

        This is exact for a child that is a single class. The more similar the classes below a node
        are, the closer is the approximation. A root over all classes is the softmax itself.

        Args:
            linear: the softmax: weight [V, D], with or without a bias.
            tied: use the weight of the softmax itself as the output embedding, not a copy. The head
                then adds T C D numbers for the roots of trees of two levels and T V for the biases
                of the classes. Below the root it is exact, and it follows the softmax when that is
                trained; :meth:`fit_nodes` fits the root to it. The head has the dtype of the
                softmax. See :meth:`hstree.heads.Head.save` for a file without the weight.
            trees: trees over the V classes; None: clustered by ``vectors``.
            vectors: class vectors, real [V, F]; None: the rows of the weight. With the mean hidden
                states of a sample, :meth:`hstree.trees.ContextMeans.vectors`, and their counts as
                ``frequencies`` the approximation is closer.
            at: the hidden vector h_0 [D]; None: 0, which suits a softmax with a bias. Without a
                bias use the mean of some hidden vectors.
            n_trees: number of clustered trees, T; None: 1, which has as many parameters as the
                softmax. Four trees give a perplexity 3% lower (``conversion.md`` of the benchmark
                results).
            root: width of the root, C; None: 1,024, or the smallest power of two that is at least
                the square root of V if that is more, but at most V / 4. Up to 1,024 classes one
                tree is the softmax itself.
            leaf: size of the leaf groups, G; None: 64, or 1 with two levels or ``tied``.
            levels: number of levels; see :meth:`from_counts`. None: any number of binary nodes
                between the root and the leaf groups, or 2 with ``tied`` and without ``leaf``.
            frequencies: class counts [V] that balance the clusters; None: all equal.
            seed: seed of the trees and of the feature subsets.
            **options: further arguments of the head, except ``embedding``. With
                ``node_vectors="leaves"``, the default with ``tied``, the output embedding starts as
                the weight of the softmax.

        Raises:
            ValueError: for ``node_vectors="free"`` with ``tied``; for ``embedding``, ``at`` of a
                wrong shape, or ``vectors``, ``n_trees``, ``root``, ``leaf`` or ``levels`` together
                with ``trees``.

        Example:
            >>> import torch, hstree
            >>> linear, hidden = torch.nn.Linear(16, 1000), torch.randn(3, 16)
            >>> head = hstree.TreeEnsemble.from_linear(linear)
            >>> torch.allclose(head.log_prob(hidden), linear(hidden).log_softmax(-1), atol=1e-5)
            True

            Two levels that read the rows of the softmax:

            >>> head = hstree.TreeEnsemble.from_linear(linear, tied=True, root=32)
            >>> head.output_embedding is linear.weight, head.root_weight.shape
            (True, torch.Size([1, 32, 16]))
        """
        if "embedding" in options:
            raise ValueError(
                "embedding: expected no such option, because the vectors are those of linear, "
                f"got {options['embedding']!r}"
            )
        if tied:
            check_choice("node_vectors", options.setdefault("node_vectors", "leaves"), ("leaves",))
        n_classes, in_features = linear.weight.shape
        if at is not None and at.shape != (in_features,):
            raise ValueError(f"at: expected shape [{in_features}], got {list(at.shape)}")
        if trees is None:
            n_trees, root = ensemble_shape(n_classes, n_trees or 1, root, usual_root=1024)
            rows = linear.weight if vectors is None else vectors
            if isinstance(rows, Tensor):
                rows = rows.detach().float().cpu().numpy()
            if tied:
                leaf, levels = shape_below(n_classes, root, leaf, levels)
            elif leaf is None:
                leaf = 1 if levels == 2 else 64
            trees = several_trees(
                "cluster", n_classes, frequencies, [rows], n_trees, seed, root, leaf, levels
            )
        else:
            shape = {"n_trees": n_trees, "root": root, "leaf": leaf, "levels": levels}
            for name, value in ({"vectors": vectors} | shape).items():
                if value is not None:
                    raise ValueError(f"{name}: expected None together with trees, got {value!r}")
        head = cls(
            in_features,
            n_classes,
            trees,
            embedding=linear if tied else None,
            frequencies=frequencies,
            seed=seed,
            **options,
        ).to(linear.weight.device, linear.weight.dtype if tied else None)
        copy_softmax(head, linear, at)
        return head


def _check_names(constructor: str, options: Mapping[str, Any], **given_by: str) -> None:
    """Raises TypeError for options of the head that the constructor sets."""
    if "trees" in options:
        raise TypeError(
            f"trees: {constructor} builds the trees, and takes their number as n_trees, got trees="
            f"{options['trees']!r}; TreeEnsemble(in_features, n_classes, trees) takes trees that "
            "exist"
        )
    for name, source in given_by.items():
        if name in options:
            raise TypeError(f"{name}: {constructor} takes them from {source}; leave {name} out")
