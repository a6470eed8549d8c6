"""The log-probabilities and gradients of :mod:`hstree.ops.mixture_log_prob`, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._numerics import block_rows, blocks, is_cast, sum_dtype, without_ignored
from hstree.ops._chunked_loss import (
    add_offset,
    aligned,
    gradient_dtype,
    group_chunks,
    keeps_low,
    rounded_weight,
    write_product,
)
from hstree.ops._recycled import recycled


def tile_rows(components: int) -> int:
    """Number of rows whose components make a tile of a matrix product on a GPU."""
    return -(-128 // components)


class Problem(NamedTuple):
    """The common arguments of the op and its backward op, in order. The first five have
    gradients."""

    latent: Tensor  # [N, K, D]
    log_prior: Tensor | None  # [N, K]
    weight: Tensor  # [V, D], of the dtype of latent or in float32
    bias: Tensor | None  # [V]
    table: Tensor | None  # [., 2] or [., 4]
    target: Tensor  # [N], -1 for an ignored row
    offset: Tensor | None  # [V], added to the logits of classes other than the target
    c: float
    k: float
    radius: float
    chunk_rows: int

    def rows(self, chunk: slice) -> Problem:
        """The problem restricted to a chunk of rows."""
        log_prior = None if self.log_prior is None else self.log_prior[chunk]
        return self._replace(
            latent=self.latent[chunk], log_prior=log_prior, target=self.target[chunk]
        )

    def contexts(self) -> Tensor:
        """latent [N K, D] for the gradient of the weight."""
        return without_ignored(self.latent, self.target == -1).flatten(0, 1)


class Gradients(NamedTuple):
    """The gradients of the first five fields of a :class:`Problem`."""

    latent: Tensor
    log_prior: Tensor
    weight: Tensor
    bias: Tensor
    table: Tensor


def empty_gradients(problem: Problem, wanted: Sequence[bool]) -> Gradients:
    """Uninitialized gradients; unwanted ones have no elements."""
    latent, _, weight, _, table, *_ = problem
    table_shape = () if table is None else table.shape
    shapes = (latent.shape, latent.shape[:2], weight.shape, weight.shape[:1], table_shape)
    dtypes = [sum_dtype(latent.dtype)] * len(shapes)
    dtypes[0], dtypes[2] = gradient_dtype(latent), gradient_dtype(weight)
    return Gradients(
        *(
            latent.new_empty(shape if want else (0,), dtype=dtype)
            for want, shape, dtype in zip(wanted, shapes, dtypes, strict=True)
        )
    )


def _logits(like: Tensor, rows: int, classes: int) -> Tensor:
    """Uninitialized logits [rows, classes]. On the CPU every row begins on a cache line: products
    into other rows take up to 1.5 times as long."""
    line = 64 // like.element_size() if like.device.type == "cpu" else 1
    return recycled(like, rows, -(-classes // line) * line)[:, :classes]


def _write_logits(logits: Tensor, latent: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write the logits [R, V] of latent [R, D]."""
    if is_cast(weight):
        latent = latent.to(logits.dtype)
    begin = 0
    for block in blocks(weight):
        part = slice(begin, begin + len(block))
        of_part = None if bias is None else bias[part]
        write_product(logits[:, part], latent, block.t(), of_part)
        begin = part.stop


def _write_gradients(
    grad_logits: Tensor,
    z: Tensor,
    weight: Tensor,
    grad_z: Tensor | None,
    grad_weight: Tensor | None,
    is_first: bool,
) -> None:
    """Write the gradient of z [R, D], and write that of the weight in the first chunk or add it:
    grad_logits [R, V], in the dtype of sums."""
    dtype, size = weight.dtype, len(weight)
    if is_cast(weight):
        # torch is slow in float16. Products of blocks stay in the cache.
        dtype = torch.float32 if dtype == torch.float16 else dtype
        size = block_rows(weight)
    z, begin = z.to(dtype), 0
    for block in torch.split(weight, size):
        part = slice(begin, begin + len(block))
        grad = grad_logits[:, part].to(dtype)
        if grad_z is not None:
            write_product(grad_z, grad, block.to(dtype), grad_z if begin else None)
        if grad_weight is not None:
            out = grad_weight[part]
            write_product(out, grad.t(), z, None if is_first else out)
        begin = part.stop


def _log_prob(
    chunk: Problem,
    logits: Tensor,
    upstream: Tensor | None,
    sum_table: bool,
    low: Tensor | None,
    *biases: Tensor | None,
) -> tuple[Tensor, Any, Any]:
    """log_prob [N] from logits [N K, V]. If its gradient ``upstream`` [N] is given, the gradient of
    the logits is rounded to ``low``, or overwrites them, and the gradients of log_prior and of the
    table are returned too; ``biases`` [V]: for the op that does both."""
    components = chunk.latent.shape[1]
    target = chunk.target if components == 1 else chunk.target.repeat_interleave(components)
    ops, function = torch.ops.hstree, (chunk.c, chunk.k, chunk.table, chunk.radius)
    if chunk.log_prior is None and upstream is not None:
        log_prob, grad_table = ops.target_log_softmax_gradient_(
            logits, upstream, target, *function, sum_table, low, *biases
        )
        return log_prob, None, grad_table
    log_prob, normalizer = ops.target_log_softmax(logits, target, *function)
    if chunk.log_prior is None:
        return log_prob, None, None
    joint = chunk.log_prior + log_prob.view(-1, components)
    log_prob = joint.logsumexp(1)
    never = (chunk.target == -1) | (log_prob == -torch.inf)  # no gradient
    log_prob = log_prob.masked_fill(chunk.target == -1, 0)
    if upstream is None:
        return log_prob, None, None
    responsibility = upstream[:, None] * joint.softmax(1)
    responsibility = responsibility.masked_fill(never[:, None], 0)
    grad_table = ops.target_log_softmax_backward_(
        logits, responsibility.reshape(-1), target, normalizer, *function, sum_table, low
    )
    return log_prob, responsibility, grad_table


