"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from .table import Table

_NARROW, _BROAD = 16, 48  # least and greatest width of a column of text, in characters


def print_tables(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Print tables and notes at the width of the terminal, wider only if numbers would break, and
    at full width if there is no terminal."""
    from rich import box, table
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    console = Console()
    wide = console.options.update(width=10_000)
    for content in tables:
        drawn = table.Table(
            box=box.SIMPLE_HEAD,
            title=Text(content.title),
            title_justify="left",
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for name, right, *cells in zip(content.header, content.right, *content.rows, strict=True):
            longest = max(map(len, (name, *cells)))
            drawn.add_column(
                Text(name.replace(" ", "\n") if right else name),
                justify="right" if right else "left",
                no_wrap=right,
                overflow="fold",
                min_width=None if right else min(longest, _NARROW),
                max_width=None if right else _BROAD,
            )
        for row in content.rows:
            drawn.add_row(*map(Text, row))
        natural = Measurement.get(console, wide, drawn).maximum
        least = Measurement.get(console, wide, drawn).minimum
        width = natural if not console.is_terminal else min(natural, max(console.width, least))
        Console(width=width).print(drawn)
    for note in notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
