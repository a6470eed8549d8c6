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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import numpy.typing as npt

from hstree._files import write_atomic
from hstree._progress import DISPLAY, Display, Task
from hstree.trees import Tree
from hstree.trees.describe import Item, outline

if TYPE_CHECKING:
    from rich.progress import TaskID

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

    def plain_word(of: str) -> str:
        return of.lstrip("-").replace("_", "-").lower()

    by_word = {plain_word(other): other for other in known}
    word = plain_word(name)
    initials = {other: "".join(re.findall(r"\b[a-z]", other)) for other in by_word}
    short = [other for other in by_word if len(word) > 1 and initials[other] == word]
    close = difflib.get_close_matches(word, by_word, n=_MOST, cutoff=0.7)
    found = [by_word[other] for other in dict.fromkeys(short + close)][:_MOST]
    return f"; did you mean {' or '.join(found)}?" if found else ""


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


# Progress of long work on standard error, in the commands of hstree: a bar with the time left on a
# terminal, elsewhere a line every ten seconds. Programs that import hstree have the line of
# hstree._progress instead.

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
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        names = ("task.description", "task.fields[note]", "task.fields[left]")
        texts = [TextColumn(f"{{{name}}}", markup=False) for name in names]
        self._progress = Progress(
            texts[0],
            BarColumn(bar_width=None),
            *texts[1:],
            console=Console(stderr=True),
            expand=True,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # lines appear above the bars
        )
        self._ids: dict[Task, TaskID] = {}
        self._drawn = 0.0

    def update(self, task: Task) -> None:
        now = time.monotonic()
        if now < max(task.begin + BAR_AFTER, self._drawn + _REDRAW):
            return
        self._drawn = now
        if task not in self._ids:
            self._ids[task] = self._progress.add_task("", total=task.total, note="", left="")
            self._progress.start()
        self._progress.update(
            self._ids[task],
            description=visible(task.description),
            completed=task.done,
            note=task.note,
            left=task.left,
        )

    def remove(self, task: Task) -> None:
        if task in self._ids:
            self._progress.remove_task(self._ids.pop(task))
            if not self._ids:
                self.close()

    def close(self) -> None:
        self._progress.stop()


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
        """A line with the figures and the perplexities; ``read_json`` reads the figures."""
        perplexities = {
            "train_perplexity": self.train_perplexity,
            "valid_perplexity": self.valid_perplexity,
        }
        return json.dumps(asdict(self) | perplexities) + "\n"


@dataclass(frozen=True)
class HeadCost:
    """Median seconds of one forward and backward pass of the head, and of a flat softmax over the
    context vectors of the same N rows and V classes.

    Attributes:
        rows: N.
        head_seconds, flat_seconds: medians, measured in the same process.
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


def read_json(kind: type[_Record], text: str) -> _Record:
    """A record from what its ``to_json`` wrote. Raises ValueError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {text[:60]!r}")
    return read_record(kind, values)


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


class ConsoleReporter(Reporter):
    """Prints messages and a line for each epoch on standard output, and shows progress with the
    time left on standard error: loss and speed, averaged over about twenty steps."""

    def __init__(self) -> None:
        self._loss = self._seconds_per_token = math.nan
        self._last = 0.0
        self._epochs = 0
        self._task: Task | None = None

    def message(self, text: str) -> None:
        for line in text.splitlines():
            print(fold(line, sys.stdout), flush=True)

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        self._epochs = epochs
        self._last = time.perf_counter()
        self._task = Task(f"epoch 1/{epochs}", epochs * steps_per_epoch, step)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        assert self._task is not None
        now = time.perf_counter()
        seconds, self._last = (now - self._last) / tokens, now
        if math.isnan(self._loss):
            self._loss, self._seconds_per_token = loss, seconds
        self._loss += 0.05 * (loss - self._loss)
        self._seconds_per_token += 0.05 * (seconds - self._seconds_per_token)
        speed = 1.0 / max(self._seconds_per_token, 1e-9)
        self._task.description = f"epoch {epoch}/{self._epochs}"
        self._task.note = f"perplexity {perplexity(self._loss):.1f}  {speed:,.0f} tokens/s"
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
        self._last = time.perf_counter()

    def stop(self) -> None:
        if self._task is not None:
            self._task.close()


