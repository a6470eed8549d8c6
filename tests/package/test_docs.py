"""What the documents show exists: pictures, pages, and commands that the parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hstree.__main__ import COMMANDS, DESCRIPTION
from hstree.lm.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "benchmarks" / "results").rglob("*.md"))


def commands(page: Path) -> Iterator[str]:
    """The lines of code that begin with ``hstree``, with the lines that go on with them."""
    fenced = False
    for line in re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8")).splitlines():
        fenced ^= line.startswith("```")
        if re.match(r"( {4}|\$ )?hstree ", line) and (fenced or line.startswith("    ")):
            yield line.strip().removeprefix("$ ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [
        link
        for link in links
        if not link.startswith(("http://", "https://")) and not (page.parent / link).exists()
    ]
    assert missing == []


def test_tables_fit_into_a_page() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        rules = re.findall(r"^\|(?: :?-+:? \|)+$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert all(rule.count("|") <= 6 for rule in rules), page.name  # five columns


@pytest.mark.parametrize("name", ["guarantees.md", "integrations.md"])
def test_every_promise_has_a_test(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8").partition("## How it is tested")[0]
    rows = re.findall(r"^\| (?!what |promise |--)(.+) \|$", page, re.MULTILINE)
    assert len(rows) > 25
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert tests, f"no test in: {row}"
        for file, name in tests:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^ *def {name}\(", text, re.MULTILINE), f"{file} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser(COMMANDS, DESCRIPTION)
    for command in commands(page):
        words = shlex.split(command, comments=True)[1:]
        try:
            parser.parse_args(words)
        except SystemExit as exit_:  # --help and --version exit too, with 0
            if exit_.code:
                pytest.fail(f"{command}: {capsys.readouterr().err}")


def test_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "hstree is a package\n```bash\nhstree train --data x \\\n    --epochs 2  # two\n```\n"
        "    hstree compare a b\n`hstree tree`\n"
    )
    assert list(commands(page)) == [
        "hstree train --data x --epochs 2  # two",
        "hstree compare a b",
    ]
