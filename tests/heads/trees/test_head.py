from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads.support import (
    FREQUENCIES,
    D,
    V,
    draw,
    draw_targets,
    probabilities,
    randomise,
    trees,
)
from hstree.heads import Head, TreeEnsemble
from hstree.heads.rows import split_rows
from hstree.heads.state import EXTRA_STATE, saved_tables
from hstree.heads.trees import nodes
from hstree.ops.mixture_log_prob import CHUNK_BYTES
from hstree.optim import AdamW
from hstree.trees import Tree, build_tree, huffman_tree, random_tree, tree_seed

SHAPES = [(1, 1), (6, 1), (1, 5), (9, 4), (V, 1)]
NESTED = {  # wide nodes at any level, and trees of different sizes
    "wide below binary": [((0, 1, 2), (3, (4, 5, 6, 7), 8))],
    "binary below wide": [((0, (1, 2)), 3, (4, 5, (6, 7, 8)))],
    "wide below wide": [((0, 1, 2), (3, 4, (5, 6, 7)), 8), ((8, 7, 6, 5), (4, 3), (2, (1, 0)))],
    "no binary node in one": [
        ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
        (0, 1, (2, ((3, 4), (5, ((6, 7), 8))))),
    ],
    "no wide node in one": [
        (((0, 1, 2), 3, 4, 5), (6, 7, 8)),
        ((0, 1), (2, ((3, 4), (5, ((6, 7), 8))))),
    ],
    "one node": [(4, 0, 8, 3, 1, 2, 5, 7, 6)],
}


def ensemble(
    recipe: str = "huffman",
    shape: tuple[int, int] = (1, 1),
    n_trees: int = 1,
    n_classes: int = V,
    **options: Any,
) -> TreeEnsemble:
    built = trees(recipe, n_trees, *shape, n_classes=n_classes)
    frequencies = np.resize(FREQUENCIES, n_classes)
    return TreeEnsemble(D, n_classes, built, **({"frequencies": frequencies} | options))


