"""Reference of :func:`hstree.ops.sample`: one draw after another."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.tree_mixture import all_log_probs, all_scores

_MASK = 2**32 - 1


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit numbers from a counter and a key."""
    a, b, c, d = counter
    low, high = key & _MASK, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, c = second >> 32 ^ b ^ low, first >> 32 ^ d ^ high
        b, d = second & _MASK, first & _MASK
        low, high = low + 0x9E3779B9 & _MASK, high + 0xBB67AE85 & _MASK
    return a, b, c, d


def uniform(seed: int, draw: int, step: int) -> float:
    """A number on the multiples of 2^-53 in [0, 1)."""
    low, high, _, _ = philox((draw & _MASK, draw >> 32, step, 0), seed)
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample_reference(
    *vectors: Any, seed: Tensor, n: int = 1, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Classes [N, n] and log-probabilities [N, n]; arguments of :func:`hstree.ops.sample`."""
    log_gate, _, node, edge, leaf_edge = vectors[6:11]
    scores = all_scores(*vectors, temperature=temperature)
    key = int(seed) % 2**64
    classes = log_gate.new_zeros((len(log_gate), n), dtype=leaf_edge.dtype).long()
    for row in range(len(log_gate)):
        for column in range(n if leaf_edge.shape[1] > 1 else 0):
            draw = row * n + column
            t, below, step = _choose(log_gate[row], uniform(key, draw, 0)), 0, 1
            while below >= 0:
                block, first, first_edge, width, _ = node[t, below].tolist()
                if block == 1:
                    members = ~edge[t, first_edge : first_edge + width, 1].long()
                    log_prob = scores.class_score[row, members] + scores.class_bias[t, members]
                elif block == 0:
                    z = scores.score[t, first, row]
                    log_prob = F.logsigmoid(torch.stack([z, -z]))
                else:
                    begin = scores.root_begin
                    log_prob = scores.score[t, begin : begin + width, row]
                child = _choose(log_prob, uniform(key, draw, step))
                below = int(edge[t, first_edge + child, 1])
                step += 1
            classes[row, column] = ~below
    return classes, all_log_probs(*vectors, temperature=temperature).gather(1, classes)


def _choose(log_prob: Tensor, u: float) -> int:
    """The first element at which the sum of the probabilities exceeds u times their total."""
    share = [math.exp(value) for value in (log_prob - log_prob.max()).tolist()]
    reached, chosen = 0.0, 0
    for place, value in enumerate(share):
        if value > 0:
            reached, chosen = reached + value, place
            if reached > u * sum(share):
                break
    return chosen
