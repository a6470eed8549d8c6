"""Builds the two extension modules; everything else about the package is in pyproject.toml.

    hstree._C     operators torch.ops.hstree.*, LibTorch Stable ABI and Python limited API: one
                  binary for Python 3.10 and later, torch 2.11 and later
    hstree._host  tree building over numpy arrays (pybind11, no torch)

Environment:
    HSTREE_CUDA               0: CPU only; 1: with CUDA, or fail; unset: with CUDA if torch and nvcc
                              support it
    TORCH_CUDA_ARCH_LIST      default "8.0;9.0;10.0;12.0+PTX", before CUDA 12.8 "8.0;9.0+PTX"
    HSTREE_SANITIZE           sanitizers for g++ -fsanitize=, such as "address,undefined"
    CUDA_HOME, CXX, MAX_JOBS  as torch.utils.cpp_extension reads them
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)
TORCH_TARGET_VERSION = (
    "0x020b000000000000"  # MINIMUM_TORCH in the encoding of torch/headeronly/version.h
)
# Code for 8.0 runs on 8.6 and 8.9 too, code for 10.0 on 10.3, code for 12.0 on 12.1.
DEFAULT_CUDA_ARCH_LIST = "8.0;9.0;10.0;12.0+PTX"
CUDA_ARCH_LIST_BEFORE_12_8 = "8.0;9.0+PTX"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
SANITIZERS = os.environ.get("HSTREE_SANITIZE", "")
OPTIMIZATION = ["-O3", "-g0"]
if SANITIZERS:
    OPTIMIZATION = ["-O1", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
    OPTIMIZATION += [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"]
    # What makes a file of kernels compile for minutes; AddressSanitizer finds such accesses itself.
    OPTIMIZATION.append("-fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute")
    OPTIMIZATION.append("-fno-sanitize=object-size,pointer-overflow,vptr")
COMMON_FLAGS = [*OPTIMIZATION, "-fvisibility=hidden", "-Wall", "-Wextra"]
# The C++ standard of the operators is the one torch passes for its own headers.
COMPILER = "a C++20 compiler such as g++ 12 (torch 2.11: C++17)"
OPERATOR_FLAGS = [*COMMON_FLAGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
CUDA_DEFINES = ["-DHSTREE_CUDA", "-DUSE_CUDA"]  # ours; that of torch's headers
HOST_FLAGS = [*COMMON_FLAGS, "-std=c++17", "-ffp-contract=off"]
EXPORTS = "csrc/exports.map"  # which symbols of a module are visible outside
COMMANDS_WITHOUT_COMPILER = {"sdist", "egg_info", "dist_info", "clean"}


def fail(problem: str, *, found: str, expected: str, command: str) -> NoReturn:
    """Ends the build with one message."""
    raise SystemExit(
        f"\nhstree cannot be built: {problem}\n"
        f"  found:    {found}\n"
        f"  expected: {expected}\n"
        f"  fix:      {command}\n"
    )


def check_torch() -> Any:
    """Imports torch, which the build links against, and checks its version."""
    expected = "torch >= " + ".".join(map(str, MINIMUM_TORCH))
    # An isolated build has no numpy, and needs none.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        import torch
    except ImportError as error:
        fail(
            "torch cannot be imported.",
            found=f"{type(error).__name__}: {error}",
            expected=f"{expected} in the environment of {sys.executable}",
            command=f"pip install '{expected.replace(' ', '')}', then build again",
        )
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None or tuple(map(int, match.groups())) < MINIMUM_TORCH:
        fail(
            "torch is too old.",
            found=f"torch {torch.__version__} in {Path(torch.__file__).parent}",
            expected=expected,
            command=f"pip install --upgrade '{expected.replace(' ', '')}'",
        )
    return torch


def check_compiler() -> str:
    """Returns the version line of the C++ compiler that torch.utils.cpp_extension runs."""
    compiler = os.environ.get("CXX", "c++").split()
    install = "apt-get install g++ (or conda install cxx-compiler), or set CXX"
    if shutil.which(compiler[0]) is None:
        fail(
            "there is no C++ compiler.",
            found=f"no program {compiler[0]!r} on PATH",
            expected=COMPILER,
            command=install,
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        fail(
            "the headers of Python are missing.",
            found=f"no file {header}",
            expected="the development files of this Python",
            command=f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev",
        )
    shown = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    if shown.returncode != 0 or not shown.stdout:
        fail(
            "the C++ compiler does not run.",
            found=f"{' '.join(compiler)} --version: {(shown.stderr or 'no output').strip()}",
            expected=COMPILER,
            command=install,
        )
    return shown.stdout.splitlines()[0]


def cuda_home() -> Path | None:
    """Returns the folder of the CUDA toolkit, following nvcc through wrapper scripts."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            return Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return DEFAULT_CUDA_HOME if (DEFAULT_CUDA_HOME / "bin" / "nvcc").exists() else None
    shown = subprocess.run(
        [nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False
    )
    match = re.search(r"^#\$ TOP=(.+)$", shown.stderr, re.MULTILINE)
    return Path(match.group(1).strip()).resolve() if match else Path(nvcc).resolve().parent.parent


def nvcc_version(home: Path | None) -> str | None:
    """Returns the release of the nvcc in `home`, such as "13.0", or None if none runs."""
    nvcc = home / "bin" / "nvcc" if home else None
    if nvcc is None or not nvcc.exists():
        return None
    shown = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+\.\d+)", shown.stdout)
    return match.group(1) if match else None


