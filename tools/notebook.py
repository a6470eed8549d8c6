"""Turn a page of the documentation into a notebook: its Python blocks are the cells of code.

    python tools/notebook.py docs/start.md start.ipynb

Links are left out, since they lead to files beside the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def notebook(page: str) -> dict[str, Any]:
    """The notebook, of version 4.5 of the format, of a page in Markdown."""
    cells: list[dict[str, Any]] = []
    for i, text in enumerate(BLOCK.split(page)):  # Markdown and code in turn
        kind = "code" if i % 2 else "markdown"
        source = text.strip() if i % 2 else LINK.sub(r"\1", text).strip()
        if source:
            cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}}
            code = {"execution_count": None, "outputs": []} if kind == "code" else {}
            cells.append(cell | code | {"source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main(page: str, output: str) -> None:
    made = notebook(Path(page).read_text(encoding="utf-8"))
    Path(output).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: notebook.py PAGE.md NOTEBOOK.ipynb")
    main(*sys.argv[1:])