class TensorBoardLog(Reporter):
    """Writes events to the subfolder ``tensorboard`` of a run folder: ``train/loss`` (nats per
    token) and ``train/perplexity``, means over the tokens of ten steps, and once per epoch
    ``valid/loss``, ``valid/perplexity``, ``learning_rate`` and ``tokens_per_second``, by optimizer
    steps of the whole run. A resumed run continues the curves from the step where it resumes."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writer: Any = None
        self._step = self._tokens = 0
        self._total = 0.0  # loss of these tokens

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        # Points of this step remain: they are not written again.
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=10)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self._step += 1
        self._total += loss * tokens
        self._tokens += tokens
        if self._step % 10 == 0:
            self._write_steps()

    def epoch(self, record: EpochRecord) -> None:
        self._write(record.step, "valid", record.valid_loss)
        self._writer.add_scalar("learning_rate", record.learning_rate, record.step)
        self._writer.add_scalar("tokens_per_second", record.tokens_per_second, record.step)

    def stop(self) -> None:
        if self._writer is not None:
            self._write_steps()
            self._writer.close()

    def _write_steps(self) -> None:
        if self._tokens:
            self._write(self._step, "train", self._total / self._tokens)
        self._total, self._tokens = 0.0, 0

    def _write(self, step: int, part: str, loss: float) -> None:
        self._writer.add_scalar(f"{part}/loss", loss, step)
        self._writer.add_scalar(f"{part}/perplexity", perplexity(loss), step)


# Tables of text, and their output as Markdown, LaTeX and CSV, and on the terminal.


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


def markdown(tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """The tables with their titles, then the notes as a list."""

    def escaped(line: str) -> str:
        return line.replace("<", "\\<")  # words such as <unk> are not HTML

    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(escaped(cell).replace("|", "\\|") for cell in cells) + " |"

    parts = []
    for content in tables:
        rule = ["---:" if right else "---" for right in content.right]
        rows = [content.header, rule, *content.rows]
        parts.append("\n".join([f"**{escaped(content.title)}**", "", *map(row, rows)]))
    listed = [f"- {escaped(note)}" for note in notes]
    return "\n\n".join(filter(None, [*parts, "\n".join(listed)])) + "\n"


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
    }
    | {character: f"\\{character}" for character in "&%$#_{}"}
)


def latex(tables: Iterable[Table]) -> str:
    """The tables as ``table`` environments with the rules of booktabs."""

    def row(cells: Iterable[str]) -> str:
        return "    " + " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

    parts = []
    for content in tables:
        lines = [
            r"\begin{table}",
            rf"  \caption{{{content.title.translate(_LATEX)}}}",
            rf"  \begin{{tabular}}{{{''.join('r' if right else 'l' for right in content.right)}}}",
            r"    \toprule",
            row(content.header),
            r"    \midrule",
            *map(row, content.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as CSV with a header. None is an empty cell; numbers keep all digits.
    Empty if there are no rows."""
    if not rows:
        return ""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


_NARROW, _BROAD = 16, 48  # characters to which a column of text may shrink and grow


