"""``hstree experiment synthetic``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..arguments import count
from ..numbers import positive
from ..results import add_output_argument, publish, results_folder

if TYPE_CHECKING:
    from hstree.experiments import SyntheticFit

_DESCRIPTION = """\
The softmax bottleneck without a network: N contexts, each with a vector of D numbers of its own,
and M outcomes, whose parameters all contexts share, are fitted by full-batch Adam to targets from a
Dirichlet distribution. For every head, D and alpha: the share of contexts whose most probable
outcome is right (mode matching), and the divergence KL(P* || P), which is the cross-entropy less
the entropy of the targets. Without flags three to four minutes on two cores. Ctrl-C ends it and
writes nothing.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "synthetic",
        help="what each head can express with D features",
        description=_DESCRIPTION,
    )
    sizes: dict[str, Any] = {"metavar": "N", "type": count, "default": argparse.SUPPRESS}
    parser.add_argument("--contexts", **sizes, help="N, number of contexts (default: 200)")
    parser.add_argument("--outcomes", **sizes, help="M, number of outcomes (default: 100)")
    parser.add_argument(
        "--dimensions", nargs="+", **sizes, help="sizes D to try (default: 2 4 8 16 32)"
    )
    parser.add_argument(
        "--alpha",
        dest="alphas",
        metavar="X",
        type=positive,
        nargs="+",
        default=argparse.SUPPRESS,
        help="concentrations of the symmetric Dirichlet distribution; the smaller, the fewer "
        "outcomes share a target's mass (default: 0.01 0.1)",
    )
    parser.add_argument(
        "--heads",
        metavar="HEAD",
        nargs="+",
        default=argparse.SUPPRESS,
        help="names, or NAME:KEY=VALUE,KEY=VALUE with options of the head, such as "
        "mos:components=15 or trees:n_trees=2,root=16; all: every head that reads one vector "
        "(default: softmax sigsoftmax gss gss:k=0.1,c=0 plif monotonic mos mixtape trees-single "
        "trees)",
    )
    parser.add_argument("--steps", **sizes, help="most steps of Adam in a fit (default: 400)")
    parser.add_argument(
        "--learning-rates",
        metavar="X",
        type=positive,
        nargs="+",
        default=argparse.SUPPRESS,
        help="grid of which each head, D and alpha get the best on the first seed "
        "(default: 0.05 0.2 0.8)",
    )
    parser.add_argument(
        "--seeds", **sizes, help="repetitions with other targets and initial values (default: 2)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default: cpu"
    )
    parser.add_argument(
        "--processes", metavar="N", type=count, default=2, help="to work in (default: 2)"
    )
    add_output_argument(parser, "results")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    import dataclasses

    from hstree.experiments import (
        SyntheticSetting,
        choose_heads,
        known_heads,
        synthetic_bottleneck,
        synthetic_data,
        synthetic_notes,
        synthetic_picture,
        synthetic_tables,
    )
    from hstree.training.build import choose_device

    given = {
        item.name: getattr(arguments, item.name)
        for item in dataclasses.fields(SyntheticSetting)
        if hasattr(arguments, item.name)
    }
    if "heads" in given:
        every = given["heads"] == ["all"]
        given["heads"] = choose_heads(known_heads() if every else given["heads"])
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    setting = SyntheticSetting(**given)
    device = choose_device(arguments.device)
    folder = results_folder(arguments)
    with _progress(setting.n_fits) as advance:
        result = synthetic_bottleneck(setting, device, advance, processes=arguments.processes)
    publish(
        folder,
        "synthetic",
        "Synthetic bottleneck experiment",
        synthetic_tables(result),
        synthetic_data(result),
        {
            f"synthetic-alpha-{alpha:g}.png": synthetic_picture(result, alpha)
            for alpha in setting.alphas
        },
        synthetic_notes(result),
        rows=[dataclasses.asdict(fit) for fit in result.fits],
    )
    return 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[SyntheticFit], None]]:
    """A function to be told of each fit: a bar on standard error if it is a terminal, else a line
    every ten seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        text, left = TextColumn("{task.description}"), TextColumn("left")
        columns = (MofNCompleteColumn(), BarColumn(bar_width=None), text, TimeLeft(), left)
        console = Console(stderr=True)
        with Progress(*columns, console=console, expand=True, transient=True) as progress:
            task = progress.add_task("", total=total)
            yield lambda fit: progress.update(task, advance=1, description=_described(fit))
        return
    begin = spoke = time.perf_counter()
    done = 0

    def advance(fit: SyntheticFit) -> None:
        nonlocal spoke, done
        done += 1
        now = time.perf_counter()
        if now - spoke >= 10:
            spoke = now
            left = (now - begin) / done * (total - done)
            print(f"{done}/{total}  {_described(fit)}  {left:.0f} s left", file=sys.stderr)

    yield advance


def _described(fit: SyntheticFit) -> str:
    return f"{fit.head}, D = {fit.dimension}, alpha = {fit.alpha:g}, KL {fit.divergence:.3f}"
