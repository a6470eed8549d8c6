"""Run folders: atomic writing, and errors for what is missing, foreign or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hstree._files import write_atomic
from hstree.data import Vocabulary
from hstree.heads import Softmax
from hstree.models import AWDLSTM, LanguageModel
from hstree.training import (
    CheckpointError,
    RunDirectory,
    TrainConfig,
    load_model,
    load_run,
    read_metrics,
)
from hstree.training.checkpoint import model_writer

VOCABULARY = Vocabulary(["<eos>", "a", "b", "<unk>"], [4, 3, 2, 0])


def make_model(n_classes: int = 4) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(AWDLSTM(n_classes, 3, 5), Softmax(5, n_classes))


def write_run(path: Path, model: LanguageModel | None = None) -> Path:
    directory = RunDirectory(path, "unused")
    directory.write(
        {
            "config.json": TrainConfig().to_json().encode(),
            "vocabulary.txt": VOCABULARY.to_bytes(),
            "model.safetensors": model_writer(model or make_model()),
        }
    )
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    model = make_model()
    run = load_run(write_run(tmp_path / "run", model))
    assert run.config == TrainConfig()
    assert run.vocabulary == VOCABULARY
    for (name, mine), (other_name, other) in zip(
        model.state_dict().items(), run.model.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(mine, other)
        assert other.data_ptr() % 64 == 0


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


def test_existing_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="run exists already"):
        RunDirectory(tmp_path / "run", "unused")
    assert names(tmp_path / "run") == []


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", "unused")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="cannot create the run folder"):
        directory.write({"a.txt": b""})
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["mine"]


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


def test_missing_parents_are_made_only_when_needed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b" / "run", "unused")
    assert names(tmp_path) == []
    directory.write({"x": b""})
    assert names(tmp_path / "a" / "b") == ["run"]


def test_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run folder"):
        load_run(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"not a run folder: config.json, vocab.* missing"):
        load_run(tmp_path)
    run = write_run(tmp_path / "run")
    (run / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not a run folder: model\.safetensors missing"):
        load_run(run)


def test_every_truncation_of_the_model_is_noticed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="not a safetensors file, or a truncated one"):
            load_run(run)


def test_foreign_models(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="no such file"):
        load_model(path)
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="a safetensors file, but not a model of hstree"):
        load_model(path)
    Softmax(3, 4).save(path)
    with pytest.raises(CheckpointError, match="not a model of hstree"):
        load_model(path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("{}", "not a consistent model file: 'version'"),
        ("no json", "not a consistent model file"),
        ('{"version": 99}', "expected format version 3, got 99"),
        (
            '{"version": 3, "aliases": {}, "backbone": {"kind": "gru"}}',
            "expected the kind 'awd-lstm'",
        ),
        (
            '{"version": 3, "aliases": {"head.weight": "absent"}}',
            "not a consistent model file: 'absent'",
        ),
    ],
)
def test_inconsistent_models(tmp_path: Path, description: str, message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2)}, path, {"hstree.model": description})
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors import safe_open

    run = write_run(tmp_path / "run")
    path = run / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    del tensors["backbone.lstms.0.bias_ih_l0"]
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=r"backbone\.lstms\.0\.bias_ih_l0"):
        load_run(run)


def test_parts_of_different_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_model(6))
    with pytest.raises(CheckpointError, match=r"has 6 classes, but vocabulary.txt 4 words"):
        load_run(run)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"config\.json: expected settings as JSON"),
        ("config.json", b"\xff", r"config\.json: "),
        ("config.json", b'{"speed": 1}', r"config\.json: unknown settings: speed"),
        ("vocabulary.txt", b"a\t1", r"vocabulary\.txt: not a vocabulary file"),
    ],
)
def test_damaged_text_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_run(run)


def test_metrics_that_are_not_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(CheckpointError, match=r"line 2: expected a JSON object, got '{\"epo'"):
        read_metrics(path)


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
