"""Asks trees for probabilities, the most probable classes and samples, and times it.

    python examples/decoding.py                     # some seconds
    python examples/decoding.py --classes 2000      # a quick look

The trees approximate a softmax with random weights over classes with the frequencies of words.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hstree

FEATURES = 200


def milliseconds(function: Callable[[], Any], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--classes", type=int, default=30_000)
    n_classes = parser.parse_args().classes
    torch.manual_seed(0)

    counts = 1e6 / torch.arange(1, n_classes + 1)  # Zipf's law
    linear = nn.Linear(FEATURES, n_classes)
    linear.weight.normal_(std=FEATURES**-0.5)  # scores vary by about 1
    linear.bias.copy_(counts.log())
    head = hstree.TreeEnsemble.from_linear(linear, frequencies=counts)
    hidden = torch.randn(1, FEATURES)

    log_prob = head.log_prob(hidden)
    print(f"probabilities of all {n_classes:,} classes sum to {log_prob.exp().sum():.6f}")
    values, classes = head.topk(hidden, 5)
    print("top 5 classes:", classes[0].tolist())
    print("their probabilities:", [round(p, 4) for p in values[0].exp().tolist()])
    assert torch.equal(classes, log_prob.topk(5).indices)  # the search is exact
    best = head.predict(hidden)
    target_log_prob = head(hidden, best).output  # without computing the other classes
    print(f"log-probability of class {best.item()}: {target_log_prob.item():.4f}")
    drawn = head.sample(hidden.expand(10_000, -1))
    share = (drawn == best).float().mean()
    print(f"share of class {best.item()} among 10,000 samples: {share:.4f}")

    print(f"\n{'one row, in milliseconds':<26}{'softmax':>9}{'trees':>9}")
    for name, softmax, trees in (
        ("log_prob, all classes", lambda: linear(hidden).log_softmax(1),
         lambda: head.log_prob(hidden)),
        ("topk, 10 classes", lambda: linear(hidden).log_softmax(1).topk(10),
         lambda: head.topk(hidden, 10)),
        ("predict", lambda: linear(hidden).argmax(1), lambda: head.predict(hidden)),
        ("sample", lambda: linear(hidden).softmax(1).multinomial(1), lambda: head.sample(hidden)),
    ):  # fmt: skip
        print(f"{name:<26}{milliseconds(softmax):9.2f}{milliseconds(trees):9.2f}")


if __name__ == "__main__":
    main()
