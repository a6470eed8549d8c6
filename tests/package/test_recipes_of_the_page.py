"""The recipes of docs/architecture.md, followed literally in a copy of the project.

A section has, in this order:

    <!-- file: PATH -->                 above a block: a new file
    ```bash                             commands
    | file | ... begins with | goes |   a table: a line below the line of the file that begins so
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
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.M | re.S)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
ROW = re.compile(r"^\| `(\S+)` \| `(.+)` \| `(.+)` \|$", re.M)
# In a process of its own: loading it registers the operator.
BUILD = """
from torch.utils.cpp_extension import load
load("subset_gather", [{source!r}], **{options!r})
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
    """Does what the section says. Returns the modules that it touches."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", PAGE, re.M | re.S)
    before = {path.relative_to(folder) for path in folder.rglob("*.py")}
    for path, text in FILE.findall(section):
        assert not (folder / path).exists()
        (folder / path).write_text(text)
    for commands in COMMANDS.findall(section):
        subprocess.run(["bash", "-ec", commands], cwd=folder, check=True)
    edited = set()
    for path, begin, new in ROW.findall(section):
        lines = (folder / path).read_text(encoding="utf-8").splitlines()
        (place,) = [n for n, line in enumerate(lines) if line.startswith(begin)]
        lines.insert(place + 1, new)
        (folder / path).write_text("\n".join([*lines, ""]), encoding="utf-8")
        edited.add(path)
    made = {path.relative_to(folder) for path in folder.rglob("*.py")} - before
    assert made
    assert edited
    return sorted({*map(str, made), *edited})


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


def check(folder: Path, modules: list[str], libraries: tuple[str, ...] = ()) -> None:
    """Ruff, in the settings of the project, and the examples in the docstrings."""
    run(folder, "-m", "ruff", "check", *modules)
    run(folder, "-m", "ruff", "format", "--check", *modules)
    names = [Path(path).stem for path in modules if path.startswith("hstree/")]
    of_these = " or ".join(["public", *(name for name in names if name != "__init__")])
    run_tests(folder, "tests/package/test_examples.py", "-k", of_these, libraries=libraries)


def test_add_a_head(copy: Path) -> None:
    touched = follow("Add a head", copy)
    assert len(touched) == 3
    check(copy, touched)
    run_tests(copy, "tests/heads", "-k", "gentle or registry", "-m", "not slow")
    write_corpus(copy / "data", sentences=100)
    small = "--embedding-size 8 --hidden-size 8 --layers 1 --epochs 1 --threads 1 --head gentle"
    run(copy, "-m", "hstree", "train", "--data", "data", "--run", "run", *small.split())


def test_add_an_operator(copy: Path) -> None:
    touched = follow("Add an operator", copy)
    built = copy / "built"
    built.mkdir()
    sources = ("ops/subset_gather.cpp", "cpu/subset_gather.cpp", "cpu/tree_batch.cpp")
    (built / "all.cpp").write_text("".join(f'#include "{source}"\n' for source in sources))
    options = {
        "extra_include_paths": [str(copy / "csrc")],
        "extra_cflags": ["-DTORCH_TARGET_VERSION=0x020b000000000000"],
        "build_directory": str(built),
        "is_python_module": False,
    }
    run(copy, "-c", BUILD.format(source=str(built / "all.cpp"), options=options))
    library = str(built / "subset_gather.so")
    check(copy, touched, (library,))
    run_tests(copy, "tests/ops/test_subset_gather.py", libraries=(library,))
