"""The examples at a small size; as a user runs them, under the slow marker."""

from __future__ import annotations

import pydoc_data.topics
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "custom_tree": ["--steps", "30"],
    "replace_a_softmax": ["--steps", "3"],
    "transformers_model": ["--steps", "2"],
}


def check(name: str, printed: str) -> None:
    """Asserts that an example printed its results."""
    if name == "custom_tree":
        assert printed.startswith("classes 12, inner nodes 7 (3 wide)")
        animals, plants = map(float, re.findall(r"mean P\(animal\) .*: ([\d.]+)", printed))
        assert animals > 0.9 > 0.1 > plants
    elif name == "replace_a_softmax":
        perplexity = [float(x) for x in re.findall(r"validation perplexity ([\d.]+)", printed)]
        assert len(perplexity) == 2
        assert all(1 < x < 8000 for x in perplexity)
    else:
        assert "TreeEnsemble(" in printed
        first, *_, last = re.findall(r"step +\d+: loss ([\d.]+)", printed)
        assert float(last) < float(first) + 1
        generated = printed.splitlines()[-1]
        assert len(generated.split()) > 10
        assert generated.lower().startswith("return the")


@pytest.mark.parametrize("name", SMALL)
def test_small(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    library = tmp_path / "library" / "pydoc_data"  # of one file: quickly read
    library.mkdir(parents=True)
    shutil.copy(pydoc_data.topics.__file__, library)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library.parent))
    picture = ["--picture", str(tmp_path / "tree.png")] if name == "custom_tree" else []
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name], *picture])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    check(name, capsys.readouterr().out)
    assert len(list(tmp_path.glob("*.png"))) == len(picture) // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_as_a_user_runs_it(name: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    check(name, shown.stdout)
    assert not list(tmp_path.iterdir())


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*SMALL, "classification", "recommender"}
    assert (
        set(re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.M)) == scripts
    )
