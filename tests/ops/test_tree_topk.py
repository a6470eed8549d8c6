"""torch.ops.hstree.tree_topk."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hstree.heads.trees.layout import Layout
from hstree.heads.trees.tree_layout import TreeLayout
from hstree.ops import tree_topk
from hstree.reference import tree_topk_reference
from hstree.trees import Tree, build_ensemble
from ops.cases import DTYPES, threads

TESTS = Path(__file__).resolve().parents[1]
CAPABILITIES = ("portable", "avx2")


@dataclass(frozen=True)
class Mixture:
    """Arguments of the op but for k, in its order, and the trees."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    wide_weight: Tensor | None
    wide_bias: Tensor | None
    leaf_weight: Tensor | None
    leaf_bias: Tensor | None
    root_log_prob: Tensor | None
    log_gate: Tensor
    feature_index: Tensor | None
    node: Tensor
    edge: Tensor
    leaf_edge: Tensor
    trees: tuple[Tree, ...]

    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:-1])

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        return tree_topk(*self.arguments(), k)

    def to(self, dtype: torch.dtype) -> Mixture:
        """Sums of 16-bit elements are in float32."""
        sums = torch.promote_types(dtype, torch.float32)
        fields = {
            name: value.to(sums if name in ("root_log_prob", "log_gate") else dtype)
            for name in list(self.__dataclass_fields__)[:-1]
            if (value := getattr(self, name)) is not None and value.is_floating_point()
        }
        return replace(self, **fields)


def draw(
    trees: list[Tree],
    rows: int = 6,
    features: int = 19,
    subset: int | None = None,
    bias: bool = True,
    scale: float = 0.5,
    seed: int = 0,
    leaves: bool = False,
) -> Mixture:
    """In float64, of values that every dtype holds."""
    random = np.random.default_rng(seed)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.from_numpy(random.standard_normal(shape) * scale)
        return drawn.to(torch.bfloat16).to(torch.float16).double()

    layout = Layout(trees, trees[0].n_classes, leaf_groups=leaves)
    n_binary, n_wide, n_leaves, width = layout.n_rows
    index, size = None, features
    if subset is not None:
        size = subset
        chosen = [np.sort(random.permutation(features)[:subset]) for _ in trees]
        index = torch.from_numpy(np.stack(chosen)).int()
    return Mixture(
        values(rows, features),
        values(len(trees), n_binary, size, scale=scale) if n_binary else None,
        values(len(trees), n_binary) if n_binary and bias else None,
        values(len(trees), n_wide, size, scale=scale) if n_wide else None,
        values(len(trees), n_wide) if n_wide and bias else None,
        values(n_leaves, features, scale=scale) if n_leaves else None,
        values(len(trees), n_leaves) if n_leaves and bias else None,
        values(len(trees), rows, width).log_softmax(2) if width else None,
        values(rows, len(trees)).log_softmax(1),
        index,
        layout.node,
        layout.edge,
        layout.leaf_edge,
        tuple(trees),
    )


def walked(mixture: Mixture, row: int) -> list[float]:
    """Log-probability of each class, from the trees as nested tuples, number by number."""
    V = mixture.trees[0].n_classes
    terms = []
    for t, tree in enumerate(mixture.trees):
        x = hidden = mixture.hidden[row]
        if mixture.feature_index is not None:
            x = x[mixture.feature_index[t].long()]
        used = {"weight": 0, "wide_weight": 0}
        log_prob = [0.0] * V

        def score(name: str, t: int = t, x: Tensor = x, used: dict[str, int] = used) -> float:
            weight = getattr(mixture, name)[t, used[name]]
            bias = getattr(mixture, name.replace("weight", "bias"))
            z = sum(float(a) * float(b) for a, b in zip(x, weight, strict=True))
            z += 0.0 if bias is None else float(bias[t, used[name]])
            used[name] += 1
            return z

        def walk(
            below: Any,
            value: float,
            root: bool,
            t: int = t,
            hidden: Tensor = hidden,
            log_prob: list[float] = log_prob,
        ) -> None:
            if isinstance(below, int):
                log_prob[below] = value
                return
            is_wide_root = root and len(below) > 2
            if (
                mixture.leaf_weight is not None
                and not is_wide_root
                and set(map(type, below)) == {int}
            ):
                classes = list(below)
                z = mixture.leaf_weight[classes] @ hidden
                z += 0 if mixture.leaf_bias is None else mixture.leaf_bias[t, classes]
                steps = z.log_softmax(0).tolist()
            elif len(below) == 2:
                z = score("weight")
                steps = [-math.log1p(math.exp(-z)), -math.log1p(math.exp(z))]
            elif root:
                steps = mixture.root_log_prob[t, row].tolist()  # type: ignore[index]
            else:
                z_of = [score("wide_weight") for _ in below]
                total = math.log(sum(math.exp(z) for z in z_of))
                steps = [z - total for z in z_of]
            for child, step in zip(below, steps, strict=True):
                walk(child, value + step, False)

        walk(tree.to_nested(), 0.0, True)
        terms.append([float(mixture.log_gate[row, t]) + value for value in log_prob])
    return [math.log(sum(math.exp(term) for term in of)) for of in zip(*terms, strict=True)]


