"""Progress of builders in a program that sets no display: a line on the terminal."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hstree import _progress
from hstree._progress import Task, track
from hstree.heads.trees import TreeShape, trees_of_text
from hstree.trees import build_ensemble, cluster_tree, recipes, vectors, word_vectors

ERASED = "\r\x1b[K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Standard error is a terminal, and work takes long at once."""
    monkeypatch.setattr(_progress._Line, "AFTER", 0.0)
    monkeypatch.setattr(_progress._Line, "EVERY", 0.0)
    stream = Terminal()
    # Not sys.stderr itself, which pytest sets again before the test.
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=stream))
    return stream


def lines(terminal):
    """What was shown, without repetitions: the first line is drawn by a thread, at any time."""
    shown = terminal.getvalue().split(ERASED)
    assert shown[0] == ""
    return list(dict.fromkeys(shown[1:]))


def test_builders_have_a_line_which_ends_with_them(terminal):
    build_ensemble("random", 50, 3)
    shown = [line.partition(",")[0] for line in lines(terminal)]
    assert shown[-4:] == [f"building trees: {done} of 3" for done in (1, 2, 3)] + [""]
    assert "1 of 3, 1 s left" in terminal.getvalue()
    assert terminal.getvalue().endswith(ERASED)

    tokens = np.arange(100) % 40
    counts = np.bincount(tokens)
    trees_of_text("cluster", 40, TreeShape(2, 4, False), counts, tokens, ("left", "both"), None, 0)
    assert "learning word vectors: 1 of 2" in terminal.getvalue()


def test_a_long_first_step_has_a_line_too(terminal, monkeypatch):
    monkeypatch.setattr(_progress._Line, "AFTER", 0.01)
    for _ in track("ab", "waiting", 2):
        for _ in range(1000):
            if terminal.getvalue():
                break
            time.sleep(0.01)
        assert terminal.getvalue() == f"{ERASED}waiting: 0 of 2"
        break
    assert terminal.getvalue().endswith(ERASED)


@pytest.mark.parametrize("name", ["building a tree", "learning word vectors"])
def test_a_single_long_step(terminal, monkeypatch, name):
    """One tree, or the vectors of one text, without a number of steps."""

    def slow(*arguments):
        for _ in range(1000):
            if terminal.getvalue():
                break
            time.sleep(0.01)
        return compute(*arguments)

    if name == "building a tree":
        compute = recipes._host.cluster_tree
        monkeypatch.setattr(recipes, "_host", SimpleNamespace(cluster_tree=slow))
        cluster_tree(np.eye(5))
    else:
        compute = vectors.right_singular_vectors
        monkeypatch.setattr(vectors, "right_singular_vectors", slow)
        word_vectors([0, 1, 2, 3, 0, 2], 4)
    assert lines(terminal) == [name, ""]


def test_an_error_ends_the_line(terminal):
    with pytest.raises(ValueError, match="recipe: expected"):
        build_ensemble("oak", 50, 3)
    assert lines(terminal)[-1] == ""
    build_ensemble("random", 50, 3)
    assert "building trees: 1 of 3" in terminal.getvalue()


def test_work_within_other_work_has_no_line(terminal):
    for _ in track("ab", "outer", 2):
        list(track("abc", "inner", 3))
    assert "outer: 1 of 2" in terminal.getvalue()
    assert "inner" not in terminal.getvalue()


def test_short_work_has_no_line(terminal, monkeypatch):
    monkeypatch.setattr(_progress._Line, "AFTER", 5.0)
    build_ensemble("random", 50, 3)
    assert terminal.getvalue() == ""


def closed():
    stream = Terminal()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [io.StringIO(), None, object(), closed()])
def test_without_a_terminal_there_is_no_line(terminal, monkeypatch, stream):
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=stream))
    assert len(build_ensemble("random", 50, 3)) == 3
    assert terminal.getvalue() == ""
    if type(stream) is io.StringIO:
        assert stream.getvalue() == ""


def test_a_terminal_that_is_closed_does_not_end_the_work(terminal):
    task = Task("building", 2)
    terminal.close()
    task.advance()
    task.close()


def test_fast_steps_do_not_redraw_the_line_each_time(terminal, monkeypatch):
    monkeypatch.setattr(_progress._Line, "EVERY", 1000.0)
    assert list(track(range(5000), "counting", 5000)) == list(range(5000))
    assert 1 <= terminal.getvalue().count("counting") <= 2
