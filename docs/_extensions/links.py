"""Links between pages, written so that GitHub follows them, made to work in the site too.

benchmarks/results is copied into the site as ``results``, and all but its README is left out of the
search. Other files outside of docs/ become links to ``repository_url``, or downloads where that is
empty. Without it, links to folders become text.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
COPY = DOCS / "results"
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")

RESULTS_CONTENTS = """
```{toctree}
:glob:
:hidden:

*
*/*
*/*/*
```
"""


def copy_results(app: Sphinx, config: Config) -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(RESULTS, COPY)


def rewrite_links(app: Sphinx, docname: str, source: list[str]) -> None:
    page = DOCS / docname
    original = RESULTS / page.relative_to(COPY) if page.is_relative_to(COPY) else page

    def rewrite(match: re.Match[str]) -> str:
        file, anchor = (original.parent / match["path"]).resolve(), match["anchor"] or ""
        if file == RESULTS:
            file = COPY / "README.md"
        elif file.is_relative_to(RESULTS):
            file = COPY / file.relative_to(RESULTS)
        elif not file.is_relative_to(DOCS) and app.config.repository_url:
            link = f"{app.config.repository_url}/blob/main/{file.relative_to(ROOT)}"
            return f"{match['text']}({link}{anchor})"
        if file.is_dir():
            return match["text"][1:-1]
        return f"{match['text']}({os.path.relpath(file, page.parent)}{anchor})"

    source[0] = LINK.sub(rewrite, source[0])
    # Reports would come first in a search of the site.
    if original not in (page, RESULTS / "README"):
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"
    if page == COPY / "README":
        source[0] += RESULTS_CONTENTS


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("repository_url", "", "env", str)
    app.connect("config-inited", copy_results)
    app.connect("source-read", rewrite_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
