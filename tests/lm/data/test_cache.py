"""The cache of tokenised texts: when it is used, and when it must not be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hstree._files import write_atomic
from hstree.lm.data import Corpus, Vocabulary, WhiteSpace, Words, load_corpus, user_cache

LINES = "".join(f"the cat number {i % 7} sat on mat {i % 11} .\n" for i in range(300))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HSTREE_CACHE", str(folder))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(LINES)
    return path


@pytest.fixture
def split_lines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of lines of each call of a tokenizer."""
    calls: list[int] = []
    for kind in (Words, WhiteSpace):
        original = kind.split_batch

        def counted(self: Any, lines: Any, original: Any = original) -> Any:
            calls.append(len(lines))
            return original(self, lines)

        monkeypatch.setattr(kind, "split_batch", counted)
    return calls


def ids(corpus: Corpus) -> list[list[int]]:
    return [part.tolist() for part in (corpus.train, corpus.valid, corpus.test)]


def files(cache: Path, suffix: str) -> list[Path]:
    return sorted((cache / "tokens").glob(f"*.{suffix}"))


def test_second_load_maps_the_stored_ids(cache: Path, text: Path, split_lines: list[int]) -> None:
    """Of the same text in another place, too, and with the vocabulary that the first load made."""
    first = load_corpus(text, max_vocabulary=9)
    assert sum(split_lines) == 301
    split_lines.clear()
    other = text.with_name("copy.txt")
    other.write_bytes(text.read_bytes())
    corpora = [
        first,
        load_corpus(text, max_vocabulary=9),
        load_corpus(other, max_vocabulary=9),
        load_corpus(text, vocabulary=first.vocabulary),
    ]
    assert split_lines == []
    assert [corpus.name for corpus in corpora] == ["book.txt", "book.txt", "copy.txt", "book.txt"]
    for corpus in corpora:
        assert ids(corpus) == ids(first)
        assert corpus.vocabulary == first.vocabulary
        assert isinstance(corpus.tokenizer, Words)
        for part in (corpus.train, corpus.valid, corpus.test):
            assert isinstance(part, np.memmap)
            assert part.dtype == np.int32
            assert not part.flags.writeable
    (stored,) = files(cache, "ids")
    assert stored.stat().st_size == 4 * sum(map(len, ids(first)))
    words, counts = first.vocabulary.words, first.vocabulary.frequencies
    changed = load_corpus(text, vocabulary=Vocabulary(words[::-1], counts[::-1]))
    assert changed.train.tolist() == (len(words) - 1 - first.train).tolist()
    assert len(files(cache, "ids")) == 2


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_changed_file_of_the_same_size_and_time(
    kind: str, cache: Path, text: Path, tmp_path: Path
) -> None:
    changed = path = text
    if kind == "folder":
        path = tmp_path / "data"
        path.mkdir()
        for name in ("train", "valid", "test"):
            (path / f"{name}.txt").write_text(LINES)
        changed = path / "test.txt"
    load_corpus(path)
    stat = changed.stat()
    changed.write_text(LINES.replace("cat number 3", "mat number 3"))
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert changed.stat().st_size == stat.st_size
    assert changed.stat().st_mtime_ns == stat.st_mtime_ns
    corpus = load_corpus(path)
    words = corpus.vocabulary.decode(corpus.test.tolist())
    assert "the mat number 3" in " ".join(words)
    assert len(files(cache, "ids")) == 2


def test_settings_have_entries_of_their_own(cache: Path, text: Path) -> None:
    corpora = [
        load_corpus(text),
        load_corpus(text, min_count=40),
        load_corpus(text, max_vocabulary=6),
        load_corpus(text, tokenizer=WhiteSpace()),
    ]
    sizes = [len(corpus.vocabulary) for corpus in corpora]
    for corpus, options in zip(
        corpora, [{}, {"min_count": 40}, {"max_vocabulary": 6}], strict=False
    ):
        assert ids(load_corpus(text, **options)) == ids(corpus)
    assert sizes[0] > sizes[1] > sizes[2] == 6
    # White space splits this text as words are split, but the tokenizer is another.
    assert len(files(cache, "ids")) == 4


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def changed(**values: Any) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_bytes()) | values))

    return change


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("ids", truncate),
        ("ids", flip),
        ("ids", Path.unlink),
        ("json", truncate),
        ("json", flip),
        ("json", Path.unlink),
        ("json", lambda path: path.write_text("[]")),
        ("json", lambda path: path.write_bytes(b"\xff")),
        ("json", changed(sizes={"train": 2708, "valid": 142, "test": 150})),
        ("json", changed(ids=".")),
    ],
)
def test_damage_is_noticed_and_mended(
    suffix: str, damage: Callable[[Path], Any], cache: Path, text: Path, split_lines: list[int]
) -> None:
    expected = ids(load_corpus(text))
    content = {path.name: path.read_bytes() for path in (cache / "tokens").iterdir()}
    for path in files(cache, suffix):
        damage(path)
    assert ids(load_corpus(text)) == expected
    assert {path.name: path.read_bytes() for path in (cache / "tokens").iterdir()} == content
    split_lines.clear()
    load_corpus(text)
    assert split_lines == []


