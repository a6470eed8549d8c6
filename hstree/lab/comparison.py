"""Compare runs: heads, settings that differ, perplexities of the best epoch, parameters, medians of
seconds per epoch and of training tokens per second.

Runs that differ only in the seed form a group, with mean and standard deviation over its finished
runs; hstree analyze significance tests whether groups differ. Unfinished runs are shown with their
results so far.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hstree.lm.cli import Argument
from hstree.lm.report import Table, count, csv_text, decimals, print_tables, show, text
from hstree.lm.run import RunResults, read_run

from .report import Form, Paragraphs, record_table


def spread(values: Iterable[float | None], digits: int = 2) -> str:
    """``mean ± standard deviation`` of the values that are known: the mean alone of one or if one
    is not finite, ``-`` of none. The deviation has n - 1 in the denominator."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = decimals(digits)(sum(known) / len(known))
    if len(known) == 1 or not all(map(math.isfinite, known)):
        return mean
    return f"{mean} ± {decimals(max(digits, 1))(statistics.stdev(known))}"


@dataclass(frozen=True)
class Comparison:
    """Runs in groups that differ only in the seed."""

    groups: dict[str, list[RunResults]]  # by a description of head and differing settings
    differing: tuple[str, ...]  # settings that differ between runs whose heads read them
    notes: tuple[str, ...]


def compare(paths: Iterable[str | os.PathLike[str]]) -> Comparison:
    """Read run folders and compare them. Raises ValueError if one is not a run."""
    runs = [*map(read_run, paths)]
    settings = [run.compared_settings() for run in runs]
    names = tuple(name for name in differing(settings) if name != "head")
    members: dict[str, list[RunResults]] = {}
    for run, values in zip(runs, settings, strict=True):
        members.setdefault(json.dumps(values, sort_keys=True), []).append(run)
    groups = {", ".join([g[0].head, *_settings(g[0], names)]): g for g in members.values()}
    notes = [
        f"{run.path} has not finished: {len(run.epochs)} of {run.config.epochs} epochs completed"
        for run in runs
        if run.final is None
    ]
    if len({run.final.text for run in runs if run.final is not None}) > 1:
        notes.append("the runs differ in text or vocabulary: their perplexities are not comparable")
    for description, group in groups.items():
        again = sorted(str(s) for s, n in Counter(run.seed for run in group).items() if n > 1)
        if again:
            listed = f"runs of the same seed ({', '.join(again)})"
            notes.append(f"{description} has {listed}: they are not independent samples")
    return Comparison(groups, names, tuple(notes))


def differing(settings: Collection[Mapping[str, Any]]) -> list[str]:
    """The names whose values differ among those of the settings that have them."""
    names = dict.fromkeys(name for of in settings for name in of)
    return [n for n in names if len({json.dumps(of[n]) for of in settings if n in of}) > 1]


def cell(value: Any) -> Any:
    """A setting in a column of figures: what is not a number or text as JSON."""
    return json.dumps(value) if isinstance(value, (bool, list, tuple, dict)) else value


def _settings(run: RunResults, names: Iterable[str]) -> list[str]:
    """``name=value`` of those of the settings that the head of a run reads."""
    read = run.compared_settings()
    return [f"{name}={text(run.settings[name])}" for name in names if name in read]


def run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """A row for each run in full precision, with a column for each setting that differs."""
    keys = ("best_epoch", "valid_perplexity", "test_perplexity")
    rows = []
    for number, group in enumerate(comparison.groups.values(), start=1):
        for run in group:
            read, final = run.compared_settings(), run.final
            row = {"group": str(number), "run": str(run.path), "head": run.head, "seed": run.seed}
            for name in comparison.differing:
                row[name] = cell(run.settings[name] if name in read else None)
            row |= {"epochs": len(run.epochs)} | {key: getattr(run, key) for key in keys}
            for name in ("backbone_parameters", "head_parameters"):
                row[name] = final and getattr(final, name)
            times = {"seconds_per_epoch": run.seconds_per_epoch}
            rows.append(row | times | {"tokens_per_second": run.tokens_per_second})
    return rows


def comparison_tables(comparison: Comparison) -> list[Table]:
    """A table of the runs and, if a group has several, one of the groups."""
    forms: dict[str, Form] = {"backbone_parameters": count, "head_parameters": count}
    forms |= {"valid_perplexity": ",.2f", "test_perplexity": ",.2f", "seconds_per_epoch": ",.1f"}
    tables: list[Table] = [
        record_table("Runs", run_rows(comparison), forms | {"tokens_per_second": ",.0f"})
    ]
    if max(map(len, comparison.groups.values())) > 1:
        groups = []
        for number, (description, runs) in enumerate(comparison.groups.items(), start=1):
            finals = [run.final for run in runs if run.final is not None]
            row = {"group": str(number), "model": description}
            row |= {"finished": f"{len(finals)} of {len(runs)}"}
            row |= {"valid": spread(final.valid_perplexity for final in finals)}
            groups.append(row | {"test": spread(final.test_perplexity for final in finals)})
        title = "Perplexity of finished runs, mean ± standard deviation over seeds"
        tables.append(record_table(title, groups))
    return tables


def add_command(commands: Any) -> None:
    about = {"help": "compare runs", "description": __doc__, "formatter_class": Paragraphs}
    parser = commands.add_parser("compare", **about)
    parser.add_argument("directories", metavar="RUN", nargs="+", help="folders of hstree train")
    formats = "csv: only the runs, in full precision"
    Argument("--format", formats, "table", choices=("table", "csv")).add(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    comparison = compare(arguments.directories)
    if arguments.format == "csv":
        show(csv_text(run_rows(comparison)), end="")
    else:
        print_tables(comparison_tables(comparison), comparison.notes)
    return 0