def run(problem: Problem, wanted: Sequence[bool], upstream: Tensor) -> tuple[Tensor, Gradients]:
    """log_prob [N], and the wanted gradients for ``upstream`` [N], the gradient of log_prob."""
    latent, _, weight, bias, *_ = problem
    rows, components, features = latent.shape
    classes, has_gradient = len(weight), any(wanted)
    log_prob = latent.new_empty(rows, dtype=sum_dtype(latent.dtype))
    chunks = -(-rows // problem.chunk_rows)
    size = max(1, -(-rows // max(1, chunks)))  # of equal chunks
    if latent.is_cuda:
        tile = tile_rows(components)
        size = max(1, min(rows, problem.chunk_rows, -(-size // tile) * tile))
    group, dtype = size, gradient_dtype(weight)
    if wanted[2] and keeps_low(latent):
        group = min(size * group_chunks(weight, size * components), max(rows, 1))
    weight = rounded_weight(weight, latent)
    missing = aligned(classes) - classes if keeps_low(weight) else 0
    if missing:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    buffer = _logits(log_prob, size * components, len(weight))
    # 16-bit gradients of the logits of a group of chunks: those of one in the memory of its logits.
    low = None
    if keeps_low(weight) and has_gradient:
        low = buffer.view(weight.dtype)[:, : len(weight)]
        if group > size:
            low = weight.new_empty(group * components, len(weight))
    # What the kernel for both the loss and the gradients adds to logits, and to those of targets.
    of_kernel: tuple[Tensor | None, ...] = ()
    tabled = problem.offset is not None and problem.table is not None  # which no kernel takes
    if low is not None and weight.is_cuda and problem.log_prior is None and not tabled:
        bias, of_kernel = None, (problem.bias, None)
        if problem.offset is not None:
            own = torch.zeros_like(problem.offset) if problem.bias is None else problem.bias
            of_kernel = own + problem.offset, own
    # That of the weight is large: it takes over the memory of the step before.
    gradients = empty_gradients(problem, [want and i != 2 for i, want in enumerate(wanted)])
    grad_weight = None
    if wanted[2]:
        sums = log_prob.dtype if group < rows else dtype
        grad_weight = recycled(log_prob, *weight.shape, dtype=sums)
        if not rows:
            grad_weight.zero_()
    grad_latent, grad_log_prior, _, grad_bias, grad_table = (
        gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
    )
    if grad_bias is not None:
        grad_bias.zero_()
    table_sum = None if grad_table is None else torch.zeros_like(grad_table, dtype=torch.float64)
    ones = log_prob.new_ones(size * components)
    for begin in range(0, rows, size):
        chunk = slice(begin, begin + size)
        part = problem.rows(chunk)
        z = part.latent.reshape(-1, features)
        padded = buffer[: len(z)]
        logits = padded[:, :classes]
        _write_logits(padded, z, weight, bias)
        if problem.offset is not None and not of_kernel:
            add_offset(logits, problem.offset, part.target.repeat_interleave(components), 1)
        first = begin % group * components
        kept = None if low is None else low[first : first + len(z)]
        log_prob[chunk], by_log_prior, by_table = _log_prob(
            part,
            logits,
            upstream[chunk] if has_gradient else None,
            table_sum is not None,
            None if kept is None else kept[:, :classes],
            *of_kernel,
        )
        if kept is not None and missing:
            kept[:, classes:] = 0
        if grad_log_prior is not None:
            grad_log_prior[chunk] = by_log_prior
        if table_sum is not None:
            table_sum += by_table
        grad_z = None if grad_latent is None else grad_latent[chunk].view(-1, features)
        if low is None or kept is None:
            if grad_bias is not None:
                grad_bias.addmv_(logits.t(), ones[: len(z)])
            if grad_latent is not None or grad_weight is not None:
                _write_gradients(logits, part.contexts(), weight, grad_z, grad_weight, begin == 0)
            continue
        if grad_z is not None:  # in float32 first: sums over classes are added up in parts
            of_z = log_prob.new_empty(grad_z.shape)
            write_product(of_z, kept, weight)
            grad_z.copy_(of_z)
        end = begin + len(part.target)
        if end % group and end < rows:
            continue
        begin = begin // group * group
        of_group = low[: (end - begin) * components]
        if grad_bias is not None:
            grad_bias += of_group[:, :classes].sum(0, dtype=grad_bias.dtype)
        if grad_weight is not None:
            z = problem.rows(slice(begin, end)).contexts()
            write_product(grad_weight, of_group.t(), z, grad_weight if begin else None)
    if grad_table is not None and table_sum is not None:
        grad_table.copy_(table_sum)
    if grad_weight is not None:
        gradients = gradients._replace(weight=grad_weight[:classes].to(dtype))
    return log_prob, gradients
