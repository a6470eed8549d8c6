"""Speculative decoding against drawing every word from the softmax: words per second of CPU time.

python -m benchmarks.speculative                 # a made-up model of WikiText-2's vocabulary
python -m benchmarks.speculative --run RUN       # a run of hstree train --head softmax

The draft is one tree of two levels that reads the softmax: RUN/draft.safetensors where
``hstree convert RUN`` has written it, otherwise the first-order expansion. All ways of a table draw
the same number of words in turn, one text, on one thread; the fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.pages import page_parser, publish, seconds
from hstree.heads import Head, Softmax, TreeEnsemble, load_head
from hstree.lab.report import Report
from hstree.lm.models import AWDLSTM, LanguageModel, SpeculativeOutput, generate, speculative
from hstree.lm.runs import load_run
from hstree.lm.runs.names import DRAFT
from hstree.lm.table import decimals, table

SCALE = 0.22  # of the weights: about as many drafted words are accepted as in a trained model


def made_up(classes: int, features: int) -> LanguageModel:
    """One LSTM layer, and a softmax with the frequencies of Zipf's law."""
    torch.manual_seed(0)
    head = Softmax(features, classes)
    with torch.no_grad():
        head.weight.normal_(0.0, SCALE)
        head.bias.copy_(-torch.arange(1, classes + 1).log())
    backbone = AWDLSTM(classes, features, features)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.normal_(0.0, SCALE)
    return LanguageModel(backbone, head)


def measure(arguments: argparse.Namespace) -> Report:
    if arguments.run is None:
        model = made_up(arguments.classes, arguments.features)
    else:
        model = load_run(arguments.run, torch.device("cpu")).model
    head = model.head
    assert isinstance(head, Softmax)
    draft: Head = TreeEnsemble.from_linear(head, tied=True, root=arguments.root)
    if arguments.run is not None and (file := Path(arguments.run, DRAFT)).exists():
        draft = load_head(file, embedding=head)

    def drafted(k: int) -> SpeculativeOutput:
        return speculative(model, draft, [0], arguments.words, k=k)

    ways: dict[int, Callable[[], object]] = {0: lambda: generate(model, [0], arguments.words)}
    ways |= {k: lambda k=k: drafted(k) for k in arguments.k}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(arguments.rounds):
        for k, way in ways.items():  # in turn
            best[k] = min(best[k], seconds(way))
    width = draft.trees[0].root_width if isinstance(draft, TreeEnsemble) else 0
    compared = table(
        f"V = {head.n_classes:,}, D = {head.in_features}, C = {width}",
        best,
        [
            ("words drafted, k", lambda k: k or None, lambda k: str(k or "-")),
            ("accepted", lambda k: drafted(k).accepted if k else None, decimals(2)),
            ("words per second", lambda k: arguments.words / best[k], decimals(0)),
            ("times softmax", lambda k: best[0] / best[k], decimals(2)),
        ],
    )
    title = "Speculative decoding against drawing every word from the softmax"
    return Report(title, [compared])


def main(argv: Sequence[str] | None = None) -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--run", metavar="RUN")
    parser.add_argument("--classes", type=int, default=33_278, metavar="V")
    parser.add_argument("--features", type=int, default=400, metavar="D")
    parser.add_argument("--root", type=int, default=1024, metavar="C")
    parser.add_argument("--words", type=int, default=100, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("-k", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    publish("speculative", parser, measure, argv)


if __name__ == "__main__":
    main()
