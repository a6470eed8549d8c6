"""The folder of a run: it appears complete, its files change in one step, one process writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hstree._files import write_atomic
from hstree.lm.run import CheckpointError, RunDirectory


def write_run(path: Path) -> None:
    RunDirectory(path, "unused").write({"config.json": b"{}", "model.safetensors": b"earlier"})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        assert not (tmp_path / "run").exists()
        raise KeyboardInterrupt

    directory = RunDirectory(tmp_path / "run", "unused")
    assert names(tmp_path) == []
    with pytest.raises(KeyboardInterrupt):
        directory.write({"a.txt": b"whole", "b.txt": fail})
    assert names(tmp_path) == []
    assert not directory.published
    directory.write({"a.txt": b"whole"})
    assert directory.published
    assert names(tmp_path) == ["run"]


def test_files_are_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(temporary: Path) -> None:
        temporary.write_bytes(b"half of the n")
        assert path.read_bytes() == b"old"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", "unused")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="cannot create the run folder"):
        directory.write({"a.txt": b""})
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["mine"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Killed processes leave parts of files, which the next one removes; an existing folder is no
    place for a new run."""
    pytest.importorskip("fcntl")
    first = RunDirectory(tmp_path / "a" / "run", "unused")
    assert names(tmp_path) == []
    first.write({"x": b"1"})
    with pytest.raises(CheckpointError, match="another process trains in this folder"):
        RunDirectory.open(first.path)
    first.close()
    (first.path / ".last.safetensors-abc.part").mkdir()
    (first.path / ".last.safetensors-abc.part" / "last.safetensors").write_bytes(b"half of")
    second = RunDirectory.open(first.path)
    assert names(first.path) == ["x"]
    second.close()
    with pytest.raises(CheckpointError, match="run already exists"):
        RunDirectory(first.path, "unused")


def test_default_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RunDirectory(None, "name"), RunDirectory(None, "name")
    assert not Path("runs").exists()
    for directory in (first, second):
        directory.write({"a.txt": b"x"})
    third = RunDirectory(None, "name")
    paths = [first.path, second.path, third.path]
    assert paths == [Path("runs/name"), Path("runs/name-2"), Path("runs/name-3")]
    assert names(Path("runs")) == ["name", "name-2"]


def test_unwritable_places_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file/run", "file/deep/run"):
        with pytest.raises(CheckpointError, match=r"cannot create the run folder .*: Not a dir"):
            RunDirectory(tmp_path / place, "unused")
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            RunDirectory(tmp_path / "run", "unused")
    finally:
        tmp_path.chmod(0o700)


def test_only_abandoned_leftovers_are_removed(tmp_path: Path) -> None:
    """A folder that another process is still filling, under the same name, is locked."""
    fcntl = pytest.importorskip("fcntl")
    abandoned = tmp_path / ".run-abcdefgh.part"
    filling = tmp_path / ".run-12345678.part"
    other = tmp_path / ".running-12345678.part"
    for folder in (abandoned, filling, other):
        folder.mkdir()
    lock = os.open(filling, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        write_run(tmp_path / "run")
    finally:
        os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {"run", filling.name, other.name}


def test_permissions_are_those_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_run(tmp_path / "run")
        write_atomic(tmp_path / "run" / "model.safetensors", b"later")
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o640}
