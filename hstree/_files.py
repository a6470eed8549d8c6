"""Atomic writing of files, and reading of tensors into their own memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from safetensors import safe_open
from torch import Tensor

Content: TypeAlias = bytes | Callable[[Path], None]
"""Content of a file: bytes, or a function that writes them to a given path."""


def write_atomic(path: Path, content: Content) -> None:
    """Write a file atomically: readers see either the old content or the new.

    Args:
        path: the file.
        content: its bytes, or a function that writes them to the path it is given.
    """
    # A folder, because the function may create temporary files next to the file.
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent))
    temporary = folder / path.name
    try:
        write_synced(temporary, content)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_synced(path: Path, content: Content) -> None:
    """Write a file with the permissions of a new file, and flush it to the disk."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    set_mode(path, 0o666)
    _sync(path)


def set_mode(path: Path, mode: int) -> None:
    """Set the permissions of a new file or folder; temporary ones have fewer."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(mode & ~mask)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_tensors(
    path: str | os.PathLike[str], prefix: str = ""
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, on the CPU.

    Every tensor is copied to its own memory with the alignment of torch (64 bytes). The tensors
    that safetensors returns can start at any address. Matrix products with those can be slower, and
    on some CPUs their last bits differ from the same products before the file was saved.

    Args:
        path: the file.
        prefix: prefix of the names of the tensors to read; removed from the names.

    Raises:
        FileNotFoundError: if the file does not exist.
        OSError: if it cannot be read.
        safetensors.SafetensorError: if it is truncated or not a safetensors file.
    """
    with safe_open(path, framework="pt") as file:
        tensors: dict[str, Tensor] = {
            name.removeprefix(prefix): file.get_tensor(name).clone()
            for name in file.keys()  # noqa: SIM118
            if name.startswith(prefix)
        }
        metadata: dict[str, str] = file.metadata() or {}
    return tensors, metadata
