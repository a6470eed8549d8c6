"""``hstree analyze rank``."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree._numerics import dtype_name
from hstree.lm._arguments import Argument, count, positive
from hstree.lm._arguments import number as limited
from hstree.lm._pictures import legend, line_style, panels, plain
from hstree.lm._terminal import fold
from hstree.lm.runs import load_run, run_names
from hstree.lm.table import Table, number, table

from ..report import Report
from ..runner import SPLIT, Measurement
from .compute import EPSILONS, METHODS, RankResult, matrix_rank, plan_rank, softmax_rank_bound
from .matrix import BlockMatrix, model_log_prob, stored_matrix

_POINTS = 1000  # largest number of singular values in the JSON file


def measure(arguments: argparse.Namespace) -> Report:
    found, notes = _matrices(arguments)
    limit = None if arguments.max_memory is None else int(arguments.max_memory * 2**30)
    plans = {name: plan_rank(matrix, arguments.method, limit) for name, matrix in found.items()}
    for name, plan in plans.items():
        print(fold(f"{name}: {plan}", sys.stderr), file=sys.stderr)
    epsilons = tuple(dict.fromkeys(arguments.epsilon or EPSILONS))
    results = {name: matrix_rank(plan, epsilons) for name, plan in plans.items()}
    for name, result in results.items():
        if result.route == "gram" and result.press_threshold:
            error, threshold = result.press_error, result.press_threshold
            near = int((abs(result.singular_values - threshold) <= error).sum())
            notes.append(
                f"{name}: at the Press threshold, the error bound of gram is "
                f"{error / threshold:.2%} of the threshold; {near:,} singular values are closer to "
                "it than that, so they may or may not count"
            )
    notes.append("rank.json has a selection of the singular values, rank-values.npz has all")
    rows, archive = rank_rows(results), io.BytesIO()
    every: dict[str, Any] = {"names": np.array(list(results))}
    matrices = []
    for i, result in enumerate(results.values()):
        every[f"matrix_{i}"] = result.singular_values
        index = thinned(len(result.singular_values))
        values = [float(f"{value:.6g}") for value in result.singular_values[index - 1]]
        matrices.append({**rows[i], "index": index, "singular_values": values})
    np.savez(archive, **every)
    return Report(
        "Ranks of log-probability matrices",
        [rank_table(rows)],
        notes,
        {"matrices": matrices},
        rows,
        {"spectrum": spectrum_picture(results), "energy": energy_picture(results)},
        {"rank-values.npz": archive.getvalue()},
    )


def _matrices(arguments: argparse.Namespace) -> tuple[dict[str, BlockMatrix], list[str]]:
    """All matrices by name, not computed yet, and notes about them."""
    places = [*arguments.directories, *arguments.log_prob]
    if not places:
        raise ValueError("RUN: expected at least one run folder or --log-prob FILE, got none")
    names = dict(zip(places, run_names(places), strict=True))
    first, dtype = arguments.rows, getattr(torch, arguments.dtype)
    matrices: dict[str, BlockMatrix] = {}
    notes = []
    for directory in arguments.directories:
        run, split = load_run(directory, arguments.device), f"{arguments.split} part"
        corpus = run.corpus(arguments.settings.data, arguments.settings.column)
        head: Any = run.model.head
        try:
            matrix = model_log_prob(run.model, getattr(corpus, arguments.split), first, dtype)
        except ValueError as error:
            raise ValueError(f"{directory}, {split}: {error}") from None
        matrices[names[directory]] = matrix
        note = f"head {head.name}, {matrix.shape[0]:,} contexts of the {split} of {corpus.name}"
        if (bound := softmax_rank_bound(head)) is not None:
            bias = "without" if head.bias is None else "with"
            features = f"{head.weight.shape[1]} features {bias} bias"
            note += f"; a softmax over {features} has rank at most {bound}"
        notes.append(f"{names[directory]}: {note}")
    for file in arguments.log_prob:
        try:
            matrices[names[file]] = stored_matrix(_mapped(file), first, dtype, arguments.device)
        except ValueError as error:
            raise ValueError(f"--log-prob {file}: {error}") from None
    return matrices, notes


def _mapped(file: str) -> npt.NDArray[Any]:
    try:
        values = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"expected a .npy file: {error}") from None
    if not isinstance(values, np.ndarray):
        raise ValueError("expected a .npy file with one array, got an archive of several")
    return values


def thinned(n: int) -> npt.NDArray[np.int64]:
    """Up to a thousand of the numbers 1 .. n, evenly spaced on a logarithmic axis, including both
    ends."""
    if n <= _POINTS:
        return np.arange(1, n + 1)
    return np.unique(np.geomspace(1, n, _POINTS).round().astype(np.int64))


def rank_rows(results: Mapping[str, RankResult]) -> list[dict[str, Any]]:
    """The results of each matrix in full precision."""
    keys = ("route", "s_max", "press_threshold", "error_bound", "press_error", "press_rank")
    epsilons = dict.fromkeys(e for result in results.values() for e in result.effective_ranks)
    rows = []
    for name, result in results.items():
        row = {"matrix": name, "rows": result.shape[0], "columns": result.shape[1]}
        row |= {"dtype": dtype_name(result.dtype)} | {key: getattr(result, key) for key in keys}
        row |= {f"effective_rank_{e:g}": result.effective_ranks.get(e) for e in epsilons}
        rows.append(row)
    return rows


def rank_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    ranks = [key for key in rows[0] if key.startswith("effective_rank_")]
    return table(
        "Press rank and effective ranks",
        rows,
        [
            ("matrix", itemgetter("matrix")),
            ("rows", itemgetter("rows"), number(",")),
            ("columns", itemgetter("columns"), number(",")),
            ("dtype", itemgetter("dtype")),
            ("route", itemgetter("route")),
            ("largest singular value", itemgetter("s_max"), number(".4g")),
            ("Press threshold", itemgetter("press_threshold"), number(".3g")),
            ("Press rank", itemgetter("press_rank"), number(",")),
            *((k.replace("_rank_", " rank, epsilon "), itemgetter(k), number(",")) for k in ranks),
        ],
    )


def spectrum_picture(results: Mapping[str, RankResult]) -> Any:
    """Plot the singular values against their index, as shares of the largest, with linear and
    logarithmic axes, and the Press thresholds."""
    figure, (linear, logarithmic) = panels(10.5, 4.6 + 0.2 * len(results), 1, 2)
    thresholds = {
        name: result.press_threshold / result.s_max
        for name, result in results.items()
        if result.s_max > 0
    }
    common = len({f"{value:.3g}" for value in thresholds.values()}) == 1
    for place, (name, result) in enumerate(results.items()):
        style = line_style(place)
        index = np.arange(1, len(result.singular_values) + 1)
        share = result.singular_values / (result.s_max or 1)
        label = f"{plain(name)}: Press rank {result.press_rank:,}"
        linear.plot(index[1:], share[1:], **style, lw=1.4, label=label)
        logarithmic.plot(index, np.where(share > 0, share, np.nan), **style, lw=1.4)
        if name in thresholds:
            colour = "#000000" if common else style["color"]
            logarithmic.axhline(thresholds[name], color=colour, lw=0.8, ls=":")
    floor = min(thresholds.values(), default=1e-6)
    logarithmic.text(1.0, floor * 1.2, " Press threshold", fontsize=8, va="bottom")
    logarithmic.set(yscale="log", ylim=(floor / 30, 2))
    linear.set_ylim(bottom=0)
    linear.set_title("linear, from the second on: the first is 1", fontsize=9)
    logarithmic.set_title("logarithmic", fontsize=9)
    for axes in (linear, logarithmic):
        axes.set(xscale="log", xlim=_index_limits(results))
        axes.set_xlabel("index of the singular value (log scale)")
        axes.set_ylabel("singular value / largest singular value")
    legend(figure)
    return figure


def energy_picture(results: Mapping[str, RankResult]) -> Any:
    """Plot the share of the sum of squares that the k largest singular values leave out, against k,
    with a dot at each effective rank."""
    figure, axes = panels(7.2, 4.4 + 0.2 * len(results))
    epsilons = {epsilon for result in results.values() for epsilon in result.effective_ranks}
    lowest = highest = min(epsilons, default=1.0)
    for place, (name, result) in enumerate(results.items()):
        style = line_style(place)
        squares = np.square(result.singular_values / (result.s_max or 1))
        left = np.append(np.cumsum(squares[::-1])[::-1][1:], 0.0) / (squares.sum() or 1)
        highest = max(highest, float(left[0]))
        index = np.arange(1, len(left) + 1)
        axes.plot(index, np.where(left > 0, left, np.nan), **style, lw=1.4, label=plain(name))
        dots = [rank for rank in result.effective_ranks.values() if rank]
        axes.plot(dots, [left[rank - 1] for rank in dots], "o", color=style["color"], ms=4)
    for epsilon in epsilons:
        axes.axhline(epsilon, color="#000000", lw=0.8, ls=":")
    limits = {"xlim": _index_limits(results), "ylim": (lowest / 30, min(1.0, 3 * highest))}
    axes.set(xscale="log", yscale="log", **limits)
    axes.set_xlabel("k, number of singular values kept (log scale)")
    axes.set_ylabel("share of the sum of squares left out (log scale)")
    axes.set_title("dots: effective ranks; dotted lines: their epsilon", fontsize=9)
    legend(figure)
    return figure


def _index_limits(results: Mapping[str, RankResult]) -> tuple[float, float]:
    return 0.8, 1.25 * max(len(result.singular_values) for result in results.values())


COMMAND = Measurement(
    "rank",
    "rank of the log-probability matrix",
    """\
