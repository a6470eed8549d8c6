"""Tensors from files lie in memory of their own, wherever they lie in the file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hstree._files import read_tensors

PACKAGE = Path(__file__).resolve().parents[2] / "hstree"
ALIGNMENT = 64  # bytes, of what torch allocates on a CPU


def test_tensors_are_aligned_and_share_no_memory(tmp_path: Path) -> None:
    """Whatever the sizes before them in the file, and the length of its header."""
    torch.manual_seed(0)
    for length in range(8):
        saved = {
            "bytes": torch.randint(255, (3,), dtype=torch.uint8),
            "empty": torch.zeros(0, 4),
            "half": torch.randn(5).bfloat16(),
            "long": torch.arange(7),
            "weight": torch.randn(3, 17),
        }
        save_file(saved, tmp_path / "file", {"key": "x" * length})
        read, metadata = read_tensors(tmp_path / "file")
        assert metadata == {"key": "x" * length}
        assert read.keys() == saved.keys()
        for name, tensor in read.items():
            assert tensor.dtype == saved[name].dtype
            assert torch.equal(tensor, saved[name])
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_tensors_of_a_prefix(tmp_path: Path) -> None:
    save_file({"head.bias": torch.ones(2), "body": torch.zeros(3)}, tmp_path / "file")
    read, _ = read_tensors(tmp_path / "file", "head.")
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"bias": [1.0, 1.0]}


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"no safetensors")
    with pytest.raises(SafetensorError):
        read_tensors(tmp_path / "file")


def test_no_other_module_reads_tensors() -> None:
    """Only trees, whose arrays are of numpy and copied by their constructor, beside it."""
    calls = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Name, ast.Attribute))
        if re.search(r"\b(get_tensor|load_file|torch\.load)$", ast.unparse(node))
    }
    assert calls == {"_files.py", "trees/files.py"}


def test_no_test_has_a_time_limit() -> None:
    """A busy machine makes any limit on the clock too short; what hangs is ended from outside."""
    clock = re.compile(r"\btimeout=\(?\d|\btimeout\(|\balarm\(|\bperf_counter\(\) [<>]")
    tests = Path(__file__).resolve().parents[1]
    found = [
        f"{path.relative_to(tests)}:{number}"
        for path in tests.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if clock.search(line) and path != Path(__file__).resolve()
    ]
    assert not found
