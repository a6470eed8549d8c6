"""Loads the two extension modules, or raises one error that explains why that failed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

MINIMUM_TORCH = (2, 11)

# Operators without a CUDA kernel in any build, and what replaces them on a GPU.
CPU_OPERATORS = {
    "tree_topk": "TreeEnsemble.topk takes the k largest of all classes",
    "leaf_tree_topk": "TreeEnsemble.topk takes the k largest of all classes",
    "recycled": "torch's allocator keeps memory on CUDA",
}


@dataclass(frozen=True)
class BuildInfo:
    """Versions and options with which the installed binary was built.

    Attributes:
        version: version of hstree.
        torch: version of torch that the binary was compiled against.
        torch_target: oldest version of torch that can load the binary (stable ABI).
        cuda: CUDA version of that torch; None for a CPU-only build.
        cuda_arch_list: GPU architectures of the kernels, as in ``TORCH_CUDA_ARCH_LIST``; None for
            a CPU-only build.
        cpu_only: reason why there are no CUDA kernels; None for a build with CUDA.
        compiler: first line of the C++ compiler's ``--version``.
        python: version of the Python that ran the build.

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
    """Versions and options with which the installed binary was built.

    Raises:
        ImportError: if the package has not been built.

    Example:
        >>> import hstree
        >>> hstree.build_info().torch_target
        '2.11'
    """
    try:
        import hstree._build_info as written
    except ModuleNotFoundError as error:
        if error.name != "hstree._build_info":
            raise
        folder = Path(__file__).resolve().parent
        _fail(
            "its extension modules have not been built.",
            found=f"a source checkout without compiled modules, {folder}",
            expected="an installed hstree, or a checkout installed in place",
            command=f"pip install {folder.parent} (with -e to work on the code)",
        )
    return BuildInfo(*(getattr(written, field.name) for field in fields(BuildInfo)))


