"""Version, metadata, wheels and workflows agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def test_one_version_everywhere(project: dict[str, Any]) -> None:
    """Between two releases too: CHANGELOG.md and CITATION.cff name the last one."""
    version = project["project"]["version"]
    (newest, date), *_ = re.findall(r"^## \[(\d.*)\] - (\S+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert newest == version
    assert re.search(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE)[1] == version  # type: ignore[index]
    assert f"\ndate-released: {date}\n" in read("CITATION.cff")
    assert "\n## [Unreleased]\n" in read("CHANGELOG.md")


def test_wheels_for_every_python(project: dict[str, Any]) -> None:
    named = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(named) for c in project["project"]["classifiers"] if named in c]
    wheels = project["tool"]["cibuildwheel"]
    assert wheels["build"] == f"cp3{{{','.join(minors)}}}-*"
    assert project["project"]["requires-python"] == f">=3.{minors[0]}"
    assert f"CIBW_BUILD=cp3{minors[0]}-* cp3{minors[-1]}-*" in read(".github/workflows/ci.yml")


def test_one_torch_for_builds(project: dict[str, Any]) -> None:
    torch = re.search(r"torch==[\d.]+\d", read("tools/develop.sh"))
    assert torch is not None
    assert torch[0] in project["tool"]["cibuildwheel"]["before-build"]


def test_ci_packs_wheels_as_releases_do(project: dict[str, Any]) -> None:
    repair = project["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
    command, _, _ = repair.partition(" -w ")
    assert command.startswith("auditwheel repair --exclude ")
    assert command in read(".ci/run")


def test_linters_are_those_of_tools_requirements() -> None:
    """Hooks run what is installed, so tools/requirements.txt alone says which version."""
    config = read(".pre-commit-config.yaml")
    programs = set(re.findall(r"entry: (\S+)", config))
    required = set(re.findall(r"^([\w-]+)", read("tools/requirements.txt"), re.MULTILINE))
    assert {"clang-format", "mypy", "ruff"} < programs <= required
    assert config.count("language: system") == config.count("- id: ")
    pinned = re.findall(r"^([\w-]+)==", read("tools/requirements.txt"), re.MULTILINE)
    assert pinned == ["clang-format", "mypy", "ruff"]
    assert "pre-commit run --all-files" in read(".ci/run")


def test_workflow_runs_what_ci_runs() -> None:
    assert re.findall(r"^ +- run: (\.ci/\S+)$", read(".github/workflows/ci.yml"), re.M) == [
        ".ci/run"
    ]
    assert "uses: ./.github/workflows/ci.yml" in read(".github/workflows/release.yml")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_sdist_has_every_file(tmp_path: Path) -> None:
    """Of the repository: from it all can be built and tested."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    shown = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in shown.stdout.splitlines() if (ROOT / name).is_file()}
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "setup.py", "-q", "sdist"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        names = {member.name.partition("/")[2] for member in packed if member.isfile()}
    assert sorted(files - names) == []
    built = {name for name in names - files if ".egg-info/" not in name}
    assert built == {"PKG-INFO", "setup.cfg"}
