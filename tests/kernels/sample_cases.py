"""Mixtures of trees for the kernels of sample and candidate_log_prob, and what they are compared
with: a walk in float64 with the same random numbers, and the log-probabilities of all classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from ops.test_tree_topk import MIXTURES, Mixture, draw, huffman
from torch import Tensor

from hstree.reference import tree_topk_reference
from hstree.trees import Tree
from kernels.emulation import call
from kernels.random_numbers import uniform

SEED = 2**62 + 12345
TABLES = ("node", "edge", "leaf_edge")


def wide_groups(leaves: bool) -> Mixture:
    """Groups of more leaves than a block holds scores, and of fewer."""
    groups = (tuple(range(2100)), tuple(range(2100, 2105)), 2105)
    first, second = Tree.from_nested(groups), Tree.from_nested((2105, *groups[:2]))
    return draw([first, second], rows=2, features=6, scale=1.0, leaves=leaves)


CASES: dict[str, Callable[[], Mixture]] = MIXTURES | {
    "features of several accesses": lambda: draw(huffman(30, 2, root=5, leaf=4), features=301),
    "aligned rows": lambda: draw(huffman(30, 2, root=5, leaf=4), features=528),
    "aligned rows of subsets": lambda: draw(
        huffman(60, 3, root=6, leaf=5), features=48, subset=16, leaves=True
    ),
    "no features, shared leaves": lambda: draw(huffman(16, 2, leaf=4), features=0, leaves=True),
    "wide groups": lambda: wide_groups(leaves=False),
    "wide groups, shared": lambda: wide_groups(leaves=True),
}


def sample(mixture: Mixture, n: int, temperature: float = 1.0, seed: int = SEED) -> list[Tensor]:
    return list(call("sample", *mixture.arguments(), torch.tensor([seed]), n, temperature))


def candidates(mixture: Mixture, index: Tensor, temperature: float = 1.0) -> Tensor:
    log_prob: Tensor = call("candidate_log_prob", *mixture.arguments(), index, temperature)
    return log_prob


def tempered(mixture: Mixture, temperature: float) -> Mixture:
    """All vectors and biases divided by the temperature."""
    names = ("weight", "bias", "wide_weight", "wide_bias", "leaf_weight", "leaf_bias")
    present = {name: value for name in names if (value := getattr(mixture, name)) is not None}
    return replace(mixture, **{name: value / temperature for name, value in present.items()})


def all_log_probs(mixture: Mixture) -> Tensor:
    """[N, V]"""
    classes = mixture.leaf_edge.shape[1]
    values, order = tree_topk_reference(*mixture.arguments(), classes)
    return torch.empty_like(values).scatter(1, order, values)


def log_shares(mixture: Mixture, t: int, row: int, node: int) -> np.ndarray:
    """Log-probabilities of the children of a node but for a constant."""
    hidden = mixture.hidden[row]
    x = hidden if mixture.feature_index is None else hidden[mixture.feature_index[t].long()]
    block, first, first_edge, width, _ = mixture.node[t, node].tolist()
    if block == 2:
        return mixture.root_log_prob[t, row].numpy()  # type: ignore[index]
    n_wide = 0 if mixture.wide_weight is None else mixture.wide_weight.shape[1]
    if block == 1 and mixture.leaf_weight is not None and first >= n_wide:
        classes = ~mixture.edge[t, first_edge : first_edge + width, 1].long()
        bias = None if mixture.leaf_bias is None else mixture.leaf_bias[t, classes]
        z = mixture.leaf_weight[classes] @ hidden
    else:
        rows = slice(first, first + (1 if block == 0 else width))
        weight, bias = (
            (mixture.weight, mixture.bias) if block == 0
            else (mixture.wide_weight, mixture.wide_bias)
        )  # fmt: skip
        bias = None if bias is None else bias[t, rows]
        z = weight[t, rows] @ x
    z = z if bias is None else z + bias
    return torch.cat([z, torch.zeros_like(z)]).numpy() if block == 0 else z.numpy()


def choose(log_prob: np.ndarray, u: float) -> int:
    share = np.exp(log_prob - log_prob.max())
    return int(np.searchsorted(np.cumsum(share), u * share.sum(), side="right"))


def walk(mixture: Mixture, n: int, seed: int = SEED) -> Tensor:
    """Draws [N, n], number by number."""
    index = np.zeros((len(mixture.hidden), n), np.int64)
    for row, i in np.ndindex(*index.shape):
        place = row * n + i
        t = choose(mixture.log_gate[row].numpy(), uniform(seed, place, 0))
        below, step = 0 if mixture.node.shape[1] else ~0, 0
        while below >= 0:
            step += 1
            child = choose(log_shares(mixture, t, row, below), uniform(seed, place, step))
            below = int(mixture.edge[t, int(mixture.node[t, below, 2]) + child, 1])
        index[row, i] = ~below
    return torch.from_numpy(index)


def check_sample(name: str, dtype: torch.dtype, temperature: float, n: int = 2) -> None:
    """The same draws as the walk, but for the roundings of the dtype, and their log-probabilities
    under all trees."""
    exact = CASES[name]()
    index, log_prob = sample(exact.to(dtype), n, temperature)
    mixture = tempered(exact, temperature)
    expected = walk(mixture, n)
    assert index.shape == log_prob.shape == expected.shape
    assert index.dtype == torch.int64
    assert log_prob.dtype == torch.promote_types(dtype, torch.float32)
    other = int((index != expected).sum())
    assert other <= (0 if dtype == torch.float64 else 0.1 * index.numel())
    every = all_log_probs(mixture)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(log_prob.double(), every.gather(1, index), **close)
    index[:, 0] = 0
    got = candidates(exact.to(dtype), index, temperature)
    torch.testing.assert_close(got.double(), every.gather(1, index), **close)


def check_corrupt_tables(seed: int) -> None:
    """Random numbers in the tables give classes in range, and no stray access."""
    random = np.random.default_rng(seed)
    name = list(CASES)[seed % len(MIXTURES)]
    mixture = CASES[name]().to(torch.float32)
    classes = mixture.leaf_edge.shape[1]
    tables = {name: getattr(mixture, name).clone() for name in TABLES}
    for table in tables.values():
        flat = table.view(-1).numpy()
        count = min(len(flat), int(random.integers(1, 8)))
        wild = random.integers(-(2**31), 2**31 - 1, count)
        near = random.integers(-30, 30, count)
        values = np.where(random.random(count) < 0.3, wild, near)
        flat[random.integers(0, max(len(flat), 1), count)] = values
    index, _ = sample(replace(mixture, **tables), 2)
    assert ((index >= 0) & (index < classes)).all()
    wild_index = torch.tensor([-1, -2, classes, 2**62])
    got = candidates(replace(mixture, **tables), wild_index.expand(len(mixture.hidden), 4))
    assert (got[:, 0] == 0).all()
    assert got[:, 1:].isnan().all()
