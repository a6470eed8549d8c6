"""Classification with 100,000 labels: trees and a sampled softmax against a linear layer.

    python examples/classification.py                     # one label a row; about a minute
    python examples/classification.py --labels 5          # five labels a row
    python examples/classification.py --heads linear trees --classes 10000 --steps 300
    python examples/classification.py --data train.txt test.txt --seconds 60

Without --data the data are made up: labels follow a power law and lie in clusters of a feature
space; the features of a row are the mean of its labels' prototypes, and noise. --data takes files
of the Extreme Classification Repository. Below every head stands the same small network, and each
head is trained in a process of its own. benchmarks/results/classification.md has figures of longer
runs.

The labels of a row share one distribution, whose probabilities sum to 1, and the loss is the mean
over all labels. Independent labels, each with a yes or no of its own (a sigmoid, as in
torch.nn.BCEWithLogitsLoss), are not supported.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
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


def read_data(path: str) -> tuple[Any, Any]:
    """Features [N, F], of length 1 in each row, and labels [N, V], sparse matrices of scipy: a file
    of the Extreme Classification Repository. Its first line is "N F V"; each further line is a row,
    such as "3,17 0:0.5 8:1.25": the labels, and features with their values."""
    features, labels = [], []
    with open(path, encoding="ascii") as file:
        first = file.readline().split()
        if len(first) != 3 or not all(number.isdecimal() for number in first):
            raise SystemExit(f'{path}: expected "N F V" in the first line, got {" ".join(first)!r}')
        n_rows, n_features, n_labels = map(int, first)
        for line in file:
            of_row, _, pairs = line.strip("\n").partition(" ")
            if ":" in of_row:  # a row without a label
                of_row, pairs = "", line
            labels.append(np.fromstring(of_row, np.int64, sep=","))
            features.append(np.fromstring(pairs.replace(":", " "), sep=" ").reshape(-1, 2))
    if len(labels) != n_rows:
        raise SystemExit(
            f"{path}: expected {n_rows} rows, as the first line says, got {len(labels)}"
        )

    def matrix(values: Any, columns: list[Any], width: int) -> Any:
        ends = np.cumsum([0, *map(len, columns)])
        return scipy.sparse.csr_array(
            (values, np.concatenate(columns), ends), shape=(n_rows, width), dtype=np.float32
        )

    columns = [pairs[:, 0].astype(np.int64) for pairs in features]
    values = [pairs[:, 1] / (np.linalg.norm(pairs[:, 1]) or 1.0) for pairs in features]
    ones = np.ones(sum(map(len, labels)))
    return (
        matrix(np.concatenate(values), columns, n_features),
        matrix(ones, labels, n_labels),
    )


def batch(data: tuple[Any, Any], rows: Any) -> tuple[Any, Tensor]:
    """Features and labels [N, K], padded with -1, of some rows."""
    features, labels = data[0][rows], data[1][rows]
    return features, labels if isinstance(labels, Tensor) else hstree.trees.padded_labels(labels)


def count_labels(labels: Any, classes: int) -> Tensor:
    """Number of rows of each label [V]."""
    if isinstance(labels, Tensor):
        return torch.bincount(labels.flatten(), minlength=classes)
    return torch.from_numpy(labels.sum(0)).long()


class SparseLinear(nn.Module):
    """A linear layer for rows of a sparse matrix of scipy, with row-sparse gradients."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(
            in_features, out_features, mode="sum", sparse=True, include_last_offset=True
        )
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, features: Any) -> Tensor:
        index, begin, value = map(
            torch.from_numpy, (features.indices, features.indptr, features.data)
        )
        return self.rows(index, begin, per_sample_weights=value) + self.bias


