"""The ops that walk the trees from the root: the most probable classes, draws, and the
log-probabilities of candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree._transforms import is_transformed
from hstree.heads.losses import split_rows
from hstree.heads.trees.blocks import RootBlock, to_dtype_of
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import BINARY, KINDS, LEAF, ROOT, WIDE
from hstree.ops import candidate_log_prob, sample, tree_topk

GAIN_OF_A_BATCH = 5
"""All classes of a batch cost at most this many times less than those of its rows one by one."""

SEARCHED = 1 / 3
"""Share of the products of all classes after which a search is given up. A flat row then takes
about 1.5 times as long as all classes."""


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
    return scored * _gain(hidden) < head.n_classes


def _gain(hidden: Tensor) -> int:
    compiled = torch.compiler.is_compiling()  # one graph for all numbers of rows
    return GAIN_OF_A_BATCH if compiled else max(1, min(hidden.shape[0], GAIN_OF_A_BATCH))


def most_scored(head: EnsembleState, hidden: Tensor) -> int:
    """Number of vectors that a search may score for a row: :data:`SEARCHED` of those of all
    classes, and less in a batch, where these cost less."""
    rows = head.layout.n_rows
    every = head.n_trees * (rows[BINARY] + rows[WIDE]) + rows[LEAF]
    return int(SEARCHED * every / _gain(hidden))


def search_classes(
    head: EnsembleState, hidden: Tensor, k: int, *, limited: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and classes [N, k] from :func:`hstree.ops.tree_topk`: hidden [N, D].

    With ``limited``, rows whose distribution is so flat that the search scores more than
    :func:`most_scored` vectors are ranked from all classes, unless values must not be read: in
    compiled programs and under torch.func.
    """
    arguments = _arguments(head, hidden)
    if not limited or torch.compiler.is_compiling() or is_transformed():
        return tree_topk(**arguments, k=k)
    values, classes = tree_topk(**arguments, k=k, most_scored=most_scored(head, hidden))
    given_up = classes[:, 0] < 0
    if bool(given_up.any()):
        of_all, ranked = rank_classes(head, hidden[given_up], k)
        values[given_up], classes[given_up] = of_all.to(values.dtype), ranked
    return values, classes


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
        root_log_prob = root.log_prob(hidden, temperature)
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