def huffman(
    classes: int, trees: int = 1, root: int = 1, leaf: int = 1, order: float = 1.0
) -> list[Tree]:
    frequencies = np.arange(1, classes + 1) ** -order
    return build_ensemble("huffman", classes, trees, frequencies, None, 0, root, leaf)


def random_trees(classes: int, n_trees: int) -> list[Tree]:
    """Of different numbers of nodes, each of 2 to 5 children, the root of 4."""
    random = np.random.default_rng(classes)

    def split(leaves: list[int], width: int) -> Any:
        if len(leaves) == 1:
            return leaves[0]
        width = min(len(leaves), width)
        cuts = np.sort(random.choice(np.arange(1, len(leaves)), width - 1, replace=False))
        return tuple(
            split(leaves[a:b], int(random.integers(2, 6)))
            for a, b in zip([0, *cuts], [*cuts, len(leaves)], strict=True)
        )

    return [
        Tree.from_nested(split(random.permutation(classes).tolist(), 4)) for _ in range(n_trees)
    ]


MIXTURES = {
    "one binary tree": lambda: draw(huffman(23)),
    "binary trees over subsets": lambda: draw(huffman(37, 3), features=40, subset=17),
    "wide root": lambda: draw(huffman(50, 2, root=8), subset=7),
    "wide root, groups of leaves": lambda: draw(huffman(60, 3, root=6, leaf=5), rows=3),
    "shared leaves": lambda: draw(huffman(60, 3, root=6, leaf=5), subset=9, leaves=True),
    "shared leaves of random wide trees": lambda: draw(random_trees(41, 4), leaves=True),
    "two classes, shared": lambda: draw(huffman(2, 2), leaves=True, bias=False),
    "random wide trees": lambda: draw(random_trees(41, 4), bias=False),
    "one node": lambda: draw(huffman(30, 2, root=30)),
    "two classes": lambda: draw(huffman(2, 2)),
    "one class": lambda: draw(huffman(1, 2)),
    "deepest tree": lambda: draw(huffman(61, 2, order=30.0), scale=0.1),
    "flat": lambda: draw(huffman(64, 2), scale=0.0, bias=False),
    "peaked": lambda: draw(huffman(64, 3), scale=2.0),
    "no features": lambda: draw(huffman(16, 2), features=0),
    "no rows": lambda: draw(huffman(16, 2), rows=0),
}
every_mixture = pytest.mark.parametrize("name", MIXTURES)


@every_mixture
def test_equals_walk(name: str) -> None:
    """In float64, with every k."""
    mixture = MIXTURES[name]()
    V = mixture.trees[0].n_classes
    true = [walked(mixture, row) for row in range(len(mixture.hidden))]
    for k in sorted({1, 2, 7, V - 1, V} & set(range(1, V + 1))):
        log_prob, classes = mixture.topk(k)
        assert log_prob.shape == classes.shape == (len(true), k)
        assert classes.dtype == torch.int64
        for row, of in enumerate(true):
            best = sorted(of, reverse=True)[:k]
            np.testing.assert_allclose(log_prob[row], best, rtol=1e-12, atol=1e-12)
            found = classes[row].tolist()
            assert len(set(found)) == k
            np.testing.assert_allclose([of[y] for y in found], best, rtol=1e-12, atol=1e-12)


@every_mixture
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_equals_reference(name: str, dtype: torch.dtype) -> None:
    mixture = MIXTURES[name]().to(dtype)
    true = MIXTURES[name]()
    V = true.trees[0].n_classes
    everything, order = tree_topk_reference(*true.arguments(), V)
    every = torch.empty_like(everything).scatter(1, order, everything)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    k = min(5, V)
    log_prob, classes = mixture.topk(k)
    assert log_prob.dtype == torch.promote_types(dtype, torch.float32)
    close = {"rtol": 5 * tolerance, "atol": 5 * tolerance}
    torch.testing.assert_close(log_prob.double(), everything[:, :k], **close)
    torch.testing.assert_close(log_prob.double(), every.gather(1, classes), **close)