def print_tables(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Print tables and notes no wider than the terminal, at full width where there is none.

    Columns of text shrink, numbers stay whole. Columns that do not fit follow in further tables,
    which repeat the columns that tell the rows apart. Without rich: as Markdown.
    """
    for content in tables:
        if find_spec("rich") is None:  # it is part of the extra lm
            print(visible(markdown([content])))
        else:
            _print_table(content, terminal_width(sys.stdout) or 10_000)
    for note in notes:
        print(fold(f"note: {note}", sys.stdout))


def _print_table(content: Table, width: int) -> None:
    from rich import box, table
    from rich.cells import cell_len
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    def drawn(columns: Sequence[int], title: str = "", broad: int = _BROAD) -> table.Table:
        part = table.Table(
            box=box.SIMPLE_HEAD,
            title=Text(visible(title)) if title else None,
            title_justify="left",
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for i in columns:
            right, heading = content.right[i], [visible(content.header[i])]
            if right:  # numbers are narrow: a word a line
                heading = [w for word in heading[0].split() for w in textwrap.wrap(word, _NARROW)]
            cells = [visible(row[i]) for row in content.rows]
            longest = max(map(cell_len, heading + cells), default=0)
            part.add_column(
                Text("\n".join(heading)),
                justify="right" if right else "left",
                no_wrap=right,
                overflow="fold",
                min_width=longest if right else min(longest, _NARROW),
                max_width=None if right else broad,
            )
        for row in content.rows:
            part.add_row(*(Text(visible(row[i])) for i in columns))
        return part

    def measured(columns: Sequence[int], broad: int = _BROAD) -> Measurement:
        console = Console(width=10_000)
        return Measurement.get(console, console.options, drawn(columns, broad=broad))

    repeated = _repeated(content)
    parts = [[*repeated]]
    for column in range(len(repeated), len(content.header)):
        if len(parts[-1]) > len(repeated) and measured([*parts[-1], column]).minimum > width:
            parts.append([*repeated])
        parts[-1].append(column)
    for number, part in enumerate(parts):
        least = measured(part, _NARROW).maximum
        title = "" if number else content.title
        Console(width=max(width, least)).print(drawn(part, title))


def _repeated(content: Table) -> range:
    """The first columns, up to one in which no two rows agree; the first if there is none."""
    for column, right in enumerate(content.right):
        if right:
            break
        if len({row[column] for row in content.rows}) == len(content.rows):
            return range(column + 1)
    return range(1)


def format_summary(summary: Summary, other: Summary | None = None) -> str:
    """The summary as a table of plain text, at most 80 columns wide.

    Args:
        summary: of the run.
        other: of a run with another head and otherwise the same settings, to be shown next to it.
    """

    def row(name: str, valid: float, test: float) -> str:
        return f"{name:<34}{valid:>12,.1f}{test:>12,.1f}"

    def of(run: Summary, name: str) -> str:
        return f"{row(name, run.valid_perplexity, run.test_perplexity)}{run.seconds:>10,.0f}"

    cost = summary.cost
    faster = cost.ratio >= 1
    ratio = (
        f"{cost.ratio if faster else 1 / cost.ratio:.1f} times {'faster' if faster else 'slower'}"
    )
    lines = [
        f"{'perplexity':<34}{'valid':>12}{'test':>12}{'seconds':>10}",
        of(summary, f"head {summary.head}"),
    ]
    if other is not None:
        times = f"   x {other.seconds / summary.seconds:.1f}"
        lines.append(of(other, f"head {other.head}, same settings") + times)
    unigram = summary.unigram_valid_perplexity, summary.unigram_test_perplexity
    lines.append(row("unigram model", *unigram))
    if summary.valid_share < 1:
        lines.append(f"valid: {summary.valid_share:.1%} of the validation text")
    lines += [
        "",
        f"{'parameters of the backbone':<34}{summary.backbone_parameters:>12,}",
        f"{'parameters of the head':<34}{summary.head_parameters:>12,}",
        f"{f'head, one step of {cost.rows:,} rows':<34}{1e3 * cost.head_seconds:>9.2f} ms",
        f"{'flat softmax of the same size':<34}{1e3 * cost.flat_seconds:>9.2f} ms   "
        f"the head is {ratio}",
    ]
    return "\n".join(lines)


# Figures without a display, in colors that color-blind readers can distinguish, as files.

# Okabe and Ito, Color Universal Design (2008), without yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")


def new_figure(width: float, height: float, *, constrained: bool = True) -> Any:
    """A :class:`matplotlib.figure.Figure` of this size in inches, without a window."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no message when it builds its cache
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained" if constrained else None)


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


def plain(text: str) -> str:
    """The text changed so that matplotlib shows it literally: a dollar would start a formula, and a
    leading underscore would hide a label."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def picture(figure: Any, **options: Any) -> bytes:
    """A figure as the content of a PNG file. ``options``: further arguments of ``savefig``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "hstree"}, **options)
    return buffer.getvalue()


