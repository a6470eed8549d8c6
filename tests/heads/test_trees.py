"""Ensembles of trees against trees that are walked node by node, of both shapes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heads.support import (
    FREQUENCIES,
    HEADS,
    D,
    V,
    draw,
    draw_targets,
    make,
    probabilities,
    randomise,
    trees,
)
from hstree.heads import Head, Softmax, TreeEnsemble
from hstree.heads import trees as tree_module
from hstree.heads.rows import topk_of_all
from hstree.heads.trees import Groups, Paths
from hstree.ops.mixture_log_prob import CHUNK_BYTES
from hstree.trees import Tree, huffman_tree, random_tree

KINDS = [kind for kind in HEADS if kind.startswith("trees")]
SHAPES: dict[str, dict[str, Any]] = {  # of `trees`
    "binary": {},
    "binary below roots": {"clusters": 9, "binary": True},
    "groups": {"clusters": 6},
    "groups, many classes alone": {"clusters": 30},
    "roots alone": {"clusters": V},
}


def ensemble(
    shape: str = "groups", n_trees: int = 1, recipe: str = "huffman", **options: Any
) -> TreeEnsemble:
    built = trees(recipe, n_trees, **SHAPES[shape])
    return TreeEnsemble(D, V, built, **({"frequencies": FREQUENCIES} | options))


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster"])
def test_probabilities(recipe: str, shape: str) -> None:
    """Every gate, with and without feature subsets."""
    for gate, subset in itertools.product(("uniform", "constant", "context"), (None, 4)):
        head = ensemble(shape, 3, recipe, gate=gate, subset_size=subset)
        assert head.groups == shape.startswith("groups")
        check_probabilities(randomise(head))


@pytest.mark.parametrize(
    "nested",
    [
        [((0, 1, 2), (3, 4, 5), (6, 7, 8)), ((8, 7, 6, 5), (4, 3), (2, 1, 0))],
        [((0, (1, 2)), 3, (4, (5, (6, (7, 8)))))],
        [(4, 0, 8, 3, 1, 2, 5, 7, 6)],
        [((0, 1), (2, ((3, 4), (5, ((6, 7), 8)))))],
    ],
    ids=["groups", "binary below a root", "one node", "binary"],
)
def test_given_trees(nested: list[Any]) -> None:
    """Of different sizes, with the shape that they have; read as groups where that is asked for."""
    built = [Tree.from_nested(n) for n in nested]
    head = TreeEnsemble(D, 9, built, gate="context")
    assert isinstance(head.below, Groups if len(nested) == 2 else Paths)
    check_probabilities(randomise(head))
    if max(tree.height for tree in built) <= 2:
        head = TreeEnsemble(D, 9, built, groups=True)
        assert isinstance(head.below, Groups)
        check_probabilities(randomise(head))


def test_two_clusters() -> None:
    """A root of two children is one binary node, or the roots of two groups."""
    tree = Tree.from_nested(((0, 1), (2, 3)))
    for groups in (None, False, True):
        head = randomise(TreeEnsemble(D, 4, [tree], groups=groups))
        assert (head.roots is not None) == bool(groups)
        check_probabilities(head)


def test_trees_of_another_shape_are_refused() -> None:
    wide = Tree.from_nested((0, 1, ((2, 3, 4), (5, 6))))
    with pytest.raises(ValueError, match=r"trees: expected binary nodes .* got node 2 with 3"):
        TreeEnsemble(D, 7, [wide])
    deep = Tree.from_nested((0, 1, ((2, 3), 4)))
    with pytest.raises(ValueError, match=r"trees: expected two levels, .* got node 1 with 2"):
        TreeEnsemble(D, 5, [deep], groups=True)
    with pytest.raises(ValueError, match="embedding: expected None for trees with binary nodes"):
        TreeEnsemble(D, 5, [deep], groups=False, embedding=nn.Embedding(5, D))


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("n_trees", [1, 2])
@pytest.mark.parametrize("n_classes", [1, 2, 3])
def test_few_classes(n_classes: int, n_trees: int, groups: bool) -> None:
    built = [
        random_tree(n_classes, seed, clusters=3 if groups else None) for seed in range(n_trees)
    ]
    head = TreeEnsemble(D, n_classes, built, groups=groups, gate="context", reduction="sum")
    check_probabilities(randomise(head))
    hidden, target = draw(7, D), draw_targets(7, n_classes=n_classes)
    hidden.requires_grad_()
    sample = head.sample(hidden)
    assert 0 <= sample.min() <= sample.max() < n_classes
    loss = head(hidden, target).loss
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    (of_log_prob,) = torch.autograd.grad(head.log_prob(hidden).sum(), hidden)
    assert of_log_prob.isfinite().all()
    if n_classes == 1:
        assert loss.abs() < 1e-6
        assert hidden.grad.abs().max() < 1e-6
    assert head.predict(hidden).max() < n_classes


@pytest.mark.parametrize("groups", [False, True])
def test_roots_over_all_classes_are_the_flat_softmax(groups: bool) -> None:
    """Values and gradients of F.linear and log_softmax, rows in leaf order."""
    head = ensemble("roots alone", groups=groups)
    assert head.roots is not None
    order = torch.from_numpy(head.trees[0].order.astype(np.int64))
    weight = draw(V, D, seed=5)
    bias = torch.from_numpy(np.log(FREQUENCIES / FREQUENCIES.sum())).float()
    own: Any = head.output_embedding if groups else head.roots.weight
    with torch.no_grad():
        own.view(V, D).copy_(weight if groups else weight[order])
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
    got = own.grad.view(V, D)
    got = got if groups else torch.empty_like(got).index_copy_(0, order, got)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(got, flat_weight.grad, rtol=1e-5, atol=1e-6)
    of_bias = flat_bias.grad[order]
    torch.testing.assert_close(head.roots.bias.grad[0], of_bias, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_untrained_is_the_distribution_of_the_frequencies(shape: str) -> None:
    """Zero vectors, any context; frequencies whose ratio is 10^9, and a class never seen."""
    counts = 10.0 ** np.linspace(0, 9, V)
    np.random.default_rng(0).shuffle(counts)
    counts[5] = 0
    head = ensemble(shape, 2, frequencies=counts, gate="context")
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
    for tree in (
        huffman_tree(counts),
        random_tree(len(counts)),
        huffman_tree(counts, clusters=256),
    ):
        head = TreeEnsemble(4, len(counts), [tree], frequencies=counts)
        with torch.no_grad():
            prob = head.log_prob(torch.zeros(1, 4))[0].double().exp().numpy()
        np.testing.assert_allclose(prob, counts / counts.sum(), rtol=1e-5)
        assert abs(prob.sum() - 1) < 1e-5


@pytest.mark.parametrize("subset", [None, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_marks_of_targets(shape: str, subset: int | None) -> None:
    """-1 makes its row 0, and other rows stay as they are; V is an error on a CPU."""
    head = randomise(ensemble(shape, 3, subset_size=subset))
    hidden, target = draw(8, D), draw_targets(8)
    expected = head.target_log_prob(hidden, target).detach()
    target[4], expected[4] = -1, 0
    torch.testing.assert_close(head.target_log_prob(hidden, target), expected)
    target[1] = V
    with pytest.raises(RuntimeError, match=r"target\["):
        head.target_log_prob(hidden, target)


class Calls(TorchDispatchMode):
    """Counts the calls of operators that do work: on a GPU each launches a kernel or more."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def test_calls_of_a_step() -> None:
    """Of four trees with groups; docs/gpu.md states the numbers."""
    head = TreeEnsemble.from_counts(D, 10_000 / torch.arange(1, 2001), clusters=32)
    hidden, target = draw(100, D).requires_grad_(), torch.arange(100)
    with Calls() as forward:
        loss = head(hidden, target).loss
    with Calls() as backward:
        loss.backward()
    assert forward.number <= 38
    assert backward.number <= 24