Singular values of the matrix log P(word | context), with a row for each context of a text and a
column for each word: its Press rank (singular values above the expected rounding error), its
effective ranks (fewest singular values that hold all but a share epsilon of the squares), and
pictures. The matrix is read in blocks. The required memory is printed before the computation
begins.
""",
    measure,
    (
        Argument(
            "--log-prob",
            "another matrix, with or without runs: floating point [contexts, words] "
            "in a .npy file, which is memory-mapped; may be repeated. Rows are used "
            "unchanged: whether their exponentials sum to 1 is not checked",
            [],
            metavar="FILE",
            action="append",
        ),
        SPLIT,
        Argument("--rows", "only the first N contexts (default: all)", type=count),
        Argument(
            "--dtype",
            "dtype of the matrix and the Press threshold; with float64, models compute in it too",
            "float32",
            choices=("float32", "float64"),
        ),
        Argument(
            "--method",
            "svd: of the whole matrix; gram: eigenvalues of its Gram matrix in float64, for "
            "float32 only; qr: block by block in float64; auto: svd for small matrices; for "
            "large ones gram in float32, qr or svd in float64",
            "auto",
            choices=METHODS,
        ),
        Argument(
            "--epsilon",
            "epsilon of an effective rank; may be repeated (default: 1e-3, 1e-4 and 1e-5)",
            type=limited("a number between 0 and 1", lambda value: 0 < value < 1),
            action="append",
        ),
        Argument(
            "--max-memory",
            "fail if more is needed (default: the memory available on the device)",
            type=positive,
            metavar="GIB",
        ),
    ),
    runs="*",
    settings=("data", "column", "device", "threads"),
)
