"""Replaces the softmax of a small language model by trees: one line of the model changes.

    python examples/replace_a_softmax.py                              # half a minute
    python examples/replace_a_softmax.py --steps 20 --classes 2000    # a quick look

A network reads four words and predicts the fifth, in the docstrings of this Python installation.
The trees start from the frequencies of the words, so this short training favors them;
benchmarks/results/trees-study.md compares longer ones.
"""

from __future__ import annotations

import argparse
import time
from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hstree
from hstree.lm.data import load_corpus

CONTEXT, FEATURES, BATCH = 4, 200, 256


def loss_of(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    if isinstance(head, nn.Linear):
        return F.cross_entropy(head(hidden), target)
    return head(hidden, target).loss  # the line that changes


def perplexity(network: nn.Module, head: nn.Module, tokens: Tensor) -> float:
    windows = tokens.unfold(0, CONTEXT + 1, 1)[:5000]
    with torch.no_grad():
        return exp(loss_of(head, network(windows[:, :-1]), windows[:, -1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--classes", type=int, help="keeps only the most frequent words")
    arguments = parser.parse_args()
    steps = arguments.steps

    corpus = load_corpus(max_vocabulary=arguments.classes)
    n_classes = len(corpus.vocabulary)
    train, valid = torch.tensor(corpus.train).long(), torch.tensor(corpus.valid).long()
    windows = train.unfold(0, CONTEXT + 1, 1)
    print(f"{len(train):,} words of training text, {n_classes:,} classes, {steps} steps")

    def fit(name: str, head: nn.Module) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Embedding(n_classes, 50),
            nn.Flatten(),
            nn.Linear(50 * CONTEXT, FEATURES),
            nn.Tanh(),
        )
        optimizer = hstree.optim.AdamW([*network.parameters(), *head.parameters()], lr=0.003)
        begin = time.perf_counter()
        for _ in range(steps):
            batch = windows[torch.randint(len(windows), (BATCH,))]
            loss_of(head, network(batch[:, :-1]), batch[:, -1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        milliseconds = 1000 * (time.perf_counter() - begin) / steps
        print(f"{name:<42} {milliseconds:6.1f} ms a step, ", end="")
        print(f"validation perplexity {perplexity(network, head, valid):.1f}")

    fit("softmax: nn.Linear and F.cross_entropy", nn.Linear(FEATURES, n_classes))
    fit(
        "trees: TreeEnsemble.from_tokens",
        hstree.TreeEnsemble.from_tokens(FEATURES, n_classes, train, sparse=True),
    )


if __name__ == "__main__":
    main()
