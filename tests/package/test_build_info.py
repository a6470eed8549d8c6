"""What the installed package says about itself; that its binary keeps to stable interfaces."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

import hstree

PACKAGE = Path(hstree.__file__).parent


def module_file(name: str) -> Path:
    spec = importlib.util.find_spec(f"hstree.{name}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def test_version_is_that_of_the_distribution() -> None:
    assert hstree.__version__ == hstree.build_info().version == metadata.version("hstree")


def test_build_info() -> None:
    info = hstree.build_info()
    assert dataclasses.is_dataclass(info)
    assert info.torch_target == "2.11"
    assert re.match(r"\d+\.\d+", info.torch)
    assert re.match(r"3\.\d+\.\d+", info.python)
    assert info.compiler
    assert (info.cuda is None) == (info.cuda_arch_list is None)
    assert (info.cuda is None) == bool(info.cpu_only)
    assert hstree.build_info() is info
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.torch = "1.0"  # type: ignore[misc]


def test_import_registers_the_operators() -> None:
    for name in ("forward", "group_log_prob", "feature_gather"):
        assert isinstance(getattr(torch.ops.hstree, name), torch._ops.OpOverloadPacket)


def test_marker_of_typed_packages_is_installed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_operators_are_one_binary_for_all_pythons() -> None:
    assert module_file("_C").name in ("_C.abi3.so", "_C.pyd")


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")
@pytest.mark.parametrize("name", ["_C", "_host"])
def test_modules_export_only_their_init_function(name: str) -> None:
    """Else templates of the standard library could be taken from here by other libraries."""
    shown = subprocess.run(
        ["nm", "--dynamic", "--defined-only", module_file(name)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == [f"PyInit_{name}"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")
def test_operators_use_only_the_stable_interface_of_torch() -> None:
    """No C++ symbol of at::, c10:: or torch::, which change between versions, is left undefined."""
    shown = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", module_file("_C")],
        capture_output=True,
        text=True,
        check=True,
    )
    symbols = [line.split()[-1] for line in shown.stdout.splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
    unstable = [
        symbol for symbol in symbols if re.match(r"_ZN?K?(St|S\w_)?(2at|3c10|5torch)", symbol)
    ]
    assert not unstable
    python = [symbol for symbol in symbols if symbol.startswith(("_Py", "PyUnstable"))]
    assert not python, "private Python functions are outside the limited API"
