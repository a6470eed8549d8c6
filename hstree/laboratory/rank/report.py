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

from hstree._arguments import count, positive
from hstree._arguments import number as limited
from hstree._dtypes import dtype_name
from hstree.cli.runs import run_corpus, run_names
from hstree.training import load_run

from ..report import Report
from ..runner import Argument, Measurement
from ..table import Table, number, table
from .compute import EPSILONS, METHODS, RankResult, matrix_rank, plan_rank, softmax_rank_bound
from .matrix import BlockMatrix, model_log_prob, stored_matrix
from .picture import energy_picture, spectrum_picture

_POINTS = 1000  # singular values in the JSON file, at most


def measure(arguments: argparse.Namespace) -> Report:
    """Ranks of the log P matrices of runs and files."""
    matrices, notes = _matrices(arguments)
    limit = None if arguments.max_memory is None else int(arguments.max_memory * 2**30)
    plans = {name: plan_rank(matrix, arguments.method, limit) for name, matrix in matrices.items()}
    for name, plan in plans.items():
        print(f"{name}: {plan}", file=sys.stderr, flush=True)
    epsilons = tuple(dict.fromkeys(arguments.epsilon or EPSILONS))
    results = {name: matrix_rank(plan, epsilons) for name, plan in plans.items()}
    for name, result in results.items():
        if result.route == "gram" and result.press_threshold:
            error, threshold = result.press_error, result.press_threshold
            near = int((abs(result.singular_values - threshold) <= error).sum())
            notes.append(
                f"{name}: by the error bound of gram, singular values at the Press threshold are "
                f"exact to {error / threshold:.2%} of it; {near:,} lie as close as that and could "
                "count either way"
            )
    notes.append("rank.json has a selection of the singular values, rank-values.npz all")
    rows, selections, archive = rank_rows(results), [], io.BytesIO()
    for result in results.values():
        index = thinned(len(result.singular_values))
        values = [float(f"{value:.6g}") for value in result.singular_values[index - 1]]
        selections.append({"index": index, "singular_values": values})
    own = {f"matrix_{i}": result.singular_values for i, result in enumerate(results.values())}
    np.savez(archive, names=np.array(list(results)), **own)
    return Report(
        "Ranks of log-probability matrices",
        [rank_table(rows)],
        notes,
        {"matrices": [row | selection for row, selection in zip(rows, selections, strict=True)]},
        rows,
        {"spectrum": spectrum_picture(results), "energy": energy_picture(results)},
        {"rank-values.npz": archive.getvalue()},
    )


def _matrices(arguments: argparse.Namespace) -> tuple[dict[str, BlockMatrix], list[str]]:
    """All matrices by name, nothing of them computed, and what is to be said about them."""
    places = [*arguments.directories, *arguments.log_prob]
    if not places:
        raise ValueError("RUN: expected at least one run folder or --log-prob FILE, got none")
    names = dict(zip(places, run_names(places), strict=True))
    first, dtype = arguments.rows, getattr(torch, arguments.dtype)
    matrices: dict[str, BlockMatrix] = {}
    notes = []
    for directory in arguments.directories:
        run, name = load_run(directory, arguments.device), names[directory]
        corpus, head = run_corpus(run, arguments.settings.data), run.model.head
        text = f"the {arguments.split} part of {corpus.name}"
        try:
            matrix = model_log_prob(run.model, getattr(corpus, arguments.split), first, dtype)
        except ValueError as error:
            raise ValueError(f"{directory}, {arguments.split} part: {error}") from None
        matrices[name] = matrix
        note = f"{name}: head {head.name}, {matrix.shape[0]:,} contexts of {text}"
        if (bound := softmax_rank_bound(head)) is not None:
            bias = "without" if head.bias is None else "with"
            softmax = f"a softmax over {head.weight.shape[1]} features {bias} bias"
            note += f"; {softmax} has rank at most {bound}"
        notes.append(note)
    for file in arguments.log_prob:
        try:
            matrices[names[file]] = stored_matrix(_mapped(file), first, dtype, arguments.device)
        except ValueError as error:
            raise ValueError(f"--log-prob {file}: {error}") from None
    return matrices, notes


def _mapped(file: str) -> npt.NDArray[Any]:
    """The array of a .npy file, mapped into memory."""
    try:
        values = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"expected a .npy file: {error}") from None
    if not isinstance(values, np.ndarray):
        raise ValueError("expected a .npy file with one array, got an archive of several")
    return values


def thinned(n: int) -> npt.NDArray[np.int64]:
    """Up to a thousand of the numbers 1 .. n, evenly spread on a logarithmic axis, with both
    ends."""
    if n <= _POINTS:
        return np.arange(1, n + 1)
    return np.unique(np.geomspace(1, n, _POINTS).round().astype(np.int64))


def rank_rows(results: Mapping[str, RankResult]) -> list[dict[str, Any]]:
    """The figures of each matrix in full digits."""
    return [
        {
            "matrix": name,
            "rows": result.shape[0],
            "columns": result.shape[1],
            "dtype": dtype_name(result.dtype),
            "route": result.route,
            "s_max": result.s_max,
            "press_threshold": result.press_threshold,
            "error_bound": result.error_bound,
            "press_error": result.press_error,
            "press_rank": result.press_rank,
            **{f"effective_rank_{e:g}": rank for e, rank in result.effective_ranks.items()},
        }
        for name, result in results.items()
    ]


def rank_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows of :func:`rank_rows` to show."""
    effective = dict.fromkeys(key for row in rows for key in row if key.startswith("effective"))
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
            *(
                (
                    key.replace("effective_rank_", "effective rank, epsilon "),
                    lambda row, key=key: row.get(key),
                    number(","),
                )
                for key in effective
            ),
        ],
    )


COMMAND = Measurement(
    "rank",
    "rank of the log-probability matrix",
    """\
Singular values of the matrix log P(word | context), with a row for each context of a text and a
column for each word: its Press rank (singular values above the expected rounding error), its
effective ranks (fewest singular values that hold all but a share epsilon of the squares), and
pictures. The matrix is read in blocks. Memory needed is printed before the work begins.
""",
    measure,
    (
        Argument(
            "--log-prob",
            metavar="FILE",
            action="append",
            default=[],
            help="a matrix of your own beside the runs or alone: floating point [contexts, words] "
            "in a .npy file, which is mapped into memory; may be given several times. Rows are "
            "taken as they are: that their exponentials sum to 1 is not checked",
        ),
        Argument("--split", choices=("test", "valid"), default="test", help="part of the text"),
        Argument(
            "--rows", type=count, metavar="N", help="the first N contexts alone (default: all)"
        ),
        Argument(
            "--dtype",
            choices=("float32", "float64"),
            default="float32",
            help="of the matrix and the Press threshold; with float64 the models compute in it too",
        ),
        Argument(
            "--method",
            choices=METHODS,
            default="auto",
            help="svd: of the whole matrix; gram: eigenvalues of its Gram matrix in float64, for "
            "float32 alone; qr: block by block in float64; auto: svd for small matrices, for "
            "large ones gram in float32, qr or svd in float64",
        ),
        Argument(
            "--epsilon",
            type=limited("a number between 0 and 1", lambda value: 0 < value < 1),
            action="append",
            metavar="X",
            help="of an effective rank; may be given several times (default: 1e-3, 1e-4 and 1e-5)",
        ),
        Argument(
            "--max-memory",
            type=positive,
            metavar="GIB",
            help="refuse what needs more (default: what the device has available)",
        ),
    ),
    runs="*",
    settings=("data", "device", "threads"),
    output="rank",
)
