"""The emulation itself: its arithmetic, and that it finds the faults that it is there to find."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_emu.library import HERE, ORDERS, ROOT, SANITIZE, compile_library, compile_operators

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute


FAULTS = [HERE / "faults.cu", HERE / "runtime.cu"]


class Faults:
    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.run.restype = ctypes.c_char_p
        self.input = np.zeros(64, np.float32)
        self.output = np.zeros(128, np.float32)

    def run(
        self,
        name: str,
        order: tuple[str, int] = ORDERS[0],
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (64, 1, 1),
        shared_bytes: int = 64 * 4,
        shared_limit: int = 227 << 10,
        races: bool = False,
        on_stream: bool = True,
        guarded: bool = True,
    ) -> str:
        """The message of the launch that failed, or nothing."""
        self.library.emu_order(("ascending", "descending", "shuffled").index(order[0]), order[1])
        self.library.emu_races(races, b"")
        self.input[:] = np.arange(64)
        self.output[:] = 0
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (self.input, self.output))
        self.library.emu_shared_limit(ctypes.c_size_t(shared_limit))
        shape = ((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block))
        message: bytes = self.library.run(
            name.encode(), *shape, ctypes.c_size_t(shared_bytes), *pointers, on_stream, guarded
        )
        return message.decode()


@pytest.fixture(scope="module")
def faults(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("faults")
    return Faults(compile_library(folder, FAULTS))


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
        ("reverse_without_wait", "ended with asynchronous copies under way"),
        ("reverse_without_commit", "ended with asynchronous copies under way"),
        ("reverse_early_write", "shared memory was written while an asynchronous copy"),
        ("reverse_source_write", "the source of an asynchronous copy was written"),
        (
            "misaligned",
            "misaligned address of .*uint4. at .*faults.cu:.* of 16, and is 4 more",
        ),
        ("blocks_of_8_from_misaligned", "misaligned asynchronous copy of 8 bytes"),
        ("blocks_of_8_to_misaligned", "misaligned asynchronous copy of 8 bytes"),
        ("blocks_of_16_from_misaligned", "misaligned asynchronous copy of 16 bytes"),
        ("blocks_of_16_to_misaligned", "misaligned asynchronous copy of 16 bytes"),
    ],
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_fault_is_reported(faults: Faults, name: str, message: str, order: tuple[str, int]) -> None:
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(faults.run(name, order, shared_bytes=1024))
    assert faults.run("block_sum") == ""  # the next launch starts afresh


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((1, 1, 1), (1024, 1, 1), ""),
        ((1, 1, 1), (1, 1024, 1), ""),
        ((1, 1, 1), (16, 1, 64), ""),
        ((1, 1, 1), (1025, 1, 1), "1025 threads in one direction"),
        ((1, 1, 1), (1, 1025, 1), "1025 threads in one direction"),
        ((1, 1, 1), (1, 1, 65), "65 threads in one direction"),
        ((1, 1, 1), (32, 33, 1), "1056 threads in a block of at most 1024"),
        ((1, 1, 1), (0, 1, 1), "0 threads in one direction"),
        ((1, 0, 1), (1, 1, 1), "0 blocks in one direction"),
        ((1, 65535, 1), (1, 1, 1), ""),
        ((2**31, 1, 1), (1, 1, 1), "2147483648 blocks in one direction"),
        ((1, 65536, 1), (1, 1, 1), "65536 blocks in one direction"),
        ((1, 1, 65536), (1, 1, 1), "65536 blocks in one direction"),
    ],
)
def test_limits_of_shapes(
    faults: Faults, grid: tuple[int, int, int], block: tuple[int, int, int], message: str
) -> None:
    got = faults.run("any_shape", grid=grid, block=block)
    assert message in got
    assert bool(message) == ("any_shape" in got)  # the message names the kernel


def test_static_shared_memory_starts_undefined(faults: Faults) -> None:
    assert faults.run("much_static") == ""
    assert np.isnan(faults.output).all()


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
def test_limit_of_shared_memory(faults: Faults, limit: int) -> None:
    """launch.h asks for what goes beyond 48 KiB, static bytes counted, and the device ends it."""
    for name, static_bytes in (("any_shape", 256), ("much_static", 24000)):
        for total in ((48 << 10) - 4, 48 << 10, (48 << 10) + 4, limit):
            shared_bytes = total - static_bytes
            assert faults.run(name, shared_bytes=shared_bytes, shared_limit=limit) == ""
        message = faults.run(name, shared_bytes=limit - static_bytes + 4, shared_limit=limit)
        needed = f"needs {limit + 4} bytes of shared memory"
        assert f"{needed}, but the CUDA device has {limit}" in message
        assert name in message


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_asynchronous_copies_land_at_the_wait(faults: Faults, order: tuple[str, int]) -> None:
    assert faults.run("reverse", order) == ""
    np.testing.assert_array_equal(faults.output[:64], np.arange(64)[::-1])
    assert faults.run("two_groups_wait_0", order, shared_bytes=512) == ""
    np.testing.assert_array_equal(faults.output, np.tile(np.arange(64), 2))
    for floats in (1, 2, 4):
        assert faults.run(f"blocks_of_{4 * floats}", order, shared_bytes=512) == ""
        np.testing.assert_array_equal(faults.output[: 16 * floats], np.arange(16 * floats))
        np.testing.assert_array_equal(faults.output[16 * floats :], 0)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_asynchronous_copies_land_no_earlier(faults: Faults, order: tuple[str, int]) -> None:
    assert faults.run("reverse_early_read", order) == ""
    assert np.isnan(faults.output[64:]).all()
    assert faults.run("two_groups_wait_1", order, shared_bytes=512) == ""
    np.testing.assert_array_equal(faults.output[:64], np.arange(64))
    assert np.isnan(faults.output[64:]).all()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("block_sum", ""),
        ("missing_barrier", "shared"),
        ("told_past_a_block_barrier", ""),
        ("told_past_a_warp_barrier", ""),
        ("told_past_a_shuffle", "shared"),
        ("told_past_nothing", "shared"),
        ("reverse", ""),
        ("reverse_without_barrier", "shared"),
        ("counted", ""),
        ("counted_from_0", ""),
        ("counted_from_0_without_barrier", "global"),
        ("flagged", "global"),
        ("flagged_volatile", ""),
    ],
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_races(faults: Faults, name: str, where: str, order: tuple[str, int]) -> None:
    """Whichever thread goes first."""
    got = faults.run(name, order, races=True)
    assert bool(got) == bool(where)
    if where:
        line = r"[a-z_]+\.(cu|h):\d+"
        does, did = "(read|write)s|accesses atomically", "read|wrote|accessed atomically"
        thread = r"block \(\d+, 0, 0\), thread \d+"
        race = f"{thread}: race in .* on {where} memory: ({does}) at {line} what another"
        assert re.search(f"{race} ({did}) at {line}; the other is {thread}$", got), got


@pytest.mark.parametrize(
    ("name", "races"),
    [("told_past_a_block_barrier", True), ("counted", False), ("counted_from_0", True)],
)
def test_barriers_order_nothing_between_blocks(faults: Faults, name: str, races: bool) -> None:
    assert ("global memory" in faults.run(name, grid=(2, 1, 1), races=True)) == races


def test_launches_are_on_the_stream_and_device_of_torch(faults: Faults) -> None:
    assert "not on torch's current stream" in faults.run("block_sum", on_stream=False)
    assert "outside a device guard" in faults.run("block_sum", guarded=False)


def test_every_half_converts_to_float(faults: Faults) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    convert = faults.library.emu_half_to_float
    convert.restype = ctypes.c_float
    got = np.array([convert(ctypes.c_uint16(int(b))) for b in bits])
    with np.errstate(invalid="ignore"):  # signalling NaN
        np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float64))
    convert = faults.library.emu_bfloat16_to_float
    convert.restype = ctypes.c_float
    got = np.array([convert(ctypes.c_uint16(int(b))) for b in bits[::7]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, (bits[::7].astype(np.uint32) << 16).view(np.float32))


def test_rounding_to_half_is_to_nearest_even(faults: Faults) -> None:
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
    bfloat16 = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    pairs = (("half", halves.view(np.uint16)), ("bfloat16", bfloat16))
    for name, want in pairs:
        convert = faults.library[f"emu_float_to_{name}"]
        convert.restype = ctypes.c_uint16
        got = np.array([convert(ctypes.c_float(float(v))) for v in values], np.uint16)
        numbers = ~np.isnan(values)
        np.testing.assert_array_equal(got[numbers], want[numbers])
        assert (got[~numbers] & 0x7FFF > 0x7C00).all()


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python under AddressSanitizer, with tests/ on its path."""
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")  # the second for the first to find __cxa_throw
    ]
    if not Path(libraries[0]).is_absolute():
        pytest.skip("g++ has no libasan.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment,
        cwd=ROOT / "tests",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("past_shared", "heap-buffer-overflow"),
        ("past_global", "heap-buffer-overflow"),
        ("zeros_from_outside", "heap-buffer-overflow"),
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
    return compile_library(folder, FAULTS, SANITIZE)


def test_kernels_are_clean_under_sanitizers(compiler: str, tmp_path: Path) -> None:
    library = compile_operators(tmp_path, SANITIZE)
    parts = 2

    def run_part(part: int) -> subprocess.CompletedProcess[str]:
        return run_sanitized("-m", "kernels.sanitized", str(library), str(part), str(parts))

    with ThreadPoolExecutor(parts) as pool:
        for result in pool.map(run_part, range(parts)):
            assert result.returncode == 0, result.stderr[-4000:] + result.stdout[-1000:]
            assert "checks passed" in result.stdout