@pytest.mark.parametrize("subset", [None, 4])
def test_roots_under_autocast(subset: int | None) -> None:
    """Products in bfloat16; log-softmax, mixture and the weights' gradients in float32."""
    head = randomise(ensemble("roots alone", 2, subset_size=subset))
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
        grads.append(head.roots.weight.grad)
    assert grads[0].dtype == torch.float32
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sparse", [True, False])
def test_scores_of_classes_alone_in_their_clusters(
    monkeypatch: pytest.MonkeyPatch, sparse: bool, dtype: torch.dtype
) -> None:
    """The products with E are added for few rows, and E to the vectors of the roots for many."""
    head = ensemble("groups, many classes alone", 2, "cluster", sparse=sparse)
    assert len(head.below.single_child) > len(head.below.single_class) > 0
    randomise(head).to(dtype)
    hidden, target, found = draw(9, D), draw_targets(9), []
    for few in (0, 9):
        monkeypatch.setattr(tree_module, "FEW_ROWS", few)
        head.zero_grad()
        output, loss = head(hidden, target)
        loss.backward()
        every = head.log_prob(hidden)
        torch.testing.assert_close(every[torch.arange(9), target], output)
        gradients = [parameter.grad.to_dense() for parameter in head.parameters()]
        found.append([output, head.topk(hidden, 3)[0], *gradients])
    close = {"rtol": 0.016, "atol": 1e-3} if dtype == torch.bfloat16 else {}
    for few, many in zip(*found, strict=True):
        torch.testing.assert_close(few, many, **close)


