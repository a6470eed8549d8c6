"""Operators with wrong arguments, in a process of its own: an error that names one, or a result."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

from fuzz.scale import FACTOR, cases

TESTS = Path(__file__).resolve().parents[1]


def test_wrong_arguments_never_crash() -> None:
    seed = 0 if FACTOR <= 1 else secrets.randbelow(2**31)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fuzz.hostile", str(seed), str(cases(40))],
        cwd=TESTS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"crashed at the last of:\n{done.stderr[-2000:]}"
    *unnamed, last = done.stdout.splitlines()
    assert not unnamed, done.stdout
    refused, returned = (int(part.split()[0]) for part in last.split(", "))
    assert refused > cases(200)
    assert returned > cases(100)
