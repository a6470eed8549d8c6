"""Imports flow one way: kernel -> op -> head -> model -> trainer -> cli; nothing points back."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hstree

ROOT = Path(__file__).resolve().parents[2]

# What each room of hstree/ may import from others: first the core, then the reference language
# model (lm), then the laboratory (lab). The modules of lm import those above them in this list.
TRAINER = ("report", "data", "model", "generate", "config", "run", "train", "cli")
ROOMS: dict[str, set[str]] = {
    "trees": set(),
    "ops": {"trees"},
    "optim": {"ops"},
    "heads": {"trees", "ops", "optim"},
    "lm": {"trees", "ops", "optim", "heads"},
    "lab": {"trees", "ops", "heads", "lm"},
}

# The rooms of csrc/, and what must not be included there at all.
NATIVE_ROOMS: dict[str, set[str]] = {
    "kernels": set(),
    "host": {"kernels"},
    "cpu": {"kernels"},
    "ops": {"kernels", "cpu"},
}
TORCH = r"(torch|ATen|c10|caffe2)/"
FORBIDDEN_INCLUDES: dict[str, str] = {
    "kernels": rf"{TORCH}|pybind11/|Python\.h|numpy/",
    "host": rf"{TORCH}|cuda",
    "cpu": r"ATen/|c10/|pybind11/|Python\.h|cuda",
    "ops": r"ATen/|c10/|caffe2/|torch/extension\.h|torch/all\.h|torch/torch\.h|pybind11/",
}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi"))


def imported_modules(path: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yields line and name of each module of hstree that a file imports, anywhere in it."""
    package = path.relative_to(root).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from hstree import ops` names a room in the alias, not in the module.
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "hstree":
                yield node.lineno, name


def room_of(module: str) -> str:
    """Returns the room of a dotted name: "heads" for hstree.heads.base, "" for a root module."""
    parts = module.split(".")[1:]
    return parts[0] if parts and parts[0] in ROOMS else ""


def files_of(room: str) -> Iterator[Path]:
    """The files of a room, without those of the rooms in it."""
    for path in python_files(ROOT / "hstree" / room):
        if room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) == room:
            yield path


def test_every_folder_is_a_known_room() -> None:
    hstree = ROOT / "hstree"
    folders = {
        str(path.relative_to(hstree)) for path in hstree.iterdir() if list(path.glob("*.py"))
    }
    assert folders == set(ROOMS)
    native = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert native <= set(NATIVE_ROOMS)


@pytest.mark.parametrize("rooms", [ROOMS, NATIVE_ROOMS], ids=["hstree", "csrc"])
def test_allowed_imports_have_no_cycle(rooms: dict[str, set[str]]) -> None:
    earlier: set[str] = set()
    for room, allowed in rooms.items():
        assert allowed <= earlier, f"{room} may import a room that is not below it"
        earlier.add(room)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_flow_one_way(room: str) -> None:
    allowed = ROOMS[room] | {room, ""}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room} imports {module}"
        for path in files_of(room)
        for line, module in imported_modules(path)
        if room_of(module) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_trainer_is_read_in_one_direction() -> None:
    folder = ROOT / "hstree" / "lm"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", *TRAINER}
    for number, name in enumerate(TRAINER):
        imported = {
            module.split(".")[2]
            for _, module in imported_modules(folder / f"{name}.py")
            if module.startswith("hstree.lm.")
        }
        assert imported <= set(TRAINER[:number]), name


def test_modules_import_each_other_in_no_circle() -> None:
    """Also not for types, and not inside functions. ``import hstree`` itself does not count."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in python_files(ROOT / "hstree")
    }
    imports = {
        module: {name if name in modules else name.rpartition(".")[0] for _, name in found}
        - {module, "hstree"}
        for module, path in modules.items()
        if (found := list(imported_modules(path)))
    }
    graphlib.TopologicalSorter(imports).prepare()


def test_the_page_on_architecture_says_the_same() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(hstree|csrc)/([\w/]+)` \|.*\| ([^|]+) \|$", page, flags=re.M)
    told = {
        (house, room): set() if imports == "-" else set(imports.split(", "))
        for house, room, imports in table
    }
    rooms = {("hstree", room): allowed for room, allowed in ROOMS.items()}
    rooms |= {("csrc", room): allowed for room, allowed in NATIVE_ROOMS.items()}
    assert told == rooms


