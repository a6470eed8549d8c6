"""What the trainer and the laboratory show: text, messages, figures, progress, tables, pictures."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import importlib
import io
import json
import logging
import math
import os
import re
import shlex
import sys
import textwrap
import time
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import numpy.typing as npt

from hstree._files import write_atomic
from hstree._progress import DISPLAY, Display, Task
from hstree.trees import Tree
from hstree.trees.describe import Item, Outline, count_of, percent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table as Drawn
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "ConsoleReporter",
    "EpochRecord",
    "HeadCost",
    "Reporter",
    "Summary",
    "TensorBoardLog",
    "draw_tree",
    "format_summary",
    "perplexity",
]


# Parts of messages
#
# Parts of error messages: what was given, shortened, and what may have been meant.

_LIMIT = 80
_MOST = 3


def shortened(text: str, limit: int = _LIMIT) -> str:
    """The text, or its beginning and its length if it has more than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def quoted(value: object) -> str:
    """``repr``, shortened: values come from texts and files of others, and may be long."""
    if isinstance(value, str) and len(value) > _LIMIT:
        return f"{value[:_LIMIT]!r}... ({len(value):,} characters)"
    return shortened(repr(value))


def meant(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the known names that are spelled like ``name`` or abbreviated by
    it, such as ``--lr`` for ``--learning-rate``; empty if there is none.

    Example:
        >>> from hstree.lm.report import meant
        >>> meant("--lr", ["--learning-rate", "--layers"])
        '; did you mean --learning-rate?'
    """
    if len(name) > _LIMIT:
        return ""
    by_word = {_word(other): other for other in known}
    word = _word(name)
    short = [other for other in by_word if len(word) > 1 and _initials(other) == word]
    close = difflib.get_close_matches(word, by_word, n=_MOST, cutoff=0.7)
    found = [by_word[other] for other in dict.fromkeys(short + close)][:_MOST]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _word(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _initials(word: str) -> str:
    return "".join(re.findall(r"\b[a-z]", word))


# Optional packages
#
# Packages that only some commands need.


def optional_package(name: str, needed_by: str, extra: str) -> Any:
    """The imported package. If it is missing, raises ValueError that names what needs it, such as a
    flag, and the extra of hstree that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"{needed_by}: needs the package {name}: pip install 'hstree[{extra}]'"
        ) from None


def has_pictures() -> bool:
    """Whether pictures can be drawn: matplotlib is part of the extra ``lm``."""
    return find_spec("matplotlib") is not None


# Terminal
#
# What reaches a terminal: text without control characters, folded to its width.


def terminal_width(stream: TextIO) -> int | None:
    """Number of columns: ``COLUMNS`` if it is set, else the width of the terminal that ``stream``
    writes to, None if it writes elsewhere."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # a file, a pipe, or no file at all
        return None


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with escapes such as ``\\x1b`` for what a terminal would obey: control characters,
    except line feeds and tabs, line separators, and overrides of the direction of writing. Words
    and names come from files of others."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a :func:`visible` text, by default to standard output."""
    print(visible(text), end=end, file=file or sys.stdout, flush=True)


