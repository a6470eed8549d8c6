"""Scores: products of weights with float32 sums that are not rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._autocast import autocasts
from hstree._dtypes import sum_dtype

BLOCK_NUMBERS = 2**19
"""Numbers of a weight that are cast to float32 at a time, so that they stay in the cache."""


def is_low(tensor: Tensor) -> bool:
    """Whether it has 16 bits."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def is_cast(weight: Tensor) -> bool:
    """Whether products with it are computed in float32: on the CPU, where torch rounds products of
    16 bits to 16 bits and is slow in float16."""
    return is_low(weight) and weight.device.type == "cpu"


def blocks(weight: Tensor, dim: int = 0) -> Iterator[Tensor]:
    """Blocks of the weight along ``dim``, in float32 if products are computed in it."""
    if not is_cast(weight):
        yield weight
    elif torch.compiler.is_compiling():
        yield weight.float()
    else:
        of_row = max(1, weight.numel() // max(1, weight.shape[dim]))
        for block in torch.split(weight, max(1, BLOCK_NUMBERS // of_row), dim):
            yield block.float()


def linear_scores(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b [..., V] in the dtype of sums: x [..., D], W [V, D]. A GPU rounds products of 16
    bits to 16 bits; under autocast, autocast decides."""
    if autocasts(x.device) or not is_cast(weight):
        scores = F.linear(x, weight, bias)
        return scores.to(sum_dtype(scores.dtype))
    x = x.float()
    parts = [F.linear(x, block) for block in blocks(weight)]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return scores if bias is None else scores + bias


def batched_scores(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x + b [T, R, N] in the dtype of sums, for each of T trees: x [T, N, S], W [T, R, S]; as
    :func:`linear_scores`."""

    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or x.shape[1] > 2:  # exported programs take any number
            return torch.baddbmm(bias.unsqueeze(2), weight, x.mT)
        # A product with one or two contexts is faster with them as its rows.
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT).mT

    x, bias = x.to(weight.dtype), bias.to(weight.dtype)
    if autocasts(x.device) or not is_cast(weight):
        scores = product(x, weight, bias)
        return scores.to(sum_dtype(scores.dtype))
    x, parts, begin = x.float(), [], 0
    for block in blocks(weight, 1):
        end = begin + block.shape[1]
        parts.append(product(x, block, bias[:, begin:end].float()))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
