"""``hstree analyze rank``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..arguments import add_config_arguments, config_values, count
from ..numbers import number, positive
from ..results import add_output_argument, publish, results_folder
from ..runs import run_corpus, run_names

if TYPE_CHECKING:
    from hstree.analysis import BlockMatrix, RankResult

_DESCRIPTION = """\
Singular values of the matrix log P(word | context), with a row for each context of a text and a
column for each word: its Press rank (singular values above the expected rounding error), its
effective ranks (fewest singular values that hold all but a share epsilon of the squares), and
pictures. The matrix is read in blocks. Memory needed is printed before the work begins.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "rank", help="rank of the log-probability matrix", description=_DESCRIPTION
    )
    parser.add_argument("directories", metavar="RUN", nargs="*", help="run folders of hstree train")
    parser.add_argument(
        "--log-prob",
        metavar="FILE",
        action="append",
        default=[],
        help="a matrix of your own beside the runs or alone: floating point [contexts, words] in a "
        ".npy file, which is mapped into memory; may be given several times. Rows are taken as "
        "they are: that their exponentials sum to 1 is not checked",
    )
    parser.add_argument(
        "--split",
        choices=("test", "valid"),
        default="test",
        help="part of the text (default: test)",
    )
    parser.add_argument(
        "--rows", type=count, metavar="N", help="the first N contexts alone (default: all)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float32",
        help="of the matrix and the Press threshold; with float64 the models compute in it too "
        "(default: float32)",
    )
    parser.add_argument(
        "--method",
        choices=("auto", "svd", "gram", "qr"),
        default="auto",
        help="svd: of the whole matrix; gram: eigenvalues of its Gram matrix in float64, for "
        "float32 alone; qr: block by block in float64; auto: svd for small matrices, for "
        "large ones gram in float32, qr or svd in float64 (default: auto)",
    )
    parser.add_argument(
        "--epsilon",
        type=number("a number between 0 and 1", lambda value: 0 < value < 1),
        action="append",
        metavar="X",
        help="of an effective rank; may be given several times (default: 1e-3, 1e-4 and 1e-5)",
    )
    parser.add_argument(
        "--max-memory",
        type=positive,
        metavar="GIB",
        help="refuse what needs more (default: what the device has available)",
    )
    add_config_arguments(parser, only=("data", "device", "threads"))
    add_output_argument(parser, "rank")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    import io
    import sys

    import numpy as np

    from hstree._files import write_atomic
    from hstree.analysis import (
        energy_picture,
        matrix_rank,
        plan_rank,
        rank_rows,
        rank_table,
        spectrum_picture,
    )
    from hstree.analysis.rank import EPSILONS

    matrices, notes = _matrices(arguments)
    limit = None if arguments.max_memory is None else int(arguments.max_memory * 2**30)
    plans = {name: plan_rank(matrix, arguments.method, limit) for name, matrix in matrices.items()}
    folder = results_folder(arguments)
    for name, plan in plans.items():
        print(f"{name}: {plan}", file=sys.stderr, flush=True)
    epsilons = tuple(dict.fromkeys(arguments.epsilon or EPSILONS))
    results = {
        name: matrix_rank(matrix, plans[name], epsilons) for name, matrix in matrices.items()
    }
    notes += _error_notes(results)
    buffer = io.BytesIO()
    values: dict[str, Any] = {
        f"matrix_{i}": result.singular_values for i, result in enumerate(results.values())
    }
    np.savez(buffer, names=np.array(list(results)), **values)
    write_atomic(folder / "rank-values.npz", buffer.getvalue())
    publish(
        folder,
        "rank",
        "Ranks of log-probability matrices",
        [rank_table(results)],
        _data(results),
        {
            "rank-spectrum.png": spectrum_picture(results),
            "rank-energy.png": energy_picture(results),
        },
        notes,
        rows=rank_rows(results),
    )
    print(f"rank.json has a selection of the singular values, {folder / 'rank-values.npz'} all")
    return 0


def _matrices(arguments: argparse.Namespace) -> tuple[dict[str, BlockMatrix], list[str]]:
    """All matrices by name, nothing of them computed, and what is to be said about them."""
    import torch

    from hstree.analysis import model_log_prob, softmax_rank_bound, stored_matrix
    from hstree.training import TrainConfig, choose_device, load_run, set_threads

    places = [*arguments.directories, *arguments.log_prob]
    if not places:
        raise ValueError("RUN: expected at least one run folder or --log-prob FILE, got none")
    names = dict(zip(places, run_names(places), strict=True))
    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    device = choose_device(settings.device)
    dtype = getattr(torch, arguments.dtype)
    matrices: dict[str, BlockMatrix] = {}
    notes = []
    for directory in arguments.directories:
        run = load_run(directory, device)
        corpus = run_corpus(run, settings.data)
        tokens = getattr(corpus, arguments.split)
        name = names[directory]
        try:
            matrices[name] = model_log_prob(run.model, tokens, arguments.rows, dtype)
        except ValueError as error:
            raise ValueError(f"{directory}, {arguments.split} part: {error}") from None
        contexts = matrices[name].shape[0]
        about = f"{contexts:,} contexts of the {arguments.split} part of {corpus.name}"
        bound = softmax_rank_bound(run.model.head)
        if bound is not None:
            about += f"; a softmax over {_features(bound, run.model.head)} has rank at most {bound}"
        notes.append(f"{name}: head {run.model.head.name}, {about}")
    for file in arguments.log_prob:
        try:
            matrices[names[file]] = stored_matrix(_mapped(file), arguments.rows, dtype, device)
        except ValueError as error:
            raise ValueError(f"--log-prob {file}: {error}") from None
    return matrices, notes


def _mapped(file: str) -> Any:
    """The array of a .npy file, mapped into memory."""
    import numpy as np

    try:
        values = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"expected a .npy file: {error}") from None
    if not isinstance(values, np.ndarray):
        raise ValueError("expected a .npy file with one array, got an archive of several")
    return values


def _features(bound: int, head: Any) -> str:
    bias = head.bias is not None
    return f"{bound - 1 - bias} features {'with' if bias else 'without'} bias"


def _error_notes(results: dict[str, RankResult]) -> list[str]:
    """How exact the Gram route is where the Press rank is decided."""
    notes = []
    for name, result in results.items():
        if result.route == "gram" and result.press_threshold:
            error = result.press_error
            near = int((abs(result.singular_values - result.press_threshold) <= error).sum())
            share = error / result.press_threshold
            notes.append(
                f"{name}: by the error bound of gram, singular values at the Press threshold are "
                f"exact to {share:.2%} of it; {near:,} lie as close as that and could count either "
                "way"
            )
    return notes


def _data(results: dict[str, RankResult]) -> dict[str, Any]:
    from hstree.analysis.rank_plot import rank_rows, thinned

    matrices = []
    for row, result in zip(rank_rows(results), results.values(), strict=True):
        index = thinned(len(result.singular_values))
        values = [float(f"{value:.6g}") for value in result.singular_values[index - 1]]
        matrices.append(row | {"index": index.tolist(), "singular_values": values})
    return {"matrices": matrices}
