"""``hstree experiment jacobian``."""

from __future__ import annotations

import argparse
from typing import Any

from hstree.layers import ACTIVATIONS, GATES
from hstree.training.config import DEVICES

from ..arguments import count
from ..results import add_output_argument, publish, results_folder

_DESCRIPTION = """\
Singular values of dy/dx of untrained layers with Glorot uniform weights, at standard normal inputs:
a linear layer, a dense layer with an activation, and mixtures of experts
y = sum_k g_k(x) f(W_k x + c_k) in its place, for growing numbers of experts. A layer is well
conditioned, and easy to train through, if they are of similar size.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "jacobian", help="how well conditioned mixtures of experts are", description=_DESCRIPTION
    )
    parser.add_argument(
        "--features",
        type=count,
        default=128,
        metavar="N",
        help="input and output features of the layers (default: 128)",
    )
    parser.add_argument(
        "--inputs", type=count, default=250, metavar="N", help="inputs of a draw (default: 250)"
    )
    parser.add_argument(
        "--experts",
        type=count,
        nargs="+",
        default=[2, 4, 8, 16, 32],
        metavar="K",
        help="numbers of experts (default: 2 4 8 16 32)",
    )
    parser.add_argument(
        "--activation",
        default="relu",
        choices=tuple(ACTIVATIONS),
        help="of the dense layer and of every expert (default: relu)",
    )
    parser.add_argument(
        "--gates",
        nargs="+",
        choices=GATES,
        default=["softmax", "constant"],
        help="of the mixtures; constant: 1 / K, none: 1 (default: softmax constant)",
    )
    parser.add_argument(
        "--seeds",
        type=count,
        default=5,
        metavar="N",
        help="draws of inputs and weights (default: 5)",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where to compute; auto takes a GPU if there is one (default: auto)",
    )
    add_output_argument(parser, "jacobian")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    import dataclasses

    from hstree.experiments import (
        jacobian_experiment,
        jacobian_notes,
        jacobian_picture,
        jacobian_rows,
        jacobian_table,
    )
    from hstree.training import choose_device

    device = choose_device(arguments.device)
    folder = results_folder(arguments)
    experiment = jacobian_experiment(
        arguments.features,
        arguments.inputs,
        arguments.experts,
        arguments.activation,
        arguments.gates,
        arguments.seeds,
        device,
    )
    publish(
        folder,
        "jacobian",
        "Jacobians of mixtures of experts",
        [jacobian_table(experiment)],
        dataclasses.asdict(experiment),
        {
            "jacobian-normalised-singular-values.png": jacobian_picture(
                experiment, normalised=True
            ),
            "jacobian-singular-values.png": jacobian_picture(experiment, normalised=False),
        },
        jacobian_notes(experiment),
        rows=jacobian_rows(experiment),
    )
    return 0
