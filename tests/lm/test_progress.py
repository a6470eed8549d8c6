"""Progress of long work on standard error, and the width of what is printed."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from itertools import count

import pytest

from hstree._progress import Task, duration, track
from hstree.lm import report
from hstree.lm.report import command_line, fold, shown, terminal_width


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second, and ten are enough for a line."""
    monkeypatch.setattr(report, "LINE_EVERY", 10.0)
    seconds = count()
    monkeypatch.setattr(report.time, "monotonic", lambda: float(next(seconds)))


@pytest.mark.usefixtures("clock")
def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with shown():
        assert list(track(range(100), "reading", 100)) == list(range(100))
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert 5 < len(lines) < 20
    assert all(re.fullmatch(r"reading  \d+%  \d+ (s|min) left", line) for line in lines)
    assert "\x1b" not in captured.err


def test_short_work_and_programs_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown():
        assert list(track("abc", "reading", 3)) == ["a", "b", "c"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "LINE_EVERY", 0.0)
        assert list(track("abc", "reading", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_loop_that_is_left_early_ends_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    with shown():
        for item in track(range(10), "reading", 10):
            if item == 3:
                break
    assert capsys.readouterr() == ("", "")


def test_time_left_counts_the_steps_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    task = Task("training", 100, done=50)
    assert task.left == ""
    task.advance(10)
    assert task.left == "40 s left"
    assert [duration(s) for s in (0.2, 59.0, 61.0, 7500.0)] == ["1 s", "59 s", "1 min", "2 h 5 min"]


BAR = """
    import time
    from hstree._progress import track
    from hstree.lm import report
    report.BAR_AFTER = 0.0
    with report.shown():
        for i in track(range(4), "reading", 4):
            if i == 2:
                print("a line above the bar")
            time.sleep(0.15)
"""


def test_a_bar_on_a_terminal() -> None:
    """On a real one: lines of standard output stay whole, and the bar is gone at the end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BAR)],
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "60"},
    )
    os.close(slave)
    text = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(master)
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())
    assert "a line above the bar\r\n" in plain
    assert re.search(r"reading .* 1 s left", plain)
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= 60
    assert text.rstrip().endswith((b"\x1b[2K", b"\x1b[?25h"))


def test_text_is_folded_to_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "hstree: not in the vocabulary " + "x" * 50
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width(io.StringIO()) is None
    assert fold(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "40")
    assert terminal_width(io.StringIO()) == 40
    assert fold(text, io.StringIO()) == "hstree: not in the vocabulary\n  " + "x" * 50


def test_a_command_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    arguments = ["printf", "%s\\n", "--data", "my text", "--learning-rate", "0.5", "--epochs", "3"]
    text = command_line(arguments, io.StringIO(), indent="  ")
    assert max(map(len, text.splitlines())) <= 30
    run = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == arguments[2:]
