"""The Python blocks of README.md and docs/*.md run.

The blocks of a page run in order, in one namespace, in an empty folder. A comment above a block
marks an exception:

    <!-- not run: the reason -->     the block is compiled, and what it names of hstree exists
    <!-- torchrun: ... -->           the same here; tests/distributed/test_guide.py runs it
    <!-- file: ... -->, <!-- after: ... -->, <!-- before: ... -->
                                     left to test_recipes_of_the_page.py
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>(?:(?!-->).)*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
SLOW = {"cookbook.md", "moving.md", "recommenders.md", "transformers.md"}  # more than three seconds
OF_RECIPES = re.compile("file: |after: |before: ")
NOT_RUN = re.compile(r"(not run|torchrun): .+", re.S)


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    runs: bool


def blocks(text: str) -> list[Block]:
    return [
        Block(
            line=text.count("\n", 0, match.start("code")) + 1,
            code=match["code"],
            runs=not NOT_RUN.fullmatch(match["note"] or ""),
        )
        for match in BLOCK.finditer(text)
        if not OF_RECIPES.match(match["note"] or "")
    ]


PAGES = [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if blocks(page.read_text(encoding="utf-8"))
]


def missing_names(tree: ast.AST) -> list[str]:
    """What a block imports from hstree, or names as hstree.x.y, and does not exist."""
    dotted = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name):
                dotted.append(name)
    return [name for name in dotted if name.split(".")[0] == "hstree" and not exists(name)]


def exists(name: str) -> bool:
    try:
        resolve(name)
    except (ModuleNotFoundError, AttributeError):
        return False
    return True


def resolve(name: str) -> Any:
    """The module or attribute of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        return getattr(resolve(parent), attribute)


# PEFT and TRL use old names of transformers.
@pytest.mark.filterwarnings(
    "ignore:.[a-z_]*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"
)
# What the Trainer of Lightning says of a short run on a CPU.
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*you have not used a validation loop")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        code = "\n" * (block.line - 1) + block.code  # so that errors name the line of the page
        tree = ast.parse(code, str(page))
        if block.runs:
            exec(compile(tree, str(page), "exec"), names)
        else:
            assert missing_names(tree) == []


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: a GPU -->\n```python\nhstree.no_name\n```\n"
    assert blocks(text) == [Block(3, "x = 1\n", True), Block(7, "hstree.no_name\n", False)]
    tree = ast.parse("from hstree.heads import PLIF, No\nhstree.heads.Softmax(1, 2).no\nhstree.no")
    assert missing_names(tree) == ["hstree.heads.No", "hstree.no"]
