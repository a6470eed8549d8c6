"""The text of many types made from documentation."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.large_text import (
    html_paragraphs,
    make_text,
    manual_pages,
    part_of,
    pieces,
    python_documents,
    roff_paragraphs,
    service_documents,
    words,
)

MANUAL = r"""
.TH LS 1
.SH NAME
ls \- list directory contents
.SH DESCRIPTION
.PP
List information about the \fBFILE\fRs,
sorted by name.
.nf
"""


def test_manual_pages(tmp_path: Path) -> None:
    (tmp_path / "man1").mkdir()
    (tmp_path / "man1" / "ls.1.gz").write_bytes(gzip.compress(MANUAL.encode()))
    (tmp_path / "man1" / "dir.1").write_text(".so man1/ls.1\n")
    (tmp_path / "man1" / "broken.1.gz").write_bytes(b"not gzip")
    (document,) = manual_pages([tmp_path])
    name, paragraphs = document
    assert name == "manual ls.1.gz"
    assert list(paragraphs) == [
        "ls - list directory contents",
        "List information about the FILEs, sorted by name.",
    ]
    assert list(roff_paragraphs(".PP\n")) == []


def test_docstrings_of_packages(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    source = 'def f():\n    """Return the number of lines."""\n'
    (tmp_path / "package" / "module.py").write_text(source)
    documents = {name: list(texts) for name, texts in python_documents([tmp_path])}
    assert documents == {"package/module.py": ["Return the number of lines."]}


def test_descriptions_of_services(tmp_path: Path) -> None:
    for version, text in (("2019", "old"), ("2020", "<p>Deletes a <b>table</b>.</p><li>One</li>")):
        folder = tmp_path / "store" / version
        folder.mkdir(parents=True)
        content = json.dumps({"operations": [{"documentation": text}], "name": "x"})
        (folder / "service-2.json.gz").write_bytes(gzip.compress(content.encode()))
    ((name, paragraphs),) = service_documents([tmp_path])
    assert name == "service store"
    assert [part for part in paragraphs if part] == ["Deletes a table .", "One"]
    assert list(html_paragraphs(["a &lt; b<br/>c"])) == ["a < b", "c"]


def test_numbers_are_one_word() -> None:
    assert words("Use 3.11 or 12 of utf-8.") == [
        *("use", "<number>", "or", "<number>", "of", "utf-8", ".")
    ]


def test_parts_of_the_text(tmp_path: Path) -> None:
    names = [f"document {number}" for number in range(300)]
    assert {part_of(name) for name in names} == {"train", "valid", "test"}
    documents = [(name, [f"The {name} has its own word w{name[9:]}."]) for name in names]
    documents.append(("again", ["The document 7 has its own word w7.", "too short"]))
    size = make_text(documents, tmp_path / "text", types=100, tokens=500)
    files = {part: tmp_path / "text" / f"{part}.txt" for part in ("train", "valid", "test")}
    lines = {part: file.read_text().splitlines() for part, file in files.items()}
    assert sum(map(len, lines.values())) == len(names)
    for part, its in lines.items():
        assert sum(len(line.split()) for line in its) == size[part]
        assert all(part_of(f"document {line.split()[-2][1:]}") == part for line in its)
    types = {word for line in lines["train"] for word in line.split()}
    assert size["types"] == len(types)


def test_pieces_of_documents_are_mixed(tmp_path: Path) -> None:
    words_after = " ".join(["word"] * 32)
    documents = [
        (f"document {d}", [f"d{d} p{p} {words_after}." for p in range(40)]) for d in range(200)
    ]
    (first, second) = pieces(documents[0][1], seen := set())
    assert [len(first), len(second)] == [29, 11]  # of 35 words each
    assert not list(pieces(documents[0][1], seen))
    make_text(documents, tmp_path / "text", types=10, tokens=1000)
    lines = (tmp_path / "text" / "train.txt").read_text().splitlines()
    places = [(int(d[1:]), int(p[1:])) for d, p, *_ in map(str.split, lines)]
    begins = [index for index, (_, paragraph) in enumerate(places) if paragraph in (0, 29)]
    documents_of_pieces = [places[index][0] for index in begins]
    assert documents_of_pieces != sorted(documents_of_pieces)
    for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
        document, paragraph = places[begin]
        size = 29 if paragraph == 0 else 11
        assert places[begin:end] == [(document, paragraph + number) for number in range(size)]


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected at least 2,000,000 tokens .* manpages-dev"):
        make_text([("document", ["One short paragraph of text."])], tmp_path / "text")
    assert not (tmp_path / "text").exists()
