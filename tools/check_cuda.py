"""Compiles every CUDA source for the supported architectures and reports what the kernels use.

Fails on any warning, on any register spill, on a kernel with no __launch_bounds__ or with more
static shared memory than csrc/kernels/launch.h allows, and on a torch include below csrc/kernels.
Needs nvcc but neither a GPU nor torch:

    python tools/check_cuda.py [--report benchmarks/results/cuda-registers.md]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).resolve().parents[1] / "csrc" / "kernels"
ARCHITECTURES = ("80", "90")
MOST_STATIC_BYTES = 24 << 10  # most_static_bytes of csrc/kernels/launch.h
# As torch.utils.cpp_extension.BuildExtension compiles.
TORCH_DEFINES = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)


class Kernel(NamedTuple):
    name: str
    registers: int
    spill: int  # bytes, stores and loads
    shared: int  # bytes, static


def find_nvcc() -> Path | None:
    """nvcc itself, behind a wrapper script too: CUDA_HOME, else PATH and what it says of itself."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if nvcc.is_file():
            return nvcc
        sys.exit(f"CUDA_HOME is {home}, but there is no {nvcc}: correct or unset CUDA_HOME")
    found = shutil.which("nvcc")
    if found is None:
        return None
    dry_run = subprocess.run(
        [found, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ (?:_?TOP)=(.*)$", dry_run.stderr + dry_run.stdout, re.MULTILINE)
    if top is not None:
        nvcc = Path(top.group(1).strip()) / "bin" / "nvcc"
        if nvcc.is_file():
            return nvcc.resolve()
    return Path(found)


def torch_includes() -> list[str]:
    """Lines below csrc/kernels that include a header of torch."""
    pattern = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2)/')
    return [
        f"{path.name}:{number}: {line}"
        for path in sorted(KERNELS.iterdir())
        if path.suffix in (".cu", ".cuh", ".h")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def unbounded_kernels() -> list[str]:
    """Kernels below csrc/kernels without __launch_bounds__: nvcc may give them more registers than
    a block has."""
    pattern = re.compile(r"__global__\s+void\s+(?!__launch_bounds__\()(\w+)")
    return [
        f"{path.name}: {found.group(1)}"
        for path in sorted(KERNELS.iterdir())
        if path.suffix in (".cu", ".cuh", ".h")
        for found in pattern.finditer(path.read_text())
    ]


def compile_source(nvcc: Path, source: Path, architecture: str, folder: Path) -> str:
    """Returns what the compiler printed; raises RuntimeError with it on errors and warnings."""
    output = folder / f"{source.stem}.{architecture}.o"
    command = [str(nvcc), "-std=c++17", "-O3", *TORCH_DEFINES, "-Werror", "all-warnings"]
    command += ["-Xcompiler", "-Wall,-Wextra,-fPIC", "-Xptxas", "-v"]
    command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    result = subprocess.run(
        [*command, "-c", str(source), "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    printed = result.stdout + result.stderr
    if result.returncode != 0 or "warning" in printed.lower():
        raise RuntimeError(f"{source.name}, sm_{architecture}:\n{printed}")
    return printed


def demangle(names: list[str]) -> list[str]:
    """Readable names of kernels, without namespaces and parameters."""
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


def parse(printed: str) -> list[Kernel]:
    """Reads the report of ptxas -v."""
    sections = re.split(r"Compiling entry function '(\w+)' for '\w+'", printed)[1:]
    names = demangle(sections[::2])
    kernels = []
    for name, text in zip(names, sections[1::2], strict=True):
        registers = re.search(r"Used (\d+) registers", text)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
        if registers is None or not spills:
            raise RuntimeError(f"no report of ptxas for {name} in:\n{text}")
        shared = re.search(r"(\d+) bytes smem", text)
        kernels.append(
            Kernel(
                name,
                int(registers.group(1)),
                sum(int(n) for n in spills),
                int(shared.group(1)) if shared else 0,
            )
        )
    return kernels


def compiler_version(nvcc: Path) -> str:
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release [^,]+, V(\S+)", printed)
    return found.group(1) if found else "of unknown version"


def markdown(kernels: dict[str, dict[str, Kernel]], version: str) -> str:
    """Markdown; kernels by name and architecture."""
    heads = [f"sm_{architecture}: {what}" for architecture in ARCHITECTURES
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
    for name in sorted(kernels):
        cells = []
        for architecture in ARCHITECTURES:
            kernel = kernels[name][architecture]
            cells += [str(kernel.registers), str(kernel.spill), str(kernel.shared)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optional", action="store_true", help="succeed where nvcc is not found")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args()

    failures = [f"torch include in {line}" for line in torch_includes()]
    failures += [f"no __launch_bounds__ in {kernel}" for kernel in unbounded_kernels()]
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc not found: CUDA sources not checked (looked at CUDA_HOME and PATH)")
        return 0 if options.optional and not failures else 1
    print(f"nvcc: {nvcc}")

    sources = sorted(KERNELS.glob("*.cu"))
    jobs = [(source, architecture) for source in sources for architecture in ARCHITECTURES]
    header = f"{'kernel':76} {'arch':>5} {'registers':>9} {'spill B':>8} {'shared B':>8}"
    print(header, "-" * len(header), sep="\n")
    found: dict[str, dict[str, Kernel]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = [
            pool.submit(compile_source, nvcc, source, architecture, Path(folder))
            for source, architecture in jobs
        ]
        for (_, architecture), report in zip(jobs, reports, strict=True):
            try:
                kernels = parse(report.result())
            except RuntimeError as error:
                failures.append(str(error))
                continue
            for kernel in sorted(kernels):
                name, registers, spill, shared = kernel
                found.setdefault(name, {})[architecture] = kernel
                print(f"{name:76} {'sm_' + architecture:>5} {registers:9} {spill:8} {shared:8}")
                if spill > 0:
                    failures.append(f"{name}, sm_{architecture}: {spill} bytes of spills")
                if shared > MOST_STATIC_BYTES:
                    failures.append(
                        f"{name}, sm_{architecture}: {shared} bytes of static shared memory"
                    )
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures and options.report is not None:
        options.report.write_text(markdown(found, compiler_version(nvcc)))
    if not failures:
        print(f"{len(sources)} sources, {len(ARCHITECTURES)} architectures: no warnings, no spills")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
