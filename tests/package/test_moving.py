"""docs/moving.md: trained trees of other libraries become heads with the same log-probabilities.

The libraries are not needed: their arrays are made here, and their formulas written down.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import deque
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import hstree
from hstree.trees import Tree

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "moving.md").read_text(encoding="utf-8")
V, D, N = 41, 6, 5
RANDOM = np.random.default_rng(3)
HIDDEN = RANDOM.standard_normal((N, D)).astype(np.float32)
WEIGHT = RANDOM.standard_normal((V, D)).astype(np.float32)
BIAS = RANDOM.standard_normal(V).astype(np.float32)
COUNTS = np.sort(RANDOM.zipf(1.4, V).clip(max=500))[::-1]  # many are equal


def block(begin: str) -> str:
    """The block of the page that begins so."""
    (code,) = re.findall(rf"^```python\n({re.escape(begin)}.*?)^```$", PAGE, re.M | re.S)
    return str(code)


def run(code: str, **names: Any) -> dict[str, Any]:
    """What the block defines, after that of head_of_paths."""
    names |= {"hstree": hstree, "torch": torch}
    exec(block("def head_of_paths"), names)
    exec(code, names)
    return names


def log_sigmoid(z: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return -np.logaddexp(0.0, -z.astype(np.float64))


def check(head: hstree.TreeEnsemble, expected: npt.NDArray[np.float64]) -> None:
    got = head.log_prob(torch.from_numpy(HIDDEN))
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.exp(expected).sum(1), 1.0)  # the formula is right, too


def paths_of_gensim() -> tuple[list[npt.NDArray[np.uint8]], list[npt.NDArray[np.uint32]]]:
    """``code`` and ``point`` of each word: a heap of nodes, of which the two lightest are joined;
    the lightest has bit 0."""
    heap: list[Any] = [(int(mass), c, None, None) for c, mass in enumerate(COUNTS)]
    heapq.heapify(heap)
    for index in range(V, 2 * V - 1):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (first[0] + second[0], index, first, second))
    code: list[Any] = [None] * V
    point: list[Any] = [None] * V
    stack: list[Any] = [(heap[0], [], [])]
    while stack:
        (_, index, first, second), bits, nodes = stack.pop()
        if first is None:
            code[index] = np.array(bits, np.uint8)
            point[index] = np.array(nodes, np.uint32)
        else:
            nodes = [*nodes, index - V]
            stack += [(first, [*bits, 0], nodes), (second, [*bits, 1], nodes)]
    return code, point


def test_gensim() -> None:
    code, point = paths_of_gensim()
    attributes = {"code": code, "point": point, "count": COUNTS}
    words = [f"word {c}" for c in range(V)]
    vectors = SimpleNamespace(
        index_to_key=words, get_vecattr=lambda word, name: attributes[name][words.index(word)]
    )
    model = SimpleNamespace(wv=vectors, syn1=WEIGHT)
    assert {nodes[0] for nodes in point} == {V - 2}
    head = run(block("words = model.wv"), model=model)["head"]
    z = HIDDEN @ WEIGHT.T
    terms = [log_sigmoid(z[:, p] * (1.0 - 2.0 * b)) for p, b in zip(point, code, strict=True)]
    check(head, np.stack([term.sum(1) for term in terms], 1))


def test_fasttext() -> None:
    """Two queues, of labels from the rarest on and of joined nodes: the lighter front is taken, of
    two equal ones the joined node. The second of a pair has bit 1, which is sigmoid(+z)."""
    model = SimpleNamespace(
        get_labels=lambda include_freq: ([f"__label__{c}" for c in range(V)], COUNTS),
        get_output_matrix=lambda: WEIGHT,
    )
    head = run(block("def paths_of_fasttext"), model=model)["head"]
    z = HIDDEN @ WEIGHT.T
    leaves = deque((int(COUNTS[c]), {c: np.zeros(N)}) for c in reversed(range(V)))
    joined: deque[Any] = deque()
    for row in range(V - 1):
        pair = []
        for _ in range(2):
            lighter = leaves and (not joined or leaves[0][0] < joined[0][0])
            pair.append((leaves if lighter else joined).popleft())
        below = {
            c: so_far + log_sigmoid(sign * z[:, row])
            for sign, (_, classes) in zip((-1, 1), pair, strict=True)
            for c, so_far in classes.items()
        }
        joined.append((pair[0][0] + pair[1][0], below))
    ((_, log_prob),) = joined
    check(head, np.stack([log_prob[c] for c in range(V)], 1))


def row_of(library: str) -> list[str]:
    """The pieces of code in the row of a library."""
    (row,) = re.findall(rf"^\| {library}.*$", PAGE, re.M)
    return [str(code) for code in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("n_classes", [2, 7, 8, V])
def test_paddle(n_classes: int) -> None:
    """softplus(z) - bit z for each step, and for the steps that a path lacks ln 2."""
    ways = [code for code in row_of("PaddlePaddle") if code.startswith(("point[c]", "left[c]"))]
    assert len(ways) == 2
    point: list[Any] = [None] * n_classes
    left: list[Any] = [None] * n_classes
    z = (HIDDEN @ WEIGHT.T + BIAS).astype(np.float64)
    longest = (n_classes - 1).bit_length()
    expected = np.empty((N, n_classes))
    for c in range(n_classes):
        x = n_classes + c
        for way in ways:
            exec(way, {"x": x, "n": x.bit_length() - 1, "c": c, "point": point, "left": left})
        heap_node, loss = x, np.zeros(N)
        while heap_node > 1:
            bit, heap_node = heap_node & 1, heap_node // 2
            loss += np.logaddexp(0, z[:, heap_node - 1]) - bit * z[:, heap_node - 1]
        padded = loss + math.log(2) * (longest - len(point[c]))
        expected[:, c] = math.log(2) * (longest - len(point[c])) - padded
    names = run("", point=point, left=left)
    check(names["head_of_paths"](point, left, WEIGHT, BIAS), expected)


def random_tuples(numbers: list[int]) -> Any:
    if len(numbers) == 1:
        return numbers[0]
    cut = int(RANDOM.integers(1, len(numbers)))
    return random_tuples(numbers[:cut]), random_tuples(numbers[cut:])


def test_chainer() -> None:
    """Nodes are numbered when the tuples are read from the left, and a left step has the code 1."""
    assert row_of("Chainer")[-2:] == [
        "Tree.from_nested(link.tree)",
        "head.below.weight[0] = link.W",
    ]
    tuples = random_tuples(RANDOM.permutation(V).tolist())
    z, number, expected = HIDDEN @ WEIGHT.T, count(), np.empty((N, V))

    def read(item: Any, log_prob: npt.NDArray[np.float64]) -> None:
        if isinstance(item, int):
            expected[:, item] = log_prob
            return
        node = next(number)
        for code, child in zip((1.0, -1.0), item, strict=True):
            read(child, log_prob + log_sigmoid(code * z[:, node]))

    read(tuples, np.zeros(N))
    head = hstree.TreeEnsemble(D, V, [Tree.from_nested(tuples)])
    with torch.no_grad():
        head.below.weight[0] = torch.from_numpy(WEIGHT[:-1])  # type: ignore[index]
        head.below.bias.zero_()  # type: ignore[union-attr]
    check(head, expected)


def logits_of_nodes(tree: Any) -> tuple[npt.NDArray[np.float64], dict[tuple[int, ...], list[int]]]:
    """Log-probabilities, and the rows of each node, by the child ordinals on the way to it: a
    softmax over the logits of its children, whose rows are given out in preorder before those of
    the nodes below."""
    logits = (HIDDEN @ WEIGHT.T + BIAS).astype(np.float64)
    expected, begin = np.empty((N, 7)), count()
    rows: dict[tuple[int, ...], list[int]] = {}

    def read(item: Any, log_prob: npt.NDArray[np.float64], way: tuple[int, ...]) -> None:
        if isinstance(item, int):
            expected[:, item] = log_prob
            return
        own = rows[way] = [next(begin) for _ in item]
        share = logits[:, own] - np.logaddexp.reduce(logits[:, own], 1)[:, None]
        for k, child in enumerate(item):
            read(child, log_prob + share[:, k], (*way, k))

    read(tree, np.zeros(N), ())
    return expected, rows


@torch.no_grad()
def test_hierarchicalsoftmax_with_binary_nodes() -> None:
    tree = ((6, 0), (1, (2, 3)), 4, 5)
    expected, rows = logits_of_nodes(tree)
    head = hstree.TreeEnsemble(D, 7, [Tree.from_nested(tree)])
    weight, bias = torch.from_numpy(WEIGHT), torch.from_numpy(BIAS)
    root = rows.pop(())
    below = torch.tensor(list(rows.values()))
    assert head.roots is not None
    for own, values in ((head.roots.weight, weight), (head.roots.bias, bias)):
        own[0] = values[root]  # type: ignore[index]
    for own, values in ((head.below.weight, weight), (head.below.bias, bias)):
        own[0] = values[below[:, 0]] - values[below[:, 1]]  # type: ignore[index]
    check(head, expected)


@torch.no_grad()
def test_hierarchicalsoftmax_with_groups() -> None:
    """The child of a root that is a class has no row of its own in E."""
    tree = ((6, 0), (1, 2, 3), 4, 5)
    expected, rows = logits_of_nodes(tree)
    head = hstree.TreeEnsemble(D, 7, [Tree.from_nested(tree)], groups=True)
    weight, bias = torch.from_numpy(WEIGHT), torch.from_numpy(BIAS)
    assert head.roots is not None
    head.roots.weight[0], head.roots.bias[0] = weight[rows[()]], bias[rows[()]]  # type: ignore[index]
    head.below.weight.zero_()  # type: ignore[union-attr]
    for way, own in rows.items():
        if way:
            classes = list(tree[way[0]])  # type: ignore[call-overload]
            head.below.weight[classes], head.below.bias[0, classes] = weight[own], bias[own]  # type: ignore[index]
    check(head, expected)
