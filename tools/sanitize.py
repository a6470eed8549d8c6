"""Build hstree with sanitizers, in build/sanitize-NAME, and run tests of the operators on it.

    python tools/sanitize.py address                 # all tests below, on every instruction set
    python tools/sanitize.py thread --capability avx2 tests/ops/test_sample.py -x
    python tools/sanitize.py address --quick         # what CI runs
    python tools/sanitize.py thread --quick          # operators with one thread, two and more

    address   AddressSanitizer and UndefinedBehaviorSanitizer, in one build
    thread    ThreadSanitizer, with two threads; loops of the kernels then run on std::thread
    cuda      AddressSanitizer and UndefinedBehaviorSanitizer on the CUDA kernels, in the emulator

What follows the options goes to pytest instead of the tests below. A finding ends the process with
a stack trace, and the command with an error. Needs g++ with its sanitizer libraries; no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import torch

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = ("portable", "avx2", "avx512")
TESTS = ("tests/ops", "tests/optim", "tests/reference", "tests/trees", "tests/fuzz")
# Every kernel on every instruction set, which the tests choose, and corrupted tables and targets.
QUICK_NAMES = "every_instruction_set or instruction_sets_agree or corrupt or bad_target"
# Operators whose results are compared between numbers of threads.
QUICK = {
    "address": ("tests/ops", "-n", "2", "-k", QUICK_NAMES),
    "thread": ("tests/ops", "-k", "threads"),
}
CUDA_TESTS = ("tests/kernels/test_emulation.py", "-m", "slow", "-k", "sanitizers")

FLAGS = {"address": "address,undefined", "thread": "thread"}
# libstdc++ is loaded before Python, for the sanitizers to find __cxa_throw.
LIBRARIES = {"address": ("libasan.so", "libstdc++.so"), "thread": ("libtsan.so", "libstdc++.so")}
SETTINGS = {
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep much until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    },
    "thread": {
        # torch and Python are not instrumented: what they synchronize by is unknown.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
    },
}


def fail(message: str) -> NoReturn:
    raise SystemExit(f"tools/sanitize.py: {message}")


def library(name: str) -> str:
    """The path of a library of g++."""
    command = ["g++", f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        fail(f"expected g++ with {name}, found none; fix: install the sanitizers of g++")
    return str(Path(path).resolve())


def available() -> tuple[str, ...]:
    """The instruction sets of this machine."""
    best = {"AVX512": 3, "AVX2": 2}.get(torch.backends.cpu.get_cpu_capability(), 1)
    return CAPABILITIES[:best]


def build(name: str) -> Path:
    """Builds the package; what has not changed since the last time is kept."""
    base = ROOT / "build" / f"sanitize-{name}"
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(base)]
    command += ["--build-lib", str(base / "lib")]
    environment = {**os.environ, "HSTREE_SANITIZE": FLAGS[name], "HSTREE_CUDA": "0"}
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
        fail("the build has failed")
    return base / "lib"


def environment_of(name: str, package: Path, capability: str) -> dict[str, str]:
    preload = " ".join(library(each) for each in LIBRARIES[name])
    chosen = {"LD_PRELOAD": preload, "PYTHONPATH": str(package)}
    return {**os.environ, **SETTINGS[name], **chosen, "HSTREE_CPU_CAPABILITY": capability}


def run_tests(name: str, package: Path, capability: str, arguments: list[str]) -> bool:
    """Runs pytest in one process on the sanitized package; returns whether it passed."""
    environment = environment_of(name, package, capability)
    probe = [sys.executable, "-c", "import hstree; print(hstree.__path__[0])"]
    shown = subprocess.run(
        probe, capture_output=True, text=True, check=False, env=environment, cwd=package
    )
    if shown.stdout.strip() != str(package / "hstree"):
        fail(f"expected to import hstree from {package}, got {shown.stdout}{shown.stderr}")
    # The script, unlike `python -m pytest`, does not put the checkout before PYTHONPATH.
    script = Path(sysconfig.get_path("scripts"), "pytest")
    command = [sys.executable, str(script), "-p", "no:cacheprovider", *arguments]
    print(f"===== {name}, {capability}: {' '.join(arguments)}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizer", choices=("address", "thread", "cuda"))
    parser.add_argument(
        "--capability",
        choices=available(),
        action="append",
        help="an instruction set; may be repeated; default: all that this machine has",
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes: a part of the tests")
    options, arguments = parser.parse_known_args()
    name = options.sanitizer
    if name == "cuda" and (options.quick or options.capability):
        given = "--quick" if options.quick else "--capability"
        parser.error(f"{given}: expected the sanitizer address or thread, got cuda")
    capabilities = options.capability or available()[-1 if options.quick else 0 :]
    if name == "cuda":
        command = [sys.executable, "-m", "pytest", *(arguments or CUDA_TESTS)]
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    default = QUICK[name] if options.quick else [path for path in TESTS if (ROOT / path).exists()]
    package = build(name)
    failed = [
        capability
        for capability in capabilities
        if not run_tests(name, package, capability, arguments or list(default))
    ]
    if failed:
        fail(f"{name}: tests have failed with {', '.join(failed)}")
    print(f"{name}: no findings with {', '.join(capabilities)}")


if __name__ == "__main__":
    main()