def test_large_scores() -> None:
    """Of order 1000: probabilities that no float holds are still in order."""
    mixture = draw(huffman(40, 2), scale=300.0)
    wanted = tree_topk_reference(*mixture.arguments(), 40)
    assert wanted[0].min() < -2000
    for got in (mixture.topk(40), mixture.to(torch.float32).topk(40)):
        torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-4, atol=1e-3)


def test_ties_come_in_order_of_class() -> None:
    """A balanced tree without weights: all classes are equally probable."""
    trees = build_ensemble("random", 16, 2, seed=1)
    log_prob, classes = draw(trees, scale=0.0, bias=False, rows=2).topk(16)
    torch.testing.assert_close(log_prob, torch.full((2, 16), -math.log(16), dtype=torch.float64))
    assert classes.tolist() == [list(range(16))] * 2


def test_opens_what_may_be_among_the_best_alone() -> None:
    """Nodes less probable than the k-th class may hold NaN; those above its path may not."""
    mixture = draw(huffman(200), rows=1, scale=0.7)
    k = 5
    log_prob, classes = mixture.topk(k)
    values, order = tree_topk_reference(*mixture.arguments(), 200)
    every = torch.empty_like(values).scatter(1, order, values)[0].exp()
    layout = TreeLayout(mixture.trees[0])
    edges = mixture.trees[0].edges()
    inner = np.flatnonzero(edges.child_node >= 0)
    order_of_leaves = torch.from_numpy(mixture.trees[0].order.astype(np.int64))
    mass = np.array([float(every[order_of_leaves[edges.begin[e] : edges.end[e]]].sum())
                     for e in inner])  # fmt: skip
    tables = layout.nodes()
    rows = tables["node"][edges.child_node[inner], 1]
    worst = float(log_prob[0, -1].exp())
    unlikely = rows[mass < worst * (1 - 1e-9)]
    assert len(unlikely) > 100
    assert mixture.weight is not None
    mixture.weight[0, torch.from_numpy(unlikely).long()] = torch.nan
    got = mixture.topk(k)
    assert torch.equal(got[0], log_prob)
    assert torch.equal(got[1], classes)
    mixture.weight[0, int(tables["node"][0, 1])] = torch.nan
    assert mixture.topk(k)[0].isnan().all()


