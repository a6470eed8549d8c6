"""The operators of a CUDA build, compiled for the CPU: the CUDA part of csrc/ops/*.cpp and
csrc/kernels/*.cu against the emulator cuda_emu.h.

The library registers its kernels for the dispatch key CUDA, as a CUDA build does; `on_cpu_tensors`
lets the operators call them for CPU tensors.
"""

from __future__ import annotations

import ctypes
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from hstree.ops import _kernels

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HERE = Path(__file__).resolve().parent
# What this calls is in cuda_emu.h and races.cpp, in place of the sanitizers' libraries.
TSAN = ("instrument-func-entry-exit=0", "distinguish-volatile=1")
CHECKED = ("-fsanitize=alignment,thread", *(f"--param=tsan-{each}" for each in TSAN), "-g1")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
ORDERS = (("ascending", 0), ("descending", 0), ("shuffled", 1))
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")


def compile_library(
    folder: Path,
    sources: list[Path],
    options: tuple[str, ...] = CHECKED,
    link: tuple[str, ...] = (),
) -> Path:
    """Compiles sources with g++ into one shared library; .cu files see the emulator."""
    common = ["g++", "-std=c++17", "-O1", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden"]
    common += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-attributes"]
    common += ["-DHSTREE_CUDA", "-DHSTREE_CUDA_ONLY", "-DUSE_CUDA"]
    common += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    common += [f"-I{CSRC}", *(f"-isystem{path}" for path in include_paths())]
    emulated = ["-fno-strict-aliasing", "-include", str(HERE / "cuda_emu.h"), "-x", "c++"]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.{source.suffix[1:]}.o"
        more = [*options, *emulated] if source.suffix == ".cu" else []
        run([*common, *more, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*sources, HERE / "races.cpp"]))
    library = folder / "emulated.so"
    runtime = () if options == CHECKED else options
    run(["g++", "-shared", *runtime, *objects, *link, "-o", str(library)])
    return library


def compile_operators(folder: Path, options: tuple[str, ...] = CHECKED) -> Path:
    """Compiles what a CUDA build adds to the operators, and the argument checks that it calls."""
    sources = [*(CSRC / "kernels").glob("*.cu"), HERE / "runtime.cu"]
    ops = sorted((CSRC / "ops").glob("*.cpp"))
    sources += [path for path in ops if "#ifdef HSTREE_CUDA\n" in path.read_text()]
    libraries = Path(torch.__file__).parent / "lib"
    link = (f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}")
    return compile_library(folder, sorted(sources), options, (*link, "-Wl,--no-undefined"))


class EmulatedLibrary:
    """The operators of an emulated library; one in a process, which must not be a CUDA build's."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self.library = ctypes.CDLL(str(library))
        self.library.emu_seen.restype = ctypes.c_char_p
        # A kernel in Python for every device serves CUDA where there is no other.
        keys = ("CUDA", "CompositeExplicitAutograd")
        names = map(torch._C._dispatch_get_registrations_for_dispatch_key, keys)
        self.operators = [name for name in chain(*names) if name.startswith("hstree::")]

    def set_order(self, order: str, seed: int) -> None:
        """Which thread and block goes first from now on; at first the first of ORDERS."""
        self.library.emu_order(("ascending", "descending", "shuffled").index(order), seed)

    def set_shared_limit(self, kib: int = 99) -> None:
        """Largest shared memory of a block from now on; 99 KiB at first, the least of a device."""
        self.library.emu_shared_limit(ctypes.c_size_t(kib << 10))

    @contextmanager
    def watching_races(self, unordered: str = "") -> Iterator[set[str]]:
        """A launch fails at a race while the context lasts, which takes four times as long.
        unordered: FILE:LINE of a barrier that is taken for none. Gives the names of the kernels,
        mangled, and FILE:LINE of the barriers that ran, at the end of the context."""
        seen = set[str]()
        self.library.emu_races(True, unordered.encode())
        try:
            yield seen
        finally:
            self.library.emu_races(False, b"")
            seen.update(self.library.emu_seen().decode().split())

    @contextmanager
    def on_cpu_tensors(self) -> Iterator[None]:
        """The operators run the CUDA kernels for CPU tensors while the context lasts."""
        library = torch.library.Library("hstree", "IMPL")
        of_cuda, _kernels.of_cuda = _kernels.of_cuda, lambda _: True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in self.operators:
                library.impl(name, redispatched(name), "CPU", allow_override=True)
        try:
            yield
        finally:
            _kernels.of_cuda = of_cuda
            library._destroy()


def redispatched(name: str) -> Any:
    operator = getattr(torch.ops.hstree, name.removeprefix("hstree::")).default

    def kernel(*arguments: Any, **options: Any) -> Any:
        return operator.redispatch(CUDA, *arguments, **options)

    return kernel
