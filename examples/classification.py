"""Classification with 100,000 labels: trees and a sampled softmax against a linear layer.

    python examples/classification.py                     # one label a row; about a minute
    python examples/classification.py --labels 5          # five labels a row
    python examples/classification.py --heads linear trees --classes 10000 --steps 300

The data are made up: labels follow a power law and lie in clusters of a feature space; the features
of a row are the mean of its labels' prototypes, and noise. Below every head stands the same small
network, and each head is trained in a process of its own. benchmarks/results/classification.md has
figures of longer runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hstree

FEATURES, HIDDEN = 64, 128
TRAIN_ROWS, TEST_ROWS = 200_000, 2_000
PER_CLUSTER = 100
"""Labels in a cluster."""


def make_data(
    classes: int, labels: int, rows: Sequence[int], seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Features [N, FEATURES] and labels [N, K] for each of the numbers N. Label r has the frequency
    1 / (r + 10); the K labels of a row differ, and are of one cluster."""
    random = torch.Generator().manual_seed(seed)
    clusters = classes // PER_CLUSTER  # cluster c has the labels c, c + clusters, ...
    mass = (1 / (torch.arange(classes) + 10.0)).view(PER_CLUSTER, clusters).t().contiguous()
    prototype = torch.randn(clusters, FEATURES, generator=random).repeat(PER_CLUSTER, 1)
    prototype += 0.7 * torch.randn(prototype.shape, generator=random)
    data = []
    for n in rows:
        features, target = torch.empty(n, FEATURES), torch.empty(n, labels, dtype=torch.int64)
        for some, wanted in zip(features.split(10_000), target.split(10_000), strict=True):
            cluster = torch.multinomial(mass.sum(1), len(some), replacement=True, generator=random)
            member = torch.multinomial(mass[cluster], labels, generator=random)
            wanted.copy_(member * clusters + cluster[:, None])
            noise = torch.randn(some.shape, generator=random)
            some.copy_(F.embedding_bag(wanted, prototype, mode="mean") + 0.5 * noise)
        data.append((features, target))
    return data


def clustered_trees(n_trees: int, counts: Tensor, features: Tensor, target: Tensor) -> nn.Module:
    """Trees that part the labels by the mean features of their rows."""
    return hstree.TreeEnsemble.from_features(
        HIDDEN, len(counts), features, target, n_trees=n_trees, sparse=True
    )


def sampled(negatives: int, counts: Tensor, features: Tensor, target: Tensor) -> nn.Module:
    """A softmax that trains on drawn labels and those of the batch."""
    return hstree.SampledSoftmax(
        HIDDEN, len(counts), frequencies=counts, negatives=negatives, sparse=True
    )


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], nn.Module]] = {
    "linear": lambda counts, features, target: nn.Linear(HIDDEN, len(counts)),
    "adaptive": lambda counts, features, target: hstree.AdaptiveSoftmax(
        HIDDEN, len(counts), order=counts.argsort(descending=True)
    ),
    "trees": lambda counts, features, target: hstree.TreeEnsemble.from_counts(
        HIDDEN, counts, sparse=True
    ),
    "clustered-tree": partial(clustered_trees, 1),
    "clustered-trees": partial(clustered_trees, 4),
    "sampled-512": partial(sampled, 512),
    "sampled-2048": partial(sampled, 2048),
}
"""Built from the counts [V] of the labels in the training data, and that data."""

RATES = {"linear": 0.02, "adaptive": 0.01}
"""Of AdamW, the best of 0.004, 0.01 and 0.02 after some seconds; 0.004 for the others."""


def loss(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all labels: hidden [N, D], target [N, K]."""
    if isinstance(head, nn.Linear):  # the logits of a row serve all its labels
        return -head(hidden).log_softmax(1).gather(1, target).mean()
    return head(hidden.repeat_interleave(target.shape[1], 0), target.flatten()).loss


@torch.no_grad()
def precision(network: nn.Module, head: nn.Module, features: Tensor, target: Tensor) -> list[float]:
    """Share of right ones among the first label and the first five, of those that could be right:
    with one label a row, how often it is among them."""
    found = []
    for x in features.split(256):
        hidden = network(x)
        scores = head(hidden) if isinstance(head, nn.Linear) else None
        found.append((head.topk(hidden, 5) if scores is None else scores.topk(5))[1])
    right = (torch.cat(found)[:, :, None] == target[:, None, :]).any(2).float()
    return [right[:, :n].sum(1).mean().item() / min(n, target.shape[1]) for n in (1, 5)]


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


class Result(NamedTuple):
    """What one head did; the memory is that of its process, before the head was built and at the
    end of training."""

    parameters: int
    milliseconds: float
    steps: int
    precision: list[float]
    before_mib: float
    peak_mib: float


def measure(
    name: str,
    *,
    classes: int,
    labels: int,
    batch_size: int,
    lr: float | None,
    seconds: float,
    steps: int,
    threads: int,
) -> Result:
    """Trains one head for so many seconds, and at most so many steps."""
    torch.set_num_threads(threads)
    (features, target), test = make_data(classes, labels, (TRAIN_ROWS, TEST_ROWS))
    before = peak_mib()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, HIDDEN))
    head = HEADS[name](torch.bincount(target.flatten(), minlength=classes), features, target)
    lr = RATES.get(name, 0.004) if lr is None else lr
    optimizer = hstree.optim.AdamW([*network.parameters(), *head.parameters()], lr)
    clock = time.process_time if threads == 1 else time.perf_counter
    times: list[float] = []
    while sum(times) < seconds and len(times) < steps:
        rows = torch.randint(len(features), (batch_size,))
        begin = clock()
        loss(head, network(features[rows]), target[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock() - begin)
    peak = peak_mib()
    size = sum(parameter.numel() for parameter in head.parameters())
    found = precision(network, head, *test)
    return Result(size, 1000 * median(times), len(times), found, before, peak)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--classes", type=int, default=100_000, help="V, a multiple of 100")
    parser.add_argument("--labels", type=int, default=1, help="labels of a row")
    parser.add_argument("--batch-size", type=int, default=512, help="rows of a step")
    parser.add_argument("--lr", type=float, help="without it each head has its own")
    parser.add_argument("--seconds", type=float, default=6.0, help="of training, for each head")
    parser.add_argument("--steps", type=int, default=10**9, help="at most so many")
    parser.add_argument("--threads", type=int, default=1)
    options = vars(parser.parse_args(arguments))
    heads = options.pop("heads")
    if options["classes"] < PER_CLUSTER or options["classes"] % PER_CLUSTER:
        parser.error(f"--classes: expected a multiple of {PER_CLUSTER}, got {options['classes']}")
    if not 1 <= options["labels"] <= PER_CLUSTER:
        parser.error(f"--labels: expected 1 to {PER_CLUSTER}, got {options['labels']}")
    print("| head | parameters | ms a step | steps | precision@1 | precision@5 | peak MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in heads:
            found = pool.apply(measure, (name,), options)
            print(
                f"| {name} | {found.parameters:,} | {found.milliseconds:.1f} | {found.steps:,} "
                f"| {found.precision[0]:.3f} | {found.precision[1]:.3f} | {found.peak_mib:,.0f} |",
                flush=True,
            )
    print(f"\nOf the peak, torch and the data take {found.before_mib:,.0f} MiB.")


if __name__ == "__main__":
    main()
