"""What all numerical code shares: dtypes of results, autocast, transforms of torch.func, products
whose float32 sums are not rounded to 16 bits, and logarithms of sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from hstree._checks import in_torch_func, is_readable


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums, scores and log-probabilities: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float64 or float32."""
    return tensor.to(sum_dtype(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the module: ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def input_dtype(linear: nn.Linear) -> torch.dtype:
    """The dtype that a linear layer computes in: that of its weight, or float32 if
    ``torch.ao.quantization.quantize_dynamic`` has replaced it, whose weight is a method."""
    return getattr(linear.weight, "dtype", torch.float32)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for the device."""
    # Not torch.amp.is_autocast_available, which torch.compile of torch 2.11 cannot trace.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast for the device."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward mode is active. Values must then not be read,
    and derivatives may be needed where ``requires_grad`` is False."""
    return in_torch_func() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Whether it is a tensor of :func:`torch.func.vmap` or of batched gradients."""
    return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)


def without_ignored(rows: Tensor, ignored: Tensor) -> Tensor:
    """Rows [..., D] with 0 in those that are ignored, a mask [...]: 0 times what these hold, in the
    gradients of parameters, could be NaN."""
    if is_readable(ignored) and not ignored.any():
        return rows
    return rows.masked_fill(ignored.view(*ignored.shape, *[1] * (rows.dim() - ignored.dim())), 0)


BLOCK_NUMBERS = 2**19
"""Numbers of a weight that are cast to float32 at a time, so that they stay in the cache."""


LOW_DTYPES = torch.bfloat16, torch.float16


def is_low(tensor: Tensor) -> bool:
    """Whether it has 16 bits."""
    return tensor.dtype in LOW_DTYPES


def is_cast(weight: Tensor) -> bool:
    """Whether products with it are computed in float32: on the CPU, where torch rounds products of
    16 bits to 16 bits and is slow in float16."""
    return is_low(weight) and weight.device.type == "cpu"


def block_rows(weight: Tensor, dim: int = 0) -> int:
    """Size along ``dim`` of the blocks of a weight that are cast."""
    return max(1, BLOCK_NUMBERS * weight.shape[dim] // max(1, weight.numel()))


def blocks(weight: Tensor, dim: int = 0) -> Iterator[Tensor]:
    """Blocks of the weight along ``dim``, in float32 if products are computed in it."""
    if not is_cast(weight):
        yield weight
    elif torch.compiler.is_compiling():
        yield weight.float()
    else:
        for block in torch.split(weight, block_rows(weight, dim), dim):
            yield block.float()


# Products of float32 by oneDNN, for x86 processors that MKL has no AVX-512 code for.

ONEDNN_LEAST = 2**21
"""Multiplications of the smallest product that is faster: a call begins later than MKL's."""
ONEDNN_PANEL = 2**19
"""Numbers of a result that are computed at a time."""


@cache
def _beats_mkl() -> bool:
    """Whether torch's products of float32 come from MKL, which uses AVX-512 on Intel's processors
    only, while oneDNN uses it on this one: benchmarks/results/onednn.md."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch._C.has_mkl
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and cpuinfo.is_file()
        and "GenuineIntel" not in cpuinfo.read_text()
    )


def onednn_is_faster(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`onednn_product` is to compute a @ b: [M, K] and [K, N], or batches of them."""
    return (
        not torch.compiler.is_compiling()
        and a.dtype == b.dtype == torch.float32
        and a.shape[-2] >= 4
        and a.shape[-2] * a.shape[-1] * b.shape[-1] >= ONEDNN_LEAST
        and a.device.type == "cpu"
        and _beats_mkl()
        and {type(a), type(b)} <= {Tensor, nn.Parameter}
        and torch._C._get_mkldnn_enabled()
    )


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without gradients."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for parts in zip(out, a, b, strict=True) if a.dim() == 3 else [(out, a, b)]:
        write_onednn_product(*parts)
    return out


def write_onednn_product(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None) -> None:
    """out = a @ b, or addend + a @ b; ``addend``: broadcast, or ``out``."""
    if addend is not None:
        addend = addend.expand_as(out)
    # Panel by panel: a large result of oneDNN would be in fresh pages every time.
    dim = int(out.shape[1] > out.shape[0])
    size = max(1, ONEDNN_PANEL // out.shape[1 - dim])
    for begin in range(0, out.shape[dim], size):
        of_rows, of_columns = slice(None), slice(begin, begin + size)
        if dim == 0:
            of_rows, of_columns = of_columns, of_rows
        panel = out[of_rows, of_columns]
        result = _onednn(a[of_rows], b[:, of_columns])
        if addend is None:
            panel.copy_(result)
        else:
            torch.add(result, addend[of_rows, of_columns], out=panel)


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in memory of its own, possibly not contiguous."""
    linear = torch.ops.mkldnn._linear_pointwise
    if a.stride(0) == 1 and a.shape[0] > b.shape[1] and _is_dense(a):
        # The other way round it is faster.
        transposed: Tensor = linear(b.t(), a, None, "none", [], "")
        return transposed.t()
    result: Tensor = linear(a, (b if _is_dense(b) else b.contiguous()).t(), None, "none", [], "")
    return result


def _is_dense(matrix: Tensor) -> bool:
    """Whether its numbers lie side by side: oneDNN has no fast code for another second factor."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


class _Product(torch.autograd.Function):
    """a b^T in float32 of factors that are rounded to ``dtype``, 16 bits or float32: matrices, or
    batches of them. Gradients of float32 factors are not rounded either."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return _product(a.to(dtype), b.to(dtype).mT, torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        rounded = grad.to(ctx.dtype)
        of_a, of_b, _ = ctx.needs_input_grad
        return (
            _product(rounded, b.to(ctx.dtype), a.dtype) if of_a else None,
            _product(rounded.mT, a.to(ctx.dtype), b.dtype) if of_b else None,
            None,
        )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b of factors of 16 bits or float32, rounded to ``dtype`` only."""
    if torch.is_grad_enabled():  # of a gradient, which torch differentiates a second time
        return (a @ b).to(dtype)
    transformed = is_transformed() or is_batched(a) or is_batched(b)
    if not transformed and onednn_is_faster(a, b):
        return onednn_product(a, b).to(dtype)
    mm = torch.mm if a.dim() == 2 else torch.bmm
    with no_autocast(a.device):
        if not a.is_cuda:  # torch is slow in float16
            return mm(a.float(), b.float()).to(dtype)
        if dtype == a.dtype:
            return mm(a, b)
        return mm(a, b, out_dtype=torch.float32).to(dtype)


def _own_dtype(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The dtype of the factors where :class:`_Product` computes a b^T. torch's own product of 16
    bits is rounded to 16 bits, and infinite above 65,504 in float16."""
    dtype, device = b.dtype, b.device
    if is_transformed() or torch.compiler.is_exporting():
        return None
    if autocasts(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
        # On a CPU torch computes products of bfloat16 in half of the time of float32.
        computed = b.is_cuda or (device.type == "cpu" and dtype == torch.float16)
    else:
        computed = b.is_cuda
    if dtype == torch.float32:
        return dtype if onednn_is_faster(a, b.mT) else None
    return dtype if computed and dtype in LOW_DTYPES else None


def linear_scores(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b [..., V] in the dtype of sums: x [..., D], W [V, D]. Under autocast the factors get
    its dtype; on a CPU products of bfloat16 are then rounded to it."""
    rows = x.reshape(-1, x.shape[-1])
    dtype = _own_dtype(rows, weight)
    if dtype is not None:
        flat: Tensor = _Product.apply(rows, weight, dtype)  # type: ignore[no-untyped-call]
        scores = flat.view(*x.shape[:-1], len(weight))
        return scores if bias is None else scores.add_(bias)
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
            return batched_product(weight, x, bias.unsqueeze(2))
        # A product with one or two contexts is faster with them as its rows.
        return batched_product(x, weight, bias.unsqueeze(1)).mT

    x, bias = x.to(weight.dtype), bias.to(weight.dtype)
    if autocasts(x.device) or not is_cast(weight):
        return product(x, weight, bias)
    x, parts, begin = x.float(), [], 0
    for block in blocks(weight, 1):
        end = begin + block.shape[1]
        parts.append(product(x, block, bias[:, begin:end].float()))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def batched_product(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """a b^T + addend [T, M, N] in the dtype of sums: a [T, M, S], b [T, N, S]."""
    dtype = _own_dtype(a, b)
    if dtype is not None:
        scores: Tensor = _Product.apply(a, b, dtype)  # type: ignore[no-untyped-call]
        return scores.add_(addend)
    scores = torch.baddbmm(addend, a, b.mT)
    return scores.to(sum_dtype(scores.dtype))


def log_sum_exp(values: Tensor, dim: int) -> Tensor:
    """log sum exp over a dimension; -inf where all are -inf, with a gradient of 0 where that of
    :func:`torch.logsumexp` is NaN."""
    limits = torch.finfo(values.dtype)
    most = values.detach().amax(dim, keepdim=True)
    total = (values - most.clamp(limits.min, limits.max)).exp().sum(dim)
    return (total + limits.tiny).log() + most.squeeze(dim)


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp a + exp b); -inf where both are -inf, with a gradient of 0 where that of
    :func:`torch.logaddexp` is NaN."""
    never = (a == -math.inf) & (b == -math.inf)
    a, b = a.masked_fill(never, 0.0), b.masked_fill(never, 0.0)
    return torch.logaddexp(a, b).masked_fill(never, -math.inf)


DRAW_BLOCK = 256
"""Most columns of a block of :func:`draw_columns`."""


def draw_columns(weight: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Columns [N, n], int64, drawn with replacement in proportion to the weights [N, V] of a row.

    Sums are in float64, so that a column of any share is drawn as often as it should: those of
    :func:`torch.multinomial` are in float32, where a share below 6e-8 of the sum so far is lost. A
    draw finds its block of columns first: only the sums of blocks are added up for all.

    Raises:
        ValueError: on the CPU, for a row whose sum is not positive and finite.
    """
    columns = weight.shape[1]
    # The blocks of all draws together are a small part of the columns.
    size = min(DRAW_BLOCK, 2 ** max(0, (columns // (16 * n)).bit_length() - 1))
    whole = columns // size
    sums = weight
    if size > 1:
        sums = weight[:, : whole * size].reshape(-1, whole, size).sum(2)
        if columns % size:
            rest = weight[:, whole * size :].sum(1, keepdim=True)
            sums = torch.cat([sums, rest], 1)
    sums = sums.double().cumsum(1)
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = ~((sums[:, -1] > 0) & (sums[:, -1] < math.inf))
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ValueError(
                "probabilities: expected rows with a positive and finite sum, got "
                f"{sums[row, -1].item()} in row {row}"
            )
    options: Any = {"dtype": torch.float64, "device": weight.device, "generator": generator}
    block, part = _find(sums, torch.rand(len(weight), n, **options))
    if size == 1:
        return block
    place = size * block.unsqueeze(2) + torch.arange(size, device=block.device)
    own = weight.gather(1, place.clamp(max=columns - 1).flatten(1)).view(place.shape).double()
    within, _ = _find(own.masked_fill(place >= columns, 0.0).cumsum(2), part.unsqueeze(2))
    found: Tensor = size * block + within.squeeze(2)
    return found


def _find(sums: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the increasing sums [..., K] above ``part`` [..., n], from 0 to 1, of the last
    one, and which part of its step that is."""
    total = sums[..., -1:]
    at = torch.minimum(part * total, torch.nextafter(total, total.new_zeros(())))
    index = torch.searchsorted(sums, at, right=True).clamp(max=sums.shape[-1] - 1)
    end = sums.gather(-1, index)
    begin = sums.gather(-1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0.0)
    return index, (at - begin) / (end - begin)
