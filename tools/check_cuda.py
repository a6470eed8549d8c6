"""Build hstree with CUDA as setup.py does for users, and check the result.

    python tools/check_cuda.py [--report benchmarks/results/cuda-registers.md]

Fails on a warning, on a register spill on 8.0 or 9.0 (on others it is reported), on one of the hot
kernels on 8.6 or 8.9, for which these alone are compiled, on a kernel without __launch_bounds__ or
with more static shared memory than csrc/kernels/launch.h allows, on an operator without a kernel
for both devices, and on a module that is not stripped, exports more than its init function or
cannot be imported without a GPU. Needs nvcc and any torch that setup.py accepts. A torch without
CUDA is patched to report CUDA, with stub libraries for libtorch_cuda and libc10_cuda. Writes
nothing into the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
# In addition to the flags of setup.py: a report on each kernel, and warnings as errors.
NVCC_FLAGS = "-Xptxas=-v -Werror=all-warnings -Xcompiler=-Wall,-Wextra"

# For 8.6 and 8.9 a user builds with TORCH_CUDA_ARCH_LIST; code for 8.0 runs there too.
WITHOUT_SPILLS = ("sm_80", "sm_86", "sm_89", "sm_90")
HOT = ("group_log_prob", "path_log_prob")
MOST_STATIC_BYTES = 24 << 10  # most_static_bytes of csrc/kernels/launch.h

# The symbols of torch's CUDA libraries that hstree._C uses.
STUB = "int aoti_torch_get_current_cuda_stream(int device, void** stream) { return 1; }\n"
PRETEND = """
import torch
torch.version.cuda = {version!r}
"""
BUILD = """
import runpy, sys, torch
vars(torch._C).setdefault("_cuda_getDeviceCount", lambda: 0)  # by it torch knows that it has CUDA
sys.argv = ["setup.py", *{arguments!r}]
runpy.run_path("setup.py", run_name="__main__")
"""
PROBE = """
import json, torch, hstree
from hstree._extension import CPU_OPERATORS, describe_cuda

operators = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("hstree::"))
has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
gathered = torch.ops.hstree.feature_gather(
    torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0, 2]], dtype=torch.int32)
)
print(json.dumps({
    "package": hstree.__path__[0],
    "build": describe_cuda(),
    "kernels": {n: [k for k in ("CPU", "CUDA") if has_kernel(n, k)] for n in operators},
    "cpu_operators": ["hstree::" + name for name in CPU_OPERATORS],
    "gathered": gathered.tolist(),
}))
"""


class Kernel(NamedTuple):
    name: str
    architecture: str  # such as sm_90
    registers: int
    spill: int  # bytes, stores and loads
    shared: int  # bytes, static


class Python:
    """Run Python code in a process whose torch has CUDA or is patched to report it."""

    def __init__(self, home: Path, version: str, folder: Path) -> None:
        self.preamble = ""
        self.environment = dict(os.environ)
        # Uses the architectures of setup.py, and imports nothing before the built modules.
        for variable in ("TORCH_CUDA_ARCH_LIST", "PYTHONPATH"):
            self.environment.pop(variable, None)
        if torch.version.cuda is not None:
            return
        self.preamble = PRETEND.format(version=version)
        for library, source in (("torch_cuda", STUB), ("c10_cuda", "")):
            command = ["c++", "-x", "c", "-shared", "-fPIC", "-", "-o", f"{folder}/lib{library}.so"]
            subprocess.run(command, input=source, text=True, check=True)
        self.environment["LIBRARY_PATH"] = str(folder)
        self.environment["LD_LIBRARY_PATH"] = f"{folder}:{home / 'lib64'}"

    def run(self, code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", self.preamble + code],
            cwd=cwd,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def warnings_of(printed: str) -> list[str]:
    """The warnings of compilers and linker. Those of setuptools are at the beginning of a line, and
    Python's follow a class name."""
    return re.findall(r"^(?!warning: ).*\bwarning\b.*$", printed, re.MULTILINE)


