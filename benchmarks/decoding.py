"""Queries of a trained head: all classes, the most probable ones, a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contest import Build, Contestant, Size, batch
from hstree.heads import Head, Softmax, TreeEnsemble

QUESTIONS: dict[str, Callable[[Head, Tensor], object]] = {
    "all classes": lambda head, hidden: head.log_prob(hidden),
    "top 10": lambda head, hidden: head.topk(hidden, 10),
    "top 1": lambda head, hidden: head.predict(hidden),
    "a draw": lambda head, hidden: head.sample(hidden),
}
SOFTMAX, DEFAULT_TREES = "softmax", "C = 256, T = 4 (default)"
TREES: dict[str, dict[str, Any]] = {
    DEFAULT_TREES: {},
    "C = 256, T = 1": {"n_trees": 1},
    "binary, T = 1": {"n_trees": 1, "root": 1, "leaf": 1},
    "binary, T = 8, S = D / 2": {"n_trees": 8, "root": 1, "leaf": 1},
    "C = 256, binary below, T = 4": {"leaf": 1},
}
"""Options of :meth:`hstree.TreeEnsemble.from_counts`."""
DECODED_ROWS = {"cpu": (1, 32), "cuda": (1, 8, 4096)}
"""Numbers of rows by device."""


def decoding_head(name: str, size: Size) -> tuple[Head, Tensor]:
    """Huffman trees initialized to Zipf's law, with vectors that change the scores by about one."""
    hidden, _, frequencies = batch(size.rows, size.features, size.classes)
    head: Head = Softmax(size.features, size.classes)
    if name == SOFTMAX:
        mass = torch.from_numpy(np.log(frequencies)).float()
        head.load_state_dict(head.state_dict() | {"bias": mass})
    else:
        subset = size.features // 2 if TREES[name].get("n_trees") == 8 else None
        head = TreeEnsemble.from_counts(
            size.features, frequencies, subset_size=subset, **TREES[name]
        )
    for parameter_name, parameter in head.named_parameters():
        if parameter_name.endswith(("weight", "embedding")):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return head.requires_grad_(False), hidden.detach()


def _decode(size: Size, device: str, head: str, question: str, rows: int) -> Contestant:
    built, hidden = decoding_head(head, replace(size, rows=rows))
    return Contestant(partial(QUESTIONS[question], built.to(device), hidden.to(device)))


DECODING_CONTESTS: dict[str, dict[str, Build]] = {
    f"decoding, N = {rows}": {
        f"{head}: {question}": partial(_decode, head=head, question=question, rows=rows)
        for head in (SOFTMAX, *TREES)
        for question in QUESTIONS
    }
    for rows in sorted({*DECODED_ROWS["cpu"], *DECODED_ROWS["cuda"]})
}