def test_nan_and_infinity() -> None:
    """NaN counts as the largest value, as in torch.topk; a class without probability comes last."""
    mixture = draw(huffman(12, 2), rows=3)
    mixture.hidden[1] = torch.nan
    log_prob, classes = mixture.topk(12)
    clean = draw(huffman(12, 2), rows=3).topk(12)
    assert log_prob[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(log_prob[row], clean[0][row])
        assert torch.equal(classes[row], clean[1][row])
    assert classes[1].sort().values.tolist() == list(range(12))
    mixture = draw(huffman(12, root=4), rows=1)
    assert mixture.root_log_prob is not None
    mixture.root_log_prob[0, 0, 1] = -torch.inf
    log_prob = mixture.topk(12)[0]
    assert log_prob.isinf().any()
    assert torch.equal(log_prob, log_prob.sort(dim=1, descending=True).values)


def results(dtype: torch.dtype) -> list[Tensor]:
    return [part for make in MIXTURES.values() for part in make().to(dtype).topk(1)] + list(
        draw(huffman(300, 4), rows=40, subset=9).to(dtype).topk(20)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(results(dtype))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


OTHER_PROCESS = """
import sys, torch
from ops.cases import DTYPES
from ops.test_tree_topk import results
torch.save([x for d in DTYPES for x in results(d)[::2]], sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_instruction_sets_agree(capability: str, tmp_path: Path) -> None:
    path = tmp_path / "results.pt"
    subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(path)],
        cwd=TESTS,
        env=os.environ | {"HSTREE_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    here = [x for dtype in DTYPES for x in results(dtype)[::2]]
    for got, expected in zip(torch.load(path), here, strict=True):
        torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


@every_mixture
def test_opcheck(name: str) -> None:
    mixture = MIXTURES[name]()
    torch.library.opcheck(
        torch.ops.hstree.tree_topk,
        (*mixture.arguments(), 1),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_is_not_differentiable() -> None:
    mixture = draw(huffman(9))
    hidden = mixture.hidden.requires_grad_()
    log_prob, _ = replace(mixture, hidden=hidden).topk(2)
    with pytest.raises(
        RuntimeError, match=r"hstree::tree_topk: not differentiable; .*TreeEnsemble\.topk"
    ):
        log_prob.sum().backward()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({}, "k: expected 1 to 37 .the number of classes., got 38"),
    "hidden": ({"hidden": torch.zeros(3)}, r"hidden: expected shape \[N, D\], got \[3\]"),
    "integers": ({"hidden": torch.zeros(6, 19).long()}, "hidden: expected dtype float32"),
    "weight": ({"weight": torch.zeros(3, 5, 17)}, "weight: expected dtype Double, got Float"),
    "trees": (
        {"weight": torch.zeros(2, 5, 17).double()},
        r"weight: expected size 3 \(trees of log_gate\) in dimension 0",
    ),
    "features": (
        {"weight": torch.zeros(3, 36, 16).double()},
        r"weight: expected size 17 \(features of feature_index\) in dimension 2",
    ),
    "bias": (
        {"bias": torch.zeros(3, 35).double()},
        r"bias: expected size 36 \(rows of its weight\) in dimension 1",
    ),
    "leaf weight": (
        {"leaf_weight": torch.zeros(37, 17).double()},
        r"leaf_weight: expected size 19 \(features of hidden\) in dimension 1",
    ),
    "leaf bias": (
        {"leaf_bias": torch.zeros(3, 37).double()},
        "leaf_bias: expected None, as there is no leaf_weight",
    ),
    "no weight": ({"weight": None}, "bias: expected None, as there is no weight"),
    "gate": (
        {"log_gate": torch.zeros(5, 3).double()},
        r"log_gate: expected size 6 \(rows of hidden\) in dimension 0",
    ),
    "root": (
        {"root_log_prob": torch.zeros(3, 5, 4).double()},
        r"root_log_prob: expected size 6 \(rows of hidden\) in dimension 1",
    ),
    "subset": (
        {"feature_index": torch.zeros(3, 17).int()},
        r"feature_index\[0, 1\]: expected a value in \[1, 19\)",
    ),
    "node": ({"node": torch.zeros(3, 36, 4).int()}, "node: expected size 5"),
    "edge": ({"edge": torch.zeros(3, 72, 2)}, "edge: expected dtype Int, got Float"),
    "no nodes": ({"node": torch.zeros(3, 0, 5).int()}, "node: expected at least one node"),
    "leaf_edge": (
        {"leaf_edge": torch.zeros(2, 37).int()},
        r"leaf_edge: expected size 3 \(trees of log_gate\) in dimension 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    mixture = replace(draw(huffman(37, 3), subset=17), **changes)
    with pytest.raises(RuntimeError, match=f"hstree::tree_topk: {message}"):
        mixture.topk(38 if name == "k" else 5)


def test_corrupt_tables_never_crash() -> None:
    """Each is refused, or what it gives is k classes."""
    shown = subprocess.run(
        [sys.executable, "-c", "from ops.test_tree_topk import corrupt; corrupt()"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    refused, accepted = map(int, shown.stdout.split())
    assert refused > 100
    assert accepted > 100


def corrupt() -> None:
    random = np.random.default_rng(0)
    refused = accepted = 0
    names = [name for name in MIXTURES if name not in ("no rows", "no features")]
    for seed in range(600):
        mixture = MIXTURES[names[seed % len(names)]]()
        table = ("node", "edge", "leaf_edge", "feature_index")[random.integers(4)]
        if getattr(mixture, table) is None:
            continue
        value = getattr(mixture, table).clone()
        flat = value.view(-1).numpy()
        if len(flat):
            places = random.integers(0, len(flat), 3)
            wild = random.integers(-(2**31), 2**31, 3)
            flat[places] = np.where(random.random(3) < 0.3, wild, random.integers(-70, 70, 3))
        V = mixture.trees[0].n_classes
        try:
            classes = replace(mixture, **{table: value}).topk(min(3, V))[1]
            assert int(classes.min()) >= 0
            assert int(classes.max()) < V
            accepted += 1
        except RuntimeError as error:
            if not str(error).startswith("hstree::tree_topk: "):
                raise
            refused += 1
    print(refused, accepted)