def test_no_cache(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSTREE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    corpus = load_corpus(text)
    assert sum(map(len, ids(corpus))) == 3000
    assert not (tmp_path / "xdg").exists()
    assert list(temporary.iterdir()) == []
    assert isinstance(corpus.train, np.memmap)


def test_unwritable_cache_is_no_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("not a folder")
    monkeypatch.setenv("HSTREE_CACHE", str(occupied / "below"))
    assert len(load_corpus(text).train) == 2700
    assert occupied.read_text() == "not a folder"


def test_full_disk_is_no_error(cache: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: Any) -> None:
        if cache in path.parents:
            raise OSError(28, "No space left on device")
        write_atomic(path, content)

    monkeypatch.setattr("hstree.lm.data.write_atomic", full)
    assert len(load_corpus(text).train) == 2700
    assert list((cache / "tokens").iterdir()) == []


def test_errors_of_the_text_are_not_swallowed(cache: Path, text: Path) -> None:
    text.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_corpus(text)
    assert list((cache / "tokens").iterdir()) == []


def test_what_a_killed_process_left_is_removed_later(cache: Path, text: Path) -> None:
    for name, age in (("new", 0.0), ("old", 2 * 24 * 3600.0)):
        folder = cache / "tokens" / f".{name}-x.part"
        folder.mkdir(parents=True)
        (folder / "some.ids").write_bytes(b"1234")
        os.utime(folder, (time.time() - age, time.time() - age))
    load_corpus(text)
    assert [path.name for path in (cache / "tokens").glob(".*")] == [".new-x.part"]


AT_ONCE = """
import os, sys
from hstree.lm.data import load_corpus

start, children = os.pipe(), []
for number in range(4):
    child = os.fork()
    if child == 0:
        os.close(start[1])
        os.read(start[0], 1)  # until the parent closes its end
        corpora = [load_corpus(sys.argv[1], max_vocabulary=size) for size in (None, 9, 8, 7)]
        os.write(1, f"{[int(corpus.train.sum()) for corpus in corpora]}\\n".encode())
        os._exit(0)
    children.append(child)
os.close(start[1])
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_processes_that_write_at_once(cache: Path, text: Path, tmp_path: Path) -> None:
    """Four start together; a damaged entry lies in their way."""
    expected = int(load_corpus(text).train.sum())
    truncate(*files(cache, "ids"))
    command = [sys.executable, "-W", "ignore", "-c", AT_ONCE, str(text)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    *printed, statuses = map(json.loads, shown.stdout.splitlines())
    assert statuses == [0] * 4, shown.stderr
    assert printed == [printed[0]] * 4
    assert printed[0][0] == expected
    assert (len(files(cache, "ids")), len(files(cache, "json"))) == (4, 8)
    assert list((cache / "tokens").glob(".*")) == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSTREE_CACHE", "/some/where")
    assert user_cache() == Path("/some/where")
    monkeypatch.setenv("HSTREE_CACHE", "")
    assert user_cache() is None
    monkeypatch.delenv("HSTREE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/hstree")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache() == Path.home() / ".cache" / "hstree"


MEMORY = """
import sys
from pathlib import Path
import hstree.lm.data

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

hstree.lm.data.load_corpus(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmHWM")
corpus = hstree.lm.data.load_corpus(sys.argv[1])
after = memory("VmHWM")
tokens = len(corpus.train) + len(corpus.valid) + len(corpus.test)
print(tokens, after - before, *(name in sys.modules for name in ("tokenizers", "datasets")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the memory")
def test_memory_of_a_large_text(cache: Path, text: Path, tmp_path: Path) -> None:
    """22 MB, of which the words in memory would take some 200 MB, and the ids 17 MB."""
    large = tmp_path / "large.txt"
    generator = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(5000)])
    with large.open("w") as file:
        for i in range(50):
            chosen = words[generator.integers(len(words), size=80_000)]
            # The last fifth is one line.
            file.write(
                " ".join(chosen) if i >= 40 else "\n".join(map(" ".join, chosen.reshape(-1, 20)))
            )
            file.write(" " if i >= 40 else "\n")
    assert large.stat().st_size > 20_000_000
    shown = subprocess.run(
        [sys.executable, "-c", MEMORY, str(large), str(text)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    tokens, peak, *imported = shown.stdout.split()
    assert int(tokens) > 4_000_000
    assert int(peak) < 3 * int(tokens), shown.stdout
    assert imported == ["False", "False"]
