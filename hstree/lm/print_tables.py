"""Tables on the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hstree.lm._terminal import fold, terminal_width, visible

from .table import Table, markdown

if TYPE_CHECKING:
    from rich.table import Table as Drawn

_NARROW, _BROAD = 16, 48  # characters to which a column of text may shrink and grow


def print_tables(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Print tables and notes no wider than the terminal, at full width where there is none.

    Columns of text shrink, numbers stay whole, and so do their headings up to 16 characters.
    Columns that do not fit follow in further tables, which repeat the columns that tell the rows
    apart. Words are broken only where a column next to these does not fit otherwise.
    """
    width = terminal_width(sys.stdout)
    for content in tables:
        if find_spec("rich") is None:  # it is part of the extra lm
            print(visible(markdown([content])))
            continue
        from rich.console import Console

        for part in _parts(content, width):
            drawn = _drawn(part)
            least, _, natural = _widths(drawn)
            columns = natural if width is None else min(natural, max(width, least))
            Console(width=columns).print(drawn)
    for note in notes:
        print(fold(f"note: {note}", sys.stdout))


def _parts(content: Table, width: int | None) -> Iterator[Table]:
    """The table in parts that fit the width, if each column fits next to the repeated ones."""
    repeated = _repeated(content)
    shown, title = list(repeated), content.title
    for column in range(len(repeated), len(content.header)):
        _, whole, _ = _widths(_drawn(_part(content, [*shown, column], title)))
        if len(shown) > len(repeated) and width is not None and whole > width:
            yield _part(content, shown, title)
            shown, title = list(repeated), ""
        shown.append(column)
    yield _part(content, shown, title)


def _repeated(content: Table) -> range:
    """The first columns, up to one in which no two rows agree; the first if there is none."""
    for column, right in enumerate(content.right):
        if right:
            break
        if len({row[column] for row in content.rows}) == len(content.rows):
            return range(column + 1)
    return range(1)


def _part(content: Table, columns: Sequence[int], title: str) -> Table:
    rows = tuple(tuple(row[i] for i in columns) for row in content.rows)
    return Table(
        title,
        tuple(content.header[i] for i in columns),
        rows,
        tuple(content.right[i] for i in columns),
    )


def _drawn(content: Table) -> Drawn:
    from rich import box, table
    from rich.cells import cell_len
    from rich.text import Text

    drawn = table.Table(
        box=box.SIMPLE_HEAD,
        title=Text(visible(content.title)) if content.title else None,
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    rows = [[visible(cell) for cell in row] for row in content.rows]
    for name, right, *cells in zip(content.header, content.right, *rows, strict=True):
        heading = _heading(name, max(map(cell_len, cells), default=0)) if right else [name]
        longest = max(map(cell_len, (*heading, *cells)), default=0)
        drawn.add_column(
            Text("\n".join(heading)),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            min_width=longest if right else min(longest, _NARROW),
            max_width=longest if right else min(longest, _BROAD),
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _heading(name: str, width: int) -> list[str]:
    """The lines of the heading of numbers of this width: a word each, broken where it is longer
    than them and than a narrow column."""
    return [line for word in name.split() for line in textwrap.wrap(word, max(width, _NARROW))]


def _widths(drawn: Drawn) -> tuple[int, int, int]:
    """The least width of a table, the least one that keeps words whole, and the one it takes where
    there is room."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10_000)
    measured = Measurement.get(console, console.options, drawn)
    room = [(column.max_width or 0) - (column.min_width or 0) for column in drawn.columns]
    return measured.maximum - sum(room), measured.minimum, measured.maximum
