"""Products of float32 by oneDNN, for x86 processors that MKL has no AVX-512 code for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

LEAST = 2**21
"""Multiplications of the smallest product that is faster; a call takes 10 µs."""


@cache
def _beats_mkl() -> bool:
    """Whether torch's products of float32 come from MKL, which uses AVX-512 on Intel's processors
    only, while oneDNN uses it on this one: twice as fast on an AMD EPYC 9005."""
    cpuinfo = Path("/proc/cpuinfo")
    return (
        torch._C.has_mkl
        and torch._C._has_mkldnn
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
        and len(a) > 0
        and _is_dense(b if b.dim() == 2 else b[0])
        and torch._C._get_mkldnn_enabled()
        and _beats_mkl()
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b without gradients, possibly not contiguous."""
    if a.dim() == 3:
        return torch.stack([product(*pair) for pair in zip(a, b, strict=True)])
    linear = torch.ops.mkldnn._linear_pointwise
    if a.stride(0) == 1 and a.shape[0] > b.shape[1] and _is_dense(a):
        # The other way round it is faster.
        transposed: Tensor = linear(b.t(), a, None, "none", [], "")
        return transposed.t()
    result: Tensor = linear(a, b.t(), None, "none", [], "")
    return result


def _is_dense(matrix: Tensor) -> bool:
    """Whether its numbers lie side by side: as the second factor any other takes oneDNN 1,000 times
    as long."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()
