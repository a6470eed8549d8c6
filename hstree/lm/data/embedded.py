"""The embedded corpus: English prose from the Python installation.

The docstrings of the standard library and the help topics of :mod:`pydoc` are about 400,000 tokens
of technical English that need no download. Modules are parsed, never imported, so none of their
code runs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
import itertools
import os
import re
import sys
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path

from hstree._progress import track

from .corpus import Corpus, corpus_of
from .source import SPLITS, Part, Source
from .text import sentences, tokenize
from .tokenization import Settings
from .tokenizer import Words
from .vocabulary import END, UNKNOWN, Vocabulary

FORMAT_VERSION = 1
VOCABULARY_SIZE = 10_000
_HELD_OUT_PERCENT = 5
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_EXAMPLE = (">>>", "...", "$ ")
_CODE_MARKS = re.compile(r"[^\w\s.,;:!?'\"()-]")
_ROLE = re.compile(
    r":[a-z]+(?::[a-z]+)?:(?=`)|:(?=(?:param|type|return|returns|rtype|raise|raises)\b[^:]*:)"
)
_QUOTE = re.compile(r"(?<!\w)['\u2018\u2019]+|['\u2019]+(?!\w)|[\"\u201c\u201d`*|]")


def embedded_corpus(
    *,
    min_count: int = 1,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
    library: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """The docstrings and help topics of this Python installation as a corpus of 8,000 to 10,000
    types.

    Paragraphs of prose are kept, code and tables are dropped. The rest is tokenized by
    :func:`hstree.lm.data.tokenize`, one sentence a line. Whole modules and topics are assigned to
    the training (90%), validation and test part (5% each) by a hash of their names, so no module
    is in two parts; repeated paragraphs are dropped. Words outside the 10,000 most
    frequent of the training part, and words that occur only once in it, become ``<unk>``. The
    result is the same for the same installation.

    The ids are kept in the cache (``hstree.lm.data.cache``), so that only the first call takes
    seconds. A cache that cannot be written is ignored.

    Args:
        min_count, max_vocabulary, vocabulary: as in :func:`hstree.lm.data.load_corpus`.
        library: folder of the modules; None: the standard library of the running Python.
        cache: folder of the cache; None: that of the user.

    Raises:
        ValueError: ``library`` holds too little text, as in installations without source files.
    """
    folder = None if cache is None else Path(cache)
    settings = Settings(Words(), min_count, max_vocabulary, vocabulary)
    return corpus_of(embedded_source(library), settings, folder)


def embedded_source(library: str | os.PathLike[str] | None = None) -> Source:
    root = Path(library) if library is not None else Path(sysconfig.get_path("stdlib"))
    files = _source_files(root)
    text = functools.cache(partial(_build, root, files))  # read when a part is
    name = "docstrings and help topics of Python " + ".".join(map(str, sys.version_info[:3]))
    parts = {
        split: Part(
            f"{name}: the part {split}",
            partial(_lines, text, split),
            partial(lambda of: len(text()[of]), split),
        )
        for split in SPLITS
    }
    return Source(name, parts, parts["train"].pieces, partial(_fingerprint, root, files))


def prose(text: str) -> Iterator[str]:
    """Paragraphs of English in a docstring or help topic, without interactive examples, literal
    blocks after ``::``, grammar, tables, underlines of headings, and much code."""
    literal_indent: int | None = None
    for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
        if not block.strip():
            continue
        lines = [line for line in block.split("\n") if line.strip()]
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        if literal_indent is not None and indent > literal_indent:
            continue
        literal_indent = indent if block.rstrip().endswith("::") else None
        lines = [line for line in lines if any(character.isalnum() for character in line)]
        before = takewhile(lambda line: not line.lstrip().startswith(_EXAMPLE), lines)
        plain = " ".join(line for line in before if "::=" not in line)
        paragraph = " ".join(_QUOTE.sub("", _ROLE.sub("", plain)).split())
        words = re.findall(r"[A-Za-z]{2,}", paragraph)
        if len(words) >= 3 and 10 * len(_CODE_MARKS.findall(paragraph)) < sum(map(len, words)):
            yield paragraph


def docstrings(source: bytes) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, in order of the source; nothing where it
    does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
        children: list[ast.AST] = []
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            nested = getattr(node, block, None)
            if isinstance(nested, list):  # expressions hold no docstrings
                children.extend(nested)
        pending.extend(reversed(children))


def help_topics(source: bytes) -> dict[str, str]:
    """The dictionary of help topics in the source of ``pydoc_data.topics``; empty if it is not
    there."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    topics: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(
            statement.value, ast.Dict
        ):
            for nodes in zip(statement.value.keys, statement.value.values, strict=True):
                name, text = (getattr(node, "value", None) for node in nodes)
                if isinstance(name, str) and isinstance(text, str):
                    topics[name] = textwrap.dedent(text)
    return topics


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """A context without cyclic garbage collection: syntax trees have no cycles, and traversing them
    repeatedly doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _source_files(root: Path) -> list[Path]:
    """Python files below ``root`` in order of their names, those of installed packages left out."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _fingerprint(root: Path, files: list[Path]) -> str:
    """By names and sizes: reading all files would take seconds."""
    digest = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\n".encode())
    version = ".".join(map(str, sys.version_info[:3]))
    return f"embedded: Python {version}, {FORMAT_VERSION}, {digest.hexdigest()}"


def _documents(root: Path, files: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            source = file.read_bytes()
        except OSError:
            continue
        if name == "pydoc_data/topics.py":
            for topic, text in sorted(help_topics(source).items()):
                yield f"topic {topic}", [text]
        else:
            yield name, list(docstrings(source))


def _part(name: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if bucket < _HELD_OUT_PERCENT:
        return "test"
    return "valid" if bucket < 2 * _HELD_OUT_PERCENT else "train"


def _build(root: Path, files: list[Path]) -> dict[str, bytes]:
    lines: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    documents = track(_documents(root, files), "reading the docstrings of Python", len(files))
    with _collection_paused():
        for name, texts in documents:
            part = lines[_part(name)]
            for paragraph in itertools.chain.from_iterable(map(prose, texts)):
                if paragraph not in seen:
                    seen.add(paragraph)
                    part.extend(sentences(tokenize(paragraph)))
    if min(sum(map(len, part)) for part in lines.values()) < 100:
        raise ValueError(
            f"{root}: this Python installation has too few docstrings for a corpus; "
            f"give a text of your own"
        )
    counts = Counter(word for line in lines["train"] for word in line)
    vocabulary = Vocabulary.from_counts(counts, min_count=2, max_size=VOCABULARY_SIZE)

    def joined(line: list[str]) -> str:
        known = (word if word in vocabulary else UNKNOWN for word in line if word != END)
        return " ".join(known) + "\n"

    return {split: "".join(map(joined, part)).encode() for split, part in lines.items()}


def _lines(text: Callable[[], Mapping[str, bytes]], split: str) -> Iterator[str]:
    for line in text()[split].splitlines(keepends=True):
        yield line.decode()
