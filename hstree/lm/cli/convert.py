"""``hstree convert``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hstree.decoding import Agreement, agreement
from hstree.heads import Softmax, TreeEnsemble
from hstree.lm._arguments import NUMBER, Argument, output_file
from hstree.lm._terminal import fold, show
from hstree.lm.data import Streams
from hstree.lm.runs import Run
from hstree.lm.runs.flags import add_config_arguments, add_run_argument, open_run
from hstree.lm.runs.names import DRAFT
from hstree.lm.training import processes
from hstree.lm.training.relearning import read_contexts
from hstree.trees import ContextMeans

_DESCRIPTION = """\
Turn the softmax of a trained model into trees that read its rows, a draft for speculative decoding.
The trees cluster words by their mean hidden states over the training text; the nodes above the
words are fitted to the softmax on a sample of these hidden states. The file that is written holds
what the trees add to the softmax, not its weight.
"""

_VALIDATED = 1 << 14  # contexts of the validation text on which both are compared


_ARGUMENTS = (
    Argument("--output", metavar="FILE", help="file to write (default: draft.safetensors in RUN)"),
    Argument("--n-trees", default=1, help="number of trees, T", **NUMBER),
    Argument(
        "--hidden-states",
        default=1 << 17,
        help="number of hidden states to which the nodes are fitted",
        **NUMBER,
    ),
    Argument("--epochs", default=3, help="passes over these hidden states", **NUMBER),
    Argument(
        "--root",
        help="number of children of the root, C (default: 1024, at most a quarter of the words "
        "and at least the square root of their number; up to 1,024 words: all of them)",
        **NUMBER,
    ),
    Argument("--seed", type=int, default=0, metavar="N", help="seed of trees and fit"),
)


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "convert", help="trees from the softmax of a trained model", description=_DESCRIPTION
    )
    add_run_argument(parser)
    for argument in _ARGUMENTS:
        argument.add(parser)
    add_config_arguments(parser, only=("device", "threads"))
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    run, _ = open_run(arguments)
    softmax = run.model.head
    if not isinstance(softmax, Softmax):
        raise ValueError(
            f"{run.path}: expected a run with the head 'softmax', got {softmax.name!r}"
        )
    output = output_file("--output", arguments.output or run.path / DRAFT)
    if os.path.lexists(output):
        raise ValueError(f"{output} already exists; name a new file with --output")
    begin = time.perf_counter()
    draft, before, after = _convert(run, softmax, arguments)
    seconds = time.perf_counter() - begin
    draft.save(output, embedding=softmax)
    show(_report(run, draft, before, after))
    print(fold(f"written to {output} in {seconds:.0f} s", sys.stdout))
    return 0


def _convert(
    run: Run, softmax: Softmax, arguments: argparse.Namespace
) -> tuple[TreeEnsemble, Agreement, Agreement]:
    """The trees, and how they agree with the softmax on validation text before and after the
    fit."""

    def contexts(split: str, n: int) -> tuple[ContextMeans, Tensor]:
        tokens = getattr(corpus, split)
        if len(tokens) < 2:
            raise ValueError(
                f"{corpus.name}: the {split} part has {len(tokens)} tokens, at least 2 are needed"
            )
        streams = Streams(tokens, min(run.config.batch_size, len(tokens) - 1))
        with processes(device) as alone:
            means, hidden, target = read_contexts(run.model, streams, alone, n)
        return means, hidden[target != streams.ignore_index]

    device = softmax.weight.device.type
    corpus = run.corpus()
    means, hidden = contexts("train", arguments.hidden_states)
    _, valid = contexts("valid", _VALIDATED)
    draft = TreeEnsemble.from_linear(
        softmax,
        tied=True,
        vectors=means.vectors(),
        at=means.mean,
        frequencies=means.count.cpu(),
        n_trees=arguments.n_trees,
        root=arguments.root,
        seed=arguments.seed,
    ).eval()
    before = agreement(softmax, draft, valid)
    draft.fit_nodes(hidden, softmax, epochs=arguments.epochs, seed=arguments.seed)
    return draft, before, agreement(softmax, draft, valid)


def _report(run: Run, draft: TreeEnsemble, before: Agreement, after: Agreement) -> str:
    shared = draft.output_embedding
    own = sum(p.numel() for p in draft.parameters() if p is not shared)
    rows = _rows_scored(draft, run.vocabulary.frequencies)
    heading = (
        f"{run.path}: T = {draft.n_trees}, C = {draft.trees[0].root_width}, below it the rows of "
        f"the softmax over {draft.n_classes:,} words"
    )
    lines = [
        fold(heading, sys.stdout),
        f"parameters       {own:>12,}  beside {shared.numel():,} of the softmax",
        f"rows for a draw  {rows:>12,.0f}  of {draft.n_classes:,}",
        "",
        f"on {len(after.acceptance):,} contexts of the validation text",
        f"{'':<16}{'expected acceptance':>21}{'KL divergence':>15}",
    ]
    for name, found in (("first order", before), ("fitted", after)):
        acceptance, divergence = found.acceptance.mean(), found.divergence.mean()
        lines.append(f"{name:<16}{acceptance:>21.4f}{divergence:>15.4f}")
    return "\n".join(lines)


def _rows_scored(draft: TreeEnsemble, frequencies: npt.NDArray[np.int64]) -> float:
    """Mean number of rows of weights on the path of a word in one tree: one for a binary node, one
    for each child of another."""
    means = []
    for tree in draft.trees:
        visits = np.bincount(tree.edges().node, tree.edge_masses(frequencies), tree.n_nodes)
        means.append(visits @ np.where(tree.n_children > 2, tree.n_children, 1))
    return float(np.mean(means) / frequencies.sum())
