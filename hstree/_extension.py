"""Loads the two extension modules, or raises one error that explains why that failed."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

MINIMUM_TORCH = (2, 11)
TORCH = "torch>=" + ".".join(map(str, MINIMUM_TORCH))
CPU_OPERATORS = ("tree_topk", "group_topk", "forest_log_softmax", "recycled")
"""No build has CUDA kernels of these."""
REBUILD = "pip install --force-reinstall --no-deps ."
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class BuildInfo:
    """With what the installed binary was built: the version of hstree; the torch and its CUDA (None
    for a build without CUDA kernels, and ``cpu_only`` says why); the oldest torch that can load it;
    the GPU architectures, as in ``TORCH_CUDA_ARCH_LIST``; the C++ compiler and the Python.

    Example:
        >>> import hstree
        >>> isinstance(hstree.build_info(), hstree.BuildInfo)
        True
    """

    version: str
    torch: str
    torch_target: str
    cuda: str | None
    cuda_arch_list: str | None
    cpu_only: str | None
    compiler: str
    python: str


@functools.cache
def build_info() -> BuildInfo:
    """With what the installed binary was built.

    Example:
        >>> import hstree
        >>> hstree.build_info().torch_target
        '2.11'
    """
    import hstree._build_info as written

    return BuildInfo(*(getattr(written, field.name) for field in fields(BuildInfo)))


def load() -> None:
    """Imports ``hstree._C``, which registers ``torch.ops.hstree.*``, and ``hstree._host``. Raises
    ImportError with what was found, what was expected and the command that mends it."""
    if not (HERE / "_build_info.py").exists():
        _load_installed()
        return
    try:
        import torch
    except ImportError as error:
        found, expected = f"{type(error).__name__}: {error}", f"{TORCH} for {sys.executable}"
        _fail("torch cannot be imported.", found, expected, f"pip install '{TORCH}'")
    version, cuda = str(torch.__version__), torch.version.cuda
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MINIMUM_TORCH:
        found = f"torch {version} in {Path(torch.__file__).parent}"
        _fail("torch is too old.", found, TORCH, f"pip install --upgrade '{TORCH}'")
    built = build_info()
    if built.cuda is not None and built.cuda.split(".")[0] != (cuda or "").split(".")[0]:
        found = f"torch {version} {f'with CUDA {cuda}' if cuda else 'for the CPU only'}"
        _fail("it was built for another CUDA than this torch.", found, f"CUDA {built.cuda}")
    for module in ("hstree._C", "hstree._host"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            found = f"{error} (Python {sys.version.split()[0]}, torch {version}, {HERE})"
            _fail(f"{module} does not load.", found, f"the binary as it was built, {built}")
    if built.cuda is None and (cuda or torch.version.hip):
        for operator in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
            if operator.startswith("hstree::") and operator[8:] not in CPU_OPERATORS:
                torch.library.impl(operator, "cuda", _refuse_cuda)


def _load_installed() -> None:
    """In a clone that was not built, an installed hstree takes its place in ``sys.modules``."""
    built = [place for place in sys.path if Path(place, "hstree", "_build_info.py").exists()]
    spec = PathFinder.find_spec("hstree", built)
    if spec is None or spec.loader is None:
        found = f"a source checkout without compiled modules, {HERE}"
        fix = f"pip install {HERE.parent} (with -e to work on the code)"
        _fail("its extension modules have not been built.", found, "an installed hstree", fix)
    sys.modules["hstree"] = installed = importlib.util.module_from_spec(spec)
    del sys.modules["hstree._extension"]
    spec.loader.exec_module(installed)


def _fail(problem: str, found: str, expected: str, fix: str = REBUILD) -> NoReturn:
    text = f"  found:    {found}\n  expected: {expected}\n  fix:      {fix}"
    raise ImportError(f"hstree cannot be imported: {problem}\n{text}", name="hstree") from None


def _refuse_cuda(*_: Any) -> NoReturn:
    raise RuntimeError(f"hstree: expected CPU tensors, got CUDA; this build is {describe_cuda()}")


def describe_cuda() -> str:
    """Describes the CUDA kernels in one line, or why there are none and how to get them."""
    import torch

    built, cuda = build_info(), torch.version.cuda
    if built.cuda is not None:
        return f"CUDA {built.cuda} kernels for {built.cuda_arch_list}"
    fix = "; hstree has no kernels for ROCm" if torch.version.hip else ""
    if cuda is not None:
        fix = f"; fix: with the CUDA {cuda} toolkit on PATH, in a clone: HSTREE_CUDA=1 {REBUILD}"
    return f"CPU only: {built.cpu_only}{fix}"
