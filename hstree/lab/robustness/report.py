"""``hstree experiment robustness``."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from hstree._numerics import dtype_name
from hstree.lm._arguments import Argument, not_negative
from hstree.lm._pictures import legend, line_style, panels
from hstree.lm.table import Table, decimals, number, table

from ..drawing import MARKERS
from ..rank.matrix import DTYPES
from ..report import Report, row_table
from ..runner import Measurement
from .compute import NoisePoint, noise_ranks, reconstructions


def measure(arguments: argparse.Namespace) -> Report:
    size, rank, seed, device = arguments.size, arguments.rank, arguments.seed, arguments.device
    if rank >= size:
        raise ValueError(f"--rank: expected a number below --size, {size}, got {rank}")
    variances = sorted(set(arguments.c or (10.0**power for power in range(-30, -4))))
    repeat = partial(reconstructions, size, rank, arguments.repetitions, seed=seed, device=device)
    repeated = []
    for prune, dtype in itertools.product((True, False), DTYPES):
        ranks, change = repeat(dtype, prune=prune)
        row = {"dtype": dtype_name(dtype), "pruned_every_time": prune}
        repeated.append({**row, "press_ranks": ranks, "relative_change": change})
    points = {
        dtype_name(dtype): noise_ranks(size, variances, rank, dtype, seed, device)
        for dtype in DTYPES
    }
    rows = noise_rows(points)
    return Report(
        "Robustness of the Press rank",
        [reconstruction_table(repeated), noise_table(points)],
        [
            f"matrices of {size:,} x {size:,}, rank {rank}, seed {seed}",
            "singular values of the matrix before the noise: exp(-i / 2), i = 0, 1, ...; "
            "expected: by the quarter-circle law for the singular values of noise",
        ],
        {"size": size, "rank": rank, "seed": seed, "reconstructions": repeated, "noise": rows},
        rows,
        {"noise": noise_picture(points)},
    )


def reconstruction_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return table(
        "Decomposed and multiplied repeatedly",
        rows,
        [
            ("dtype", itemgetter("dtype")),
            ("pruned", lambda row: "every time" if row["pruned_every_time"] else "once"),
            ("repetitions", lambda row: len(row["press_ranks"]) - 1, str),
            ("lowest Press rank", lambda row: min(row["press_ranks"]), number(",")),
            ("highest Press rank", lambda row: max(row["press_ranks"]), number(",")),
            ("relative change", itemgetter("relative_change"), number(".1e")),
        ],
    )


def noise_table(points: Mapping[str, Sequence[NoisePoint]]) -> Table:
    """A table with a row for each c. ``points``: by dtype. Effective ranks are those of the last
    dtype."""
    *_, last = points.values()
    header = ["c"]
    for name in points:
        header += [f"Press rank, {name}", "expected"]
    header += [f"effective rank, epsilon {epsilon:g}" for epsilon in last[0].effective_ranks]
    rows = []
    for own in zip(*points.values(), strict=True):
        press = [rank for point in own for rank in (point.press_rank, point.expected)]
        rows.append([own[-1].c, *press, *own[-1].effective_ranks.values()])
    title = "With normal noise of variance c / n^2"
    return row_table(title, header, rows, number(".3g"), decimals(0))


def noise_rows(points: Mapping[str, Sequence[NoisePoint]]) -> list[dict[str, Any]]:
    return [
        {
            "dtype": name,
            "c": point.c,
            "press_rank": point.press_rank,
            "expected": point.expected,
            **{f"effective_rank_{e:g}": rank for e, rank in point.effective_ranks.items()},
        }
        for name, own in points.items()
        for point in own
    ]


def noise_picture(points: Mapping[str, Sequence[NoisePoint]]) -> Any:
    """Plot Press ranks, measured and expected by the quarter-circle law, and the effective ranks of
    the last dtype against c. ``points``: by dtype, in increasing c."""
    figure, axes = panels(7.6, 5.6)
    for place, (name, every) in enumerate(points.items()):
        own = [point for point in every if point.c > 0]
        c = [point.c for point in own]
        style = {"color": line_style(place)["color"], "lw": 1}
        label = f"Press rank, {name}"
        axes.plot(c, [point.press_rank for point in own], "o-", ms=4, label=label, **style)
        label = f"the same by the quarter-circle law, {name}"
        axes.plot(c, [point.expected for point in own], "o", mfc="none", ms=9, label=label, **style)
    for place, epsilon in enumerate(every[0].effective_ranks, start=len(points)):
        ranks = [point.effective_ranks[epsilon] for point in own]
        style = {"color": line_style(place)["color"], "lw": 1}
        label = f"effective rank, epsilon {epsilon:g}, {name}"
        marker = MARKERS[place % len(MARKERS)]
        axes.plot(c, ranks, f"{marker}--", ms=4, label=label, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="c, variance of the noise times n squared (log scale)",
        ylabel="rank (log scale)",
    )
    legend(figure, ncols=2)
    return figure


COMMAND = Measurement(
    "robustness",
    "Press rank under rounding and noise",
    """\
Robustness of the Press rank, in float32 and float64. First, a matrix pruned to a few singular
values is decomposed and multiplied repeatedly, pruned every time or only once: rounding errors
should not change its Press rank. Then normal noise of variance c / n^2 is added to a matrix of the
same rank: its Press rank rises to nearly n once the noise is above the threshold, while its
effective ranks do not change.
""",
    measure,
    (
        Argument("--size", "n, rows and columns of the matrices", 1000),
        Argument("--rank", "number of singular values to keep", 10),
        Argument("--repetitions", "number of times that a matrix is decomposed and multiplied", 10),
        Argument(
            "--c",
            "n^2 times the variance of the noise; may be repeated (default: every "
            "power of ten from 1e-30 to 1e-5)",
            type=not_negative,
            action="append",
        ),
        Argument("--seed", "seed of matrices and noise", 0, type=int),
    ),
    settings=("device", "threads"),
)
