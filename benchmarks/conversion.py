"""Replace a trained softmax by trees: without training, and after a short training of the head.

    python -m benchmarks.conversion runs/softmax --data ptb/

The run must have a flat softmax. Its backbone is not trained. The trees are clustered by the rows
of the softmax and initialized from it by ``TreeEnsemble.from_linear`` or, for comparison, from the
frequencies of the words. Learning rates of Adam are chosen on the validation text. One thread.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.pages import page_parser, publish
from hstree.heads import Softmax, TreeEnsemble
from hstree.lab.report import Report
from hstree.lm.models import LanguageModel
from hstree.lm.models.stream import read_stream
from hstree.lm.runs import load_run
from hstree.lm.table import decimals, table
from hstree.trees import build_ensemble

SHAPES = [(1, 1, 1), (1, 256, 1), (1, 1024, 64), (4, 256, 1), (4, 1024, 64)]
"""T, C and G."""
TRAIN_TOKENS, ROWS = 200_000, 1000
RATES = (0.001, 0.004)

Text = tuple[Tensor, Tensor]
"""Hidden vectors [n - 1, D] and the next words [n - 1]."""


@torch.no_grad()
def read(model: LanguageModel, tokens: npt.NDArray[Any]) -> Text:
    hidden = torch.cat(list(read_stream(model, tokens[:-1])))
    return hidden, torch.from_numpy(tokens[1:].astype(np.int64))


@torch.no_grad()
def perplexity(head: nn.Module, text: Text) -> float:
    parts = zip(text[0].split(5000), text[1].split(5000), strict=True)
    total = sum(float(head(*part).loss) * len(part[1]) for part in parts)
    return math.exp(total / len(text[1]))


def trained(
    build: Callable[[], TreeEnsemble], train: Text, steps: int, rate: float
) -> TreeEnsemble:
    """Train a new head for some steps of Adam on random rows, with a learning rate that decays to
    zero."""
    torch.manual_seed(0)
    head = build()
    optimizer = torch.optim.Adam(head.parameters(), rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(train[0]), (ROWS,))
        optimizer.zero_grad()
        head(train[0][rows], train[1][rows]).loss.backward()
        optimizer.step()
        schedule.step()
    return head


def measure(options: argparse.Namespace) -> Report:
    run = load_run(options.run)
    softmax = run.model.head
    if type(softmax) is not Softmax:
        raise SystemExit(f"{options.run}: expected a run with the head 'softmax'")
    corpus = run.corpus(options.data)
    train, valid, test = (
        read(run.model, tokens)
        for tokens in (corpus.train[:TRAIN_TOKENS], corpus.valid, corpus.test)
    )
    V, D = softmax.weight.shape
    linear = nn.Linear(D, V)
    linear.load_state_dict({"weight": softmax.weight.detach(), "bias": softmax.bias.detach()})
    counts = np.asarray(corpus.vocabulary.frequencies)
    rows = []
    for shape in SHAPES:
        n_trees, root, leaf = shape
        vectors = [linear.weight.detach().numpy()]
        noise = {"noise": 0.3} if n_trees > 1 else {}
        shape_of = (counts, vectors, 0, root, leaf)
        trees = build_ensemble("cluster", V, n_trees, *shape_of, **noise)
        converted = partial(TreeEnsemble.from_linear, linear, trees, gate="context")
        fresh = partial(TreeEnsemble, D, V, trees, gate="context", frequencies=counts)
        after = []
        for build in (converted, fresh):
            heads = [trained(build, train, options.steps, rate) for rate in RATES]
            best = min(heads, key=lambda head: perplexity(head, valid))
            after.append(perplexity(best, test))
        rows.append((*shape, perplexity(converted(), test), *after))
        print(rows[-1], flush=True)
    of = [(name, itemgetter(place), str) for place, name in enumerate(("T", "C", "G"))]
    names = ("from_linear", "then trained", "from frequencies, trained")
    of += [(name, itemgetter(place), decimals(1)) for place, name in enumerate(names, 3)]
    title = (
        f"Test perplexity of {corpus.name}, V = {V:,}, D = {D}; "
        f"the softmax has {perplexity(softmax, test):.1f}"
    )
    notes = (
        "The backbone is not trained. from_linear: the head of `TreeEnsemble.from_linear`.",
        f"Then trained: after {options.steps} steps of Adam on {ROWS:,} rows each from the first "
        f"{TRAIN_TOKENS:,} words of the training text. Last, the same trees and steps, initialized "
        "only from the frequencies of the words.",
        f"The learning rate of each is the better of {' and '.join(map(str, RATES))} on the "
        "validation text.",
    )
    return Report("Trees in place of a trained softmax", [table(title, rows, of)], notes)


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=300)
    publish("conversion", parser, measure)


if __name__ == "__main__":
    main()
