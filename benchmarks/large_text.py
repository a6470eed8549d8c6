"""A text of more than 100,000 types, the same on every machine: the documentation of packages.

    python -m benchmarks.large_text --save FOLDER

downloads the wheels that large_text.txt pins, 80 MB, and writes FOLDER/train.txt, valid.txt and
test.txt: the docstrings of all modules, and the descriptions of web services in the data of
botocore and google-api-python-client. No code of the packages runs. Whole documents go to one part,
by a hash of their names; within a part, pieces of about 1,000 words of all documents are mixed, so
that the beginning of a text is like the rest of it. Words are those of hstree.lm.data.tokenize,
with one token for all numbers; repeated paragraphs are left out. Nothing of the text is part of
this repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from hstree.lm.data import docstrings, prose, sentences, tokenize

PACKAGES = Path(__file__).with_suffix(".txt")
NUMBER = "<number>"
VALID_PERCENT, TEST_PERCENT = 2, 2
SHORTEST = 5
"""Words of a paragraph that is kept."""
PIECE = 1_000
"""Words of a document that stay together; a piece ends with a paragraph."""

Document = tuple[str, Iterable[str]]
"""Name and paragraphs."""

_SERVICE = re.compile(r"botocore/data/([^/]+)/[^/]+/service-2\.json\.gz")
_API = re.compile(r"googleapiclient/discovery_cache/documents/([^/.]+)\..*json")
_BLOCK_TAG = re.compile(r"</?(?:p|li|ul|ol|dl|dt|dd|div|note|br|h\d)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"[\d.,:]*\d[\d.,:]*")


def download(folder: Path) -> list[Path]:
    """The wheels of PACKAGES, downloaded to a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    chosen = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(PACKAGES)]
    subprocess.run([*pip, *chosen, "--dest", str(folder)], check=True)
    return list(folder.glob("*.whl"))


def documents(wheel: Path) -> Iterator[Document]:
    """The documents of a wheel: each module, and each web service in all its versions."""
    services: dict[str, list[str]] = {}
    with ZipFile(wheel) as archive:
        for file in sorted(archive.namelist()):
            if file.endswith(".py"):
                texts = docstrings(archive.read(file))
                yield file, (part for text in texts for part in prose(text))
            elif service := _SERVICE.fullmatch(file) or _API.fullmatch(file):
                services.setdefault(service[1], []).append(file)
        for name, files in services.items():
            described = (text for file in files for text in _descriptions(archive.read(file)))
            yield f"service {name}", html_paragraphs(described)


def _descriptions(data: bytes) -> Iterator[str]:
    """All descriptions in a file of JSON, which may be compressed."""
    compressed = data.startswith(b"\x1f\x8b")
    yield from _described(json.loads(gzip.decompress(data) if compressed else data))


def _described(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            if key in ("documentation", "description", "enumDescriptions"):
                yield from _strings(below)
            yield from _described(below)
    elif isinstance(value, list):
        for below in value:
            yield from _described(below)


def _strings(value: Any) -> Iterator[str]:
    """A description, or a list of them; a property may have the same name."""
    values = value if isinstance(value, list) else [value]
    yield from (text for text in values if isinstance(text, str))


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


def make_text(documents: Iterable[Document], save: Path) -> dict[str, int]:
    """Write the three parts of a text to a folder that is created. Returns the number of tokens of
    each part, and the ``types`` of the training part."""
    texts: dict[str, list[tuple[int, str]]] = {"train": [], "valid": [], "test": []}
    size, types, seen = Counter[str](), set[str](), set[bytes]()
    for name, paragraphs in documents:
        part = part_of(name)
        for number, piece in enumerate(pieces(paragraphs, seen)):
            size[part] += sum(map(len, piece))
            if part == "train":
                types.update(word for found in piece for word in found)
            lines = (" ".join(line) + "\n" for found in piece for line in sentences(found))
            texts[part].append((_digest(f"{name} {number}"), "".join(lines)))
    save.mkdir(parents=True)
    for part, its in texts.items():
        mixed = "".join(text for _, text in sorted(its))
        (save / f"{part}.txt").write_text(mixed, encoding="utf-8")
    return {**size, "types": len(types)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", type=Path, required=True, help="folder to create")
    save = parser.parse_args().save
    if save.exists():
        parser.error(f"--save: expected a folder that does not exist, got {save}")
    with TemporaryDirectory() as folder:
        wheels = sorted(download(Path(folder)))
        size = make_text((found for wheel in wheels for found in documents(wheel)), save)
    print(", ".join(f"{name} {number:,}" for name, number in size.items()))


if __name__ == "__main__":
    main()
