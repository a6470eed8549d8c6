"""Queries of a trained head: all classes, the most probable ones, a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contest import Build, Contestant, Size, batch
from hstree.heads import Head, Softmax, TreeEnsemble
from hstree.trees import build_ensemble

QUESTIONS: dict[str, Callable[[Head, Tensor], object]] = {
    "all classes": lambda head, hidden: head.log_prob(hidden),
    "top 10": lambda head, hidden: head.topk(hidden, 10),
    "top 1": lambda head, hidden: head.predict(hidden),
    "a draw": lambda head, hidden: head.sample(hidden),
}
SOFTMAX = "softmax"
TREES = {
    "binary, T = 1": (1, 1, 1),
    "binary, T = 8, S = D / 2": (8, 1, 1),
    "C = 256, T = 4": (4, 256, 1),
    "C = 256, G = 32, T = 4": (4, 256, 32),
}
"""T, C and G."""
DECODED_ROWS = {"cpu": (1, 32), "cuda": (1, 8, 4096)}
"""Numbers of rows by device."""


def _head(name: str, size: Size) -> tuple[Head, Tensor]:
    """Huffman trees initialized to Zipf's law, with vectors that change the scores by about one."""
    hidden, _, frequencies = batch(size.rows, size.features, size.classes)
    head: Head = Softmax(size.features, size.classes)
    if name == SOFTMAX:
        mass = torch.from_numpy(np.log(frequencies)).float()
        head.load_state_dict(head.state_dict() | {"bias": mass})
    else:
        n_trees, root, leaf = TREES[name]
        root = min(root, size.classes // 4)
        trees = build_ensemble("huffman", size.classes, n_trees, frequencies, root=root, leaf=leaf)
        subset = size.features // 2 if n_trees == 8 else None
        head = TreeEnsemble(
            size.features, size.classes, trees, frequencies=frequencies, subset_size=subset
        )
    for parameter in head.parameters():
        if parameter.shape[-1] > 1 and parameter.dim() == (2 if name == SOFTMAX else 3):
            features = parameter.shape[-1]
            nn.init.normal_(parameter, std=features**-0.5)
    return head.requires_grad_(False), hidden.detach()


def _decode(size: Size, device: str, head: str, question: str, rows: int) -> Contestant:
    built, hidden = _head(head, replace(size, rows=rows))
    return Contestant(partial(QUESTIONS[question], built.to(device), hidden.to(device)))


DECODING_CONTESTS: dict[str, dict[str, Build]] = {
    f"decoding, N = {rows}": {
        f"{head}: {question}": partial(_decode, head=head, question=question, rows=rows)
        for head in (SOFTMAX, *TREES)
        for question in QUESTIONS
    }
    for rows in sorted({*DECODED_ROWS["cpu"], *DECODED_ROWS["cuda"]})
}
