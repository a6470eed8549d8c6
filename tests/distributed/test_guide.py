"""The torchrun script of docs/training-loops.md, with each wrapper that the page offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- torchrun: .*?-->\n```python\n(.*?)```", re.DOTALL)
AT_THE_END = "\nimport time\ntime.sleep(1)\n"
"""A thread of gloo that drops a collective of a backward pass needs the GIL. If Python ends before
it gets it, the process aborts (https://github.com/pytorch/pytorch/issues/190489)."""
WRAPPED = "model = DistributedDataParallel(Model())\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "DistributedDataParallel"), (1, "fully_shard")],
    ids=str,
)
def test_two_processes(number: int, name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training-loops.md").read_text(encoding="utf-8")
    script, *wrappers = BLOCK.findall(page)
    assert script.count(WRAPPED) == 1
    wrapper = [WRAPPED, *wrappers][number]
    assert f"{name}(" in wrapper
    file = tmp_path / "train.py"
    file.write_text(script.replace(WRAPPED, wrapper) + AT_THE_END, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
