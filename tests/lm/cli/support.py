"""What the tests of the commands share."""

from __future__ import annotations

import pytest

from hstree.__main__ import main


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """Runs a command that must fail with one line on stderr; returns the line."""
    assert main(list(arguments)) == status
    error = capsys.readouterr().err
    assert error.endswith("\n")
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    assert error.startswith("hstree")
    return error
