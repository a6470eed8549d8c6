"""The text of many types made from documentation."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
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


def test_documents_of_a_package(tmp_path: Path) -> None:
    def service(text: str) -> bytes:
        content = {"operations": [{"documentation": text}], "name": "x"}
        return gzip.compress(json.dumps(content).encode())

    schema = {
        "description": "A table.",
        "enumDescriptions": ["Small.", "Large."],
        "properties": {"description": {"type": "string", "description": "Of the table."}},
    }
    api = json.dumps({"schemas": {"Table": schema}})
    files = {
        "package/module.py": b'def f():\n    """Return the number of lines."""\n',
        "package/data.json": b"{}",
        "botocore/data/store/2019/service-2.json.gz": service("Old &lt; new<br/>One"),
        "botocore/data/store/2020/service-2.json.gz": service("<p>Deletes <b>it</b>.</p>"),
        "botocore/data/store/2020/paginators-1.json": b'{"documentation": "no service"}',
        "googleapiclient/discovery_cache/documents/base.v1.json": api.encode(),
    }
    path = tmp_path / "package-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    found = {name: [part for part in texts if part] for name, texts in documents(path)}
    assert found == {
        "package/module.py": ["Return the number of lines."],
        "service store": ["Old < new", "One", "Deletes it ."],
        "service base": ["A table.", "Small.", "Large.", "Of the table."],
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
    documents = [(name, [f"The {name} has its own word w{name[9:]}."]) for name in names]
    documents.append(("again", ["The document 7 has its own word w7.", "too short"]))
    size = make_text(documents, tmp_path / "text")
    files = {part: tmp_path / "text" / f"{part}.txt" for part in ("train", "valid", "test")}
    lines = {part: file.read_text().splitlines() for part, file in files.items()}
    assert sum(map(len, lines.values())) == len(names)
    for part, its in lines.items():
        assert sum(len(line.split()) for line in its) == size[part] > 0
        assert all(part_of(f"document {line.split()[-2][1:]}") == part for line in its)
    own = [int(line.split()[-2][1:]) for line in lines["train"]]
    assert own != sorted(own)  # mixed
    assert size["types"] == len({word for line in lines["train"] for word in line.split()})


def test_pieces_end_with_a_paragraph() -> None:
    paragraphs = [f"p{p} {'word ' * 33}." for p in range(40)]  # of 35 words each
    (first, second) = pieces(paragraphs, seen := set())
    assert [len(first), len(second)] == [29, 11]
    assert not list(pieces(paragraphs, seen))
