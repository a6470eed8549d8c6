"""A natural text of more than 100,000 types, from the documentation that this machine has.

    python -m benchmarks.large_text --save FOLDER

writes FOLDER/train.txt, valid.txt and test.txt: the English manual pages, and the docstrings of the
standard library and of all installed packages; with the package botocore also its descriptions of
web services. Whole documents go to one part, by a hash of their names; within a part, pieces of
about 1,000 words of all documents are mixed, so that the beginning of a text is like the rest of
it. Words are those of hstree.lm.data.tokenize, with one token for all numbers; repeated paragraphs
are left out. The text depends on what is installed. Nothing of it is part of this repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hstree.lm.data import sentences, tokenize
from hstree.lm.data.embedded import docstrings, prose

MANUALS = (Path("/usr/share/man"), Path("/usr/local/share/man"))
NUMBER = "<number>"
TYPES, TOKENS = 100_000, 2_000_000
"""Smallest numbers of types and tokens of the training part."""
VALID_PERCENT, TEST_PERCENT = 2, 2
SHORTEST = 5
"""Words of a paragraph that is kept."""
PIECE = 1_000
"""Words of a document that stay together; a piece ends with a paragraph."""

Document = tuple[str, Iterable[str]]
"""Name and paragraphs."""

_ROFF_MACRO = re.compile(r"^[.'].*$", re.MULTILINE)
_ROFF_ESCAPE = re.compile(r"\\(?:f(?:\[[^]]*\]|\(..|.)|s[-+]?\d|\*?\(..|\[[^]]*\]|[|^&%:]|.)")
_ROFF_DASH = re.compile(r"\\-")
_BLOCK_TAG = re.compile(r"</?(?:p|li|ul|ol|dl|dt|dd|div|note|br|h\d)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"[\d.,:]*\d[\d.,:]*")


def manual_pages(folders: Iterable[Path] = MANUALS) -> Iterator[Document]:
    """The English manual pages, each a document."""
    for folder in folders:
        for file in sorted(folder.glob("man[1-9]*/*")):
            try:
                text = _bytes(file).decode("utf-8")
            except (OSError, EOFError, zlib.error, UnicodeDecodeError):
                continue
            if not text.startswith(".so "):  # another page by another name
                yield f"manual {file.name}", roff_paragraphs(text)


def _bytes(file: Path) -> bytes:
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix == ".gz" else data


def roff_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a manual page without macros, fonts and special characters."""
    blocks = re.split(r"^\.(?:PP|P|LP|Pp|TP|IP|SH|SS|Sh|Ss|It)\b.*$", text, flags=re.MULTILINE)
    for block in blocks:
        plain = _ROFF_ESCAPE.sub("", _ROFF_DASH.sub("-", _ROFF_MACRO.sub("", block)))
        yield from prose(plain)


def python_documents(folders: Iterable[Path]) -> Iterator[Document]:
    """The docstrings of all modules below folders, each module a document."""
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            try:
                source = file.read_bytes()
            except OSError:
                continue
            name = file.relative_to(folder).as_posix()
            yield name, (part for text in docstrings(source) for part in prose(text))


def python_folders() -> list[Path]:
    """The standard library with the packages beside it, and those of this environment."""
    paths = sysconfig.get_paths()
    found: list[Path] = []
    for name in ("stdlib", "purelib", "platlib"):
        folder = Path(paths[name]).resolve()
        if not any(folder.is_relative_to(other) for other in found):
            found.append(folder)
    return found


def service_documents(folders: Iterable[Path]) -> Iterator[Document]:
    """The descriptions of services in botocore's data, each service a document."""
    for folder in folders:
        latest = {path.parent.parent.name: path for path in sorted(folder.rglob("service-2.json*"))}
        for name, file in sorted(latest.items()):
            yield f"service {name}", html_paragraphs(_documentation(json.loads(_bytes(file))))


def _documentation(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            if key == "documentation" and isinstance(below, str):
                yield below
            else:
                yield from _documentation(below)
    elif isinstance(value, list):
        for below in value:
            yield from _documentation(below)


def html_paragraphs(texts: Iterable[str]) -> Iterator[str]:
    """The paragraphs and list items of texts in HTML, without tags."""
    for text in texts:
        for block in _BLOCK_TAG.split(text):
            yield " ".join(html.unescape(_TAG.sub(" ", block)).split())


def words(paragraph: str) -> list[str]:
    """The words of a paragraph, with one token for all numbers."""
    return [NUMBER if _NUMBER.fullmatch(word) else word for word in tokenize(paragraph)]


def part_of(name: str) -> str:
    """The part to which a document belongs, by a hash of its name."""
    bucket = _digest(name) % 100
    if bucket < TEST_PERCENT:
        return "test"
    return "valid" if bucket < TEST_PERCENT + VALID_PERCENT else "train"


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def pieces(paragraphs: Iterable[str], seen: set[bytes]) -> Iterator[list[list[str]]]:
    """The paragraphs of a document as words, in pieces of at least PIECE words but for the last;
    without short ones and those in ``seen``, to which the others are added."""
    piece: list[list[str]] = []
    size = 0
    for paragraph in paragraphs:
        digest = hashlib.blake2b(paragraph.encode(), digest_size=12).digest()
        found = [] if digest in seen else words(paragraph)
        seen.add(digest)
        if len(found) < SHORTEST:
            continue
        piece.append(found)
        size += len(found)
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def make_text(
    documents: Iterable[Document], save: Path, *, types: int = TYPES, tokens: int = TOKENS
) -> dict[str, int]:
    """Write the three parts of a text to a folder that is created. Returns the number of tokens of
    each part, and the ``types`` of the training part. Raises ValueError, and writes nothing, if the
    training part has fewer than ``types`` or ``tokens``, or another part is empty."""
    texts: dict[str, list[tuple[int, str]]] = {"train": [], "valid": [], "test": []}
    size, counts, seen = Counter[str](), Counter[str](), set[bytes]()
    for name, paragraphs in documents:
        part = part_of(name)
        for number, piece in enumerate(pieces(paragraphs, seen)):
            size[part] += sum(map(len, piece))
            if part == "train":
                counts.update(word for found in piece for word in found)
            lines = (" ".join(line) + "\n" for found in piece for line in sentences(found))
            texts[part].append((_digest(f"{name} {number}"), "".join(lines)))
    if len(counts) < types or size["train"] < tokens or not (size["valid"] and size["test"]):
        raise ValueError(
            f"expected at least {tokens:,} tokens of {types:,} types in the training part, got "
            f"{size['train']:,} of {len(counts):,}; install manual pages (on Debian: man-db, "
            "manpages-dev) or Python packages with much documentation (botocore, scipy, torch)"
        )
    save.mkdir(parents=True)
    for part, its in texts.items():
        mixed = "".join(text for _, text in sorted(its))
        (save / f"{part}.txt").write_text(mixed, encoding="utf-8")
    return {**size, "types": len(counts)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", type=Path, required=True, help="folder to create")
    parser.add_argument(
        "--python",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="further folders with Python packages",
    )
    arguments = parser.parse_args()
    if arguments.save.exists():
        parser.error(f"--save: expected a folder that does not exist, got {arguments.save}")
    folders = [*python_folders(), *arguments.python]

    def documents() -> Iterator[Document]:
        yield from manual_pages()
        yield from python_documents(folders)
        yield from service_documents(folders)

    try:
        size = make_text(documents(), arguments.save)
    except ValueError as error:
        parser.error(str(error))
    print(", ".join(f"{name} {number:,}" for name, number in size.items()))


if __name__ == "__main__":
    main()