def choose_cuda(torch: Any) -> str | None:
    """Chooses and prints whether to build with CUDA or for the CPU only; a GPU is not needed.

    Returns:
        Why the build is CPU-only, or None for a build with CUDA.
    """
    wish = os.environ.get("HSTREE_CUDA", "")
    if wish not in ("", "0", "1"):
        fail(
            "HSTREE_CUDA is neither 0 nor 1.",
            found=f"HSTREE_CUDA={wish}",
            expected="0 (CPU only), 1 (with CUDA) or unset (follows torch and nvcc)",
            command="unset HSTREE_CUDA",
        )
    if wish == "0":
        print("hstree: building for the CPU only: HSTREE_CUDA=0", flush=True)
        return "HSTREE_CUDA was 0"

    needed = torch.version.cuda
    home = cuda_home()
    available = nvcc_version(home)
    if needed is None:
        obstacle = f"torch {torch.__version__} has no CUDA"
        expected = "a torch with CUDA"
        command = "install a CUDA build of torch"
    elif available is None:
        where = str(home) if home else f"PATH or in {DEFAULT_CUDA_HOME}"
        obstacle = (
            f"torch {torch.__version__} has CUDA {needed}, but there was no nvcc "
            f"{'in' if home else 'on'} {where}"
        )
        expected = f"nvcc of CUDA {needed}"
        command = f"install the CUDA {needed} toolkit and set CUDA_HOME"
    elif available.split(".")[0] != needed.split(".")[0]:
        obstacle = (
            f"torch {torch.__version__} has CUDA {needed}, but nvcc in {home} was of {available}"
        )
        expected = f"nvcc of CUDA {needed.split('.')[0]}.x"
        command = f"install the CUDA {needed} toolkit and set CUDA_HOME"
    else:
        os.environ["CUDA_HOME"] = str(home)
        known = tuple(map(int, available.split("."))) >= (12, 8)
        default = DEFAULT_CUDA_ARCH_LIST if known else CUDA_ARCH_LIST_BEFORE_12_8
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default)
        print(
            f"hstree: building with CUDA {available} for {os.environ['TORCH_CUDA_ARCH_LIST']}",
            flush=True,
        )
        return None
    if wish == "1":
        fail(
            "HSTREE_CUDA=1, but CUDA cannot be built.",
            found=obstacle,
            expected=expected,
            command=f"{command}, or build for the CPU: HSTREE_CUDA=0 pip install .",
        )
    print(f"hstree: building for the CPU only: {obstacle}", flush=True)
    if needed is not None:
        print(f"hstree: for CUDA, {command}, then build again", flush=True)
    return obstacle


def sources(folder: str, suffix: str) -> list[str]:
    """Returns the files csrc/<folder>/*<suffix>, relative to the repository for setuptools."""
    return sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).glob("*" + suffix)
    )


def pybind11_headers() -> str:
    """Copies the headers of pybind11 to build/ and returns their folder. An isolated build has them
    in a new folder every time, and ninja would compile everything again."""
    import pybind11

    folder = ROOT / "build" / f"pybind11-{pybind11.__version__}"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(pybind11.get_include(), part)
        part.rename(folder)
    return str(folder)


