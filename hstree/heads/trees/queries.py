"""What the trees answer besides the training loss: the probabilities of all classes, the most
probable classes, draws, and the log-probabilities of candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hstree._numerics import is_low, is_transformed, log_sum_exp, no_autocast, sum_dtype
from hstree.heads.rows import mask_candidates
from hstree.heads.trees.layout import BINARY, KINDS, LEAF, WIDE, Layout
from hstree.heads.trees.nodes import Block, LeafBlock, RootBlock, to_dtype_of, tree_features
from hstree.ops import (
    candidate_log_prob,
    default_chunk_rows,
    leaf_order,
    leaf_tree_topk,
    sample,
    tree_log_softmax,
    tree_topk,
)
from hstree.ops._row_sparse import cast

OF_A_SEARCH = 10
"""Time of a product of a search, in products of all classes of a large batch: 6 to 13 on a core of
an AMD EPYC at V = 10,000 and 33,278."""

WORTH = 0.5
"""Largest share of the time of all classes that a search may be expected to take."""

GIVEN_UP = 3
"""A row is given up when it has scored so many times the expected number of vectors: with random
weights, rows need 0.4 to 2.4 times as many."""

LEAST = 0.2
"""Share of the time of all classes that a row may take in any case."""

PILOT = 16
"""A search of N rows begins with N / 16 of them, and ends there unless it finds three quarters."""

FEW = 8
"""So many candidates in all are looked up without counting what they share."""

FEW_ON_CUDA = 256
"""So many candidates in all are looked up on CUDA, where nothing is shared. Not measured."""

READING = 10
"""Reading the vectors of all classes takes as long as the products of this many rows with them."""

CHUNK_ROWS = 128
"""Smallest chunk of rows for which all classes are computed: each chunk reads all vectors."""

OF_A_CANDIDATE = 1.5
"""Time of a product of :func:`composed_candidates`, in products of all classes."""

OF_A_LOOKUP = 6
"""Time of a product of :func:`looked_up_candidates`, in products of all classes."""


def records_gradients(*tensors: Tensor) -> bool:
    """Whether what is computed from the tensors is differentiated."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return recorded or is_transformed()


