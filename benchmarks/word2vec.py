"""Epochs of skip-gram with hierarchical softmax over one corpus: hstree, gensim, fastText.

Every word predicts its two neighbors. The unit is a node visit: one node on the path of a predicted
word, with its score, its gradients and the update of both vectors. gensim and fastText update after
every pair of words, hstree after a batch.
"""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.contest import Build, Contestant, Size
from hstree.heads.trees import Paths
from hstree.ops import path_log_prob
from hstree.trees import build_ensemble

LINE = 100
"""Number of words in a line."""
RATE = 0.025
WORD2VEC_SIZES = [Size(1400, 400, 33_278, 400), Size(1400, 100, 33_278, 100)]


@lru_cache(maxsize=1)
def corpus(classes: int) -> list[np.ndarray[Any, Any]]:
    """Lines of words 0 to V - 1: 10 V words drawn from Zipf's law, and each word once more."""
    random = np.random.default_rng(0)
    frequencies = 1.0 / np.arange(1, classes + 1)
    drawn = random.choice(classes, 10 * classes, p=frequencies / frequencies.sum())
    words = random.permutation(np.concatenate([drawn, np.arange(classes)]))
    return np.split(words, np.arange(LINE, len(words), LINE))


def pairs(lines: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Pairs (predicting, predicted) of all neighbors, in the order of the text, [pairs, 2]."""
    both = [
        np.stack([np.stack([a, b], 1), np.stack([b, a], 1)], 1).reshape(-1, 2)
        for a, b in ((line[:-1], line[1:]) for line in lines)
    ]
    return np.concatenate(both)


def visits(lines: list[np.ndarray[Any, Any]]) -> int:
    """Number of visits in an epoch: the same for any Huffman tree, except for words at the ends of
    lines."""
    counts = np.bincount(np.concatenate(lines))
    tree = build_ensemble("huffman", len(counts), 1, counts)[0]
    return int(np.diff(tree.tables().path_offset)[pairs(lines)[:, 1]].sum())


def _hstree(size: Size, device: str) -> Contestant:
    lines = corpus(size.classes)
    counts = np.bincount(np.concatenate(lines))
    paths = Paths(build_ensemble("huffman", size.classes, 1, counts), None, 1, sparse=True)
    contexts, targets = torch.from_numpy(pairs(lines).T.copy())
    vectors = torch.empty(size.classes, size.features)
    torch.nn.init.uniform_(vectors, -0.5 / size.features, 0.5 / size.features)
    weight, bias = torch.zeros(1, size.classes - 1, size.features), None
    parameters = [vectors.requires_grad_(), weight.requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    tables = paths.path_offset, paths.path, paths.leaf_position
    options: dict[str, Any] = {"max_depth": paths.max_depth, "sparse": True}

    def epoch() -> None:
        batches = contexts.split(size.rows), targets.split(size.rows)
        for context, target in zip(*batches, strict=True):
            optimizer.zero_grad()
            input = F.embedding(context, vectors, sparse=True)
            log_prob = path_log_prob(input, weight, bias, target, *tables, **options)
            (-log_prob.mean()).backward()
            optimizer.step()

    return Contestant(epoch, visits=visits(lines))


def _gensim(size: Size, device: str) -> Contestant:
    """gensim's compiled loop over the corpus, without its worker threads."""
    from gensim.models import Word2Vec
    from gensim.models.word2vec_inner import train_batch_sg

    lines = [line.astype(str).tolist() for line in corpus(size.classes)]
    model = Word2Vec(
        vector_size=size.features,
        window=1,
        shrink_windows=False,
        min_count=1,
        sample=0,
        sg=1,
        hs=1,
        negative=0,
        workers=1,
    )
    model.build_vocab(lines)
    work = np.zeros(size.features, np.float32)
    codes = {word: len(model.wv.get_vecattr(word, "code")) for word in model.wv.index_to_key}
    visited = sum(codes[a] + codes[b] for line in lines for a, b in pairwise(line))

    jobs = [lines[i : i + 10_000 // LINE] for i in range(0, len(lines), 10_000 // LINE)]

    def epoch() -> None:
        trained = sum(train_batch_sg(model, job, RATE, work, False) for job in jobs)
        assert trained == sum(map(len, lines))

    return Contestant(epoch, visits=visited)


def _fasttext(size: Size, device: str) -> Contestant:
    """fastText without subwords, with ten threads on one core: with one thread, release 0.9.3
    initializes only the first tenth of its vectors.

    It reads a file and initializes its vectors in the same call; the idle step does only that. Each
    line ends in an end-of-line word, which counts like others.
    """
    import fasttext

    lines = corpus(size.classes)
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name, "corpus.txt")
    file.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))

    def train(epochs: int) -> None:
        assert folder  # keeps the file
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            fasttext.train_unsupervised(
                str(file),
                model="skipgram",
                loss="hs",
                dim=size.features,
                ws=1,
                minCount=1,
                maxn=0,
                bucket=0,
                t=1.0,
                lr=RATE,
                epoch=epochs,
                thread=10,
                verbose=0,
            )
        finally:
            os.sched_setaffinity(0, cores)

    ended = [np.append(line, size.classes) for line in lines]
    return Contestant(lambda: train(1), visits=visits(ended), idle=lambda: train(0))


LIBRARIES = {"gensim": _gensim, "fasttext": _fasttext}
"""Functions that build contestants, by the name of the module that they need."""

WORD2VEC_CONTESTS: dict[str, dict[str, Build]] = {
    f"{name}, D = {size.features}": {"hstree": _hstree, name: build}
    for name, build in LIBRARIES.items()
    for size in WORD2VEC_SIZES
}
