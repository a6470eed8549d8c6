"""Speculative decoding against drawing every word from the softmax: words per second of CPU time.

python -m benchmarks.speculative                 # a made-up model of WikiText-2's vocabulary
python -m benchmarks.speculative --run RUN       # a run of hstree train --head softmax

The draft is one tree of two levels that reads the softmax: RUN/draft.safetensors where
``hstree convert RUN`` has written it, otherwise the first-order expansion. All ways of a table draw
the same number of words in turn, one text, on one thread; the fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hstree.heads import Head, Softmax, TreeEnsemble, load_head
from hstree.lm.models import AWDLSTM, LanguageModel, SpeculativeOutput, generate, speculative
from hstree.lm.runs import load_run
from hstree.lm.runs.names import DRAFT

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


def seconds(ways: list[Callable[[], object]], rounds: int) -> list[float]:
    """Shortest processor time of each, in turn: of one thread, whatever else the machine does."""
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for i, way in enumerate(ways):
            start = time.process_time()
            way()
            best[i] = min(best[i], time.process_time() - start)
    return best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", metavar="RUN")
    parser.add_argument("--classes", type=int, default=33_278, metavar="V")
    parser.add_argument("--features", type=int, default=400, metavar="D")
    parser.add_argument("--root", type=int, default=1024, metavar="C")
    parser.add_argument("--words", type=int, default=100, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("-k", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
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

    ways: list[Callable[[], object]] = [lambda: generate(model, [0], arguments.words)]
    ways += [lambda k=k: drafted(k) for k in arguments.k]
    plain, *times = seconds(ways, arguments.rounds)
    width = draft.trees[0].root_width if isinstance(draft, TreeEnsemble) else 0
    print(f"V = {head.n_classes:,}, D = {head.in_features}, C = {width}, one thread\n")
    print("| words drafted, k | accepted | words per second | times softmax |")
    print("| ---: | ---: | ---: | ---: |")
    print(f"| - | - | {arguments.words / plain:,.0f} | 1.00 |")
    for k, time_ in zip(arguments.k, times, strict=True):
        speed = f"{arguments.words / time_:,.0f} | {plain / time_:.2f}"
        print(f"| {k} | {drafted(k).accepted:.2f} | {speed} |")


if __name__ == "__main__":
    main()