def sparse_and_dense(shape: str) -> tuple[TreeEnsemble, TreeEnsemble]:
    first, second = (
        randomise(ensemble(shape, 2, sparse=sparse, gate="constant")) for sparse in (True, False)
    )
    return first, second


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # in torch's Adagrad
@pytest.mark.parametrize("shape", ["binary below roots", "groups"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_steps_are_dense_steps(optimizer: Any, shape: str) -> None:
    heads = sparse_and_dense(shape)
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
        for parameter in heads[0].sparse_parameters():
            assert parameter.grad is not None
            assert parameter.grad.is_sparse
        assert not heads[1].below.weight.grad.is_sparse
        torch.testing.assert_close(*losses)
    assert len(heads[0].sparse_parameters()) == 2
    assert not heads[1].sparse_parameters()
    for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_sparse_gradients_touch_only_visited_rows() -> None:
    head, _ = sparse_and_dense("binary below roots")
    head(draw(1, D), torch.tensor([4])).loss.backward()
    index = head.below.weight.grad.coalesce().indices()
    for t, tree in enumerate(head.trees):
        tables = tree.tables()
        path = tables.path[tables.path_offset[4] : tables.path_offset[5]] >> 1
        assert sorted(index[1][index[0] == t].tolist()) == sorted(path.tolist())
    head, _ = sparse_and_dense("groups")
    head(draw(1, D), torch.tensor([4])).loss.backward()
    cluster = head.below.root_child[:, :V]
    classes = (cluster == cluster[:, 4:5]).any(0).nonzero().squeeze(1)
    visited = head.below.weight.grad.coalesce().indices()[0]
    alone = head.below.single_class
    assert set(classes.tolist()) <= set(visited.tolist()) <= {*classes.tolist(), *alone.tolist()}


def test_sparse_gradients_of_a_tied_embedding() -> None:
    """Groups, classes below the root and the model itself read its rows."""
    gradients = []
    for sparse in (False, True):
        embedding = nn.Embedding.from_pretrained(draw(V, D), freeze=False, sparse=sparse)
        head = TreeEnsemble(D, V, trees("cluster", 2, 20), embedding=embedding, sparse=sparse)
        assert len(head.below.single_class)
        assert not any(p is embedding.weight for p in head.sparse_parameters())
        randomise(head)
        hidden = embedding(torch.tensor([0, 3, 0]))
        head(hidden, torch.tensor([4, 1, 4])).loss.backward()
        gradients.append(embedding.weight.grad)
    assert gradients[1].is_sparse
    assert len(gradients[1].coalesce().indices()[0]) < V
    torch.testing.assert_close(gradients[1].to_dense(), gradients[0])


def tied(module: Any, **options: Any) -> TreeEnsemble:
    """Trees over 200 classes whose parameters have any value."""
    options = {"n_trees": 1, "clusters": 6} | options
    weight = module.weight.detach().clone()
    head = TreeEnsemble.from_counts(D, np.arange(200, 0, -1), embedding=module, **options)
    randomise(head)
    with torch.no_grad():
        module.weight.copy_(weight)
    return head


@pytest.mark.parametrize("kind", [nn.Linear, Softmax], ids=["linear", "head"])
def test_reads_the_rows_of_a_softmax(kind: Any) -> None:
    """Only roots and biases are added; those of another optimizer are not trained twice, and what
    the softmax learns is followed."""
    softmax, hidden = kind(D, 200), draw(9, D)
    head = tied(softmax)
    assert head.output_embedding is softmax.weight
    assert head.tied
    assert head.config()["tied"]
    groups = head.parameter_groups(lr=0.1)
    assert not any(p is softmax.weight for group in groups for p in group["params"])
    own = sum(p.numel() for p in head.parameters() if p is not softmax.weight)
    assert own == 6 * D + 6 + 200
    classes = torch.from_numpy(head.trees[0].order[: head.trees[0].boundary[1]].copy()).long()
    with torch.no_grad():
        softmax.weight.mul_(1.5)
    within = F.linear(hidden, softmax.weight)[:, classes] + head.below.bias[0, classes]
    got = head.log_prob(hidden)[:, classes].log_softmax(1)
    torch.testing.assert_close(got, within.log_softmax(1), rtol=1e-4, atol=1e-4)
    for dtype in (torch.float64, torch.bfloat16):
        head.to(dtype)
        assert head.output_embedding is softmax.weight
        assert {p.dtype for p in head.parameters()} == {dtype}
        assert head.log_prob(hidden.to(dtype)).isfinite().all()


class Rows:
    """Numbers of rows in the calls that search, rank groups, and compute all classes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[int]] = {"search": [], "groups": [], "all": []}
        search, rank = tree_module.tree_topk, tree_module.group_topk
        every = tree_module.topk_of_all

        def of_search(**arguments: Any) -> Any:
            self.seen["search"].append(len(arguments["hidden"]))
            return search(**arguments)

        def of_groups(**arguments: Any) -> Any:
            self.seen["groups"].append(len(arguments["class_score"]))
            return rank(**arguments)

        def of_all(head: Head, columns: int, hidden: Tensor, *more: Any) -> Any:
            self.seen["all"].append(len(hidden))
            return every(head, columns, hidden, *more)

        monkeypatch.setattr(tree_module, "tree_topk", of_search)
        monkeypatch.setattr(tree_module, "group_topk", of_groups)
        monkeypatch.setattr(tree_module, "topk_of_all", of_all)

    def take(self) -> list[list[int]]:
        seen = list(self.seen.values())
        self.seen.update({name: [] for name in self.seen})
        return seen


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("n_trees", [1, 4])
def test_ways_to_the_most_probable_classes(
    n_trees: int, binary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sharp rows are found by search; flat ones, many rows and many classes by all classes.
    The result is exact in any case, with gradients too."""
    counts = torch.ones(4000)
    shape: Any = {"n_trees": n_trees, "clusters": 512, "binary": binary}
    sharp, plain, flat = (
        randomise(TreeEnsemble.from_counts(D, counts, **shape), scale=scale)
        for scale in (5.0, 0.5, 0.01)
    )
    rows, groups = Rows(monkeypatch), not binary
    for head, n, k, ways in (
        (sharp, 1, 3, [[1], [], []]),
        (flat, 1, 3, None),  # given up if it takes too long
        (plain, 40, 3, [[], [40], []] if groups else [[], [], [40]]),
        (flat, 2, 50, [[], [2], []] if groups else [[], [], [2]]),
    ):
        hidden = draw(n, D)
        wanted, order = head.log_prob(hidden).topk(k)
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                values, classes = head.topk(hidden, k)
            seen = rows.take()
            assert seen == (ways or [[1], [], seen[2]])
            torch.testing.assert_close(values, wanted.detach() if not recorded else wanted)
            assert values.requires_grad == recorded
            assert torch.equal(classes, order)


def test_scores_out_of_range() -> None:
    """Rows whose numbers could lose digits are ranked from the log-probabilities."""
    head = randomise(TreeEnsemble.from_counts(D, torch.ones(4000), clusters=512))
    hidden = draw(40, D)
    hidden[3] *= 100
    values, classes = head.topk(hidden, 50)
    wanted, order = head.log_prob(hidden).topk(50)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(classes[3], order[3])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_candidates_agree(kind: str, temperature: float) -> None:
    """In values and gradients, in float64."""
    head = make(kind).double()
    assert isinstance(head, TreeEnsemble)
    hidden = draw(6, D, dtype=torch.float64).requires_grad_()
    candidates = torch.randint(V, (6, 9), generator=torch.Generator().manual_seed(15))
    candidates[0, 1:3] = -1
    wanted = head._repeated(hidden, candidates, temperature)
    log_prob = head._gathered(hidden, candidates, temperature)
    close = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(log_prob, wanted, **close)
    with torch.no_grad():
        in_chunks = head._gathered(hidden, candidates, temperature)
    torch.testing.assert_close(in_chunks, wanted.detach(), **close)
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    grad = draw(6, 9, seed=8, dtype=torch.float64)
    of_all = torch.autograd.grad(log_prob, inputs, grad, allow_unused=True)
    repeated = torch.autograd.grad(wanted, inputs, grad, allow_unused=True)
    for got, true in zip(of_all, repeated, strict=True):
        assert (got is None) == (true is None)
        if got is not None and true is not None:
            torch.testing.assert_close(got.to_dense(), true.to_dense(), **close)


def test_choice_of_the_way_to_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few by the ops of the training step, many from all classes, unless their gradients would not
    be row-sparse."""
    ways: list[str] = []
    for name in ("_repeated", "_gathered"):
        plain = getattr(TreeEnsemble, name)
        monkeypatch.setattr(
            TreeEnsemble, name, lambda *a, of=plain, way=name: ways.append(way) or of(*a)
        )
    hidden, every = draw(3, D), torch.arange(1200).expand(3, -1)
    for sparse in (False, True):
        counts = torch.arange(1200, 0, -1)
        head = TreeEnsemble.from_counts(D, counts, n_trees=2, clusters=32, sparse=sparse)
        randomise(head)
        few = every[:, :4]
        torch.testing.assert_close(
            head.candidate_log_prob(hidden, few), head.log_prob(hidden)[:, :4]
        )
        torch.testing.assert_close(head.candidate_log_prob(hidden, every), head.log_prob(hidden))
        assert ways == ["_repeated", "_repeated" if sparse else "_gathered"]
        ways.clear()
    head.candidate_log_prob(hidden, every).sum().backward()
    assert head.output_embedding.grad.is_sparse


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_chunks_of_rows(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes in chunks of two rows, without and with gradients."""
    head = randomise(ensemble("groups", 2, gate="context").double()).to(device)
    hidden = draw(rows, D, dtype=torch.float64).to(device)
    with torch.no_grad():
        expected = head._of_all(hidden, 1.0)
        monkeypatch.setitem(CHUNK_BYTES, device.type, 2 * 8 * head.numbers_of_a_row(device))
        torch.testing.assert_close(head.log_prob(hidden), expected)
        columns = head.numbers_of_a_row(device)
        every = topk_of_all(head, columns, hidden, 4, None)
        for values, classes in (every, head.topk(hidden, 4)):
            torch.testing.assert_close(values, expected.topk(4)[0])
            torch.testing.assert_close(values, expected.gather(1, classes))
    values, classes = head.topk(hidden, 4)
    torch.testing.assert_close(values, expected.gather(1, classes))
    assert values.requires_grad
    assert head.log_prob(hidden).requires_grad


def test_feature_subsets() -> None:
    """Increasing, the same for a seed; only those features get a gradient."""
    heads = [ensemble("binary", 3, subset_size=4, gate="uniform", seed=s) for s in (1, 1, 2)]
    index = heads[0].below.feature_index
    assert index is not None
    assert index.shape == (3, 4)
    assert (index.diff() > 0).all()
    assert torch.equal(index, heads[1].below.feature_index)
    assert not torch.equal(index, heads[2].below.feature_index)
    head = randomise(heads[0])
    hidden = draw(30, D).requires_grad_()
    head(hidden, draw_targets(30)).loss.backward()
    used = set(index.flatten().tolist())
    assert set(hidden.grad.abs().sum(0).nonzero().flatten().tolist()) == used
    assert ensemble(subset_size=D).below.feature_index is None


@pytest.mark.cuda
@pytest.mark.parametrize("shape", ["binary below roots", "groups"])
def test_cuda_target_out_of_range_is_nan(shape: str) -> None:
    head = randomise(ensemble(shape, 2)).cuda()
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
            trees=[random_tree(V), random_tree(V, clusters=6)]),
        bad(match="subset_size: expected a whole number from 1 to 10, got 0", subset_size=0),
        bad(match="subset_size: expected a whole number from 1 to 10, got '4'", subset_size="4"),
        bad(match="seed: expected a whole number .* got -1", seed=-1),
        bad(match="sparse: expected True or False, got 1", sparse=1),
        bad(match="embedding: expected a module with a weight", embedding=3),
        bad(match="gate: expected one of uniform, constant, context, got 'x'", gate="x"),
        bad(match=r"embedding: expected a weight of shape \(37, 10\) .* got \(37, 9\)",
            embedding=nn.Embedding(V, D - 1)),
        bad(match=r"frequencies: expected a 1-D array of shape \(37,\), got shape \(3,\)",
            frequencies=[1, 2, 3]),
    ],
)  # fmt: skip
def test_bad_options(match: str, options: dict[str, Any]) -> None:
    options = {"trees": trees(clusters=6)} | options
    with pytest.raises(ValueError, match=match):
        TreeEnsemble(D, V, **options)
