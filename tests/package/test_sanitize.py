"""``tools/sanitize.py``: flags that a sanitizer does not read are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "sanitize.py"


@pytest.mark.parametrize("flags", ["--quick", "--capability portable"])
def test_flags_that_cuda_does_not_read(flags: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), "cuda", *flags.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2
    assert shown.stdout == ""
    name = flags.split()[0]
    expected = f"{name}: expected the sanitizer address or thread, got cuda"
    assert shown.stderr.splitlines()[-1].endswith(expected)
