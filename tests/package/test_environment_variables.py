"""docs/platforms.md lists every environment variable that the sources read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "setup.py",
    *(ROOT / "build_backend").rglob("*.py"),
    *(ROOT / "hstree").rglob("*.py"),
]
GETENV = re.compile(r'getenv\("(\w+)"\)')
READ_BY_TORCH = {"MAX_JOBS"}  # by torch.utils.cpp_extension alone


def strings(node: ast.AST) -> set[str]:
    return {
        child.value
        for child in ast.walk(node)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    }


def read_in_python(source: str) -> set[str]:
    """Names of variables that a module reads, by its string constants: a name in capitals where the
    module uses os.environ, or any that begins with HSTREE_."""
    tree = ast.parse(source)
    names = {name for name in strings(tree) if re.fullmatch(r"[A-Z][A-Z0-9_]+", name)}
    if "os.environ" in source:
        return {name for name in names if name.startswith("HSTREE_") or is_read(tree, name)}
    return {name for name in names if name.startswith("HSTREE_")}


def is_read(tree: ast.AST, name: str) -> bool:
    """Whether an expression of os.environ, or a loop over the names, mentions the name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.Subscript, ast.Compare)):
            names = strings(node)
        elif isinstance(node, ast.For):
            names = strings(node.iter)
        else:
            continue
        if name in names and "os.environ" in ast.unparse(node):
            return True
    return False


def read_in_sources() -> set[str]:
    names: set[str] = set()
    for path in SOURCES:
        names |= read_in_python(path.read_text(encoding="utf-8"))
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file():
            names |= set(GETENV.findall(path.read_text(encoding="utf-8")))
    return names


def documented() -> set[str]:
    page = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[A-Z][^|]*`) \|", page, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_variable_has_a_row_and_every_row_a_variable() -> None:
    assert documented() - READ_BY_TORCH == read_in_sources()


def test_variables_are_found() -> None:
    assert read_in_python('import os\nos.environ.get("NAME")\n"OTHER"') == {"NAME"}
    assert read_in_python('import os\n"NAME" in os.environ') == {"NAME"}
    assert read_in_python('NAME = "HSTREE_NAME"') == {"HSTREE_NAME"}
    loop = 'import os\nfor name in ("A_B", "C_D"):\n    os.environ.get(name)\nother = ("E_F",)'
    assert read_in_python(loop) == {"A_B", "C_D"}
    assert "HSTREE_CPU_CAPABILITY" in read_in_sources()  # in csrc