def check_probabilities(head: TreeEnsemble) -> None:
    """log_prob against the walk of the trees, sums, forward against log_prob."""
    hidden = draw(6, D)
    log_prob = head.log_prob(hidden)
    expected = probabilities(head, hidden)
    np.testing.assert_allclose(expected.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(log_prob.detach().exp(), expected, rtol=1e-4, atol=1e-7)
    assert (log_prob.exp().sum(1) - 1).abs().max() < 1e-5
    every = torch.arange(head.n_classes)
    output = head(hidden.repeat_interleave(len(every), 0), every.repeat(len(hidden))).output
    torch.testing.assert_close(output.view_as(log_prob), log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
def test_probabilities(recipe: str, shape: tuple[int, int], node_vectors: str) -> None:
    """Every gate, with and without feature subsets."""
    for gate, subset in itertools.product(("uniform", "constant", "context"), (None, 4)):
        head = ensemble(recipe, shape, 3, gate=gate, subset_size=subset, node_vectors=node_vectors)
        check_probabilities(randomise(head))


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED.keys())
def test_given_trees(nested: list[Any], node_vectors: str) -> None:
    built = [Tree.from_nested(n) for n in nested]
    head = randomise(TreeEnsemble(D, 9, built, node_vectors=node_vectors, gate="context"))
    check_probabilities(head)


@pytest.mark.parametrize("subset_size", [None, 4])
def test_log_prob_of_few_rows(subset_size: int | None) -> None:
    """Their scores are computed as another product."""
    head = randomise(ensemble("huffman", (6, 4), 3, subset_size=subset_size, gate="context"))
    hidden = draw(5, D)
    log_prob = head.log_prob(hidden)
    for rows in range(1, 5):
        torch.testing.assert_close(head.log_prob(hidden[:rows]), log_prob[:rows])


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("n_trees", [1, 2])
@pytest.mark.parametrize("n_classes", [1, 2, 3])
def test_few_classes(n_classes: int, n_trees: int, node_vectors: str) -> None:
    built = [random_tree(n_classes, seed) for seed in range(n_trees)]
    head = TreeEnsemble(
        D, n_classes, built, node_vectors=node_vectors, gate="context", reduction="sum"
    )
    check_probabilities(randomise(head))
    hidden, target = draw(7, D), draw_targets(7, n_classes=n_classes)
    hidden.requires_grad_()
    sample = head.sample(hidden)
    assert 0 <= sample.min() <= sample.max() < n_classes
    loss = head(hidden, target).loss
    loss.backward()
    assert hidden.grad.isfinite().all()
    (of_log_prob,) = torch.autograd.grad(head.log_prob(hidden).sum(), hidden)
    assert of_log_prob.isfinite().all()
    if n_classes == 1:
        assert loss.abs() < 1e-6
        assert hidden.grad.abs().max() < 1e-6
    assert head.predict(hidden).max() < n_classes


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("recipe", ["random", "huffman"])
def test_full_width_is_the_flat_softmax(recipe: str, node_vectors: str) -> None:
    """C = V: values and gradients of F.linear and log_softmax, rows in leaf order."""
    head = ensemble(recipe, (V, 1), node_vectors=node_vectors)
    order = torch.from_numpy(head.trees[0].order.astype(np.int64))
    weight = draw(V, D, seed=5)
    bias = torch.from_numpy(np.log(FREQUENCIES / FREQUENCIES.sum())).float()
    with torch.no_grad():
        if node_vectors == "free":
            head.nodes.root_weight[0] = weight[order]
        else:
            head.output_embedding.copy_(weight)
    flat_weight, flat_bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    hidden, target = draw(50, D), draw_targets(50)
    leaves = [hidden.clone().requires_grad_() for _ in range(2)]
    log_prob = F.linear(leaves[0], flat_weight, flat_bias).log_softmax(1)
    torch.testing.assert_close(head.log_prob(hidden), log_prob, rtol=1e-6, atol=2e-6)
    expected = F.nll_loss(log_prob, target)
    loss = head(leaves[1], target).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    loss.backward()
    if node_vectors != "free":
        got = head.output_embedding.grad
    else:
        got = torch.empty_like(weight).index_copy_(0, order, head.nodes.root_weight.grad[0])
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got, flat_weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        head.nodes.root_bias.grad[0], flat_bias.grad[order], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_untrained_is_the_unigram_distribution(recipe: str, shape: tuple[int, int]) -> None:
    """Zero vectors, any context; frequencies whose ratio is 10^9, and a class never seen."""
    counts = 10.0 ** np.linspace(0, 9, V)
    np.random.default_rng(0).shuffle(counts)
    counts[5] = 0
    head = ensemble(recipe, shape, 2, frequencies=counts, gate="context")
    mass = np.where(counts, counts, counts[counts > 0].min() / 2)
    mass /= mass.sum()
    hidden, target = 100 * draw(V, D), torch.arange(V)
    log_prob = head.log_prob(hidden).detach().double().numpy()
    np.testing.assert_allclose(np.exp(log_prob), np.tile(mass, (V, 1)), rtol=1e-5)
    output = head(hidden, target).output.detach().double().numpy()
    np.testing.assert_allclose(np.exp(output), mass, rtol=1e-5)


def test_untrained_large_vocabulary() -> None:
    """Long paths add up more roundings."""
    counts = 1e7 / np.arange(1, 20001) ** 1.3
    for tree in (huffman_tree(counts), random_tree(len(counts)), huffman_tree(counts, root=256)):
        head = TreeEnsemble(4, len(counts), [tree], frequencies=counts)
        with torch.no_grad():
            prob = head.log_prob(torch.zeros(1, 4))[0].double().exp().numpy()
        np.testing.assert_allclose(prob, counts / counts.sum(), rtol=1e-5)
        assert abs(prob.sum() - 1) < 1e-5


@pytest.mark.parametrize("options", [
    {"shape": (1, 1)},
    {"shape": (6, 5), "n_trees": 3, "gate": "context", "subset_size": 4},
    {"shape": (6, 5), "n_trees": 3, "gate": "uniform"},
    {"shape": (1, 5), "n_trees": 2, "gate": "constant"},
    {"shape": (6, 5), "n_trees": 2, "node_vectors": "leaves", "gate": "context", "subset_size": 4},
    {"shape": (9, 1), "n_trees": 3, "node_vectors": "leaves", "recipe": "cluster"},
], ids=["binary", "all parts", "all parts and features", "leaf groups", "leaves",
        "leaf groups of two"])  # fmt: skip
def test_gradients_through_forward_and_log_prob(options: dict[str, Any]) -> None:
    """float64: the ops' backward against autograd through all classes."""
    head = randomise(ensemble(**options, reduction="none")).double()
    hidden, target = draw(20, D, dtype=torch.float64), draw_targets(20)
    target[3] = -100
    weight = torch.linspace(-1, 2, 20, dtype=torch.float64)
    grads = []
    for through_forward in (True, False):
        leaf = hidden.clone().requires_grad_()
        head.zero_grad()
        if through_forward:
            loss = head(leaf, target).loss
        else:
            loss = F.nll_loss(head.log_prob(leaf), target, reduction="none")
        (loss * weight).sum().backward()
        grads.append([leaf.grad, *(p.grad for p in head.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("subset", [None, 4])
@pytest.mark.parametrize("n_trees", [1, 3])
def test_ignored_rows_have_exact_zeros(n_trees: int, subset: int | None) -> None:
    head = randomise(ensemble(shape=(6, 4), n_trees=n_trees, gate="context", subset_size=subset))
    hidden, target = draw(20, D).requires_grad_(), draw_targets(20)
    target[::3] = -100
    output, loss = head(hidden, target)
    loss.backward()
    assert not output[::3].any()
    assert not hidden.grad[::3].any()
    assert hidden.grad[1::3].abs().sum(1).min() > 0


class Calls(TorchDispatchMode):
    """Counts the calls of operators that do work: on a GPU each launches a kernel or more."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def test_calls_of_a_step() -> None:
    """Of four trees with shared leaves; docs/gpu.md states the numbers."""
    head = TreeEnsemble.from_counts(D, 10_000 / torch.arange(1, 2001), root=32)
    hidden, target = draw(100, D).requires_grad_(), torch.arange(100)
    with Calls() as forward:
        loss = head(hidden, target).loss
    with Calls() as backward:
        loss.backward()
    assert forward.number <= 38
    assert backward.number <= 22


@pytest.mark.parametrize("subset", [None, 4])
def test_root_under_autocast(subset: int | None) -> None:
    """Products in bfloat16; log-softmax, mixture and the weights' gradients in float32."""
    head = randomise(ensemble(shape=(V, 1), n_trees=2, subset_size=subset))
    hidden, target = draw(50, D), draw_targets(50)
    expected = head(hidden, target)
    with torch.autocast("cpu", torch.bfloat16):
        output, loss = head(hidden, target)
    assert output.dtype == loss.dtype == torch.float32
    assert not torch.equal(output, expected.output)
    torch.testing.assert_close(output, expected.output, rtol=0.02, atol=0.05)
    grads = []
    for value in (loss, expected.loss):
        head.zero_grad()
        value.backward()
        grads.append(head.nodes.root_weight.grad)
    assert grads[0].dtype == torch.float32
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sparse", [True, False])
def test_scores_of_classes_below_the_root(
    monkeypatch: pytest.MonkeyPatch, sparse: bool, dtype: torch.dtype
) -> None:
    """The products with E are added for few rows, and E to the vectors of the root for many."""
    head = TreeEnsemble(D, V, trees("cluster", 2, 8, 4), node_vectors="leaves", sparse=sparse)
    assert len(head.layout.root_row) > len(head.layout.root_class) > 0
    randomise(head).to(dtype)
    hidden, target, found = draw(9, D), draw_targets(9), []
    for few in (0, 9):
        monkeypatch.setattr(nodes, "FEW_ROWS", few)
        head.zero_grad()
        output, loss = head(hidden, target)
        loss.backward()
        every = head.log_prob(hidden)
        torch.testing.assert_close(every[torch.arange(9), target], output)
        gradients = [parameter.grad.to_dense() for parameter in head.parameters()]
        found.append([output, head.topk(hidden, 3)[0], *gradients])
    for few, many in zip(*found, strict=True):
        torch.testing.assert_close(few, many)


def sparse_and_dense() -> tuple[TreeEnsemble, TreeEnsemble]:
    heads = [
        randomise(ensemble("huffman", (6, 4), 2, sparse=sparse, gate="constant"))
        for sparse in (True, False)
    ]
    return heads[0], heads[1]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # in torch's Adagrad
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_steps_are_dense_steps(optimizer: Any) -> None:
    heads = sparse_and_dense()
    optimizers = [optimizer(head.parameters(), lr=0.3) for head in heads]
    for step in range(3):
        hidden, target = draw(10, D, seed=step), draw_targets(10)
        losses = []
        for head, opt in zip(heads, optimizers, strict=True):
            opt.zero_grad()
            loss = head(hidden, target).loss
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        assert heads[0].nodes.binary_weight.grad.is_sparse
        assert heads[0].nodes.wide_weight.grad.is_sparse
        assert not heads[1].nodes.binary_weight.grad.is_sparse
        torch.testing.assert_close(*losses)
    for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_adamw() -> None:
    head, _ = sparse_and_dense()
    optimizer = AdamW(head.parameters(), lr=0.05)
    hidden, target = draw(30, D), draw_targets(30)
    before = [p.detach().clone() for p in head.parameters()]
    losses = []
    for _ in range(20):
        loss = head(hidden, target).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))


def test_sparse_gradients_touch_only_visited_rows() -> None:
    head, _ = sparse_and_dense()
    target = torch.tensor([4])
    head(draw(1, D), target).loss.backward()
    wide = 0
    for t, tree in enumerate(head.trees):
        tables = tree.tables()
        path = tables.path[tables.path_offset[4] : tables.path_offset[5]] >> 1
        index = head.nodes.binary_weight.grad.coalesce().indices()
        assert sorted(index[1][index[0] == t].tolist()) == sorted(path.tolist())
        nodes = tables.wide_path[tables.wide_offset[4] : tables.wide_offset[5]]
        wide += int(nodes[:, 1].sum())
    assert head.nodes.wide_weight.grad._values().shape == (wide, D)


def test_sparse_gradients_of_a_tied_embedding() -> None:
    """Leaf groups, classes below the root and the model itself read its rows."""
    gradients = []
    for sparse in (False, True):
        embedding = torch.nn.Embedding.from_pretrained(draw(V, D), freeze=False, sparse=sparse)
        built = trees("cluster", 2, 8, 4)
        head = TreeEnsemble(D, V, built, node_vectors="leaves", embedding=embedding, sparse=sparse)
        assert len(head.layout.root_row)
        randomise(head)
        hidden = embedding(torch.tensor([0, 3, 0]))
        head(hidden, torch.tensor([4, 1, 4])).loss.backward()
        gradients.append(embedding.weight.grad)
    assert gradients[1].is_sparse
    assert len(gradients[1].coalesce().indices()[0]) < V
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0])


