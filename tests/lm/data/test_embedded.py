"""The embedded corpus, on a small library made here."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest

from hstree.lm.data import WhiteSpace, Words, docstrings, load_corpus, prose

SUBJECTS = ("parser", "reader", "writer", "socket", "thread", "buffer", "server")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    (root / "pydoc_data" / "topics.py").touch()
    topics = {"assert": "The assert statement checks what must be true.\n" * 2}
    monkeypatch.setattr("pydoc_data.topics.topics", topics)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    monkeypatch.setenv("HSTREE_CACHE", str(tmp_path / "cache"))
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
    found = set(docstrings(inspect.getsource(textwrap).encode()))
    for thing in (textwrap, textwrap.wrap, textwrap.TextWrapper, textwrap.dedent):
        assert inspect.getdoc(thing) in found


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


def test_corpus_is_deterministic_and_cached(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = load_corpus()
    assert "module" not in built.vocabulary
    assert {"parser", "returns", "item", "value", "statement", "."} <= set(built.vocabulary.words)
    assert "foreign" not in built.vocabulary
    assert min(len(built.train), len(built.valid), len(built.test)) > 50
    assert len(built.train) > 5 * len(built.valid)
    assert built.vocabulary.frequencies.sum() == len(built.train)

    # Its words are those of its tokenizer: a text that was split already stays.
    assert isinstance(built.tokenizer, Words)
    assert load_corpus(tokenizer=WhiteSpace()).fingerprint() == built.fingerprint()
    with monkeypatch.context() as patch:
        patch.setenv("HSTREE_CACHE", "")
        assert load_corpus().fingerprint() == built.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr("hstree.lm.data.docstrings", lambda _: pytest.fail("read again"))
        assert load_corpus().fingerprint() == built.fingerprint()
    (library / "module_0.py").write_text('"""One more sentence is here."""\n')
    assert load_corpus().fingerprint() != built.fingerprint()


def test_library_without_text(library: Path) -> None:
    for path in library.glob("module*"):
        path.unlink()
    with pytest.raises(ValueError, match="lib: this Python installation has too few docstrings"):
        load_corpus()
