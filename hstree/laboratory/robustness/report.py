"""``hstree experiment robustness``."""

from __future__ import annotations

import argparse
from typing import Any

from ..arguments import add_config_arguments, config_values, count
from ..numbers import not_negative
from ..results import add_output_argument, publish, results_folder

_DESCRIPTION = """\
How robust the Press rank is. A matrix pruned to a few singular values is decomposed and multiplied
again and again, pruned every time or only once: rounding errors should not change its Press rank.
Then normal noise of variance c / n^2 is added to a matrix of the same rank: its Press rank rises to
nearly n once the noise is above the threshold, while its effective ranks stay. Both in float32 and
in float64.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "robustness", help="Press rank under rounding and noise", description=_DESCRIPTION
    )
    for name, default, text in (
        ("size", 1000, "n, rows and columns of the matrices"),
        ("rank", 10, "singular values kept"),
        ("repetitions", 10, "how often a matrix is decomposed and multiplied again"),
    ):
        parser.add_argument(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    parser.add_argument(
        "--c",
        type=not_negative,
        action="append",
        metavar="X",
        help="n^2 times the variance of the noise; may be given several times (default: every "
        "power of ten from 1e-30 to 1e-5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of matrices and noise (default: 0)"
    )
    add_config_arguments(parser, only=("device", "threads"))
    add_output_argument(parser, "robustness")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.experiments import (
        noise_picture,
        noise_ranks,
        noise_rows,
        noise_table,
        reconstruction_table,
        reconstructions,
    )
    from hstree.experiments.robustness import DTYPES
    from hstree.training import TrainConfig, choose_device, set_threads

    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    device = choose_device(settings.device)
    size, rank, seed = arguments.size, arguments.rank, arguments.seed
    if rank >= size:
        raise ValueError(f"--rank: expected a number below --size, {size}, got {rank}")
    variances = sorted(set(arguments.c or (10.0**power for power in range(-30, -4))))
    folder = results_folder(arguments)
    repeated = [
        reconstructions(size, rank, arguments.repetitions, dtype, seed, device, prune=prune)
        for prune in (True, False)
        for dtype in DTYPES
    ]
    points = [
        point
        for dtype in DTYPES
        for point in noise_ranks(size, variances, rank, dtype, seed, device)
    ]
    data = {
        "size": size,
        "rank": rank,
        "seed": seed,
        "reconstructions": [
            {
                "dtype": str(result.dtype).removeprefix("torch."),
                "pruned_every_time": result.prune,
                "press_ranks": result.press_ranks,
                "relative_change": result.change,
            }
            for result in repeated
        ],
        "noise": noise_rows(points),
    }
    publish(
        folder,
        "robustness",
        "Robustness of the Press rank",
        [reconstruction_table(repeated), noise_table(points)],
        data,
        {"robustness-noise.png": noise_picture(points)},
        [
            f"matrices of {size:,} x {size:,}, rank {rank}, seed {seed}",
            "singular values of the matrix before the noise: exp(-i / 2), i = 0, 1, ...; "
            "expected: by the quarter-circle law for the singular values of noise",
        ],
        rows=noise_rows(points),
    )
    return 0
