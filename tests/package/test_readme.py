"""README.md's commands are the ones that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def readme_commands(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "readme_commands.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_snippets_run_as_pasted() -> None:
    snippets = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    assert len(snippets) == 2
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, names)
    assert names["loss"].isfinite()
    assert names["layer"].weight.grad.any()
    assert names["head"].weight.grad.any()
    assert names["classes"].shape == (32, 10)


def test_the_first_page_is_short() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 90
    prose = re.sub(r"^\|.*$", "", text, flags=re.M)
    assert len(re.findall(r"begin -->[^|\n]+<!--", prose)) <= 3  # measured numbers


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        (
            "install",
            ["venv", "activate", "pip install torch", "pip install '.[lm]'", "hstree train"],
        ),
        ("test", ["pip install -r tests/requirements.txt", "pytest"]),
    ],
)
def test_commands_are_marked(name: str, steps: list[str]) -> None:
    shown = readme_commands(name)
    assert shown.returncode == 0, shown.stderr
    places = [shown.stdout.find(step) for step in steps]
    assert -1 not in places, f"{steps} are not all in:\n{shown.stdout}"
    assert places == sorted(places)
    block = f"<!-- command: {name} -->\n```"
    assert (ROOT / "README.md").read_text(encoding="utf-8").count(block) == 1


def test_unknown_command_is_an_error() -> None:
    shown = readme_commands("nothing")
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "README.md has: install, test" in shown.stderr


def test_ci_takes_its_commands_from_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    for name in ("install", "test"):
        assert f"tools/readme_commands.py {name})" in text
