"""The notebook of docs/start.md, made as a user makes it, with every cell run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_cells_run(tmp_path: Path) -> None:
    file = tmp_path / "start.ipynb"
    command = [sys.executable, ROOT / "tools" / "notebook.py", ROOT / "docs" / "start.md", file]
    subprocess.run(command, check=True)
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["source"][0] == "# Start here\n"
    assert not any("](" in line for cell in cells for line in cell["source"])
    names: dict[str, Any] = {}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 2
    torch.manual_seed(0)
    for source in code:
        exec(source, names)
    assert names["loss"].isfinite()
