"""Products of float32 by oneDNN, for x86 processors that MKL has no AVX-512 code for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

LEAST = 2**21
"""Multiplications of the smallest product that is faster: a call begins later than MKL's."""
PANEL = 2**19
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


def is_faster(a: Tensor, b: Tensor) -> bool:
    """Whether a @ b is to be computed by :func:`product`: [M, K] and [K, N], or batches of them."""
    return (
        not torch.compiler.is_compiling()
        and {type(a), type(b)} <= {Tensor, Parameter}
        and a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and a.shape[-2] >= 4
        and a.shape[-2] * a.shape[-1] * b.shape[-1] >= LEAST
        and torch._C._get_mkldnn_enabled()
        and _beats_mkl()
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without gradients."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for parts in zip(out, a, b, strict=True) if a.dim() == 3 else [(out, a, b)]:
        write_product(*parts)
    return out


def write_product(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None = None) -> None:
    """out = a @ b, or addend + a @ b; ``addend``: broadcast, or ``out``."""
    if addend is not None:
        addend = addend.expand_as(out)
    # Panel by panel: a large result of oneDNN would be in fresh pages every time.
    dim = int(out.shape[1] > out.shape[0])
    size = max(1, PANEL // out.shape[1 - dim])
    for begin in range(0, out.shape[dim], size):
        of_rows, of_columns = slice(None), slice(begin, begin + size)
        if dim == 0:
            of_rows, of_columns = of_columns, of_rows
        panel = out[of_rows, of_columns]
        result = _product(a[of_rows], b[:, of_columns])
        if addend is None:
            panel.copy_(result)
        else:
            torch.add(result, addend[of_rows, of_columns], out=panel)


def _product(a: Tensor, b: Tensor) -> Tensor:
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
