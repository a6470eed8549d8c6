"""Tree files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_bytes

from hstree._files import write_atomic

_FORMAT = "hstree.Tree"
_VERSION = "1"
_DTYPES = {"order": np.int32, "node_offset": np.int64, "boundary": np.int32}


def write_tree(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays of a tree to a safetensors file, atomically."""
    metadata = {"format": _FORMAT, "version": _VERSION}
    write_atomic(path, safetensors_bytes(dict(arrays), metadata=metadata))


def read_tree(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a saved tree. Their content is not checked. Raises the errors of
    :meth:`hstree.trees.Tree.load`."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got a folder or a device")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a tree saved by hstree, got a file that is truncated or is not "
            f"safetensors ({error})"
        ) from None
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: expected a tree saved by hstree (format {_FORMAT!r}), "
            f"got format {metadata.get('format')!r}"
        )
    if metadata.get("version") != _VERSION:
        raise ValueError(
            f"{path}: expected version {_VERSION!r} of {_FORMAT}, got {metadata.get('version')!r}"
        )
    wanted = {name: np.dtype(dtype) for name, dtype in _DTYPES.items()}
    found = {name: array.dtype for name, array in arrays.items()}
    if found != wanted:
        raise ValueError(f"{path}: expected arrays {wanted}, got {found}")
    return arrays