def fold(text: str, stream: TextIO) -> str:
    """A line of :func:`visible` text, broken between words where it is wider than the terminal of
    ``stream``; a longer word stays whole."""
    text, width = visible(text), terminal_width(stream)
    if width is None:
        return text
    return textwrap.fill(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def command_line(arguments: Sequence[str], stream: TextIO, indent: str = "") -> str:
    """A command to paste into a shell, continued on further lines where it is wider than the
    terminal of ``stream``."""
    width = terminal_width(stream)
    words: list[str] = []
    for argument in map(shlex.quote, map(visible, arguments)):
        if words and words[-1].startswith("--") and not argument.startswith("--"):
            words[-1] += f" {argument}"  # a flag and its value share a line
        else:
            words.append(argument)
    lines = [indent + words[0]]
    for word in words[1:]:
        if width is None or len(f"{lines[-1]} {word} \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{indent}  {word}")
    return "\n".join(lines)


# Progress
#
# Progress of long work on standard error: a bar with the time left on a terminal, elsewhere a line
# every ten seconds.
#
# Progress is shown within :func:`shown` only, which every command of ``hstree`` enters. In a
# program that imports hstree nothing is printed.

BAR_AFTER = 2.0  # seconds of work before a bar appears: short work shows none
LINE_EVERY = 10.0  # seconds between two lines where there is no terminal
_REDRAW = 0.1  # seconds between two updates of the bars


@contextmanager
def shown() -> Iterator[None]:
    """A context in which progress is shown on standard error."""
    if DISPLAY.get() is not None:
        yield
        return
    bars = sys.stderr.isatty() and find_spec("rich") is not None
    display: Display = _Bars() if bars else _Lines()
    token = DISPLAY.set(display)
    try:
        yield
    finally:
        DISPLAY.reset(token)
        display.close()


class _Lines:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def update(self, task: Task) -> None:
        now = time.monotonic()
        if now - max(self._printed, task.begin) >= LINE_EVERY:
            self._printed = now
            share = f"{min(task.done / max(task.total, 1), 1):.0%}"
            parts = (visible(task.description), share, task.note, task.left)
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    def remove(self, task: Task) -> None:
        pass

    def close(self) -> None:
        pass


class _Bars:
    """A bar for each task that has taken more than two seconds."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._ids: dict[Task, TaskID] = {}
        self._updated = 0.0

    def update(self, task: Task) -> None:
        now = time.monotonic()
        if now - max(task.begin + BAR_AFTER - _REDRAW, self._updated) < _REDRAW:
            return
        self._updated = now
        progress = self._start()
        if task not in self._ids:
            self._ids[task] = progress.add_task("", total=task.total, note="", left="")
        progress.update(
            self._ids[task],
            description=visible(task.description),
            completed=task.done,
            note=task.note,
            left=task.left,
        )

    def _start(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[note]}", markup=False),
                TextColumn("{task.fields[left]}", markup=False),
                console=Console(stderr=True),
                expand=True,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # lines appear above the bars
            )
            self._progress.start()
        return self._progress

    def remove(self, task: Task) -> None:
        number = self._ids.pop(task, None)
        if number is not None and self._progress is not None:
            self._progress.remove_task(number)
            if not self._ids:
                self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._ids.clear()


# Figures
#
# Figures of a run: the content of metrics.jsonl and summary.json.

_Record = TypeVar("_Record")


def perplexity(loss: float) -> float:
    """exp(loss), infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class EpochRecord:
    """Figures of an epoch; a line of metrics.jsonl. Losses are in nats per token, speeds include
    training only. ``averaged``: the validation loss is that of the averaged weights. ``sampled``:
    the training loss is an estimate from sampled classes, too low on average."""

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    valid_loss: float
    best: bool
    tokens_per_second: float
    seconds: float
    averaged: bool = False
    sampled: bool = False

    @property
    def train_perplexity(self) -> float:
        """Per token."""
        return perplexity(self.train_loss)

    @property
    def valid_perplexity(self) -> float:
        """Per token."""
        return perplexity(self.valid_loss)

    def to_json(self) -> str:
        """A line with the figures, and with the perplexities, which :meth:`from_json` ignores."""
        perplexities = {
            "train_perplexity": self.train_perplexity,
            "valid_perplexity": self.valid_perplexity,
        }
        return json.dumps(asdict(self) | perplexities) + "\n"

    @classmethod
    def from_json(cls, text: str) -> EpochRecord:
        """Read what :meth:`to_json` wrote. Raises ValueError for anything else."""
        return read_record(cls, json_object(text))


@dataclass(frozen=True)
class HeadCost:
    """Median seconds of one forward and backward pass of the head, and of a flat softmax over the
    context vectors of the same N rows and V classes.

    Attributes:
        rows: N.
        head_seconds, flat_seconds: medians over alternating repetitions in the same process.
    """

    rows: int
    head_seconds: float
    flat_seconds: float

    @property
    def ratio(self) -> float:
        """Time of the flat softmax divided by the time of the head."""
        return self.flat_seconds / self.head_seconds


@dataclass(frozen=True)
class Summary:
    """Final figures of a run; summary.json. Perplexities are per token. ``valid_share``: the share
    of the validation text that the validation perplexity is of."""

    corpus: str
    head: str
    classes: int
    train_tokens: int
    epochs: int
    best_epoch: int
    valid_perplexity: float
    test_perplexity: float
    unigram_valid_perplexity: float
    unigram_test_perplexity: float
    backbone_parameters: int
    head_parameters: int
    cost: HeadCost
    seconds: float
    valid_share: float = 1.0

    @property
    def parameters(self) -> int:
        """Those of the backbone, and those of the head that it does not share."""
        return self.backbone_parameters + self.head_parameters

    @property
    def text(self) -> tuple[int, int, str]:
        """Identifies the corpus by its number of classes, its training tokens and the perplexity of
        the unigram model on the test text (six digits). Perplexities of different texts cannot be
        compared."""
        return self.classes, self.train_tokens, f"{self.unigram_test_perplexity:.6g}"

    def to_json(self) -> str:
        """The figures and the ratio of the costs as a JSON object, one line each."""
        values = asdict(self)
        values["cost"]["ratio"] = self.cost.ratio
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """What :meth:`to_json` wrote. Raises ValueError for anything else."""
        return read_record(cls, json_object(text))


def read_record(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """A dataclass of this module from its fields; others are ignored. Raises ValueError if one
    without a default is missing, or has another type; a whole number is accepted as a float."""
    types = typing.get_type_hints(kind)
    named = [name for name in types if name in values or not hasattr(kind, name)]  # no default
    return kind(**{name: _value(name, types[name], values.get(name)) for name in named})


def _value(name: str, kind: type, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return read_record(kind, value)
    if kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"expected {name!r} to be {kind.__name__}, got {quoted(value)}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """The object of a JSON text. Raises ValueError if it is not an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text[:60]!r}")
    return value


# Reporters
#
# What a run tells those who follow it: messages, steps and epochs.


class Reporter:
    """Receives what happens in a run; this one prints nothing."""

    def message(self, text: str) -> None:
        """A message of one or more lines."""

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        """Training begins, or resumes after ``step`` steps."""

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        """An optimizer step of an epoch (counted from 1) has been made on ``tokens`` tokens."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch and its validation have ended."""

    def stop(self) -> None:
        """Training has ended, in whatever way."""


class _Meter:
    """Loss and speed, averaged over about twenty steps."""

    def __init__(self) -> None:
        self.loss = math.nan
        self._seconds_per_token = math.nan
        self._last = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / max(self._seconds_per_token, 1e-9)

    def update(self, loss: float, tokens: int) -> None:
        now = time.perf_counter()
        seconds, self._last = (now - self._last) / tokens, now
        if math.isnan(self.loss):
            self.loss, self._seconds_per_token = loss, seconds
        self.loss += 0.05 * (loss - self.loss)
        self._seconds_per_token += 0.05 * (seconds - self._seconds_per_token)

    def pause(self) -> None:
        self._last = time.perf_counter()

    def __str__(self) -> str:
        return f"perplexity {perplexity(self.loss):.1f}  {self.tokens_per_second:,.0f} tokens/s"


class ConsoleReporter(Reporter):
    """Prints messages and a line for each epoch on standard output, and shows progress with the
    time left on standard error."""

    def __init__(self) -> None:
        self._meter = _Meter()
        self._epochs = 0
        self._task: Task | None = None
        self._progress = ExitStack()

    def message(self, text: str) -> None:
        for line in text.splitlines():
            print(fold(line, sys.stdout), flush=True)

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        self._epochs = epochs
        self._meter.pause()
        self._progress.enter_context(shown())
        self._task = Task(f"epoch 1/{epochs}", epochs * steps_per_epoch, step)
        self._progress.callback(self._task.close)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        assert self._task is not None
        self._meter.update(loss, tokens)
        self._task.description = f"epoch {epoch}/{self._epochs}"
        self._task.note = str(self._meter)
        self._task.advance()

    def epoch(self, record: EpochRecord) -> None:
        train = f"{'~' if record.sampled else ''}{record.train_perplexity:.1f}"
        print(
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}  perplexity "
            f"train {train:>7}  valid {record.valid_perplexity:7.1f}  "
            f"{record.seconds:5.1f} s"
            + ("  averaged" if record.averaged else "")
            + ("  best" if record.best else ""),
            flush=True,
        )
        self._meter.pause()

    def stop(self) -> None:
        self._progress.close()


# TensorBoard
#
# Training curves for TensorBoard.

STEPS_PER_POINT = 10


class TensorBoardLog(Reporter):
    """A reporter that writes events to the subfolder ``tensorboard`` of a run folder.

    ``train/loss`` (nats per token) and ``train/perplexity`` are means over the tokens of ten steps;
    ``valid/loss``, ``valid/perplexity``, ``learning_rate`` and ``tokens_per_second`` are written
    once per epoch. The horizontal axis is the number of optimizer steps of the whole run. A resumed
    run continues the same curves: points after the step where it resumes are removed. Raises
    ValueError if the package ``tensorboard`` is missing.
    """

    def __init__(self, run: Path) -> None:
        optional_package("tensorboard", "--tensorboard", "tensorboard")
        self._folder = run / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._clear()

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        self._clear()
        # Points of this step remain: they are not written again.
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=10)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self._step += 1
        self._total += loss * tokens
        self._tokens += tokens
        if self._step % STEPS_PER_POINT == 0:
            self._write_point()

    def epoch(self, record: EpochRecord) -> None:
        self._write(
            record.step,
            {
                "valid/loss": record.valid_loss,
                "valid/perplexity": record.valid_perplexity,
                "learning_rate": record.learning_rate,
                "tokens_per_second": record.tokens_per_second,
            },
        )

    def stop(self) -> None:
        self._write_point()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_point(self) -> None:
        if self._tokens > 0:
            loss = self._total / self._tokens
            self._write(self._step, {"train/loss": loss, "train/perplexity": perplexity(loss)})
        self._clear()

    def _clear(self) -> None:
        self._total, self._tokens = 0.0, 0

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)