def clustered_trees(n_trees: int, counts: Tensor, features: Tensor, target: Tensor) -> nn.Module:
    """Trees that cluster the labels by the mean features of their rows."""
    vectors, _ = hstree.trees.label_means(features, target, len(counts))
    return hstree.TreeEnsemble.from_vectors(
        HIDDEN, vectors, frequencies=counts, n_trees=n_trees, sparse=True
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
    """Mean cross-entropy over all labels: hidden [N, D], target [N, K] padded with -1."""
    rows, column = (target >= 0).nonzero(as_tuple=True)
    classes = target[rows, column]
    if isinstance(head, nn.Linear):  # the logits of a row serve all its labels
        return -head(hidden).log_softmax(1)[rows, classes].mean()
    return head(hidden[rows], classes).loss


def inverse_propensity(counts: Tensor, n_rows: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    r"""1 / p [V] of the model of Jain et al. for the share of the rows that should have a label and
    do: counts [V] among the N training rows.

    .. math::
        1 / p_v = 1 + C (N_v + B)^{-A}, \qquad C = (\log N - 1) (B + 1)^A

    They fitted A = 0.5, B = 0.4 to Wikipedia and A = 0.6, B = 2.6 to Amazon, and take the means of
    these, A = 0.55, B = 1.5, for other data.

    Source: Jain, Prabhu and Varma, Extreme multi-label loss functions for recommendation, tagging,
    ranking and other missing label applications, KDD 2016.
    """
    factor = (math.log(n_rows) - 1) * (b + 1) ** a
    return 1 + factor * (counts.double() + b) ** -a


def scores(found: Tensor, target: Tensor, weight: Tensor, n: int) -> Tensor:
    r"""What the first n classes of each row are worth, [N, 5]: precision, recall, nDCG, and both
    parts of propensity-scored precision, which is the sum of the first over that of the second.

    With r_i = 1 if the i-th class is a label of the row, which has L, and the weight 1 / p:

    .. math::
        P = \frac{1}{n} \sum_{i \le n} r_i, \qquad
        R = \frac{1}{L} \sum_{i \le n} r_i, \qquad
        nDCG = \frac{\sum_{i \le n} r_i / \log(i + 1)}{\sum_{i \le \min(n, L)} 1 / \log(i + 1)},
        \qquad PSP = \frac{\sum \sum_{i \le n} r_i / p_i}{\max \sum \sum_{i \le n} r_i / p_i}

    The outer sums are over the rows, and the largest is that of the labels with the n largest
    weights of each row. Rows without a label are 0.

    Source: Bhatia et al., The extreme classification repository: multi-label datasets and code,
    2016; for PSP Jain et al., see :func:`inverse_propensity`.
    """
    first, n_labels = found[:, :n], (target >= 0).sum(1)
    right = (first[:, :, None] == target[:, None, :]).any(2).double()
    discount = 1 / torch.arange(2, n + 2, dtype=torch.float64).log()
    ideal = discount.cumsum(0)[n_labels.clamp(1, n) - 1]
    of_labels = weight[target.clamp(min=0)].masked_fill(target < 0, 0.0)
    best = of_labels.topk(min(n, target.shape[1]), 1).values.sum(1)
    columns = (
        right.sum(1) / n,
        right.sum(1) / n_labels.clamp(min=1),
        right @ discount / ideal,
        (right * weight[first]).sum(1),
        best,
    )
    return torch.stack(columns, 1)


SCORES = ("precision@1", "precision@5", "recall@5", "nDCG@5", "PSP@5")


@torch.no_grad()
def evaluate(
    network: nn.Module, head: nn.Module, data: tuple[Any, Any], weight: Tensor
) -> list[float]:
    """The numbers that SCORES names; weight [V] is 1 / p."""
    sums = torch.zeros(2, 5, dtype=torch.float64)
    n_rows = data[0].shape[0]
    for begin in range(0, n_rows, 256):
        features, target = batch(data, slice(begin, begin + 256))
        hidden = network(features)
        found = head(hidden).topk(5) if isinstance(head, nn.Linear) else head.topk(hidden, 5)
        for row, n in enumerate((1, 5)):
            sums[row] += scores(found[1], target, weight, n).sum(0)
    means = sums / n_rows
    gained, best = means[1, 3:].tolist()
    return [means[0, 0].item(), *means[1, :3].tolist(), gained / best]


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
    scores: list[float]
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
    data: Sequence[str] | None = None,
    propensity: Sequence[float] = (0.55, 1.5),
) -> Result:
    """Trains one head for so many seconds, and at most so many steps."""
    torch.set_num_threads(threads)
    if data is None:
        train, test = make_data(classes, labels, (TRAIN_ROWS, TEST_ROWS))
        first: nn.Module = nn.Linear(FEATURES, 256)
    else:
        train, test = map(read_data, data)
        classes = train[1].shape[1]
        first = SparseLinear(train[0].shape[1], 256)
    n_rows, counts = train[0].shape[0], count_labels(train[1], classes)
    before = peak_mib()
    torch.manual_seed(0)
    network = nn.Sequential(first, nn.ReLU(), nn.Linear(256, HIDDEN))
    head = HEADS[name](counts, *train)
    lr = RATES.get(name, 0.004) if lr is None else lr
    optimizer = hstree.optim.AdamW([*network.parameters(), *head.parameters()], lr)
    clock = time.process_time if threads == 1 else time.perf_counter
    times: list[float] = []
    while sum(times) < seconds and len(times) < steps:
        rows = torch.randint(n_rows, (batch_size,)).numpy()
        begin = clock()
        features, target = batch(train, rows)
        loss(head, network(features), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock() - begin)
    peak = peak_mib()
    size = sum(parameter.numel() for parameter in head.parameters())
    found = evaluate(network, head, test, inverse_propensity(counts, n_rows, *propensity))
    return Result(size, 1000 * median(times), len(times), found, before, peak)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data", nargs=2, metavar=("TRAIN", "TEST"), help="files that begin with N F V"
    )
    parser.add_argument(
        "--propensity",
        nargs=2,
        type=float,
        default=(0.55, 1.5),
        metavar=("A", "B"),
        help="of PSP; 0.6 2.6 for Amazon, 0.5 0.4 for Wikipedia",
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
    columns = ("parameters", "ms a step", "steps", *SCORES, "peak MiB")
    print(f"| head | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}", flush=True)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in heads:
            found = pool.apply(measure, (name,), options)
            print(
                f"| {name} | {found.parameters:,} | {found.milliseconds:.1f} | {found.steps:,} | "
                f"{' | '.join(f'{score:.3f}' for score in found.scores)} "
                f"| {found.peak_mib:,.0f} |",
                flush=True,
            )
    print(f"\nOf the peak, torch and the data take {found.before_mib:,.0f} MiB.")


if __name__ == "__main__":
    main()
