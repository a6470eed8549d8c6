"""Atomic writing of files, and reading of tensors into their own memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor

Content: TypeAlias = bytes | Callable[[Path], None]
"""Content of a file: bytes, or a function that writes them to a given path."""


def write_atomic(path: Path, content: Content) -> None:
    """Write a file atomically: readers see either the old content or the new.

    Args:
        path: the file.
        content: its bytes, or a function that writes them to the path it is given.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    write_together(path.parent, {path.name: content})


def write_together(folder: Path, files: Mapping[str, Content]) -> None:
    """Write files of a folder by name: first all of them, then each is replaced atomically, in the
    order given. If one of them cannot be written, all keep their old content.

    Raises:
        OSError: a file cannot be written; the message names it.
    """
    path = folder / next(iter(files))
    try:
        # A folder, because a function may create temporary files next to its file.
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".part", dir=folder))
        try:
            for name, content in files.items():
                path = folder / name
                write_synced(part / name, content)
            for name in files:
                path = folder / name
                (part / name).replace(path)
            _sync(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise type(error)(f"cannot write {path}: {error.strerror or error}") from error


def write_synced(path: Path, content: Content) -> None:
    """Write a file with the permissions of a new file, and flush it to the disk. Raises OSError if
    that fails."""
    try:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
    except SafetensorError as error:  # a full disk
        raise OSError(str(error)) from error
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


def tensor_names(path: str | os.PathLike[str]) -> list[str]:
    """Names of the tensors of a safetensors file; raises as :func:`read_tensors`."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
