"""The recipes of docs/architecture.md, followed literally in a copy of the project.

A comment above a block says where it goes:

    <!-- file: PATH -->             a new file
    <!-- after: PATH: BEGIN -->     below the line of the file that begins with BEGIN
    <!-- before: PATH: BEGIN -->    above it
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lm.training.toy import write_corpus

import hstree

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"^<!-- (?P<how>file|after|before): (?P<path>\S+?)(?:: (?P<begin>.+?))? -->\n"
    r"```\w+\n(?P<text>.*?)^```$",
    re.M | re.S,
)
# In a process of its own: loading it registers the operator.
BUILD = """
from torch.utils.cpp_extension import load
load("squared_norm", [{source!r}], **{options!r})
"""
LOAD = """
import sys, torch, pytest
for library in {libraries}:
    torch.ops.load_library(library)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project without the recipes, with the compiled modules that this Python imports."""
    for folder in ("hstree", "tests", "csrc"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    installed = Path(hstree.__file__).parent
    for path in (*installed.glob("*.so"), installed / "_build_info.py"):
        shutil.copy(path, tmp_path / "hstree")
    return tmp_path


def follow(heading: str, folder: Path) -> list[str]:
    """Does what the section says. Returns the paths of the files that it touches."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", PAGE, re.M | re.S)
    touched = []
    for block in BLOCK.finditer(section):
        path = folder / block["path"]
        touched.append(block["path"])
        if block["how"] == "file":
            assert not path.exists()
            path.parent.mkdir(exist_ok=True)
            path.write_text(block["text"])
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (place,) = [n for n, line in enumerate(lines) if line.startswith(block["begin"])]
        lines.insert(place + (block["how"] == "after"), block["text"])
        path.write_text("".join(lines), encoding="utf-8")
    return sorted(set(touched))


def run(folder: Path, *arguments: str) -> None:
    """Runs Python in the copy, which must succeed."""
    shown = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(folder / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout[-4000:] + shown.stderr[-2000:]


def run_tests(folder: Path, *arguments: str, libraries: tuple[str, ...] = ()) -> None:
    run(folder, "-c", LOAD.format(libraries=libraries), "-q", *arguments)


def check(folder: Path, touched: list[str], libraries: tuple[str, ...] = ()) -> None:
    """Ruff, in the settings of the project, and the examples in the docstrings."""
    modules = [path for path in touched if path.endswith(".py")]
    run(folder, "-m", "ruff", "check", *modules)
    run(folder, "-m", "ruff", "format", "--check", *modules)
    packages = {Path(path).parts[1] for path in modules if path.startswith("hstree/")}
    names = " or ".join(sorted(packages))
    run_tests(folder, "tests/package/test_examples.py", "-k", names, libraries=libraries)


def train(folder: Path, *flags: str) -> None:
    write_corpus(folder / "data", sentences=100)
    small = "--embedding-size 8 --hidden-size 8 --layers 1 --epochs 1 --threads 1"
    arguments = ("train", "--data", "data", "--run", "run", *small.split(), *flags)
    run(folder, "-m", "hstree", *arguments)


def test_add_a_head(copy: Path) -> None:
    touched = follow("Add a head", copy)
    assert len(touched) <= 6
    check(copy, touched)
    run_tests(copy, "tests/heads", "-k", "gentle or registry", "-m", "not slow")
    train(copy, "--head", "gentle")


def test_add_a_tree_recipe(copy: Path) -> None:
    check(copy, follow("Add a tree recipe", copy))
    run_tests(copy, "tests/trees/test_ordered.py")
    train(copy, "--recipe", "ordered")


def test_add_a_measurement(copy: Path) -> None:
    check(copy, follow("Add a measurement", copy))
    run_tests(copy, "tests/lab/test_uncertainty.py")
    train(copy)
    run(copy, "-m", "hstree", "analyze", "uncertainty", "run")
    assert "entropy" in (copy / "uncertainty" / "uncertainty.json").read_text()


def test_add_an_op(copy: Path) -> None:
    touched = follow("Add an op", copy)
    assert len(touched) <= 12
    sources = ("ops/squared_norm.cpp", "cpu/squared_norm.cpp")
    built = copy / "built"
    built.mkdir()
    (built / "all.cpp").write_text("".join(f'#include "{source}"\n' for source in sources))
    options = {
        "extra_include_paths": [str(copy / "csrc")],
        "extra_cflags": ["-DTORCH_TARGET_VERSION=0x020b000000000000"],
        "build_directory": str(built),
        "is_python_module": False,
    }
    run(copy, "-c", BUILD.format(source=str(built / "all.cpp"), options=options))
    library = str(built / "squared_norm.so")
    check(copy, touched, (library,))
    run_tests(copy, "tests/ops/test_squared_norm.py", libraries=(library,))
