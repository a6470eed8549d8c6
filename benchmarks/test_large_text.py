"""The text of many types made from documentation."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from benchmarks.large_text import (
    PACKAGES,
    documents,
    html_paragraphs,
    make_text,
    part_of,
    pieces,
    words,
)


def wheel(folder: Path, **files: bytes) -> Path:
    path = folder / "package-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def read(path: Path) -> dict[str, list[str]]:
    return {name: [part for part in texts if part] for name, texts in documents(path)}


def test_docstrings_of_a_package(tmp_path: Path) -> None:
    source = b'def f():\n    """Return the number of lines."""\n'
    path = wheel(tmp_path, **{"package/module.py": source, "package/data.json": b"{}"})
    assert read(path) == {"package/module.py": ["Return the number of lines."]}


def test_descriptions_of_services(tmp_path: Path) -> None:
    def service(text: str) -> bytes:
        content = {"operations": [{"documentation": text}], "name": "x"}
        return gzip.compress(json.dumps(content).encode())

    def api(**schema: Any) -> bytes:
        return json.dumps({"schemas": {"Table": schema}}).encode()

    folder = "googleapiclient/discovery_cache/documents"
    property = {"description": {"type": "string", "description": "Of the table."}}
    path = wheel(
        tmp_path,
        **{
            "botocore/data/store/2019/service-2.json.gz": service("Old &lt; new<br/>One"),
            "botocore/data/store/2020/service-2.json.gz": service("<p>Deletes <b>it</b>.</p>"),
            "botocore/data/store/2020/paginators-1.json": b'{"documentation": "no service"}',
            f"{folder}/base.v1.json": api(enumDescriptions=["Small.", "Large."]),
            f"{folder}/base.v2.json": api(description="A table.", properties=property),
            f"{folder}/index.json": b'{"items": []}',
        },
    )
    assert read(path) == {
        "service store": ["Old < new", "One", "Deletes it ."],
        "service base": ["Small.", "Large.", "A table.", "Of the table."],
        "service index": [],
    }
    assert list(html_paragraphs(["a &lt; b<br/>c"])) == ["a < b", "c"]


def test_every_package_is_pinned() -> None:
    lines = [line for line in PACKAGES.read_text().splitlines() if not line.startswith("#")]
    pinned = re.compile(r"[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}")
    assert len(lines) > 10
    assert all(pinned.fullmatch(line) for line in lines)


def test_numbers_are_one_word() -> None:
    assert words("Use 3.11 or 12 of utf-8.") == [
        *("use", "<number>", "or", "<number>", "of", "utf-8", ".")
    ]


def test_parts_of_the_text(tmp_path: Path) -> None:
    names = [f"document {number}" for number in range(300)]
    assert {part_of(name) for name in names} == {"train", "valid", "test"}
    documents = [(name, [f"The {name} has its own word w{name[9:]}."]) for name in names]
    documents.append(("again", ["The document 7 has its own word w7.", "too short"]))
    size = make_text(documents, tmp_path / "text")
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
    make_text(documents, tmp_path / "text")
    lines = (tmp_path / "text" / "train.txt").read_text().splitlines()
    places = [(int(d[1:]), int(p[1:])) for d, p, *_ in map(str.split, lines)]
    begins = [index for index, (_, paragraph) in enumerate(places) if paragraph in (0, 29)]
    documents_of_pieces = [places[index][0] for index in begins]
    assert documents_of_pieces != sorted(documents_of_pieces)
    for begin, end in zip(begins, [*begins[1:], len(places)], strict=True):
        document, paragraph = places[begin]
        size = 29 if paragraph == 0 else 11
        assert places[begin:end] == [(document, paragraph + number) for number in range(size)]
