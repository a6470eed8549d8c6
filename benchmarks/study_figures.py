"""The figures of a trained language model that a study keeps."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree.heads import AdaptiveSoftmax, Head, TreeEnsemble
from hstree.heads.class_sampler import ClassSampler
from hstree.lab.study import StudyError, StudyModel, StudyRun, finish_run, read_state
from hstree.lm.config import TrainConfig
from hstree.lm.data import Corpus, Streams
from hstree.lm.model import LanguageModel
from hstree.lm.report import ConsoleReporter
from hstree.lm.run import MODEL, RunResults, load_model
from hstree.lm.train import default_streams
from hstree.trees import Tree

BANDS = (10_000, 1_000, 100, 10, 0)
"""Smallest numbers of occurrences in the training text of the bands of words."""


def rows_scored(head: Head, frequencies: npt.NDArray[Any], rows: int = 1) -> float:
    """Number of vectors that a training step of ``rows`` targets multiplies with a context, mean
    over the training text: V for a softmax; in a tree one for each binary node on the path and one
    for each child of a wide node; in a sampled softmax the draws and the different targets."""
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
    if isinstance(head, ClassSampler) and head.negatives is not None:
        return head.negatives + float((1 - (1 - frequencies / total) ** rows).sum())
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
    the training text: for each of BANDS, its smallest number of occurrences ``from``, the number of
    ``tokens``, and the ``loss`` (0 if there is no token)."""
    band = np.searchsorted(-np.asarray(BANDS), -np.asarray(frequencies), side="left")
    sums, counts = np.zeros(len(BANDS)), np.zeros(len(BANDS))
    ignore = model.head.ignore_index
    streams = Streams(tokens, default_streams(len(tokens)), ignore_index=ignore)
    training, state = model.training, None
    model.eval()
    for window, target in streams.windows(128):
        (log_prob, _), state, _ = model(window, target, state)
        here = (target != ignore).numpy()
        of = band[target.numpy()[here]]
        sums -= np.bincount(of, log_prob.double().numpy()[here], len(BANDS))
        counts += np.bincount(of, minlength=len(BANDS))
    model.train(training)
    return [
        {"from": first, "tokens": int(n), "loss": float(loss / max(n, 1))}
        for first, n, loss in zip(BANDS, counts, sums, strict=True)
    ]


def measured_run(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """Train as configured, or go on with the run in ``config.run``, on the text of ``config.data``.
    Raises StudyError if the folder holds a run with other settings, or memory ran out.

    Returns:
        ``valid``, ``test``: perplexities, None if training diverged; ``epochs``: validation
        perplexity by epoch; ``head_parameters``, ``backbone_parameters``; ``rows`` of
        :func:`rows_scored`; ``bands`` of :func:`band_losses` on the validation text; ``seconds`` of
        CPU time in all.
    """
    assert config.run is not None
    begin = time.process_time()
    run = StudyRun(StudyModel(Path(config.run).name, config), config.seed, Path(config.run))
    run = finish_run(read_state(run, None), None, ConsoleReporter())
    if run.state == "failed":
        return {"valid": None, "test": None, "error": run.failure}
    if run.figures is None or run.figures.final is None:
        raise StudyError(f"{run.name}: {run.failure}")
    return _figures(run.figures, corpus, config) | {"seconds": time.process_time() - begin}


def _figures(run: RunResults, corpus: Corpus, config: TrainConfig) -> dict[str, Any]:
    assert run.final is not None
    model = load_model(run.path / MODEL)
    frequencies = corpus.statistics().frequencies
    return {
        "valid": run.final.valid_perplexity,
        "test": run.final.test_perplexity,
        "epochs": [epoch.valid_perplexity for epoch in run.epochs],
        "head_parameters": run.final.head_parameters,
        "backbone_parameters": run.final.backbone_parameters,
        "rows": rows_scored(model.head, frequencies, config.batch_size * config.bptt),
        "bands": band_losses(model, corpus.valid, frequencies),
    }
