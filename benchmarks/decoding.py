"""Queries of a trained head: all classes, the most probable ones, a sample; the best word of a
screened softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contest import Build, Contestant, Size, batch
from hstree.heads import Head, ScreenedSoftmax, Softmax, TreeEnsemble, build_head
from hstree.ops import screened_topk

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
    "binary, T = 1": {"n_trees": 1, "clusters": 2, "binary": True},
    "binary, T = 8, S = D / 2": {"n_trees": 8, "clusters": 2, "binary": True},
    "C = 256, binary below, T = 4": {"binary": True},
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


PRODUCT = "product, bfloat16: top 1"
BEST_WORD: dict[str, Callable[[ScreenedSoftmax, Tensor, Tensor], object]] = {
    PRODUCT: lambda head, hidden, query: F.linear(hidden, head.weight).topk(1),
    "product, bfloat16: argmax": lambda head, hidden, query: F.linear(hidden, head.weight).argmax(
        1
    ),
    "screened_topk": lambda head, hidden, query: screened_topk(
        query, head.preview, head.row_scale, head.offset, hidden, head.weight, None, head.exact, 1
    ),
    "ScreenedSoftmax: top 1": lambda head, hidden, _: head.predict(hidden),
}
SCREENED_SIZES = {
    f"V = {classes:,}, D = {features:,}, N = {rows}": Size(rows, features, classes, features)
    for classes, features in ((49_152, 576), (262_144, 640), (128_256, 4096))
    for rows in (1, 8)
}
CALLS = 20
"""Calls in a CUDA graph."""


def _best_word(size: Size, device: str, way: str) -> Contestant:
    """Random weights and previews: D / 2 features in 4 bits, 1,024 exact scores. Before each call
    on a GPU another tensor fills its cache."""
    linear = nn.Linear(size.features, size.classes, bias=False, dtype=torch.bfloat16, device=device)
    head = ScreenedSoftmax(
        size.features, size.classes, rank=size.features // 2, bits=4,
        exact=min(1024, size.classes), embedding=linear.requires_grad_(False),
    ).to(device).eval()  # fmt: skip
    for table, value in ((head.rotation, size.features**-0.5), (head.row_scale, 0.01)):
        table.normal_(std=value)
    head.preview.random_()
    hidden = torch.randn(size.rows, size.features, dtype=torch.bfloat16, device=device)
    query = torch.randn(size.rows, head.rank + 1, device=device)
    call = partial(BEST_WORD[way], head, hidden, query)
    if device == "cpu":
        return Contestant(call)
    fill = torch.empty(2**27, dtype=torch.uint8, device=device).zero_
    return Contestant(_replay(fill, call), calls=CALLS, idle=_replay(fill))


@torch.no_grad()
def _replay(*calls: Callable[[], object]) -> Callable[[], object]:
    """Replays the calls, one after another, ``CALLS`` times in a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in CALLS * calls:
            call()
    return graph.replay


SCREENED_CONTESTS: dict[str, dict[str, Build]] = {
    f"decoding, screened, {name}": {way: partial(_best_word, way=way) for way in BEST_WORD}
    for name in SCREENED_SIZES
}
BEST_OF_MANY = "decoding, forest"
BEST_SIZE = Size(1000, 256, 200_000, 256)


def _best(size: Size, device: str, name: str) -> Contestant:
    """The five most probable classes."""
    hidden = torch.randn(size.rows, size.features)
    if name == "linear":
        linear = nn.Linear(size.features, size.classes).requires_grad_(False)
        return Contestant(lambda: linear(hidden).topk(5))
    head = build_head(name, size.features, size.classes).eval().requires_grad_(False)
    return Contestant(lambda: head.topk(hidden, 5))


DECODING_CONTESTS: dict[str, dict[str, Build]] = {
    BEST_OF_MANY: {
        f"{name}: top 5": partial(_best, name=name) for name in ("linear", "softmax", "forest")
    }
} | {
    f"decoding, N = {rows}": {
        f"{head}: {question}": partial(_decode, head=head, question=question, rows=rows)
        for head in (SOFTMAX, *TREES)
        for question in QUESTIONS
    }
    for rows in sorted({*DECODED_ROWS["cpu"], *DECODED_ROWS["cuda"]})
}