# Tables
#
# Tables of text, and their output as Markdown, LaTeX and CSV.


@dataclass(frozen=True)
class Table:
    """A table of text cells. ``right``: for each column, whether it is aligned right, as numbers
    are."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]


Column = tuple[str, Callable[[Any], Any]] | tuple[str, Callable[[Any], Any], Callable[[Any], str]]


def table(title: str, items: Iterable[Any], columns: Sequence[Column]) -> Table:
    """A table with a row for each item. ``columns``: for each its name, a function from an item to
    its value and, for numbers, which are aligned right, a function that formats it, such as
    :func:`count` or ``decimals(2)``."""
    rows = [
        [(column[2] if len(column) == 3 else str)(column[1](item)) for column in columns]
        for item in items
    ]
    header = tuple(column[0] for column in columns)
    right = tuple(len(column) == 3 for column in columns)
    return Table(title, header, tuple(map(tuple, rows)), right)


# Cells


def text(value: Any) -> str:
    """A setting as short text; ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return str(value)


def number(form: str) -> Callable[[float | None], str]:
    """A formatter of numbers by a format specification; ``-`` for None and nan."""
    return lambda value: "-" if value is None or math.isnan(value) else format(value, form)


def decimals(digits: int) -> Callable[[float | None], str]:
    """A formatter of numbers with this many decimals, such as 1,234.50; ``-`` for None and nan."""
    return number(f",.{digits}f")


