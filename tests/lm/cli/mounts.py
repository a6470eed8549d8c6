"""File systems that are full or read-only, in a child process with mounts of its own."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_NEW_USERS, _NEW_MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18  # MS_*
_UNAVAILABLE = 77


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _separate() -> None:
    """Give this process mounts of its own, as root of a new user namespace."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USERS | _NEW_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)


def mount_memory(folder: Path, size: int) -> None:
    """A file system of this many bytes over an empty folder."""
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())


def resize_memory(folder: Path, size: int) -> None:
    """Give a file system of :func:`mount_memory` another size."""
    options = f"size={size}".encode()
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", _REMOUNT, options)


def make_read_only(folder: Path) -> None:
    """The folder, with what it holds, read-only."""
    _call("mount", os.fsencode(folder), os.fsencode(folder), None, _BIND, None)
    flags = _BIND | _REMOUNT | _READ_ONLY
    _call("mount", None, os.fsencode(folder), None, flags, None)


def in_child(function: Callable[[], int], output: Path) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a function that may mount, in a child of
    this process; the streams pass through files of the folder ``output``."""
    files = output / "out", output / "err"
    child = os.fork()
    if child == 0:
        status = 99
        try:
            for descriptor, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            _separate()
            torch.set_num_threads(
                1
            )  # the threads of OpenMP are not forked, and would be waited for
            status = function()
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    out, err = (file.read_text() for file in files)
    return os.waitstatus_to_exitcode(ended), out, err


@cache
def available(folder: Path) -> bool:
    """Whether this system lets a process mount in a namespace of its own."""

    def attempt() -> int:
        try:
            mount_memory(folder, 1 << 16)
        except OSError:
            return _UNAVAILABLE
        return 0

    if sys.platform != "linux":
        return False
    return in_child(attempt, folder)[0] == 0
