"""The folder of a run: files that are replaced atomically, by one process at a time."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hstree._files import Content, set_mode, write_atomic, write_synced

from .names import CheckpointError


def lock_folder(folder: Path) -> int | None:
    """A file descriptor that holds the lock of a folder, even if the folder is renamed; None where
    locks are not available. Raises BlockingIOError if another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _temporary_folder(path: Path) -> Path:
    """A new folder next to ``path``; missing parents are created."""
    parent = path.absolute().parent
    for attempt in range(10):
        try:
            parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".part", dir=parent))
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(parent)) from None
        except FileNotFoundError:  # removed by another process that checked whether it can write
            if attempt == 9:
                raise
    raise AssertionError


class RunDirectory:
    """The folder of a new run. It appears, complete, with its first content.

    While it is open, no other process can open it.

    Args:
        path: folder to create; None: ``runs/<default_name>``, with a number appended if that
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
                f"{self.path} already exists, and a run never overwrites another: "
                f"name a new folder, or resume with --resume {self.path}"
            )
        self._check_writable()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The folder of a run to resume. Files that a killed process left incomplete are removed.
        Raises CheckpointError if it does not exist, or another process writes to it."""
        directory = cls.__new__(cls)
        directory.path, directory._default = Path(path), None
        directory.published, directory._lock = True, None
        if not directory.path.is_dir():
            raise CheckpointError(f"{path}: no such run folder")
        directory._take_lock()
        for leftover in directory.path.glob(".*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
        return directory

    def close(self) -> None:
        """Release the lock, so that other processes can open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> None:
        try:
            self._lock = lock_folder(self.path)
        except BlockingIOError:
            raise CheckpointError(f"{self.path}: another process trains in this folder") from None

    def _free_name(self) -> Path:
        assert self._default is not None
        path, number = self._default, 1
        while os.path.lexists(path):
            number += 1
            path = self._default.with_name(f"{self._default.name}-{number}")
        return path

    def _check_writable(self) -> None:
        """Create a folder next to the new one and remove it again, with the parents that were
        missing."""
        parent = self.path.absolute().parent
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        try:
            _temporary_folder(self.path).rmdir()
        except OSError as error:
            raise CheckpointError(
                f"cannot create the run folder {self.path}: {error.strerror or error}"
            ) from None
        finally:
            for folder in missing:
                with suppress(OSError):  # in use by now
                    folder.rmdir()

    def write(self, files: Mapping[str, Content]) -> None:
        """Write files of the run. The first call creates the folder with all of them; later ones
        replace each atomically, in the order given. Raises OSError if one cannot be written."""
        if self.published:
            for name, content in files.items():
                write_atomic(self.path / name, content)
            return
        temporary = _temporary_folder(self.path)
        try:
            self._lock = lock_folder(temporary)
            for name, content in files.items():
                write_synced(temporary / name, content)
            set_mode(temporary, 0o777)
            self._publish(temporary)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"cannot create the run folder {self.path}: {reason}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a file of the run, if it exists."""
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
                self._remove_leftovers()
                return

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed before this folder appeared have left next to
        it."""
        pattern = f".{glob.escape(self.path.name)}-????????.part"
        for leftover in self.path.absolute().parent.glob(pattern):
            with suppress(OSError):  # locked: a process that is still writing
                lock = lock_folder(leftover)
                shutil.rmtree(leftover)
                if lock is not None:
                    os.close(lock)
