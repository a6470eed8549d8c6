"""The ops that walk the trees from the root: the most probable classes, draws, and the
log-probabilities of candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree.heads.losses import split_rows
from hstree.heads.trees.blocks import RootBlock, to_dtype_of
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import KINDS, ROOT
from hstree.ops import candidate_log_prob, sample, tree_topk

GAIN_OF_A_BATCH = 5
"""All classes of a batch cost at most this many times less than those of its rows one by one."""


def pays_to_search(head: EnsembleState, hidden: Tensor, k: int) -> bool:
    """Whether :func:`search_classes` is expected to take less time than :func:`rank_classes`.

    A search scores the root, and for each class wanted the binary nodes of a path and about one
    group of classes, in every tree, one row of the batch after another. Measured in
    benchmarks/results/topk.md.
    """
    if hidden.device.type != "cpu":
        return False
    layout = head.layout
    of_class = layout.max_depth + layout.mean_group
    scored = head.n_trees * (layout.n_rows[ROOT] + k * of_class)
    compiled = torch.compiler.is_compiling()  # one graph for all numbers of rows
    gain = GAIN_OF_A_BATCH if compiled else min(hidden.shape[0], GAIN_OF_A_BATCH)
    return scored * gain < head.n_classes


def search_classes(head: EnsembleState, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and classes [N, k] from :func:`hstree.ops.tree_topk`: hidden [N, D]."""
    return tree_topk(**_arguments(head, hidden), k=k)


def rank_classes(head: EnsembleState, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same from the log-probabilities of all classes, in chunks of rows."""
    chunks = split_rows(head.numbers_of_a_row(hidden.device), hidden)
    parts = [head.class_log_prob(rows).topk(k) for (rows,) in chunks]
    values, classes = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(classes)


def sample_classes(
    head: EnsembleState,
    hidden: Tensor,
    n: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Classes and log-probabilities [N, n] from :func:`hstree.ops.sample`: hidden [N, D]."""
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=hidden.device)
    arguments = _arguments(head, hidden, temperature)
    return sample(**arguments, seed=seed, n=n, temperature=temperature)


def candidate_classes(
    head: EnsembleState, hidden: Tensor, candidates: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities [N, K] from :func:`hstree.ops.candidate_log_prob`: hidden [N, D],
    candidates [N, K]."""
    arguments = _arguments(head, hidden, temperature)
    return candidate_log_prob(**arguments, candidates=candidates, temperature=temperature)


@torch.no_grad()
def _arguments(head: EnsembleState, hidden: Tensor, temperature: float = 1.0) -> dict[str, Any]:
    """The arguments that the three ops share, without gradients and tangents."""
    blocks, layout = head.blocks(), head.layout
    x = to_dtype_of(blocks, hidden)
    of_kind = {block.kind: block for block in blocks}
    binary, wide, leaf, root = (of_kind.get(kind) for kind in KINDS)
    root_log_prob = None
    if isinstance(root, RootBlock):
        logits = root.logits(hidden).to(sum_dtype(x.dtype))
        if temperature != 1.0:
            logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        root_log_prob = logits.log_softmax(-1)
    vectors = {
        f"{name}{of}": getattr(block, of) if block else None
        for name, block in (("", binary), ("wide_", wide), ("leaf_", leaf))
        for of in ("weight", "bias")
    }
    arguments = vectors | {
        "hidden": x,
        "root_log_prob": root_log_prob,
        "log_gate": head.log_gate(hidden).to(sum_dtype(x.dtype)),
        "feature_index": head.feature_index,
        "node": layout.node,
        "edge": layout.edge,
        "leaf_edge": layout.leaf_edge,
    }
    return {name: None if value is None else value.detach() for name, value in arguments.items()}
