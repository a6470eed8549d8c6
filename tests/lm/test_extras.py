"""Without the extra ``lm``, rich and matplotlib, the command trains and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BARE = """
import sys
for name in ("rich", "matplotlib"):
    sys.modules[name] = None
from hstree.__main__ import main
sys.exit(main())
"""
SMALL = "--epochs 1 --embedding-size 8 --hidden-size 8 --layers 1 --head softmax --threads 1"


def hstree(arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran\n" * 60)
    shown = hstree(f"train --data text.txt --run run {SMALL}", folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "learning curve:  needs matplotlib: pip install 'hstree[lm]'" in shown.stdout
    assert not (folder / "run" / "learning_curve.png").exists()
    assert (folder / "run" / "model.safetensors").exists()
    trees = SMALL.replace("softmax", "trees")
    assert hstree(f"train --data text.txt --run trees {trees}", folder).returncode == 0
    return folder


def test_tables_are_markdown(trained: Path) -> None:
    shown = hstree("compare run", trained)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "| ---" in shown.stdout
    assert "softmax" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("analyze rank run", "rank"),
        ("tree draw trees", "a picture"),
        ("experiment jacobian", "jacobian"),
    ],
)
def test_a_picture_names_the_extra(arguments: str, what: str, trained: Path) -> None:
    """Before the work, not after it."""
    shown = hstree(arguments, trained)
    assert shown.returncode == 2
    line = " ".join(shown.stderr.split())
    assert line == f"hstree: {what}: needs the package matplotlib: pip install 'hstree[lm]'"