def test_weights_of_other_trees_are_refused() -> None:
    head, other = ensemble("random", n_trees=2), ensemble("huffman", n_trees=2)
    with pytest.raises(ValueError, match=r"this head, got others \(trees\.0\.boundary, "):
        other.load_state_dict(head.state_dict())
    state = {k: v for k, v in head.state_dict().items() if k != f"layout.{EXTRA_STATE}"}
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        copy.deepcopy(head).load_state_dict(state)
    head.load_state_dict(head.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (6, 5)], ids=str)
def test_topk_of_another_dtype_than_the_hidden_vectors(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    head = randomise(ensemble(shape=shape, n_trees=2, gate="context"), scale=0.3)
    hidden = draw(5, D)
    values, classes = head.to(dtype).topk(hidden, 3)
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = head.log_prob(hidden)
    torch.testing.assert_close(values, expected.gather(1, classes), rtol=0.03, atol=0.03)
    torch.testing.assert_close(values, expected.topk(3)[0], rtol=0.03, atol=0.03)
    assert torch.equal(head.predict(hidden), classes[:, 0])


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_chunks_of_rows(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes in chunks of two rows, without and with gradients."""
    head = randomise(ensemble(shape=(6, 5), n_trees=2, gate="context").double()).to(device)
    hidden = draw(rows, D, dtype=torch.float64).to(device)
    with torch.no_grad():
        expected = head.mixed_log_prob(hidden, head.log_gate(hidden))
        monkeypatch.setitem(CHUNK_BYTES, device.type, 2 * 8 * head.numbers_of_a_row(device))
        assert len(list(split_rows(head.numbers_of_a_row(device), hidden))) == max(1, -(-rows // 2))
        torch.testing.assert_close(head.log_prob(hidden), expected)
        for values, classes in (Head.topk_rows(head, hidden, 4), head.topk(hidden, 4)):
            torch.testing.assert_close(values, expected.topk(4)[0])
            torch.testing.assert_close(values, expected.gather(1, classes))
    values, classes = head.topk(hidden, 4)
    torch.testing.assert_close(values, expected.gather(1, classes))
    assert values.requires_grad
    assert head.log_prob(hidden).requires_grad


def test_feature_subsets() -> None:
    """Increasing, the same for a seed, saved; only those features get a gradient."""
    heads = [ensemble(n_trees=3, subset_size=4, gate="uniform", seed=s) for s in (1, 1, 2)]
    index = heads[0].layout.feature_index
    assert index.shape == (3, 4)
    assert (index.diff() > 0).all()
    assert torch.equal(index, heads[1].layout.feature_index)
    assert not torch.equal(index, heads[2].layout.feature_index)
    assert torch.equal(saved_tables(heads[0].state_dict(), "layout.")["feature_index"], index)
    head = randomise(heads[0])
    hidden = draw(30, D).requires_grad_()
    head(hidden, draw_targets(30)).loss.backward()
    used = set(index.flatten().tolist())
    assert set(hidden.grad.abs().sum(0).nonzero().flatten().tolist()) == used
    assert ensemble(subset_size=D).layout.feature_index is None


def test_device_moves(device: torch.device) -> None:
    """Tables and levels follow the module; results are those of the CPU."""
    for node_vectors in ("free", "leaves"):
        head = randomise(ensemble("huffman", (6, 4), 2, gate="context", node_vectors=node_vectors))
        hidden, target = draw(20, D), draw_targets(20)
        expected = head.log_prob(hidden).detach(), head(hidden, target).loss.detach()
        moved = head.to(device)
        torch.testing.assert_close(moved.log_prob(hidden.to(device)).cpu(), expected[0])
        loss = moved(hidden.to(device), target.to(device)).loss
        torch.testing.assert_close(loss.cpu(), expected[1])


@pytest.mark.cuda
def test_cuda_target_out_of_range_is_nan() -> None:
    head = randomise(ensemble("huffman", (6, 4), 2)).cuda()
    target = draw_targets(9).cuda()
    target[4] = V
    output = head(draw(9, D).cuda(), target).output
    assert output[4].isnan()
    assert output[torch.arange(9) != 4].isfinite().all()


def bad(**options: Any) -> Any:
    return pytest.param(options.pop("match"), options, id=" ".join(options))


@pytest.mark.parametrize(
    ("match", "options"),
    [
        bad(match="trees: expected at least one tree, got none", trees=[]),
        bad(match=r"trees\[1\]: expected 37 classes, got 36",
            trees=[random_tree(V), random_tree(V - 1)]),
        bad(match=r"trees\[1\]: expected a root of 2 children as in trees\[0\], got 6",
            trees=[random_tree(V), random_tree(V, root=6)]),
        bad(match="subset_size: expected a whole number from 1 to 10, got 0", subset_size=0),
        bad(match="subset_size: expected a whole number from 1 to 10, got 11", subset_size=11),
        bad(match="subset_size: expected a whole number from 1 to 10, got '4'", subset_size="4"),
        bad(match="seed: expected a whole number .* got -1", seed=-1),
        bad(match="sparse: expected True or False, got 1", sparse=1),
        bad(match="embedding: expected a module with a weight", embedding=3, node_vectors="leaves"),
        bad(match="gate: expected one of uniform, constant, context, got 'x'", gate="x"),
        bad(match="node_vectors: expected one of free, leaves, got 'shared'",
            node_vectors="shared"),
        bad(match="embedding: expected None with node_vectors='free'",
            embedding=torch.nn.Embedding(V, D)),
        bad(match=r"embedding: expected a weight of shape \(37, 10\) .* got \(37, 9\)",
            embedding=torch.nn.Embedding(V, D - 1), node_vectors="leaves"),
        bad(match=r"frequencies: expected a 1-D array of shape \(37,\), got shape \(3,\)",
            frequencies=[1, 2, 3]),
        bad(match=r"frequencies\[0\]: expected a finite number of at least 0, got -1.0",
            frequencies=-np.ones(V)),
    ],
)  # fmt: skip
def test_bad_options(match: str, options: dict[str, Any]) -> None:
    options = {"trees": trees()} | options
    with pytest.raises(ValueError, match=match):
        TreeEnsemble(D, V, **options)


def test_from_tokens_trees() -> None:
    """What it builds is what build_tree builds."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, V, 500).astype(np.int32)
    counts = np.bincount(tokens, minlength=V)
    head = TreeEnsemble.from_tokens(D, V, tokens, recipe="huffman", n_trees=1, root=5, seed=9)
    expected = build_tree("huffman", V, counts, seed=tree_seed(9, 0), root=5, levels=2)
    assert head.trees == [expected]
    given = TreeEnsemble.from_tokens(
        D, V, (), frequencies=counts, recipe="huffman", n_trees=1, root=5, seed=9
    )
    assert given.trees == [expected]
    several = TreeEnsemble.from_tokens(D, V, tokens, n_trees=3, root=5)
    assert len(set(several.trees)) == 3
    assert {tree.root_width for tree in several.trees} == {5}


def test_one_hidden_vector(device: torch.device) -> None:
    """No leading dimension at all, as when one word is generated."""
    head = randomise(ensemble("huffman", (6, 4), 2)).to(device)
    hidden: Tensor = draw(D).to(device)
    assert head.log_prob(hidden).shape == (V,)
    assert head.sample(hidden).shape == ()
    assert head(hidden, torch.tensor(3, device=device)).output.shape == ()
