"""Run the operators' tests with the installed binary under other versions of Python and torch.

    python tools/check_binary.py PYTHON... [-- PYTEST-ARGUMENTS]

Each PYTHON needs torch (2.11 or later) and the packages of tests/requirements.txt, but not hstree.
hstree._C is copied unchanged, since one binary works for all. hstree._host depends on the Python
version and is compiled for each. By default, pytest runs tests/ops.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pybind11

import hstree

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(hstree.__file__).parent

DESCRIBE = (
    "import sys, torch, hstree, hstree._C\n"
    "print(f'Python {sys.version.split()[0]}, torch {torch.__version__}: {hstree._C.__file__}')\n"
    "print(hstree.build_info())\n"
)


def query(python: str, expression: str) -> str:
    code = f"import sysconfig; print({expression})"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def assemble(python: str, folder: Path) -> None:
    """Copy the installed package into `folder` with a host module for `python`."""
    ignore = shutil.ignore_patterns("__pycache__", "_host.*.so")
    shutil.copytree(PACKAGE, folder / "hstree", ignore=ignore)
    suffix = query(python, "sysconfig.get_config_var('EXT_SUFFIX')")
    if suffix == sysconfig.get_config_var("EXT_SUFFIX"):
        shutil.copy(PACKAGE / f"_host{suffix}", folder / "hstree")
        return
    command = ["c++", "-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC"]
    command += ["-shared", "-s", f"-I{ROOT / 'csrc'}", f"-I{pybind11.get_include()}"]
    command += ["-I" + query(python, "sysconfig.get_path('include')")]
    command += [str(path) for path in sorted((ROOT / "csrc" / "host").glob("*.cpp"))]
    subprocess.run([*command, "-o", folder / "hstree" / f"_host{suffix}"], check=True)


def check(python: str, arguments: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="hstree-binary-") as name:
        folder = Path(name)
        assemble(python, folder)
        # This copy takes precedence over any other hstree, also in subprocesses of the tests.
        environment = os.environ | {"PYTHONPATH": name}
        subprocess.run([python, "-c", DESCRIBE], cwd=folder, env=environment, check=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        # Warnings of other versions of torch are not errors here.
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-W", "default"]
        shown = subprocess.run([*command, *arguments], cwd=folder, env=environment, check=False)
        return shown.returncode == 0


def main(arguments: list[str]) -> int:
    pythons, separator, rest = arguments, "--", [str(ROOT / "tests" / "ops")]
    if separator in arguments:
        place = arguments.index(separator)
        pythons, rest = arguments[:place], arguments[place + 1 :]
    if not pythons:
        print(__doc__, file=sys.stderr)
        return 2
    failed = [python for python in pythons if not check(python, rest)]
    if failed:
        print("FAILED: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