def count(value: int | None) -> str:
    """1,234 or, from 100,000 on, 1.23M; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:,}" if value < 100_000 else f"{value / 1e6:.2f}M"


def probability(value: float) -> str:
    """0.012, or 3.4e-05 below 0.001; ``-`` for nan."""
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


# Output formats


def markdown(tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """The tables with their titles, then the notes as a list."""
    parts = []
    for content in tables:
        lines = [
            f"**{_markdown_text(content.title)}**",
            "",
            _markdown_row(content.header),
            _markdown_row(["---:" if right else "---" for right in content.right]),
            *map(_markdown_row, content.rows),
        ]
        parts.append("\n".join(lines))
    listed = [f"- {_markdown_text(note)}" for note in notes]
    if listed:
        parts.append("\n".join(listed))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_markdown_text(cell).replace("|", "\\|") for cell in cells) + " |"


def _markdown_text(line: str) -> str:
    """Escape words such as <unk>, which are not HTML."""
    return line.replace("<", "\\<")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def latex(tables: Iterable[Table]) -> str:
    """The tables as ``table`` environments with the rules of booktabs."""
    parts = []
    for content in tables:
        lines = [
            r"\begin{table}",
            rf"  \caption{{{_latex_text(content.title)}}}",
            rf"  \begin{{tabular}}{{{''.join('r' if right else 'l' for right in content.right)}}}",
            r"    \toprule",
            f"    {_latex_row(content.header)}",
            r"    \midrule",
            *(f"    {_latex_row(row)}" for row in content.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(cell: str) -> str:
    return "".join(_LATEX.get(character, character) for character in cell)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as CSV with a header. None is an empty cell; numbers keep all digits.
    Empty if there are no rows."""
    if not rows:
        return ""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return buffer.getvalue()


