"""The emulation itself: its arithmetic, and that it finds the faults that it is there to find."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cuda_emu.library import (
    ORDERS,
    ROOT,
    SANITIZE,
    EmulatedLibrary,
    compile_library,
    compile_operators,
)

from kernels.emulation import BFLOAT16

FAULTS = r"""
#include <string>
#include "kernels/mma.cuh"

using hstree::launch;

// Sums in pairs through shared memory, with or without the barrier between the steps.
template <bool Barrier>
__global__ void block_sum(const float* input, float* output) {
  float* partial = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY);
  partial[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    float sum = 0;
    if (threadIdx.x < half) sum = partial[threadIdx.x] + partial[threadIdx.x + half];
    if (Barrier) __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] = sum;
    if (Barrier) __syncthreads();
  }
  if (threadIdx.x == 0) *output = partial[0];
}
__global__ void divergent(const float*, float*) {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void two_barriers(const float*, float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void outside_mask(const float* input, float* output) {
  if (threadIdx.x < 16) output[0] = __shfl_sync(0xffffu, input[threadIdx.x], 16);
}
__global__ void absent_lane(const float* input, float* output) {
  if (threadIdx.x < 16) output[0] = __shfl_xor_sync(0xffffffffu, input[threadIdx.x], 1);
}
__global__ void past_shared(const float*, float*) {
  float* shared = reinterpret_cast<float*>(HSTREE_SHARED_MEMORY);
  shared[threadIdx.x + 1] = 0;
}
__global__ void past_global(const float* input, float* output) {
  output[0] = input[64 + threadIdx.x];
}
__global__ void misaligned(const float* input, float* output) {
  const uint4 raw = *reinterpret_cast<const uint4*>(input + 1);
  output[0] = float(raw.x);
}
__global__ void warp_functions(const float*, float* output) {
  const unsigned lane = threadIdx.x % 32;
  const bool votes = __ballot_sync(0xffffffffu, lane % 3 == 0) == 0x49249249u &&
                     __any_sync(0xffffffffu, lane == 7) && !__all_sync(0xffffffffu, lane == 7) &&
                     __reduce_add_sync(0xffffffffu, lane) == 496u;
  const double up = __shfl_down_sync(0xffffffffu, double(lane), 3);
  const int swapped = __shfl_xor_sync(0xffffffffu, int(lane), 5);
  __syncwarp();
  const bool moved = up == (lane + 3 < 32 ? lane + 3 : lane) && swapped == int(lane ^ 5);
  atomicAdd(output, votes && moved ? 1.0f : 0.0f);
}

// output [16, 8] = a b for a [16, 16], b [16, 8] of small integers, which are exact in bfloat16.
__global__ void matrix_product(const float*, float* output) {
  if (threadIdx.x >= 32) return;
  const auto element = [](unsigned row, unsigned column, int kind) {
    return kind == 0 ? float(row) - 2.0f * float(column) : float(row * column % 7);
  };
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t a[4], b[2];
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
    a[i] = hstree::pack(__float2bfloat16_rn(element(row, column, 0)),
                        __float2bfloat16_rn(element(row, column + 1, 0)));
  }
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned row = 2 * t + i * 8;
    b[i] = hstree::pack(__float2bfloat16_rn(element(row, g, 1)),
                        __float2bfloat16_rn(element(row + 1, g, 1)));
  }
  float c[4] = {1, 1, 1, 1};
  hstree::mma<__nv_bfloat16>(c, a, b);
  for (unsigned i = 0; i < 4; ++i) output[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

extern "C" {
void set_order(int order, unsigned seed) {
  emu::order = static_cast<emu::Order>(order);
  emu::seed = seed;
}
const char* run(const char* name, const float* input, float* output) {
  static std::string error;
  const std::string wanted = name;
  auto kernel = wanted == "block_sum"       ? block_sum<true>
                : wanted == "missing_barrier" ? block_sum<false>
                : wanted == "divergent"     ? divergent
                : wanted == "two_barriers"  ? two_barriers
                : wanted == "outside_mask"  ? outside_mask
                : wanted == "absent_lane"   ? absent_lane
                : wanted == "past_shared"   ? past_shared
                : wanted == "past_global"   ? past_global
                : wanted == "misaligned"    ? misaligned
                : wanted == "matrix_product" ? matrix_product
                                            : warp_functions;
  try {
    const unsigned threads = wanted == "too_many_threads" ? 1025 : 64;
    launch(kernel, 1, threads, 64 * sizeof(float), nullptr, input, output);
  } catch (const std::exception& caught) {
    error = caught.what();
    return error.c_str();
  }
  return "";
}
}
"""


class Faults:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.run.restype = ctypes.c_char_p
        self.output = np.zeros(128, np.float32)

    def run(self, name: str, order: tuple[str, int] = ORDERS[0]) -> str:
        self.library.set_order(("ascending", "descending", "shuffled").index(order[0]), order[1])
        values = np.arange(64, dtype=np.float32)
        self.output[:] = 0
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (values, self.output))
        message: bytes = self.library.run(name.encode(), *pointers)
        return message.decode()


@pytest.fixture(scope="module")
def faults(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("faults")
    source = folder / "faults.cu"
    source.write_text(FAULTS)
    return Faults(compile_library(folder, [source]))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_sound_kernel(faults: Faults, order: tuple[str, int]) -> None:
    assert faults.run("block_sum", order) == ""
    assert faults.output[0] == 64 * 63 / 2


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_warp_functions(faults: Faults, order: tuple[str, int]) -> None:
    assert faults.run("warp_functions", order) == ""
    assert faults.output[0] == 64


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_matrix_instruction(faults: Faults, order: tuple[str, int]) -> None:
    assert faults.run("matrix_product", order) == ""
    inner = np.arange(16)
    a = inner[:, None] - 2 * inner
    b = inner[:, None] * inner[:8] % 7
    np.testing.assert_array_equal(faults.output.reshape(16, 8), a @ b + 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent", "divergent barrier: from thread 0 waiting at line .* from thread 32 ended"),
        ("two_barriers", "divergent barrier: from thread 0 waiting .* from thread 32 waiting"),
        ("outside_mask", "shuffle from a lane outside the mask"),
        ("absent_lane", "divergent barrier: from thread 0 waiting .* from thread 16 ended"),
        ("too_many_threads", "invalid configuration"),
    ],
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_fault_is_reported(faults: Faults, name: str, message: str, order: tuple[str, int]) -> None:
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(faults.run(name, order))
    assert faults.run("block_sum") == ""  # the next launch starts afresh


def test_missing_barrier_shows_in_some_order(faults: Faults) -> None:
    sums = set()
    for order in ORDERS:
        assert faults.run("missing_barrier", order) == ""
        sums.add(float(faults.output[0]))
    assert sums != {64 * 63 / 2}


def test_every_half_converts_to_float(emulated: EmulatedLibrary) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    convert = emulated.library.emu_half_to_float
    convert.restype = ctypes.c_float
    got = np.array([convert(ctypes.c_uint16(int(b))) for b in bits])
    with np.errstate(invalid="ignore"):  # signalling NaN
        np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float64))
    convert = emulated.library.emu_bfloat16_to_float
    convert.restype = ctypes.c_float
    got = np.array([convert(ctypes.c_uint16(int(b))) for b in bits[::7]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, BFLOAT16.decode(bits[::7]))


def test_rounding_to_half_is_to_nearest_even(emulated: EmulatedLibrary) -> None:
    random = np.random.default_rng(0)
    halves = random.integers(0, 2**16, 4000).astype(np.uint16).view(np.float16)
    finite = np.abs(halves[np.isfinite(halves)].astype(np.float32))
    bits = finite.view(np.uint32)
    near = [(bits + offset).view(np.float32) for offset in (0, 0xFFF, 0x1000, 0x1001)]
    edges = [0.0, 2.0**-25, 2.0**-24 * 1.5, 65504, 65519.99, 65520, 65536, 1e30, np.inf, np.nan]
    values = np.concatenate([*near, np.array(edges, np.float32)])
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    pairs = (("half", halves.view(np.uint16)), ("bfloat16", BFLOAT16.encode(values)))
    for name, want in pairs:
        convert = emulated.library[f"emu_float_to_{name}"]
        convert.restype = ctypes.c_uint16
        got = np.array([convert(ctypes.c_float(float(v))) for v in values], np.uint16)
        numbers = ~np.isnan(values)
        np.testing.assert_array_equal(got[numbers], want[numbers])
        assert (got[~numbers] & 0x7FFF > 0x7C00).all()


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python under AddressSanitizer, with tests/ on its path."""
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("g++ has no libasan.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("past_shared", "heap-buffer-overflow"),
        ("past_global", "heap-buffer-overflow"),
        ("misaligned", "misaligned address"),
        ("block_sum", ""),
    ],
)
def test_sanitizers_find_stray_accesses(sanitized_faults: Path, name: str, finding: str) -> None:
    code = (
        "import sys; from pathlib import Path; from kernels.test_emulation import Faults;"
        "assert Faults(Path(sys.argv[1])).run(sys.argv[2]) == ''"
    )
    result = run_sanitized("-c", code, str(sanitized_faults), name)
    assert (result.returncode != 0) == bool(finding), result.stderr
    assert finding in result.stderr


@pytest.fixture(scope="module")
def sanitized_faults(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized_faults")
    source = folder / "faults.cu"
    source.write_text(FAULTS)
    return compile_library(folder, [source], SANITIZE)


def test_kernels_are_clean_under_sanitizers(compiler: str, tmp_path: Path) -> None:
    library = compile_operators(tmp_path, SANITIZE)
    parts = 2

    def run_part(part: int) -> subprocess.CompletedProcess[str]:
        return run_sanitized("-m", "kernels.sanitized", str(library), str(part), str(parts))

    with ThreadPoolExecutor(parts) as pool:
        for result in pool.map(run_part, range(parts)):
            assert result.returncode == 0, result.stderr[-4000:] + result.stdout[-1000:]
            assert "checks passed" in result.stdout
