"""``hstree train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hstree._files import write_atomic
from hstree._progress import duration
from hstree.lm._packages import has_pictures
from hstree.lm._terminal import command_line, fold, show
from hstree.lm.print_tables import print_tables
from hstree.lm.runs import (
    RESUMABLE,
    ConfigError,
    RunResults,
    TrainConfig,
    counterpart,
    read_run,
    read_settings,
)
from hstree.lm.runs.config import check_read
from hstree.lm.runs.flags import add_config_arguments, config_values
from hstree.lm.runs.names import COMPARISON, CONFIG, CURVE
from hstree.lm.runs.settings import flag_name
from hstree.lm.table import table, text
from hstree.lm.training import (
    SOURCES,
    ConsoleReporter,
    TrainResult,
    finetuning,
    format_summary,
    is_main_process,
    resume,
    setting_sources,
    train,
)
from hstree.lm.training.plot import against_time
from hstree.lm.training.presets import PRESETS, check_text, merged

_DESCRIPTION = """\
Train an LSTM language model and write a run folder with its settings, vocabulary, metrics,
learning curve and best weights. Without arguments it trains on the docstrings and help topics of
this Python installation, with four clustered trees, in about 4 minutes on two CPU cores. --preset
uses the published settings of an AWD-LSTM, which need a GPU and hours; --finetune starts from the
best weights of another run. Ctrl-C and SIGTERM save the state and stop; --resume continues from the
last saved state. To train in several processes: torchrun -m -- hstree train.
"""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a language model", description=_DESCRIPTION)
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="NAME",
        help="published settings, which flags override: " + ", ".join(PRESETS),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings, which flags override: what --print-config json wrote, or a part of it",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume this run where it stopped; only "
        + ", ".join(f"--{flag_name(name)}" for name in RESUMABLE)
        + " can be changed",
    )
    parser.add_argument(
        "--print-config",
        nargs="?",
        const="table",
        choices=("table", "json"),
        help="print all settings and exit: as a table with the source of each value (default), "
        "or as JSON",
    )
    add_config_arguments(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None:
        _refuse_both(arguments, "resume", "preset", "config", "print_config")
        result = resume(arguments.resume, ConsoleReporter(), **config_values(arguments))
    else:
        with _named(arguments.config):
            config = _config(arguments)
            if arguments.print_config == "json":
                print(config.to_json(), end="")
                return 0
            if arguments.print_config == "table":
                _print_settings(config, arguments)
                return 0
            check_text(arguments.preset, config)
            result = train(config, ConsoleReporter())
    if is_main_process():
        _print_end(result)
    return 0


def _print_end(result: TrainResult) -> None:
    """The final figures, where the files are, and what to try next."""
    run, summary = read_run(result.run), result.summary
    other = counterpart(run, "trees" if run.head == "softmax" else "softmax")
    show(f"\n{format_summary(summary, other.final if other else None)}\n")
    show(f"run folder:      {run.path}   ({duration(summary.seconds)})")
    curve = run.path / CURVE if has_pictures() else "needs matplotlib: pip install 'hstree[lm]'"
    show(f"learning curve:  {curve}")
    if other is not None and has_pictures():
        write_atomic(run.path / COMPARISON, against_time([run, other]))
        show(f"beside {other.head + ':':9} {run.path / COMPARISON}")
    show("\nNext:")
    for purpose, command in _next_commands(run, other):
        show(f"  {purpose}\n{command_line(command, sys.stdout, indent='    ')}")


def _next_commands(run: RunResults, other: RunResults | None) -> Iterator[tuple[str, list[str]]]:
    """Commands to try on a run that has finished, and what each is for; ``other``: a run with the
    same settings and another head."""
    folder, config = str(run.path), run.config
    prompt = ["--prompt", "return the"] if config.data is None else []
    yield "generate text", ["hstree", "generate", folder, *prompt]
    if other is not None:
        yield (
            f"compare with the head {other.head!r}",
            ["hstree", "compare", folder, str(other.path)],
        )
    elif config.finetune is None:
        head, time = "trees" if run.head == "softmax" else "softmax", ""
        new = [] if config.run is None else ["--run", f"{folder}-{head}"]
        if run.final is not None and head == "softmax":
            cost = run.final.cost
            more = run.epochs[-1].step * (cost.flat_seconds - cost.head_seconds)
            time = f", about {duration(max(run.final.seconds + more, 1.0))}"
        yield (
            f"train with the head {head!r} and the same settings, to compare{time}",
            ["hstree", "train", "--config", str(run.path / CONFIG), "--head", head, *new],
        )
    if run.head == "trees":
        yield "look into the trees", ["hstree", "analyze", "tree", folder]
    else:
        yield "the rank of the log-probabilities", ["hstree", "analyze", "rank", folder]


def _print_settings(config: TrainConfig, arguments: argparse.Namespace) -> None:
    """A table of all settings with the source of each value, and what the sources are."""
    rows = setting_sources(config, config_values(arguments), arguments.preset, arguments.config)
    columns = [
        ("setting", lambda row: row.name),
        ("value", lambda row: text(row.value)),
        ("source", lambda row: row.source),
    ]
    print_tables([table("", rows, columns)])
    for source, reference in SOURCES.items():
        if any(row.source == source for row in rows):
            print(fold(f"{source}: {reference}", sys.stdout))


def _config(arguments: argparse.Namespace) -> TrainConfig:
    given = config_values(arguments)
    _refuse_both(arguments, "finetune", "preset")
    _refuse_both(arguments, "config", "preset")
    base: Mapping[str, Any] = {}
    if arguments.preset is not None:
        base = PRESETS[arguments.preset]
    elif arguments.config is not None:
        base = _read(arguments.config)
    settings = merged(base, given)
    run = settings.pop("finetune", None)
    config = TrainConfig(**settings) if run is None else finetuning(run, **settings)
    check_read(config, given)
    return config


@contextmanager
def _named(file: str | None) -> Iterator[None]:
    """A context whose errors about settings and texts name the file of ``--config``."""
    try:
        yield
    except ValueError as error:
        if file is None or file in str(error):
            raise
        raise ConfigError(f"{error} (with --config {file})") from error


def _read(path: str) -> dict[str, Any]:
    try:
        return read_settings(path)
    except FileNotFoundError:
        raise ConfigError(f"--config: {path}: no such file") from None
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from None


def _refuse_both(arguments: argparse.Namespace, one: str, *others: str) -> None:
    for other in others if getattr(arguments, one, None) else ():
        if getattr(arguments, other, None):
            raise ConfigError(f"--{flag_name(other)}: expected this or --{one}, got both")