# Tables on the terminal
#
# Tables on the terminal.

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


# Summary
#


def format_summary(summary: Summary, other: Summary | None = None) -> str:
    """The summary as a table of plain text, at most 80 columns wide.

    Args:
        summary: of the run.
        other: of a run with another head and otherwise the same settings, to be shown next to it.
    """
    cost = summary.cost
    faster = (
        f"{cost.ratio:.1f} times faster"
        if cost.ratio >= 1
        else f"{1 / cost.ratio:.1f} times slower"
    )
    lines = [
        f"{'perplexity':<34}{'valid':>12}{'test':>12}{'seconds':>10}",
        f"{f'head {summary.head}':<34}{_perplexities(summary)}{summary.seconds:>10,.0f}",
    ]
    if other is not None:
        label = f"head {other.head}, same settings"
        lines.append(
            f"{label:<34}{_perplexities(other)}{other.seconds:>10,.0f}   "
            f"x {other.seconds / summary.seconds:.1f}"
        )
    part = [f"valid: {summary.valid_share:.1%} of the validation text"]
    if summary.valid_share == 1:
        part = []
    return "\n".join(
        [
            *lines,
            f"{'unigram model':<34}{summary.unigram_valid_perplexity:>12,.1f}"
            f"{summary.unigram_test_perplexity:>12,.1f}",
            *part,
            "",
            f"{'parameters of the backbone':<34}{summary.backbone_parameters:>12,}",
            f"{'parameters of the head':<34}{summary.head_parameters:>12,}",
            f"{f'head, one step of {cost.rows:,} rows':<34}{1e3 * cost.head_seconds:>9.2f} ms",
            f"{'flat softmax of the same size':<34}{1e3 * cost.flat_seconds:>9.2f} ms   "
            f"the head is {faster}",
        ]
    )


def _perplexities(summary: Summary) -> str:
    return f"{summary.valid_perplexity:>12,.1f}{summary.test_perplexity:>12,.1f}"


# Pictures
#
# Figures without a display, in colors that color-blind readers can distinguish, as files.

# Okabe and Ito, Color Universal Design (2008), without yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
FORMATS = ("png", "pdf", "svg")


def new_figure(width: float, height: float, *, constrained: bool = True) -> Any:
    """A :class:`matplotlib.figure.Figure` of this size in inches, without a window."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no message when it builds its cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained" if constrained else None)
    FigureCanvasAgg(figure)
    return figure


def panels(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    grid: str | None = "both",
    **style: Any,
) -> tuple[Any, Any]:
    """A figure of this size in inches and its axes, as :meth:`matplotlib.figure.Figure.subplots`
    returns them, with a grid along x, y, both or (None) neither. ``style``: its options."""
    figure = new_figure(width, height)
    every = figure.subplots(rows, columns, **style)
    for axes in figure.axes if grid else ():
        axes.grid(axis=grid, alpha=0.3)
    return figure, every


def legend(figure: Any, *of: Any, loc: str = "lower left", **style: Any) -> None:
    """A legend outside of the axes. ``of``: handles and labels, by default those of all axes."""
    figure.legend(*of, loc=f"outside {loc}", frameon=False, **{"fontsize": 8} | style)


def line_style(number: int) -> dict[str, str]:
    """Color and line style of curve ``number`` of a picture: all colors solid, then dashed, ..."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
    }


def perplexity_axes(axes: Any) -> None:
    """Axes of perplexities, in a logarithmic scale, by epoch."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch (passes over the training text)")


def plain(text: str) -> str:
    """The text changed so that matplotlib shows it literally: a dollar would start a formula, and a
    leading underscore would hide a label."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def picture(figure: Any, file_format: str = "png", **options: Any) -> bytes:
    """A figure from :func:`new_figure` as the content of a file, in one of :data:`FORMATS`; raises
    ValueError for another. ``options``: further arguments of ``savefig``."""
    if file_format not in FORMATS:
        raise ValueError(f"file_format: expected one of {', '.join(FORMATS)}, got {file_format!r}")
    buffer = io.BytesIO()
    metadata = {"Software": "hstree"} if file_format == "png" else None
    figure.savefig(buffer, format=file_format, metadata=metadata, **options)
    return buffer.getvalue()


# Curves
#
# Perplexities of a run as pictures.


