"""Full disks, read-only folders and folders in use: one clear line, and no result is lost."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from lm.cli.mounts import available, in_child, make_read_only, mount_memory, resize_memory
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.lab.study import StudyError, StudyRun, parse_study, run_study
from hstree.lm.train import train

SIZE = 1 << 20  # bytes of a disk
STUDY = """\
rank = { rows = 20 }
[settings]
data = "data"
embedding_size = 8
hidden_size = 8
batch_size = 8
bptt = 10
epochs = 2
device = "cpu"
[[models]]
head = "softmax"
[[models]]
head = "gss"
"""
SMALL = "--data data --head softmax --embedding-size 8 --hidden-size 8 --epochs 1 --device cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text ``data``, runs ``run`` and ``trees`` on it, a study ``toy.toml`` and an empty folder
    ``disk``."""
    folder = tmp_path_factory.mktemp("disk")
    data = write_corpus(folder / "data", sentences=40)
    train(small_config(data, folder / "run", epochs=1))
    train(small_config(data, folder / "trees", epochs=1, head="trees"))
    (folder / "toy.toml").write_text(STUDY)
    (folder / "disk").mkdir()
    return folder


@pytest.fixture(autouse=True)
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def disk(folder: Path) -> Path:
    """An empty folder to mount on."""
    if not available(folder / "disk"):
        pytest.skip("this system lets no process mount in a namespace of its own")
    return folder / "disk"


def fill(disk: Path, left: int) -> None:
    """Leave this many bytes free."""
    (disk / "filling").write_bytes(bytes(max(0, shutil.disk_usage(disk).free - left)))


def contents(folder: Path) -> dict[str, bytes]:
    """All files by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


WRITING = {
    "analyze function run --output disk/out": "out/function-of-the-logits.png",
    "tree draw trees --output disk/tree.png": "tree.png",
}


@pytest.mark.parametrize("command", WRITING)
def test_a_full_disk(command: str, disk: Path, tmp_path: Path) -> None:
    """What was there stays there, whole."""

    def run() -> int:
        mount_memory(disk, SIZE)
        (disk / "out").mkdir()
        (disk / "out" / "function.md").write_text("old")
        fill(disk, 0)
        before = contents(disk)
        status = main(command.split())
        assert contents(disk) == before
        assert list(disk.rglob("*.part")) == []
        return status

    status, _, error = in_child(run, tmp_path)
    assert error.startswith(f"hstree: cannot write disk/{WRITING[command]}: "), error
    assert "No space left on device" in error
    assert error.count("\n") == 1
    assert status == 2


def test_a_full_disk_behind_standard_output(disk: Path, tmp_path: Path) -> None:
    def run() -> int:
        mount_memory(disk, SIZE)
        fill(disk, 0)
        sys.stdout = (disk / "result").open("w")
        return main(["generate", "run", "--words", "3000"])

    status, _, error = in_child(run, tmp_path)
    assert error == "hstree: cannot write the output: No space left on device\n"
    assert status == 2


@pytest.mark.parametrize("left", [0, 1 << 14, 1 << 15])
def test_a_run_on_a_full_disk(left: int, disk: Path, tmp_path: Path) -> None:
    """Before the folder appears nothing is left of it; later, what was saved can be resumed."""

    def run() -> int:
        mount_memory(disk, SIZE)
        fill(disk, left)
        status = main(["train", *SMALL.split(), "--run", "disk/run"])
        (disk / "filling").unlink()
        begun = (disk / "run").exists()
        assert begun == (left == 1 << 15)
        assert {path.name for path in disk.iterdir()} == ({"run"} if begun else set())
        again = ["--resume", "disk/run"] if begun else [*SMALL.split(), "--run", "disk/run"]
        assert main(["train", *again]) == 0
        return status

    status, _, error = in_child(run, tmp_path)
    place = "write disk/run/" if left == 1 << 15 else "create the run folder disk/run: "
    assert error.startswith(f"hstree: cannot {place}"), error
    assert ("resume with hstree train --resume disk/run\n" in error) == (left == 1 << 15)
    assert error.count("\n") == 1
    assert status == 2


def table(file: Path) -> list[dict[str, str]]:
    """The rows of a study without its times."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [row | {"seconds_per_epoch": ""} for row in csv.DictReader(lines)]


@pytest.mark.parametrize("left", [0, 1 << 15, 1 << 17])
def test_a_study_goes_on_after_space_is_made(
    left: int, disk: Path, folder: Path, tmp_path: Path
) -> None:
    """At the first table, within the first run, and later; with the same results."""
    if not (folder / "whole").exists():
        assert main(["study", "toy.toml", "--output", "whole"]) == 0

    def run() -> int:
        mount_memory(disk, SIZE)
        fill(disk, left)
        status = main(["study", "toy.toml", "--output", "disk/toy"])
        assert list(disk.rglob("*.part")) == []
        resize_memory(disk, 4 * SIZE)
        assert main(["study", "toy.toml", "--output", "disk/toy"]) == 0
        assert table(disk / "toy" / "study.csv") == table(folder / "whole" / "study.csv")
        return status

    status, _, error = in_child(run, tmp_path)
    assert error.startswith("hstree: cannot "), error
    assert "No space left on device" in error
    done = 1 if left == 1 << 17 else 0
    assert f"{done} of 2 runs are finished; run the same command to continue\n" in error
    assert error.count("\n") == 1
    assert status == 2


READING = {
    "experiment robustness --output disk/new": "--output: expected a folder to write to",
    "analyze function run --output disk/out": "--output: expected a folder to write to",
    f"train {SMALL} --run disk/run": "cannot create the run folder disk/run",
    "tree draw trees --output disk/tree.png": "cannot write disk/tree.png",
}


@pytest.mark.parametrize("command", READING)
def test_a_read_only_folder(command: str, disk: Path, tmp_path: Path) -> None:
    """Where a folder was named, before the work."""

    def run() -> int:
        mount_memory(disk, SIZE)
        (disk / "out").mkdir()
        make_read_only(disk)
        return main(command.split())

    status, out, error = in_child(run, tmp_path)
    assert error.startswith(f"hstree: {READING[command]}"), error
    assert error.endswith(": Read-only file system\n")
    assert error.count("\n") == 1
    assert status == 2
    if "--output disk/out" in command:
        assert out == ""


def test_two_studies_in_one_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one ends at once; the first one is not disturbed, and releases the folder."""
    pytest.importorskip("fcntl")
    study = parse_study((folder / "toy.toml").read_text())
    output = tmp_path / "toy"
    errors = []

    def again(runs: Sequence[StudyRun]) -> None:
        before = contents(output)
        assert main(["study", "toy.toml", "--output", str(output)]) == 2
        errors.append(capsys.readouterr().err)
        with pytest.raises(StudyError, match="another process runs a study in this folder"):
            run_study(study, output)
        assert contents(output) == before

    run_study(study, output, limit=1, changed=again)
    message = f"hstree: {output}: another process runs a study in this folder\n"
    assert errors == [message] * 2
    runs = run_study(study, output)
    assert [run.state for run in runs] == ["finished"] * 2