def all_log_prob(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities [N, V] of all classes: hidden [N, D], log_gate [N, T] the logarithms of the
    weights of the trees; the scores of all nodes are divided by the temperature."""
    return tree_log_softmax(**_scored(blocks, layout, hidden, log_gate, temperature))


def _scored(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """The arguments of :func:`hstree.ops.tree_log_softmax`."""
    dtype = sum_dtype(hidden.dtype)
    hidden = to_dtype_of(blocks, hidden)
    x = tree_features(hidden, layout.feature_index, layout.n_trees)

    def divided(scores: Tensor) -> Tensor:
        scores = scores.to(dtype)
        return scores if temperature == 1.0 else scores / temperature

    scores = [divided(block.scores(x)) for block in blocks if not isinstance(block, LeafBlock)]
    if not scores:  # a single class, or leaf groups alone
        # No rows, but still with the graph of hidden.
        scores = [hidden.t()[:0].to(dtype).expand(layout.n_trees, -1, -1)]
    leaves = [block for block in blocks if isinstance(block, LeafBlock)]
    return {
        "score": scores[0] if len(scores) == 1 else torch.cat(scores, 1),
        "log_gate": log_gate,
        "node": layout.node,
        "edge": layout.edge,
        "n_classes": layout.n_classes,
        "wide_begin": layout.n_rows[BINARY],
        "root_begin": layout.n_rows[BINARY] + layout.n_rows[WIDE],
        "leaf_score": divided(leaves[0].class_scores(hidden)) if leaves else None,
        "leaf_bias": divided(leaves[0].bias) if leaves else None,
    }


def _chunks(layout: Layout, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of rows whose classes are all computed."""
    numbers = layout.numbers_of_a_row(tensors[0].device)
    rows = max(default_chunk_rows(tensors[0], numbers), CHUNK_ROWS)
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def pays_to_search(layout: Layout, hidden: Tensor, k: int) -> bool:
    """Whether :func:`search_classes` is expected to take at most :data:`WORTH` of the time of the
    log-probabilities of all classes."""
    # torch.compile: one graph for all numbers of rows.
    n_rows = None if torch.compiler.is_compiling() else len(hidden)
    return _expected(layout, k) <= WORTH * _affordable(layout, n_rows)


def _expected(layout: Layout, k: int) -> float:
    """Number of vectors below the roots that the search of a row scores: for each class wanted, the
    binary nodes of a path and a group of classes, in every tree."""
    return k * layout.n_trees * (layout.max_depth + layout.mean_group)


def _affordable(layout: Layout, n_rows: int | None) -> float:
    """Number of vectors that the search of one of N rows scores in the time of all classes; None:
    of many rows."""
    reading = 0.0 if n_rows is None else READING / max(1, n_rows)
    return (1 + reading) * _vectors_of_all(layout) / OF_A_SEARCH


def _vectors_of_all(layout: Layout) -> int:
    """Number of vectors below the roots that all classes of a row score."""
    rows = layout.n_rows
    return layout.n_trees * (rows[BINARY] + rows[WIDE]) + rows[LEAF]


def most_scored(layout: Layout, n_rows: int, k: int) -> int:
    """Number of vectors that the search of one of N rows may score: :data:`GIVEN_UP` times as many
    as expected, but at least :data:`LEAST` of the time of all classes, and at most that time."""
    affordable = _affordable(layout, n_rows)
    return int(min(max(GIVEN_UP * _expected(layout, k), LEAST * affordable), affordable))


def search_classes(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    k: int,
    most_scored: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and classes [N, k] from :func:`hstree.ops.tree_topk`: hidden [N, D]."""
    return tree_topk(**_walk(blocks, layout, hidden, log_gate), k=k, most_scored=most_scored)


def ranked_classes(
    blocks: Sequence[Block], layout: Layout, hidden: Tensor, log_gate: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and classes [N, k] from :func:`hstree.ops.leaf_tree_topk`, of trees with
    leaf groups: hidden [N, D], in chunks of rows. A few rows may have classes of -1."""
    parts = [
        leaf_tree_topk(**_scored(blocks, layout, x, gate), k=k)
        for x, gate in _chunks(layout, hidden, log_gate)
    ]
    values, classes = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(classes)


def found_classes(
    blocks: Sequence[Block], layout: Layout, hidden: Tensor, log_gate: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and classes [N, k] of the rows whose search is short: hidden [N, D]. The
    other rows have classes of -1.

    A search scores few vectors if few classes share most of the probability, but each takes longer
    than in a product of all rows with all vectors. So a row is given up after
    :func:`most_scored`, and the batch after few rows if most of them are; if few are, they get the
    time of all classes.
    """
    n_rows = len(hidden)
    values = log_gate.new_full((n_rows, k), torch.nan, dtype=sum_dtype(hidden.dtype))
    classes = torch.full_like(values, -1, dtype=torch.int64)

    def search(rows: slice | Tensor, most: int) -> None:
        arguments = blocks, layout, hidden[rows], log_gate[rows], k, most
        values[rows], classes[rows] = search_classes(*arguments)

    most, pilot = most_scored(layout, n_rows, k), -(-n_rows // PILOT)
    search(slice(0, pilot), most)
    if pilot < n_rows and 4 * int((classes[:pilot, 0] < 0).sum()) <= pilot:
        search(slice(pilot, n_rows), most)
        rest = (classes[:, 0] < 0).nonzero().squeeze(1)
        if 0 < len(rest) <= n_rows // 4:  # reading all vectors for few rows takes longer
            search(rest, int(_affordable(layout, len(rest))))
    return values, classes


def sample_classes(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    n: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Classes and log-probabilities [N, n] from :func:`hstree.ops.sample`: hidden [N, D]."""
    # The op reads it on the device: a number for the host would wait for a GPU.
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=hidden.device)
    arguments = _walk(blocks, layout, hidden, log_gate, temperature)
    return sample(**arguments, seed=seed, n=n, temperature=temperature)


@torch.no_grad()
def _walk(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """The arguments of the ops that walk the trees from the root, without gradients and
    tangents."""
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
        "log_gate": log_gate.to(sum_dtype(x.dtype)),
        "feature_index": layout.feature_index,
        "node": layout.node,
        "edge": layout.edge,
        "leaf_edge": layout.leaf_edge,
    }
    return {name: None if value is None else value.detach() for name, value in arguments.items()}


Way: TypeAlias = Callable[[Sequence[Block], Layout, Tensor, Tensor, Tensor, float], Tensor]
"""Log-probabilities [N, K] of candidates from the blocks, the layout, hidden [N, D], log_gate
[N, T], candidates [N, K] of :func:`hstree.ops.mark_targets` and the temperature."""


def choose_way(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    candidates: Tensor,
    temperature: float = 1.0,
) -> Way:
    """The way that is expected to take the least time, by the number of products. The root, which
    every way scores once for each row, does not count. Measured in
    benchmarks/results/candidates.md.
    """
    every = _vectors_of_all(layout)
    differentiable = _differentiable(blocks, hidden, log_gate)
    row_sparse = differentiable and any(block.sparse for block in blocks)
    # Only the ops of the training step have row-sparse gradients; an exported program has one way
    # for any number of rows.
    if not every or torch.compiler.is_exporting() or row_sparse:
        return composed_candidates
    n_rows, n_candidates = candidates.shape
    of_path = layout.max_depth + layout.mean_group
    of_row = OF_A_CANDIDATE * n_candidates * layout.n_trees * of_path
    if torch.compiler.is_compiling():  # one graph for all numbers of rows
        return composed_candidates if of_row <= every else all_candidates
    device = hidden.device.type
    few = {"cpu": FEW, "cuda": FEW_ON_CUDA}.get(device, -1)
    if not differentiable and candidates.numel() <= few:
        return looked_up_candidates
    costs: dict[Way, float] = {
        composed_candidates: n_rows * of_row,
        all_candidates: (n_rows + READING) * every,
    }
    if temperature != 1.0 and is_low(hidden):
        costs[composed_candidates] += READING * every  # casts all vectors
    if not differentiable and device == "cpu":
        groups = count_groups(layout, candidates)
        costs[looked_up_candidates] = OF_A_LOOKUP * groups * of_path
    return min(costs, key=lambda way: costs[way])


def _differentiable(blocks: Sequence[Block], hidden: Tensor, log_gate: Tensor) -> bool:
    of_blocks = [tensor for block in blocks for tensor in (block.weight, block.bias)]
    return records_gradients(hidden, log_gate, *of_blocks)


def count_groups(layout: Layout, candidates: Tensor) -> int:
    """Number of different nodes above the candidates of a row, summed over the rows and trees."""
    leaf = layout.leaf_edge[:, candidates.flatten().clamp(min=0)].long()
    node = layout.edge[:, :, 0].gather(1, leaf).view(layout.n_trees, *candidates.shape)
    node = node.sort(-1).values
    # Equal nodes are neighbors: one at the start of each row, and one more at each change.
    return node[..., :1].numel() + int((node[..., 1:] != node[..., :-1]).sum())


def looked_up_candidates(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    candidates: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """By :func:`hstree.ops.candidate_log_prob`: on the CPU a node is scored once for all candidates
    of a row, one row after another. Not differentiable."""
    arguments = _walk(blocks, layout, hidden, log_gate, temperature)
    return candidate_log_prob(**arguments, candidates=candidates, temperature=temperature)


def all_candidates(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    candidates: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """From the log-probabilities of all classes; without gradients in chunks of rows. With
    gradients they take no more memory than what :func:`composed_candidates` keeps of as many
    candidates."""

    def chosen(hidden: Tensor, log_gate: Tensor, candidates: Tensor) -> Tensor:
        log_prob = all_log_prob(blocks, layout, hidden, log_gate, temperature)
        return log_prob.gather(1, candidates.clamp(0, layout.n_classes - 1))

    if _differentiable(blocks, hidden, log_gate):
        log_prob = chosen(hidden, log_gate, candidates)
    else:
        parts = [chosen(*chunk) for chunk in _chunks(layout, hidden, log_gate, candidates)]
        log_prob = parts[0] if len(parts) == 1 else torch.cat(parts)
    return mask_candidates(log_prob, candidates, layout.n_classes)


def composed_candidates(
    blocks: Sequence[Block],
    layout: Layout,
    hidden: Tensor,
    log_gate: Tensor,
    candidates: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """By the ops of the training step, on the rows of all candidates, which they sort by leaf; the
    root is scored once for each row."""
    n_rows, n_candidates = candidates.shape
    log_prob = log_gate.unsqueeze(1)
    flat = candidates.flatten()
    below = [block for block in blocks if not isinstance(block, RootBlock)]
    if below:
        contexts, below = tempered_blocks(to_dtype_of(below, hidden), below, temperature)
        contexts = contexts.repeat_interleave(n_candidates, 0)
        order = leaf_order(flat, layout.leaf_position) if len(below) > 1 else None
        # The quotients stay in float32 under autocast too.
        exact: AbstractContextManager[object] = (
            nullcontext() if temperature == 1.0 else no_autocast(hidden.device)
        )
        with exact:
            parts = [block.target_log_prob(contexts, flat, order) for block in below]
        of_trees = sum(parts[1:], parts[0])
        log_prob = log_prob + of_trees.view(n_rows, n_candidates, layout.n_trees)
    for block in blocks:
        if isinstance(block, RootBlock):
            log_prob = log_prob + block.candidate_log_prob(hidden, candidates, temperature)
    # Trees of a single class have no blocks: what is left is the gate, without a dimension of
    # candidates.
    log_prob = log_prob.expand(n_rows, n_candidates, layout.n_trees)
    return mask_candidates(log_sum_exp(log_prob, 2), candidates, layout.n_classes)


def tempered_blocks(
    hidden: Tensor, blocks: list[Block], temperature: float
) -> tuple[Tensor, list[Block]]:
    """Contexts and blocks with all scores divided by the temperature: the scores are linear. In
    float32 instead of 16 bits, in which the quotients would be rounded or infinite."""
    if temperature == 1.0:
        return hidden, blocks
    dtype = sum_dtype(hidden.dtype)
    blocks = [
        replace(block, weight=cast(block.weight, dtype), bias=cast(block.bias, dtype) / temperature)
        for block in blocks
    ]
    return hidden.to(dtype) / temperature, blocks