def learning_curve(records: Sequence[EpochRecord], unigram_loss: float, title: str) -> bytes:
    """A PNG of training and validation perplexity by epoch (at least one), the perplexity of the
    unigram distribution on the validation text, whose loss is in nats per token, and a line where
    averaging of the weights begins."""
    figure, axes = panels(6.4, 4.2)
    epochs = [record.epoch for record in records]
    train = [record.train_perplexity for record in records]
    name = "training, from sampled classes" if records[0].sampled else "training"
    axes.plot(epochs, train, "o-", color="#4c78a8", label=name, ms=4)
    valid = [record.valid_perplexity for record in records]
    axes.plot(epochs, valid, "s-", color="#e45756", label="validation", ms=4)
    best = min(range(len(valid)), key=valid.__getitem__)
    axes.annotate(
        f"{valid[best]:.1f}",
        (epochs[best], valid[best]),
        (0, 7),
        textcoords="offset points",
        ha="center",
        color="#e45756",
    )
    averaged = [record.epoch for record in records if record.averaged]
    if averaged:
        style = {"color": "#54a24b", "ls": ":", "lw": 1.5}
        axes.axvline(averaged[0] - 0.5, **style, label="averaging of the weights begins")
    unigram = perplexity(unigram_loss)
    name = f"unigram model, validation ({unigram:.1f})"
    axes.axhline(unigram, color="#767676", ls="--", lw=1, label=name)
    perplexity_axes(axes)
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", frameon=False)  # a search for the best place can take long
    return picture(figure)


def against_time(runs: Sequence[tuple[str, Sequence[EpochRecord]]]) -> bytes:
    """A PNG of validation perplexity against training time, with a curve for each run: its head and
    its epochs, at least one."""
    figure, axes = panels(6.4, 4.2)
    longest = max(sum(epoch.seconds for epoch in epochs) for _, epochs in runs)
    unit, seconds = ("minutes", 60) if longest > 180 else ("seconds", 1)
    for number, (head, epochs) in enumerate(runs):
        times = [total / seconds for total in accumulate(epoch.seconds for epoch in epochs)]
        valid = [epoch.valid_perplexity for epoch in epochs]
        axes.plot(times, valid, "o", **line_style(number), label=f"head {head}", ms=4)
    perplexity_axes(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"training time, {unit}")
    axes.set_ylabel("validation perplexity per token (log scale)")
    axes.legend(loc="upper right", frameon=False)
    return picture(figure)


# Pictures of trees
#
# A picture of the top levels of a tree.

_ROWS = 32  # most rows of a picture
_LEVELS = 10  # most levels below the root of a picture
_CHILDREN = 20  # children of a node that a picture shows
_INNER_CHARACTERS = 22  # width of a node that has children, in characters
_OUTER_CHARACTERS = 64  # width of a node that has none


def draw_tree(
    tree: Tree,
    words: Sequence[str] | None,
    path: str | os.PathLike[str],
    levels: int = 4,
    frequencies: npt.ArrayLike | None = None,
) -> None:
    """Draw the top levels of a tree to a PNG file, each node with its mass and frequent words.

    The root is at the left. Only the heaviest children of a wide node are shown. Nodes are unfolded
    level by level, heaviest first, until the picture has 32 rows.

    Args:
        tree: the tree.
        words: names of the V classes; None: their numbers.
        path: PNG file to write; an existing file is replaced atomically.
        levels: number of levels below the root to show, at least 1; at most 10 are shown.
        frequencies: class frequencies, real [V], finite, none negative; None (or all zero): every
            class counts once.

    Raises:
        TypeError: if the frequencies are not real numbers.
        ValueError: if matplotlib is not installed, for a wrong number of words or frequencies, or
            ``levels`` below 1.

    Example:
        >>> import hstree
        >>> from hstree.lm.report import draw_tree
        >>> counts = range(100, 0, -1)
        >>> tree = hstree.trees.huffman_tree(counts, root=8)
        >>> draw_tree(tree, None, "tree.png", frequencies=counts)
    """
    optional_package("matplotlib", "a picture", "lm")
    outline = Outline(tree, words, frequencies, levels)
    n_rows = _unfold_to_rows(outline)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack a character
        figure, area = _figure(outline, n_rows)
        write_atomic(Path(path), picture(figure, dpi=150, bbox_inches=area))


