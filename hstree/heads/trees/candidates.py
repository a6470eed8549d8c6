"""Log-probabilities of candidates in three ways, and the choice of the cheapest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree._products import is_low
from hstree._sums import log_sum_exp
from hstree.heads.inference import mask_candidates
from hstree.heads.trees.blocks import Block, RootBlock, to_dtype_of
from hstree.heads.trees.search import candidate_classes
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import BINARY, LEAF, WIDE
from hstree.ops import default_chunk_rows, leaf_order
from hstree.ops._row_sparse import cast

Way: TypeAlias = Callable[[EnsembleState, Tensor, Tensor, float], Tensor]
"""Log-probabilities [N, K], from the head, hidden [N, D], candidates [N, K] of
:func:`hstree.ops.mark_targets` and the temperature."""

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


def choose_way(
    head: EnsembleState,
    hidden: Tensor,
    candidates: Tensor,
    differentiable: bool,
    temperature: float = 1.0,
) -> Way:
    """The way that is expected to take the least time, by the number of products. The root, which
    every way scores once for each row, does not count. Measured in
    benchmarks/results/candidates.md.
    """
    trees, layout = head.n_trees, head.layout
    rows = layout.n_rows
    every = trees * (rows[BINARY] + rows[WIDE]) + rows[LEAF]
    if not every or torch.compiler.is_exporting() or (head.sparse and differentiable):
        return composed_candidates
    n_rows, n_candidates = candidates.shape
    of_path = layout.max_depth + layout.mean_group
    of_row = OF_A_CANDIDATE * n_candidates * trees * of_path
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
        groups = count_groups(head, candidates)
        costs[looked_up_candidates] = OF_A_LOOKUP * groups * of_path
    return min(costs, key=lambda way: costs[way])


def count_groups(head: EnsembleState, candidates: Tensor) -> int:
    """Number of different nodes above the candidates of a row, summed over the rows and trees."""
    layout = head.layout
    leaf = layout.leaf_edge[:, candidates.flatten().clamp(min=0)].long()
    node = layout.edge[:, :, 0].gather(1, leaf).view(head.n_trees, *candidates.shape)
    node = node.sort(-1).values
    return node[..., :1].numel() + int((node[..., 1:] != node[..., :-1]).sum())


def looked_up_candidates(
    head: EnsembleState, hidden: Tensor, candidates: Tensor, temperature: float = 1.0
) -> Tensor:
    """By :func:`hstree.ops.candidate_log_prob`: on the CPU a node is scored once for all candidates
    of a row, one row after another. Not differentiable."""
    return candidate_classes(head, hidden, candidates, temperature)


def all_candidates(
    head: EnsembleState, hidden: Tensor, candidates: Tensor, temperature: float = 1.0
) -> Tensor:
    """From the log-probabilities of all classes; without gradients in chunks of rows. With
    gradients they take no more memory than what :func:`composed_candidates` keeps of as many
    candidates."""

    def chosen(hidden: Tensor, candidates: Tensor) -> Tensor:
        log_prob = head.mixed_log_prob(hidden, head.log_gate(hidden), temperature)
        return log_prob.gather(1, candidates.clamp(0, head.n_classes - 1))

    if head.records_gradients(hidden):
        log_prob = chosen(hidden, candidates)
    else:
        numbers = head.numbers_of_a_row(hidden.device)
        rows = max(default_chunk_rows(hidden, numbers), CHUNK_ROWS)
        chunks = zip(torch.split(hidden, rows), torch.split(candidates, rows), strict=True)
        parts = [chosen(*chunk) for chunk in chunks]
        log_prob = parts[0] if len(parts) == 1 else torch.cat(parts)
    return mask_candidates(log_prob, candidates, head.n_classes)


def composed_candidates(
    head: EnsembleState,
    hidden: Tensor,
    candidates: Tensor,
    temperature: float = 1.0,
    log_gate: Tensor | None = None,
) -> Tensor:
    """By the ops of the training step, on the rows of all candidates, which they sort by leaf; the
    root and the gate, ``log_gate`` [N, T] if given, are scored once for each row."""
    (n_rows, n_candidates), blocks, layout = candidates.shape, head.blocks(), head.layout
    log_gate = head.log_gate(hidden) if log_gate is None else log_gate
    log_prob = log_gate.unsqueeze(1)
    flat = candidates.flatten()
    below = [block for block in blocks if not isinstance(block, RootBlock)]
    if below:
        contexts, below = tempered_blocks(to_dtype_of(below, hidden), below, temperature)
        contexts = contexts.repeat_interleave(n_candidates, 0)
        order = leaf_order(flat, layout.leaf_position) if len(below) > 1 else None
        parts = [block.target_log_prob(contexts, flat, order) for block in below]
        of_trees = sum(parts[1:], parts[0])
        log_prob = log_prob + of_trees.view(n_rows, n_candidates, head.n_trees)
    for block in blocks:
        if isinstance(block, RootBlock):
            log_prob = log_prob + block.candidate_log_prob(hidden, candidates, temperature)
    log_prob = log_prob.expand(n_rows, n_candidates, head.n_trees)
    return mask_candidates(log_sum_exp(log_prob, 2), candidates, head.n_classes)


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
