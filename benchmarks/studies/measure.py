"""The figures of a trained language model that a study keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree.heads import AdaptiveSoftmax, Head, TreeEnsemble
from hstree.lm.data import Corpus, Streams
from hstree.lm.models import LanguageModel
from hstree.lm.training.validation import default_streams
from hstree.trees import Tree

BANDS = (10_000, 1_000, 100, 10, 0)
"""Smallest numbers of occurrences in the training text of the bands of words."""


def rows_scored(head: Head, frequencies: npt.NDArray[Any]) -> float:
    """Number of vectors that a training step multiplies with a context, for each target, mean over
    the training text: V for a softmax; in a tree one for each binary node on the path and one for
    each child of a wide node."""
    total = float(frequencies.sum())
    if isinstance(head, TreeEnsemble):
        both = head.node_vectors == "leaves"
        return sum(_tree_rows(tree, frequencies, both) for tree in head.trees)
    if isinstance(head, AdaptiveSoftmax):
        ends = [*head.cutoffs, head.n_classes]
        mass = frequencies[head.order.cpu().numpy()] / total
        rows = float(head.cutoffs[0] + len(head.cutoffs))
        for begin, end in pairwise(ends):
            rows += float(mass[begin:end].sum()) * (end - begin)
        return rows
    if head.name == "sampled":
        return float(head.negatives) + 1  # type: ignore[arg-type]
    return float(head.n_classes)


def _tree_rows(tree: Tree, frequencies: npt.NDArray[Any], leaf_pairs: bool) -> float:
    """``leaf_pairs``: whether a binary node over two classes has a vector for each of them."""
    edges = tree.edges()
    mass = np.bincount(edges.node, tree.edge_masses(frequencies), tree.n_nodes)
    children = tree.n_children
    binary = children == 2
    if leaf_pairs:
        inner = np.bincount(edges.node, edges.child_node >= 0, tree.n_nodes)
        binary &= (inner > 0) | (np.arange(tree.n_nodes) == 0)
    return float(mass @ np.where(binary, 1, children) / frequencies.sum())


@torch.no_grad()
def band_losses(
    model: LanguageModel, tokens: npt.NDArray[Any], frequencies: npt.NDArray[Any]
) -> list[dict[str, float]]:
    """Mean negative log-probability of a text, in nats per token, by how often the words occur in
    the training text.

    Args:
        model: language model.
        tokens: class ids of the text, [n].
        frequencies: occurrences of each class in the training text, [V].

    Returns:
        For each of BANDS: ``from``, its smallest number of occurrences, the number of ``tokens``,
        and the ``loss`` (0 if there is no token).
    """
    band = np.searchsorted(-np.asarray(BANDS), -np.asarray(frequencies), side="left")
    sums, counts = np.zeros(len(BANDS)), np.zeros(len(BANDS))
    streams = Streams(
        tokens,
        default_streams(len(tokens)),
        ignore_index=model.head.ignore_index,
    )
    training, state = model.training, None
    model.eval()
    for window, target in streams.windows(128):
        (log_prob, _), state, _ = model(window, target, state)
        here = (target != model.head.ignore_index).numpy()
        of = band[target.numpy()[here]]
        sums -= np.bincount(of, log_prob.double().numpy()[here], len(BANDS))
        counts += np.bincount(of, minlength=len(BANDS))
    model.train(training)
    return [
        {"from": first, "tokens": int(n), "loss": float(loss / max(n, 1))}
        for first, n, loss in zip(BANDS, counts, sums, strict=True)
    ]


def band_perplexity(bands: Sequence[dict[str, float]]) -> float:
    """The perplexity of the text whose losses by band these are."""
    tokens = sum(band["tokens"] for band in bands)
    return math.exp(sum(band["loss"] * band["tokens"] for band in bands) / tokens)


def text_name(corpus: Corpus) -> str:
    """Identifies a text in records: the number of training tokens and classes, and the perplexity
    of the unigram distribution on the test part."""
    unigram = math.exp(corpus.statistics().unigram_loss(corpus.test[1:]))
    return (
        f"{len(corpus.train):,} training tokens, {len(corpus.vocabulary):,} classes, "
        f"unigram test perplexity {unigram:.4g}"
    )
