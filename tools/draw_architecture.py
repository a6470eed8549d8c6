"""Draws docs/architecture.svg from the table of packages in docs/architecture.md.

python tools/draw_architecture.py
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
# From top to bottom, each package at its column.
ROWS: list[dict[str, float]] = [
    {"lab": 1},
    {"lm": 1},
    {"heads": 1, "optim": 2.6},
    {"ops": 2.1},
    {"trees": 1},
    {"csrc/host": 1, "csrc/ops": 2.1},
    {"csrc/cpu": 2.1},
    {"csrc/kernels": 1.55},
]
# Python calls C++ here; the table lists imports and includes alone.
CALLS = [("trees", "csrc/host"), ("ops", "csrc/ops")]
WIDTH, HEIGHT, COLUMN, ROW, MARGIN = 116, 30, 140, 58, 20


def imports(page: str) -> dict[str, set[str]]:
    """What each package imports, by the table: hstree packages by name, others as csrc/NAME."""
    found = {}
    for root, name, others in re.findall(
        r"^\| `(hstree|csrc)/([\w/]+)` \|.*\| ([^|]+) \|$", page, flags=re.M
    ):
        prefix = "csrc/" if root == "csrc" else ""
        names = set() if others == "-" else set(others.split(", "))
        found[prefix + name] = {prefix + other for other in names}
    return found


def direct(imported: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports without those that follow from others."""
    return [
        (package, other)
        for package, others in imported.items()
        for other in sorted(others)
        if not any(other in imported[between] for between in others)
    ]


def draw(page: str) -> str:
    """The picture as SVG."""
    place = {
        name: (MARGIN + column * COLUMN, MARGIN + row * ROW)
        for row, names in enumerate(ROWS)
        for name, column in names.items()
    }
    width = round(max(x for x, _ in place.values()) + WIDTH + MARGIN)
    height = round(max(y for _, y in place.values()) + HEIGHT + MARGIN)
    imported = imports(page)
    assert set(imported) == set(place), set(imported) ^ set(place)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="14">',
        "<title>Packages of hstree and csrc; an arrow leads to what a package uses</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        "<style>.page { fill: #fff } @media (prefers-color-scheme: dark) "
        "{ .page { fill: #131416 } line { stroke: #99a } }</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
    ]
    for package, other in [*direct(imported), *CALLS]:
        (x1, y1), (x2, y2) = place[package], place[other]
        parts.append(
            f'<line x1="{x1 + WIDTH / 2:g}" y1="{y1 + HEIGHT}" x2="{x2 + WIDTH / 2:g}" y2="{y2}" '
            'stroke="#667" marker-end="url(#arrow)"/>'
        )
    for name, (x, y) in place.items():
        fill = "#fdebd3" if name.startswith("csrc/") else "#dce9f9"
        parts.append(
            f'<rect x="{x:g}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{fill}" '
            'stroke="#667"/>'
            f'<text x="{x + WIDTH / 2:g}" y="{y + 20}" text-anchor="middle" fill="#223">'
            f"{name}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    picture = draw((DOCS / "architecture.md").read_text(encoding="utf-8"))
    (DOCS / "architecture.svg").write_text(picture, encoding="utf-8")