def test_the_picture_is_drawn_from_the_table() -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "tools" / "draw_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert picture == tool.draw(page), "run: python tools/draw_architecture.py"


def test_every_path_on_the_page_on_architecture_exists() -> None:
    """STEM and NAME in a path stand for any operator, measurement or extra."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:hstree|csrc|tests|tools|docs|\.ci)/[\w./-]+)`", page)
    assert len(paths) > 25
    patterns = [path.replace("STEM", "target_log_softmax").replace("NAME", "*") for path in paths]
    assert [path for path in patterns if not list(ROOT.glob(path))] == []


def test_only_trees_import_the_host_module() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files(ROOT / "hstree")
        for line, module in imported_modules(path)
        if module.startswith("hstree._host") and path.parent.name != "trees"
    ]
    assert not wrong, "\n".join(wrong)


def test_only_ops_call_the_operators() -> None:
    """Above hstree/ops, the public functions are the way in."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(ROOT / "hstree")
        if path.relative_to(ROOT).parts[1] != "ops"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.hstree"
    ]
    assert not wrong, "\n".join(wrong)


def test_root_modules_do_not_import_rooms() -> None:
    """Only hstree/__init__.py gathers the core, and hstree/__main__.py the commands. Deferred
    logits and transformers lie above the heads; modules beside them lie below all rooms."""
    above = ("__init__", "__main__", "deferred", "transformers")
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in (ROOT / "hstree").glob("*.py*")
        if path.suffix in (".py", ".pyi") and path.stem not in above
        for line, module in imported_modules(path)
        if room_of(module)
    ]
    assert not wrong, "\n".join(wrong)


def includes(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if match:
            yield number, match[1]


@pytest.mark.parametrize("room", NATIVE_ROOMS)
def test_includes_flow_one_way(room: str) -> None:
    folder = ROOT / "csrc" / room
    wrong = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for line, name in includes(path):
            beside = (path.parent / name).resolve()
            target = (beside if beside.exists() else ROOT / "csrc" / name).parent.name
            backwards = target in NATIVE_ROOMS and target not in NATIVE_ROOMS[room] | {room}
            if backwards or re.match(FORBIDDEN_INCLUDES[room], name):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} includes {name}")
    assert not wrong, "\n".join(wrong)


def test_import_scan_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "hstree" / "trees" / "bad.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import hstree.ops.path_log_prob\n"
        "from hstree import heads\n"
        "def f():\n"
        "    from ..lm import train\n"
        "    from . import tree\n"
        "    import numpy\n"
    )
    found = [room_of(module) for _, module in imported_modules(path, tmp_path)]
    assert sorted(found) == ["heads", "lm", "ops", "trees"]


def test_include_pattern_sees_what_it_must() -> None:
    kernels = FORBIDDEN_INCLUDES["kernels"]
    assert re.match(kernels, "torch/csrc/stable/tensor.h")
    assert re.match(kernels, "ATen/ATen.h")
    assert not re.match(kernels, "cuda_runtime.h")
    assert re.match(FORBIDDEN_INCLUDES["host"], "cuda_runtime.h")


def test_the_walk_of_a_batch_is_short_and_complete() -> None:
    """docs/architecture.md names every file that a call of the default head enters."""
    classes = 10_000
    head = hstree.TreeEnsemble.from_counts(16, classes / torch.arange(1, classes + 1))
    hidden, target = torch.randn(3, 16, requires_grad=True), torch.tensor([0, 1, classes - 1])
    head(hidden, target)  # what is done once
    entered: set[Path] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        entered.update([Path(frame.f_code.co_filename)] if event == "call" else [])

    sys.setprofile(note)
    try:
        head(hidden, target)
    finally:
        sys.setprofile(None)
    package = Path(hstree.__file__).parent
    own = {f"hstree/{path.relative_to(package)}" for path in entered if package in path.parents}
    assert len(own) <= 11
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = page.partition("## One batch through the default head")[2].partition("\n## ")[0]
    assert {path for path in own if path not in walk} == set()
