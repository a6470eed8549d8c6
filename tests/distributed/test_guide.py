"""The torchrun script of docs/training-loops.md, with each wrapper that the page offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- torchrun: .*?-->\n```python\n(.*?)```", re.DOTALL)
WRAPPED = "model = hstree.distributed.DistributedDataParallel(Model())\n"


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training-loops.md").read_text(encoding="utf-8")
    script, *wrappers = BLOCK.findall(page)
    assert script.count(WRAPPED) == 1
    assert len(wrappers) == 2
    scripts = [script.replace(WRAPPED, wrapper) for wrapper in (WRAPPED, *wrappers)]
    file = tmp_path / "train.py"
    file.write_text("".join(scripts), encoding="utf-8")  # torch is imported once
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
