"""The embedded corpus, on a small library made here."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import numpy as np
import pytest

from hstree.lm.data import (
    Corpus,
    Settings,
    WhiteSpace,
    Words,
    corpus_of,
    docstrings,
    embedded_corpus,
    embedded_source,
    help_topics,
    prose,
)

SUBJECTS = ("parser", "reader", "writer", "socket", "thread", "buffer", "server")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Modules with docstrings, help topics, a broken module, and what does not belong."""
    root = tmp_path / "lib"
    (root / "site-packages").mkdir(parents=True)
    (root / "pydoc_data").mkdir()
    for number in range(60):
        subject = SUBJECTS[number % len(SUBJECTS)]
        text = " ".join(f"The {subject} returns value {number} of item {k}." for k in range(8))
        (root / f"module_{number}.py").write_text(f'"""{text}"""\nraise SystemExit("imported")\n')
    (root / "site-packages" / "foreign.py").write_text('"""Foreign words stay out of this."""\n')
    (root / "broken.py").write_text('"""Never read.\n')
    (root / "latin.py").write_bytes(b'"""caf\xe9 words do not decode"""\n')
    (root / "pydoc_data" / "topics.py").write_text(
        "topics = {'assert': 'The assert statement checks what must be true.\\n'}\n"
    )
    return root


def test_docstrings_in_order_of_the_source() -> None:
    source = '''
        """module"""
        class A:
            """class"""
            def f(self):
                """method"""
                if self:
                    def g():
                        """nested"""
        try:
            pass
        except ValueError:
            async def h():
                """async"""
        x = """no docstring"""
    '''
    expected = ["module", "class", "method", "nested", "async"]
    assert list(docstrings(textwrap.dedent(source).encode())) == expected
    assert list(docstrings(b"def broken(:")) == []
    assert list(docstrings(b"\0")) == []


def test_docstrings_are_those_python_sees() -> None:
    found = set(docstrings(inspect.getsource(textwrap).encode()))
    for thing in (textwrap, textwrap.wrap, textwrap.TextWrapper, textwrap.dedent):
        assert inspect.getdoc(thing) in found


def test_help_topics_are_read_without_import() -> None:
    assert help_topics(b"topics = {'a': 'first', 'b': 'second'}") == {"a": "first", "b": "second"}
    assert help_topics(b"topics: dict = {'a': 'x' 'y'}") == {"a": "xy"}
    assert help_topics(b"import os\nos._exit(3)") == {}
    assert help_topics(b"topics = {") == {}


def test_prose_leaves_code_out() -> None:
    text = textwrap.dedent("""\
        Return the *largest* item of ``values``.

        For example::

            result = largest(values)

        Examples follow here:
        >>> largest([1, 2])
        2

        ==========  =====
        x[0] = {1}; y(2) -> [3]

        :param values: all of the items
        expression ::= term
    """)
    assert list(prose(text)) == [
        "Return the largest item of values.",
        "Examples follow here:",
        "param values: all of the items",
    ]


def tokens(corpus: Corpus) -> np.ndarray:
    return np.concatenate([corpus.train, corpus.valid, corpus.test])


def test_corpus_is_deterministic_and_cached(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    built = embedded_corpus(library=library, cache=cache)
    assert "module" not in built.vocabulary
    assert {"parser", "returns", "item", "value", "."} <= set(built.vocabulary)
    assert "foreign" not in built.vocabulary
    assert min(len(built.train), len(built.valid), len(built.test)) > 50
    assert len(built.train) > 5 * len(built.valid)

    read = embedded_corpus(library=library, cache=cache)
    again = embedded_corpus(library=library, cache=tmp_path / "other")
    for other in (read, again):
        assert other.vocabulary == built.vocabulary
        assert np.array_equal(tokens(other), tokens(built))


def test_its_words_are_those_of_the_words_tokenizer(library: Path, tmp_path: Path) -> None:
    """So that a text of the user is split in the same way, and one that was split already stays."""
    corpus = embedded_corpus(library=library, cache=tmp_path)
    assert isinstance(corpus.tokenizer, Words)
    spaces = corpus_of(embedded_source(library), Settings(WhiteSpace()), tmp_path)
    assert corpus.fingerprint() == spaces.fingerprint()


def test_cache_is_used_and_damage_is_mended(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    built = tokens(embedded_corpus(library=library, cache=cache))
    (entry,) = (path for path in (cache / "tokens").iterdir() if path.is_dir())
    content = (entry / "tokens.bin").read_bytes()
    for damage in (content[: len(content) // 2], b"\1" * len(content)):
        (entry / "tokens.bin").write_bytes(damage)
        assert np.array_equal(tokens(embedded_corpus(library=library, cache=cache)), built)
        assert (entry / "tokens.bin").read_bytes() == content
    monkeypatch.setattr("hstree.lm.data._embedded_text", lambda *_: pytest.fail("read again"))
    assert np.array_equal(tokens(embedded_corpus(library=library, cache=cache)), built)


def test_changed_library_is_noticed(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = embedded_corpus(library=library, cache=cache)
    (library / "module_0.py").write_text('"""One more sentence is here."""\n')
    after = embedded_corpus(library=library, cache=cache)
    assert before.fingerprint() != after.fingerprint()


def test_unwritable_cache_is_no_error(library: Path, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    corpus = embedded_corpus(library=library, cache=occupied / "below")
    assert len(corpus.train) > 50
    assert occupied.read_text() == "not a folder"


def test_user_cache_is_the_default(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSTREE_CACHE", str(tmp_path / "cache"))
    built = embedded_corpus(library=library)
    assert list((tmp_path / "cache" / "tokens").glob("*.entry"))
    monkeypatch.setenv("HSTREE_CACHE", "")
    assert np.array_equal(tokens(embedded_corpus(library=library)), tokens(built))


def test_library_without_text(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(ValueError, match="too few docstrings"):
        embedded_corpus(library=tmp_path / "lib", cache=tmp_path / "cache")