def unbounded_kernels() -> list[str]:
    """Kernels without __launch_bounds__: nvcc may give them more registers than a block has."""
    pattern = re.compile(r"__global__\s+void\s+(?!__launch_bounds__\()(\w+)")
    return [
        f"no __launch_bounds__ in {path.name}: {found[1]}"
        for path in sorted((ROOT / "csrc" / "kernels").iterdir())
        for found in pattern.finditer(path.read_text())
    ]


def demangle(names: list[str]) -> list[str]:
    """Names of kernels without namespaces and parameters."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        return names
    result = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    )
    readable = []
    for name in result.stdout.splitlines():
        bare = name.replace("hstree::", "").replace("(anonymous namespace)::", "")
        readable.append(bare.removeprefix("void ").partition("(")[0])
    return readable


def read_kernels(printed: str) -> list[Kernel]:
    """Reads the report of ptxas -v."""
    _, *sections = re.split(r"Compiling entry function '(\w+)' for '(\w+)'", printed)
    names = demangle(sections[::3])
    kernels = []
    for name, architecture, text in zip(names, sections[1::3], sections[2::3], strict=True):
        registers = re.search(r"Used (\d+) registers", text)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        if registers is None or spills is None:
            raise RuntimeError(f"no report of ptxas for {name} in:\n{text}")
        shared = re.search(r"(\d+) bytes smem", text)
        kernels.append(
            Kernel(
                name,
                architecture,
                int(registers[1]),
                int(spills[1]) + int(spills[2]),
                int(shared[1]) if shared else 0,
            )
        )
    return sorted(kernels)


def report_of_hot(home: Path) -> str:
    """What nvcc prints about the hot kernels on 8.6 and 8.9."""
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (86, 89)]
    command = [str(home / "bin" / "nvcc"), "-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", *codes]
    command += [*NVCC_FLAGS.split(), "-fatbin", "-o", os.devnull]

    def report(name: str) -> str:
        source = str(ROOT / "csrc" / "kernels" / f"{name}.cu")
        result = subprocess.run([*command, source], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
        return result.stderr

    with ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(report, HOT))


def check_module(path: Path) -> list[str]:
    """Problems with the symbols of an extension module."""
    nm = ["nm", "--defined-only", "--format=just-symbols", str(path)]
    symbols = subprocess.run(nm, capture_output=True, text=True, check=True).stdout.split()
    exported = subprocess.run(
        [*nm, "--dynamic"], capture_output=True, text=True, check=True
    ).stdout.split()
    failures = [f"{path.name} is not stripped: {len(symbols)} symbols"] if symbols else []
    expected = f"PyInit_{path.name.partition('.')[0]}"
    if exported != [expected]:
        failures.append(
            f"{path.name}: expected only {expected}, but it exports {' '.join(exported)}"
        )
    return failures


def check_import(python: Python, package: Path) -> list[str]:
    """Import the built modules without a GPU, and check which kernels they registered."""
    shown = python.run(PROBE, package.parent, CUDA_VISIBLE_DEVICES="")
    if shown.returncode != 0:
        return [f"import: {shown.stdout}"]
    probe = json.loads(shown.stdout.splitlines()[-1])
    print(f"imported from {probe['package']}: {probe['build']}")
    failures = []
    if Path(probe["package"]).resolve() != package.resolve():
        failures.append(f"import: expected {package}, got {probe['package']}")
    if probe["gathered"] != [[[1.0, 3.0]]]:
        failures.append(f"feature_gather on the CPU: got {probe['gathered']}")
    kernels, cpu_operators = probe["kernels"], probe["cpu_operators"]
    for name, found in kernels.items():
        expected = ["CPU"] if name in cpu_operators else ["CPU", "CUDA"]
        if found != expected:
            failures.append(f"{name}: expected kernels for {expected}, got {found}")
    failures += [
        f"{name}: CPU-only, but no operator" for name in cpu_operators if name not in kernels
    ]
    print(f"{len(kernels)} operators, on the CPU only: {', '.join(cpu_operators)}")
    return failures


def markdown(kernels: list[Kernel], version: str) -> str:
    """A Markdown page with a row for each kernel and three columns for each architecture."""
    architectures = sorted({kernel.architecture for kernel in kernels})
    heads = [f"{architecture}: {what}" for architecture in architectures
             for what in ("registers", "spills, bytes", "static shared memory, bytes")]  # fmt: skip
    lines = [
        "# Registers, spills and shared memory of the CUDA kernels",
        "",
        f"`python tools/check_cuda.py --report FILE`, nvcc {version}, -O3. Dynamic shared memory "
        "depends on the sizes of a batch and is not counted.",
        "",
        f"| kernel | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(heads)}",
    ]
    rows: dict[str, dict[str, Kernel]] = {}
    for kernel in kernels:  # a kernel that several sources include counts once
        rows.setdefault(kernel.name, {})[kernel.architecture] = kernel
    for name, row in rows.items():
        cells = [f"{row[a].registers} | {row[a].spill} | {row[a].shared}" for a in architectures]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def compiler_version(home: Path) -> str:
    nvcc = [str(home / "bin" / "nvcc"), "--version"]
    printed = subprocess.run(nvcc, capture_output=True, text=True, check=True).stdout
    found = re.search(r"release [^,]+, V(\S+)", printed)
    return found[1] if found else "of unknown version"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args()

    setup = runpy.run_path(str(ROOT / "setup.py"))
    home = setup["cuda_home"]()
    version = setup["nvcc_version"](home)
    if home is None or version is None:
        print(f"nvcc not found in {home or 'CUDA_HOME, PATH and /usr/local/cuda'}")
        return 1
    print(f"CUDA {version} in {home}, torch {torch.__version__}")

    with tempfile.TemporaryDirectory(prefix="hstree-cuda-") as name:
        folder = Path(name)
        python = Python(home, version, folder)
        arguments = ["build", f"--build-base={folder / 'build'}", f"--build-lib={folder / 'lib'}"]
        begin = time.monotonic()
        built = python.run(
            BUILD.format(arguments=arguments),
            ROOT,
            CUDA_HOME=str(home),
            HSTREE_CUDA="1",
            NVCC_APPEND_FLAGS=NVCC_FLAGS,
        )
        seconds = time.monotonic() - begin
        if built.returncode != 0:
            print(built.stdout)
            print(f"FAILED: the build, after {seconds:.0f} s")
            return 1

        hot = report_of_hot(home)
        failures = [*unbounded_kernels(), *warnings_of(built.stdout + hot)]
        kernels, of_hot = read_kernels(built.stdout), read_kernels(hot)
        header = f"{'kernel':76} {'arch':>5} {'registers':>9} {'spill B':>8} {'shared B':>8}"
        print(header, "-" * len(header), sep="\n")
        for kernel in sorted([*kernels, *of_hot]):
            title, architecture, registers, spill, shared = kernel
            print(f"{title:76} {architecture:>5} {registers:9} {spill:8} {shared:8}")
            if spill > 0 and architecture in WITHOUT_SPILLS:
                failures.append(f"{title}, {architecture}: {spill} bytes of spills")
            if shared > MOST_STATIC_BYTES:
                failures.append(f"{title}, {architecture}: {shared} bytes of static shared memory")
        modules = sorted((folder / "lib" / "hstree").glob("*.so"))
        print(f"built in {seconds:.0f} s:", end="")
        for module in modules:
            print(f" {module.name} {module.stat().st_size / 1e6:.1f} MB", end="")
            failures += check_module(module)
        print()
        if len(modules) != 2 or not kernels:
            failures.append(f"expected two modules and kernels, got {modules}, {len(kernels)}")
        failures += check_import(python, folder / "lib" / "hstree")

    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        return 1
    if options.report is not None:
        options.report.write_text(markdown(kernels, compiler_version(home)))
    print(f"no warnings, no spills on {' and '.join(WITHOUT_SPILLS)}, kernels for both devices")
    return 0


if __name__ == "__main__":
    sys.exit(main())
