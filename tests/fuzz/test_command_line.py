"""Commands with random flags: they succeed, or they fail with one line and leave nothing."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from lm.training.toy import QUICK, write_corpus

from fuzz.flags import BAD_NUMBERS, DESCRIBE, EVALUATE, GENERATE, SMALL, TRAIN, some_flags
from fuzz.scale import cases
from hstree.__main__ import main
from hstree.heads import head_names

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about schedules and such
# Not shrunk: each try is a command of a second.
OPTIONS: dict[str, Any] = {
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


# Not a word of a generated text: a figure of a table has two blanks or a sign before it.
FIGURE = re.compile(r"(?:  |[-+=:,\[])\s*(?:nan|inf|infinity)\b", re.IGNORECASE)


class Places:
    """A corpus, a run of trees, and an empty folder for each command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, itertools.count()
        self.data = write_corpus(folder / "data", sentences=20)
        self.run = folder / "run"
        small = [f"{name}={value[0]}" for name, value in SMALL.items()]
        arguments = [
            "train",
            f"--data={self.data}",
            f"--run={self.run}",
            "--head=trees",
            "--clusters=4",
            *small,
        ]
        assert main([*arguments, "--threads=1"]) == 0

    def elsewhere(self) -> Path:
        place = self.folder / f"{next(self.number)}"
        place.mkdir()
        os.chdir(place)
        return place


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    before = Path.cwd()
    yield Places(tmp_path_factory.mktemp("command-line"))
    os.chdir(before)


def call(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> int:
    """The exit status of a command: 0; 2 with one line on stderr; or 1 where the loss diverged."""
    capsys.readouterr()
    shown = f"hstree {' '.join(map(repr, arguments))}"
    try:
        status = main(arguments)
    except BaseException as error:
        raise AssertionError(f"{shown}: {type(error).__name__}: {error}") from error
    out, error = capsys.readouterr()
    assert not (found := FIGURE.search(out)), f"{shown}: {found} in {out}"
    assert "Traceback" not in error, shown
    diverged = "loss became" in error
    assert status in (0, 2) or (status == 1 and diverged), f"{shown}: {status}: {error}"
    if status:
        *notes, last = error.splitlines()
        assert last.startswith("hstree"), shown + error
        assert len(last) > 20, shown + error
        assert all("not in the vocabulary" in note for note in notes), shown + error
    return status


@given(head=st.sampled_from(head_names()), flags=some_flags(TRAIN))
@settings(max_examples=cases(6), **OPTIONS)
def test_train(
    places: Places,
    capsys: pytest.CaptureFixture[str],
    head: str,
    flags: list[str],
) -> None:
    folder = places.elsewhere()
    names = {flag.partition("=")[0] for flag in flags}
    small = [f"{name}={value[0]}" for name, value in SMALL.items() if name not in names]
    quick = [f"--head-option={option}" for option in QUICK.get(head, ())]
    arguments = ["train", f"--data={places.data}", f"--head={head}", "--run=run", *small]
    status = call(capsys, [*arguments, *quick, *flags, "--threads=1"])
    left = [path.name for path in folder.iterdir()]
    assert left == ([] if status == 2 else ["run"]), (status, left)
    if status == 0:
        assert call(capsys, ["evaluate", "run", "--threads=1"]) == 0
        assert call(capsys, ["generate", "run", "--words=3"]) == 0


COMMANDS: dict[str, tuple[list[str], Any]] = {
    "evaluate": (["evaluate", "RUN"], EVALUATE),
    "generate": (["generate", "RUN"], GENERATE),
    "tree describe": (["tree", "describe", "RUN"], DESCRIBE),
}


@pytest.mark.parametrize("command", COMMANDS)
@given(data=st.data())
@settings(max_examples=cases(6), **OPTIONS)
def test_other_commands(
    places: Places, capsys: pytest.CaptureFixture[str], command: str, data: st.DataObject
) -> None:
    folder = places.elsewhere()
    words, known = COMMANDS[command]
    flags = data.draw(some_flags(known))
    call(capsys, [word.replace("RUN", str(places.run)) for word in [*words, *flags]])
    assert list(folder.iterdir()) == []


# Commands that take a minute or train: only with arguments that they refuse before the work.
REFUSED: dict[str, tuple[str, ...]] = {
    "study study.toml": ("--limit",),
    "compare RUN": (),
    "tree draw RUN": ("--index", "--levels"),
    "analyze rank RUN": (),
    "analyze function RUN": (),
    "analyze predictions RUN": (),
    "analyze significance RUN": (),
    "analyze tree RUN": (),
    "analyze words RUN": (),
    "analyze correlation RUN": (),
    "experiment synthetic": (),
    "experiment robustness": ("--size", "--repetitions"),
    "experiment jacobian": (),
}
BAD_FILES = ["missing", "", ".", "damaged", "/dev/null"]


@pytest.mark.parametrize("command", REFUSED)
def test_refused_arguments(
    places: Places, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = places.elsewhere()
    (folder / "damaged").write_bytes(b"\xff\x00[[")
    words = command.replace("RUN", str(places.run)).split()
    tries = [[*words, "--no-such-flag"], [*words, "--threads=x"]]
    tries += [[*words, f"{flag}={value}"] for flag in REFUSED[command] for value in BAD_NUMBERS]
    if words[0] != "experiment":
        verb = 1 + (words[0] in ("tree", "analyze"))
        tries += [[*words[:verb], file] for file in BAD_FILES]
    for arguments in tries:
        assert call(capsys, arguments) == 2, arguments
    assert [path.name for path in folder.iterdir()] == ["damaged"]