def _perplexity_axes() -> tuple[Any, Any]:
    """A figure, and its axes with perplexities in a logarithmic scale."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = panels(6.4, 4.2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    return figure, axes


def learning_curve(records: Sequence[EpochRecord], unigram_loss: float, title: str) -> bytes:
    """A PNG of training and validation perplexity by epoch (at least one), the perplexity of the
    unigram distribution on the validation text, whose loss is in nats per token, and a line where
    averaging of the weights begins."""
    figure, axes = _perplexity_axes()
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
    axes.locator_params("x", integer=True, min_n_ticks=1)
    axes.set_xlabel("epoch (passes over the training text)")
    axes.set_ylabel("perplexity per token (log scale)")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", frameon=False)  # a search for the best place can take long
    return picture(figure)


def against_time(runs: Sequence[tuple[str, Sequence[EpochRecord]]]) -> bytes:
    """A PNG of validation perplexity against training time, with a curve for each run: its head and
    its epochs, at least one."""
    figure, axes = _perplexity_axes()
    longest = max(sum(epoch.seconds for epoch in epochs) for _, epochs in runs)
    unit, seconds = ("minutes", 60) if longest > 180 else ("seconds", 1)
    for number, (head, epochs) in enumerate(runs):
        times = [total / seconds for total in accumulate(epoch.seconds for epoch in epochs)]
        valid = [epoch.valid_perplexity for epoch in epochs]
        axes.plot(times, valid, "o", **line_style(number), label=f"head {head}", ms=4)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"training time, {unit}")
    axes.set_ylabel("validation perplexity per token (log scale)")
    axes.legend(loc="upper right", frameon=False)
    return picture(figure)


def draw_tree(
    tree: Tree,
    words: Sequence[str] | None,
    path: str | os.PathLike[str],
    levels: int = 4,
    frequencies: npt.ArrayLike | None = None,
) -> None:
    """Draw what :func:`hstree.trees.describe` tells of a tree to a PNG file, which is replaced
    atomically. Its arguments and errors, and ValueError without matplotlib."""
    optional_package("matplotlib", "a picture", "lm")
    root = outline(tree, frequencies, words, min(levels, 10))
    figure = new_figure(1, 1, constrained=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")

    def place(item: Item, left: float, top: float) -> tuple[float, float]:
        """Draws a node and those below it; returns its row and the next free one."""
        ends, bottom = [], top + (not item.children)
        for child in item.children:
            end, bottom = place(child, left + 2.2, bottom)
            ends.append(end)
        row = (ends[0] + ends[-1]) / 2 if ends else top
        for child, end in zip(item.children, ends, strict=True):
            line = [left + 0.9, left + 2, left + 2.2], [row, end, end]
            axes.plot(*line, color="#b5c2cf", linewidth=0.6 + 5 * child.share**0.5, zorder=1)
        text = f"{100 * item.share:.3g}%  {item.text}"
        text = textwrap.fill(text, 26, break_long_words=False) if ends else text
        box = {"boxstyle": "round", "facecolor": "#e6eef7" if ends else "#fdf3e1", "linewidth": 0}
        axes.text(left, row, text, fontsize=8, va="center", parse_math=False, bbox=box)
        return row, bottom

    _, rows = place(root, 0, 0)
    right = 4 + max(text.get_position()[0] for text in axes.texts)
    figure.set_size_inches(right, 0.4 * rows)
    axes.set(xlim=(0, right), ylim=(rows, -1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack a character
        write_atomic(Path(path), picture(figure, dpi=150, bbox_inches="tight"))