def load() -> None:
    """Imports ``hstree._C``, which registers ``torch.ops.hstree.*``, and ``hstree._host``.

    In a source checkout that has not been built, an installed hstree replaces it in
    ``sys.modules``.

    Raises:
        ImportError: if torch is missing or older than 2.11, or the package was not built, was built
            for another CUDA or another Python, or its binary does not load. The message names what
            was found, what was expected and the command that fixes it.
    """
    if _import_installed(Path(__file__).resolve().parent):
        return
    torch_version, torch_cuda = _torch_versions()
    built = build_info()
    _compare_cuda(built, torch_version, torch_cuda)
    for module in ("hstree._C", "hstree._host"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            _explain(module, error, built, torch_version)
    if built.cuda is None and _gpu_support() is not None:
        _refuse_cuda()


def _import_installed(here: Path) -> bool:
    """Imports the installed package if this is an unbuilt checkout, which Python finds first in a
    clone; returns whether it did."""
    if (here / "_build_info.py").exists():
        return False
    folders = ((place, Path(place, "hstree").resolve()) for place in sys.path)
    built = [place for place, folder in folders if (folder / "_build_info.py").exists()]
    spec = PathFinder.find_spec("hstree", built)
    if spec is None or spec.loader is None:
        return False
    sys.modules["hstree"] = installed = importlib.util.module_from_spec(spec)
    del sys.modules["hstree._extension"]
    spec.loader.exec_module(installed)
    return True


def describe_cuda() -> str:
    """Describes the CUDA kernels in one line, or why there are none and how to get them."""
    built = build_info()
    if built.cuda is not None:
        return f"CUDA {built.cuda} kernels for {built.cuda_arch_list}"
    described = f"CPU only: {built.cpu_only}"
    support = _gpu_support()
    if support == "ROCm":
        return f"{described}; hstree has no kernels for ROCm"
    if support is not None:
        return (
            f"{described}; fix: with the {support} toolkit on PATH or in CUDA_HOME, run "
            f"HSTREE_CUDA=1 {_rebuild_command()}"
        )
    return described


def _gpu_support() -> str | None:
    """The GPU platform of the installed torch, such as "CUDA 13.0" or "ROCm", or None."""
    import torch

    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "ROCm" if torch.version.hip is not None else None


_refusals: list[Any] = []  # a torch.library.Library that is freed undoes its registrations


def _refuse_cuda() -> None:
    """Registers a CUDA kernel that raises RuntimeError for each operator that has a CUDA kernel in
    other builds."""
    import torch

    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(
            f"hstree: expected CPU tensors, got CUDA; this build is {describe_cuda()}"
        )

    library: Any = torch.library.Library("hstree", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    for operator in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        namespace, _, name = operator.partition("::")
        if namespace == "hstree" and name not in CPU_OPERATORS:
            library.impl(name, refuse)
    _refusals.append(library)


def _torch_versions() -> tuple[str, str | None]:
    """Imports torch and returns its version and its CUDA version."""
    expected = "torch >= " + ".".join(map(str, MINIMUM_TORCH))
    install = f"pip install --upgrade '{expected.replace(' ', '')}'"
    try:
        import torch
    except ImportError as error:
        _fail(
            "torch cannot be imported.",
            found=f"{type(error).__name__}: {error}",
            expected=f"{expected} for {sys.executable}",
            command=install,
        )
    version = str(torch.__version__)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MINIMUM_TORCH:
        _fail(
            "torch is too old.",
            found=f"torch {version} in {Path(torch.__file__).parent}",
            expected=expected,
            command=install,
        )
    return version, torch.version.cuda


def _compare_cuda(built: BuildInfo, torch_version: str, torch_cuda: str | None) -> None:
    """Raises ImportError if the binary needs another CUDA runtime than that of this torch."""
    if built.cuda is None or _major(built.cuda) == _major(torch_cuda):
        return
    brought = f"with CUDA {torch_cuda}" if torch_cuda else "for the CPU only"
    _fail(
        "it was built for another CUDA version than this torch.",
        found=f"torch {torch_version} {brought}, hstree built with CUDA {built.cuda}",
        expected=f"a torch with CUDA {_major(built.cuda)}, or hstree built in this environment",
        command=_rebuild_command(),
    )


def _explain(module: str, error: ImportError, built: BuildInfo, torch_version: str) -> NoReturn:
    """Raises ImportError for an extension module that does not load."""
    running = f"Python {sys.version.split()[0]}, torch {torch_version}"
    made = f"Python {built.python}, torch {built.torch}, {built.compiler}"
    folder = Path(__file__).resolve().parent
    stem = module.rpartition(".")[2]
    present = sorted(
        path.name for path in folder.glob(f"{stem}.*") if path.suffix in (".so", ".pyd")
    )
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        problem = f"{module} is missing."
        what = f"{', '.join(present) or 'no such file'} in {folder} under {running}"
    elif "undefined symbol" in str(error) or "Symbol not found" in str(error):
        problem = f"{module} does not fit this torch or this system."
        what = f"{error} (running {running})"
    else:
        problem = f"{module} does not load."
        what = f"{type(error).__name__}: {error} (running {running})"
    _fail(
        problem,
        found=what,
        expected=f"the binary as it was built ({made}; any torch from {built.torch_target} on)",
        command=_rebuild_command(),
    )


def _rebuild_command() -> str:
    """The pip command that builds this package again, from the source of its installation."""
    import json
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    source = "hstree"
    try:
        recorded = metadata.distribution("hstree").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    if recorded:
        url = json.loads(recorded)["url"]
        source = url2pathname(urlsplit(url).path) if url.startswith("file:") else url
    return f"pip install --force-reinstall --no-deps {source}"


def _major(version: str | None) -> str | None:
    return version.split(".")[0] if version else None


def _fail(problem: str, *, found: str, expected: str, command: str) -> NoReturn:
    raise ImportError(
        f"hstree cannot be imported: {problem}\n"
        f"  found:    {found}\n"
        f"  expected: {expected}\n"
        f"  fix:      {command}",
        name="hstree",
    ) from None