def _unfold_to_rows(outline: Outline) -> int:
    """Unfolds the outline level by level and returns its number of rows."""
    n_rows = 1
    level = [outline.root]
    for _ in range(min(outline.levels, _LEVELS)):
        following: list[Item] = []
        for item in sorted(level, key=lambda item: -item.share):
            if item.node < 0:
                continue
            n_children = int(outline.tree.n_children[item.node])
            width = n_children if n_children <= _CHILDREN else _CHILDREN + 1
            if item.level > 0 and n_rows + width - 1 > _ROWS:
                continue
            outline.unfold(item, _CHILDREN)
            n_rows += width - 1
            following += item.children
        level = following
    return n_rows


def _figure(outline: Outline, n_rows: int) -> tuple[Any, Any]:
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path as Curve
    from matplotlib.transforms import Bbox

    # Units are inches; `character` is the largest width of a character.
    character, row, gap, margin, title = 0.072, 0.4, 0.45, 0.25, 0.45
    inner_width = _INNER_CHARACTERS * character + 0.2
    outer_width = _OUTER_CHARACTERS * character + 0.9
    depth = _depth(outline.root)
    width = 2 * margin + depth * (inner_width + gap) + outer_width
    height = 2 * margin + title + n_rows * row
    figure = new_figure(width, height, constrained=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    ink, line, fill, leaf_fill = "#1b2733", "#7f93a8", "#e6eef7", "#fdf3e1"

    def write(x: float, y: float, text: str, **style: Any) -> None:
        axes.text(x, y, text, va="center_baseline", color=ink, parse_math=False, zorder=3, **style)

    def box(left: float, middle: float, width: float, height: float, color: str) -> None:
        rounded = f"round,pad=0,rounding_size={height / 5}"
        style: dict[str, Any] = {"facecolor": color, "edgecolor": line, "linewidth": 0.8}
        corner = (left, middle - height / 2)
        axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=rounded, zorder=2, **style))

    def place(item: Item, top: float) -> tuple[float, float]:
        """Draws a node and its subtree; returns the y-coordinates of its middle and its end."""
        left = margin + item.level * (inner_width + gap)
        if not item.children:
            middle, bottom = top + row / 2, top + row
            text = outline.label(item, _OUTER_CHARACTERS, "  ")
            share = percent(item.share)
            if item.n_hidden:
                write(left + 0.08, middle, f"{text}, {share}", fontsize=8.5, style="italic")
                return middle, bottom
            box(left, middle, 0.62, 0.3, leaf_fill if item.node < 0 else fill)
            write(left + 0.31, middle, share, fontsize=8.5, ha="center", weight="bold")
            write(left + 0.72, middle, text, fontsize=9)
            return middle, bottom
        ends = []
        bottom = top
        for child in item.children:
            child_middle, bottom = place(child, bottom)
            ends.append(child_middle)
        middle = (ends[0] + ends[-1]) / 2
        right, next_left = left + inner_width, left + inner_width + gap
        for child, end in zip(item.children, ends, strict=True):
            bend = (right + next_left) / 2
            curve = Curve(
                [(right, middle), (bend, middle), (bend, end), (next_left, end)],
                [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
            )
            width, dashes = (0.8, ":") if child.n_hidden else (0.6 + 5 * child.share**0.5, "-")
            style = {"facecolor": "none", "edgecolor": line, "alpha": 0.55, "capstyle": "butt"}
            axes.add_patch(PathPatch(curve, linewidth=width, linestyle=dashes, zorder=1, **style))
        box(left, middle, inner_width, 0.4, fill)
        count = f"{percent(item.share)} · {item.end - item.begin:,} classes"
        center = left + inner_width / 2
        write(center, middle - 0.085, count, fontsize=8.5, ha="center", weight="bold")
        words = outline.label(item, _INNER_CHARACTERS, "  ")
        write(center, middle + 0.095, words, fontsize=8.5, ha="center")
        return middle, bottom

    tree = outline.tree
    heading = (
        f"{count_of(tree.n_classes, 'class', 'es')}, {count_of(tree.n_nodes, 'inner node', 's')}"
    )
    if tree.root_width > 2:
        heading += f", root of {tree.root_width:,} children"
    write(margin, margin + 0.15, heading, fontsize=11, weight="bold")
    place(outline.root, margin + title)
    right = max(text.get_window_extent().x1 for text in axes.texts) / figure.dpi
    return figure, Bbox([[0, 0], [right + margin, height]])


def _depth(item: Item) -> int:
    return max((_depth(child) + 1 for child in item.children), default=0)
