"""Files: written in one step, so that no reader sees a part, and tensors read into memory of their
own."""

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
"""Bytes of a file, or a function that writes them to the path it is given."""


def write_atomic(path: Path, content: Content) -> None:
    """Put a file in place in one step: whoever looks sees the old content or the new, and never a
    part of either.

    Args:
        path: the file.
        content: its bytes, or a function that writes them to the path it is given.
    """
    # A folder, because who fills the file may make temporary files of their own beside it.
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent))
    temporary = folder / path.name
    try:
        write_synced(temporary, content)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_synced(path: Path, content: Content) -> None:
    """Write a file, to the disk itself, with the permissions of a new one."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    set_mode(path, 0o666)
    _sync(path)


def set_mode(path: Path, mode: int) -> None:
    """The permissions that a new file or folder would have; temporary ones have fewer."""
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
    """Tensors and metadata of a safetensors file, on the CPU; of the tensors those whose names
    begin with a prefix, named without it.

    Every tensor is a copy in memory of its own, aligned as torch aligns what it allocates (64
    bytes). The tensors that safetensors returns begin at any address. With those, matrix products
    can be slower, and on some CPUs differ in the last bits from the same products before the file
    was saved.

    Raises:
        FileNotFoundError: there is no such file.
        OSError, safetensors.SafetensorError: it cannot be read, is truncated, or is no safetensors
            file.
    """
    with safe_open(path, framework="pt") as file:
        tensors: dict[str, Tensor] = {
            name.removeprefix(prefix): file.get_tensor(name).clone()
            for name in file.keys()  # noqa: SIM118
            if name.startswith(prefix)
        }
        metadata: dict[str, str] = file.metadata() or {}
    return tensors, metadata
