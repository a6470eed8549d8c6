"""Without the extra ``lm``, rich and matplotlib, the command trains and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BARE = """
import sys
for name in ("rich", "matplotlib"):
    sys.modules[name] = None
from hstree.__main__ import main
sys.exit(main())
"""
SMALL = "--epochs 1 --embedding-size 8 --hidden-size 8 --layers 1 --head softmax --threads 1"


@pytest.mark.slow
def test_tables_are_markdown_and_a_picture_names_the_extra(tmp_path: Path) -> None:
    def hstree(arguments: str) -> tuple[str, str]:
        command = [sys.executable, "-c", BARE, *arguments.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == (2 if done.stderr else 0)
        return done.stdout, done.stderr

    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran\n" * 60)
    shown, error = hstree(f"train --data text.txt --run run {SMALL}")
    assert error == ""
    assert "learning curve:  needs matplotlib: pip install 'hstree[lm]'" in shown
    assert not (tmp_path / "run" / "learning_curve.png").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()
    hstree(f"train --data text.txt --run trees {SMALL.replace('softmax', 'trees')}")
    shown, error = hstree("compare run")
    assert error == ""
    assert "| ---" in shown
    for arguments, what in [
        ("analyze rank run", "rank"),
        ("tree draw trees", "a picture"),
        ("experiment jacobian", "jacobian"),
    ]:  # before the work, not after it
        shown, error = hstree(arguments)
        line = f"hstree: {what}: needs the package matplotlib: pip install 'hstree[lm]'"
        assert " ".join(error.split()) == line
