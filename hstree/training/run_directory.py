"""The folder of a run: files that are replaced in one step, by one process at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

CONFIG, VOCABULARY, TOKENIZER = "config.json", "vocabulary.txt", "tokenizer.json"
MODEL, STATE = "model.safetensors", "last.safetensors"
METRICS, CURVE, SUMMARY = "metrics.jsonl", "learning_curve.png", "summary.json"

Content: TypeAlias = bytes | Callable[[Path], None]


class CheckpointError(ValueError):
    """A run folder or model file that is missing, foreign, truncated or not consistent."""


def _fill(path: Path, content: Content) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: Content) -> None:
    """Put a file in place in one step: whoever looks sees the old content or the new, and never a
    part of either.

    Args:
        path: the file.
        content: its bytes, or a function that writes them to the path it is given.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        _fill(temporary, content)
        temporary.chmod(0o644)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


class RunDirectory:
    """The folder of a new run, which appears with its first content, complete, and not before.

    While it is open, no other process can open it.

    Args:
        path: folder to create; None: ``runs/<default_name>``, with a number behind it if that
            exists.
        default_name: name where ``path`` is None.

    Raises:
        CheckpointError: ``path`` exists, or a folder cannot be created there. Nothing is left
            behind.
    """

    def __init__(self, path: str | os.PathLike[str] | None, default_name: str) -> None:
        self._default = None if path is not None else Path("runs", default_name)
        self.path = Path(path) if path is not None else self._free_name()
        self.published = False
        self._lock: int | None = None
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"{self.path} exists already; a run never overwrites another: name a new folder, "
                f"or go on with --resume {self.path}"
            )
        self._check_writable()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The folder of a run that goes on, without what a killed process left half-written.

        Raises:
            CheckpointError: there is no such folder, or another process writes to it.
        """
        directory = cls.__new__(cls)
        directory.path, directory._default = Path(path), None
        directory.published, directory._lock = True, None
        if not directory.path.is_dir():
            raise CheckpointError(f"{path}: no such run folder")
        directory._take_lock()
        for leftover in directory.path.glob(".*.part"):
            leftover.unlink(missing_ok=True)
        return directory

    def close(self) -> None:
        """Let other processes open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: no locks
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointError(f"{self.path}: another process trains in this folder") from None
        except OSError:  # a file system without locks
            self.close()

    def _free_name(self) -> Path:
        assert self._default is not None
        path, number = self._default, 1
        while os.path.lexists(path):
            number += 1
            path = self._default.with_name(f"{self._default.name}-{number}")
        return path

    def _check_writable(self) -> None:
        """Create a folder beside the coming one and remove it again, with the parents that were
        missing."""
        parent = self.path.absolute().parent
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        created: list[Path] = []
        try:
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                created.append(folder)
            probe = tempfile.mkdtemp(prefix=f".{self.path.name}-", suffix=".part", dir=parent)
            os.rmdir(probe)
        except OSError as error:
            raise CheckpointError(
                f"cannot create the run folder {self.path}: {error.strerror or error}"
            ) from None
        finally:
            for folder in reversed(created):
                folder.rmdir()

    def write(self, files: Mapping[str, Content]) -> None:
        """Write files of the run. The first call creates the folder with all of them; later ones
        replace each atomically, in the order given."""
        if self.published:
            for name, content in files.items():
                write_atomic(self.path / name, content)
            return
        parent = self.path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", suffix=".part", dir=parent))
        try:
            for name, content in files.items():
                _fill(temporary / name, content)
                _sync(temporary / name)
            temporary.chmod(0o755)
            self._publish(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a file of the run, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def _publish(self, temporary: Path) -> None:
        while True:
            try:
                temporary.rename(self.path)
            except OSError as error:
                if self._default is None or not os.path.lexists(self.path):
                    raise CheckpointError(
                        f"cannot create the run folder {self.path}: {error.strerror}"
                    ) from None
                self.path = self._free_name()
            else:
                self.published = True
                self._take_lock()
                self._remove_leftovers()
                return

    def _remove_leftovers(self) -> None:
        """What processes that were killed before this folder appeared have left beside it."""
        for leftover in self.path.absolute().parent.glob(f".{self.path.name}-????????.part"):
            with suppress(OSError):
                shutil.rmtree(leftover)