def write_build_info(path: Path, fields: dict[str, Any]) -> None:
    """Writes hstree/_build_info.py, which `import hstree` compares with the environment."""
    lines = ['"""Written by setup.py: what this build was made with."""', ""]
    lines += [f"{name} = {value!r}" for name, value in fields.items()]
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class BuildProgress:
    """A context in which what ninja prints becomes a line for each file it has compiled, with the
    time left; error messages stay whole. `pip install` shows these lines with -v only."""

    STATUS = re.compile(r"\[(\d+)/(\d+)\] .*?([^\s/]+/[^\s/]+\.(?:cpp|cu)) -o ")

    def __enter__(self) -> None:
        sys.stdout.flush()
        self.begin = time.monotonic()
        self.stdout = os.dup(1)
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(writing)
        self.thread = threading.Thread(target=self.copy, args=(reading,))
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        os.dup2(self.stdout, 1)  # closes the pipe, which ends the thread
        self.thread.join()
        os.close(self.stdout)

    def copy(self, reading: int) -> None:
        """Copies lines until the pipe is closed."""
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                os.write(self.stdout, self.shown(line).encode())

    def shown(self, line: str) -> str:
        """Returns what is printed for a line of ninja's."""
        match = self.STATUS.match(line)
        if match is None:
            return line
        done, total = int(match[1]), int(match[2])
        if done == total:
            return f"[{done}/{total}] {match[3]}\n"
        seconds = (time.monotonic() - self.begin) / done * (total - done)
        left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        return f"[{done}/{total}] {match[3]}, about {left} left\n"


def extension_arguments() -> dict[str, Any]:
    """Returns the arguments of setup() that describe the extension modules."""
    torch = check_torch()
    compiler = check_compiler()
    cpu_only = choose_cuda(torch)
    cuda = cpu_only is None

    try:
        pybind11 = pybind11_headers()
    except ImportError:
        fail(
            "pybind11 is missing.",
            found=f"a build without isolation in the environment of {sys.executable}",
            expected="the build requirements of pyproject.toml in that environment",
            command="pip install 'setuptools>=77.0.3' ninja 'pybind11>=3'",
        )
    # Imported here because it reads CUDA_HOME at import.
    from torch.utils.cpp_extension import (
        BuildExtension,
        CppExtension,
        CUDAExtension,
        include_paths,
    )

    csrc = ROOT / "csrc"
    headers = [
        str(path.relative_to(ROOT)) for path in csrc.rglob("*") if path.suffix in (".h", ".cuh")
    ]
    linux = platform.system() == "Linux"
    link_flags = [f"-Wl,--version-script={EXPORTS}"] if linux else []
    if SANITIZERS:
        link_flags.append(f"-fsanitize={SANITIZERS}")
    elif linux:
        link_flags.append("-Wl,-s")

    operators = (CUDAExtension if cuda else CppExtension)(
        "hstree._C",
        sources("ops", ".cpp")
        + sources("cpu", ".cpp")
        + (sources("kernels", ".cu") if cuda else []),
        include_dirs=[str(csrc)],
        depends=[*headers, EXPORTS],
        extra_compile_args={
            # Torch headers are system headers, which are exempt from warnings.
            "cxx": [
                *OPERATOR_FLAGS,
                *(CUDA_DEFINES if cuda else []),
                *(f"-isystem{path}" for path in include_paths()),
            ],
            "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden"],
        },
        extra_link_args=link_flags,
        py_limited_api=True,
    )
    host = Extension(
        "hstree._host",
        sources("host", ".cpp"),
        include_dirs=[str(csrc), pybind11],
        depends=[*headers, EXPORTS],
        extra_compile_args={"cxx": HOST_FLAGS},
        extra_link_args=link_flags,
        language="c++",
    )
    extensions = [extension for extension in (operators, host) if extension.sources]

    fields: dict[str, Any] = {
        "version": "",
        "torch": torch.__version__,
        "torch_target": ".".join(map(str, MINIMUM_TORCH)),
        "cuda": torch.version.cuda if cuda else None,
        "cuda_arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if cuda else None,
        "cpu_only": cpu_only,
        "compiler": compiler,
        "python": platform.python_version(),
    }

    class BuildExtensions(BuildExtension):  # type: ignore[misc]
        """Compiles with ninja and writes hstree/_build_info.py next to the modules."""

        def finalize_options(self) -> None:
            super().finalize_options()
            if self.editable_mode:
                # Instead of a temporary folder, so that ninja compiles only what has changed.
                tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
                self.build_temp = str(ROOT / "build" / f"temp.{tag}-editable")

        def build_extension(self, extension: Extension) -> None:
            with BuildProgress():
                super().build_extension(extension)

        def build_extensions(self) -> None:
            fields["version"] = self.distribution.get_version()
            build_info = Path(self.get_ext_fullpath("hstree._C")).with_name("_build_info.py")
            write_build_info(build_info, fields)
            # Build the modules again when torch, CUDA or the compiler has changed.
            for extension in self.extensions:
                extension.depends.append(str(build_info))
            super().build_extensions()

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            write_build_info(ROOT / "hstree" / "_build_info.py", fields)

    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildExtensions}}


if __name__ == "__main__":
    setup(**({} if COMMANDS_WITHOUT_COMPILER & set(sys.argv[1:]) else extension_arguments()))
