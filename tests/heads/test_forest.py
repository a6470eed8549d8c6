"""The forest head: a mixture of softmaxes that add cluster vectors to one output embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hstree
from hstree.heads import ForestSoftmax, SampledSoftmax, Softmax, build_head, load_head
from hstree.trees import build_ensemble

from .support import (
    EVERY_CLASS,
    FREQUENCIES,
    D,
    V,
    allocations,
    check_bfloat16,
    check_formula,
    check_unigram,
    draw,
    draw_targets,
    embedding,
    make,
    randomise,
    trees,
)


def forest(**options: Any) -> ForestSoftmax:
    head = ForestSoftmax(D, V, **{"n_trees": 3, "clusters": 6} | options)
    return randomise(head)  # type: ignore[return-value]


def scores(head: ForestSoftmax, hidden: Tensor) -> Tensor:
    """Scores [T, N, V] in each tree: every class with a vector of its own."""
    row = (head.cluster + head.clusters * torch.arange(head.n_trees)).t()  # [T, V]
    weight, bias = head.weight + head.cluster_weight[row], head.cluster_bias[row]
    bias = bias if head.bias is None else bias + head.bias
    return torch.einsum("nd,tvd->tnv", hidden, weight) + bias[:, None]


def by_tree(head: ForestSoftmax, hidden: Tensor) -> Tensor:
    """Log-probabilities [T, N, V] in each tree."""
    return scores(head, hidden).log_softmax(2)


def formula(head: ForestSoftmax, hidden: Tensor) -> Tensor:
    gate = torch.zeros(len(hidden), head.n_trees, dtype=hidden.dtype)
    if head.gate.name == "constant":
        gate = gate + head.gate.logits
    if head.gate.name == "context":
        gate = hidden @ head.gate.linear.weight.t() + head.gate.linear.bias
    return (gate.log_softmax(1).t()[:, :, None] + by_tree(head, hidden)).logsumexp(0)


@pytest.mark.parametrize("gate", ["uniform", "constant", "context"])
def test_formula(gate: str) -> None:
    check_formula(forest(gate=gate), formula)


def test_formula_of_other_shapes() -> None:
    check_formula(forest(bias=False, clusters=1, n_trees=1), formula)
    check_formula(forest(embedding=embedding(), clusters=V), formula)


def test_bfloat16() -> None:
    check_bfloat16(forest(), formula)
    check_bfloat16(forest(**EVERY_CLASS), formula)


SAMPLED: dict[str, Any] = {"negatives": 9, "frequencies": FREQUENCIES}


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    ("sparse", "in_batch"), [(False, True), (True, True), (True, False)], ids=str
)
def test_the_sampled_loss_by_definition(sparse: bool, in_batch: bool, reduction: str) -> None:
    """All terms of every tree in float64, weighted by m / c, with ignored rows."""
    weights = torch.linspace(0.5, 2, V, dtype=torch.float64)
    options = {"sparse": sparse, "in_batch": in_batch, "reduction": reduction}
    head = forest(class_weight=weights, **SAMPLED, **options).double()
    hidden, target = draw(12, D).double().requires_grad_(), draw_targets(12)
    target[2:5] = torch.tensor([-100, 30, 30])
    kept = (target != -100).nonzero()[:, 0]
    torch.manual_seed(5)
    classes, log_weight = head.draw_classes(target)
    factor = torch.zeros(V, dtype=torch.float64).index_add(0, classes, log_weight.exp())
    is_target = torch.arange(V) == target[kept, None]
    by_class = factor.expand(len(kept), -1).masked_fill(is_target, 1.0)
    score = scores(head, hidden[kept])
    normalizer = (by_class * score.exp()).sum(2, keepdim=True).log()
    chosen = (score - normalizer)[:, is_target].t()
    log_gate = head.gate(hidden[kept])
    expected = torch.zeros(12, dtype=torch.float64)
    expected = expected.index_put((kept,), (log_gate + chosen).logsumexp(1))
    of_rows = torch.zeros(12, dtype=torch.float64).index_put((kept,), weights[target[kept]])
    wanted = -of_rows * expected
    wanted = wanted if reduction == "none" else wanted.sum() / of_rows.sum()
    torch.manual_seed(5)
    output, loss = head(hidden, target)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, wanted)
    upstream, leaves = torch.linspace(-1, 2, loss.numel()).to(loss), [hidden, *head.parameters()]
    got = torch.autograd.grad((loss.flatten() * upstream).sum(), leaves)
    right = torch.autograd.grad((wanted.flatten() * upstream).sum(), leaves)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a.to_dense(), b)
    assert [g.is_sparse for g in got[1:3]] == [sparse, sparse]
    assert head.sparse_parameters() == ([head.weight, head.bias] if sparse else [])
    exact = head.eval()(hidden, target).output
    torch.testing.assert_close(exact[kept], head.log_prob(hidden)[kept, target[kept]])


def test_sampled_estimate_is_that_of_the_sampled_softmax() -> None:
    """At the start, with the same draws, and with one tree after ``fold``."""
    hidden, target = draw(20, D), draw_targets(20)
    plain = SampledSoftmax(D, V, **SAMPLED)
    head = ForestSoftmax.from_linear(plain, clusters=6, n_trees=1, **SAMPLED)
    for _ in range(2):
        outputs = []
        for some in (head, plain):
            torch.manual_seed(1)
            outputs.append(some(hidden, target).output)
        torch.testing.assert_close(*outputs)
        randomise(head)
        plain = SampledSoftmax.from_linear(head.fold(), **SAMPLED)
    torch.testing.assert_close(head.log_prob(hidden), plain.log_prob(hidden))
    with pytest.raises(ValueError, match="fold: expected a head with one tree, got 3"):
        forest().fold()


def test_a_sampled_step_holds_nothing_of_the_size_of_the_classes() -> None:
    options = {"clusters": 8, "negatives": 64, "frequencies": range(100_000, 0, -1)}
    head = ForestSoftmax(4, 100_000, n_trees=2, sparse=True, **options)
    hidden, target = draw(50, 4).requires_grad_(), draw_targets(50, n_classes=100_000)
    largest, _ = allocations(lambda: head(hidden, target).loss.backward())
    assert largest <= 50 * (50 + 64) * 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
def test_compile_sampled() -> None:
    torch._dynamo.reset()
    head = forest(**SAMPLED)
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 12):
        results = []
        for some in (head, compiled):
            hidden, target = draw(rows, D).requires_grad_(), draw_targets(rows)
            target[1] = -100
            torch.manual_seed(2)
            loss = some(hidden, target).loss
            results.append([loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])])
        torch.testing.assert_close(*results)


def test_starts_as_the_softmax() -> None:
    check_unigram(ForestSoftmax(D, V, clusters=6, frequencies=FREQUENCIES), FREQUENCIES)
    head, plain = ForestSoftmax(D, V, clusters=6), Softmax(D, V)
    plain.load_state_dict({"weight": head.weight, "bias": head.bias})
    hidden, target = draw(20, D), draw_targets(20)
    torch.testing.assert_close(head(hidden, target).output, plain(hidden, target).output)
    head(hidden, target).loss.backward()
    assert head.cluster_weight.grad.any()  # although the trees are alike


def test_clusters() -> None:
    """Random ones are balanced and differ; those of trees are the children of the root."""
    head = ForestSoftmax(D, 1000, n_trees=3, clusters=10)
    for counts in (torch.bincount(c) for c in head.cluster.t()):
        assert counts.tolist() == [100] * 10
    same = [(a == b).float().mean() for a, b in zip(head.cluster.t(), head.cluster.t()[1:])]  # noqa: B905
    assert max(same) < 0.2
    trees = build_ensemble("cluster", V, 2, FREQUENCIES, draw(V, 4).numpy(), 1, 5)
    cluster = ForestSoftmax(D, V, trees=trees).cluster
    for t, tree in enumerate(trees):
        for k, child in enumerate(tree.to_nested()):
            classes = child if isinstance(child, tuple) else (child,)
            assert (cluster[list(classes), t] == k).all()
    assert ForestSoftmax(D, V).clusters == V
    assert ForestSoftmax(D, 1).cluster.tolist() == [[0] * 4]
    one = build_ensemble("random", 1, 2)
    assert ForestSoftmax(D, 1, trees=one).cluster.tolist() == [[0, 0]]


def test_clusters_of_a_text() -> None:
    """Words with the same neighbours are in one cluster; the name and the constructor agree."""
    random = np.random.default_rng(0)
    part = np.arange(30_000) % 4
    tokens = 9 * part + random.integers(9, size=len(part))  # four kinds of words in turns
    head = ForestSoftmax.from_tokens(D, 36, tokens, n_trees=2, clusters=4, seed=1)
    for groups in head.cluster.t().reshape(2, 4, 9):
        common = groups.mode(1).values
        assert len(set(common.tolist())) == 4
        assert (groups == common[:, None]).float().mean() > 0.9
    built = build_head("forest", D, 36, tokens=tokens, n_trees=2, clusters=4, seed=1)
    assert isinstance(built, ForestSoftmax)
    assert torch.equal(built.cluster, head.cluster)
    assert np.array_equal(built.frequencies, np.bincount(tokens))
    other = build_head("forest", D, V, seed=1)
    assert torch.equal(other.cluster, ForestSoftmax(D, V, seed=1).cluster)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'trees'"):
        ForestSoftmax.from_tokens(D, 36, tokens, trees=build_ensemble("random", 36, 2))
    with pytest.raises(ValueError, match="clusters: expected a whole number of at least 2, got 1"):
        ForestSoftmax.from_tokens(D, 36, tokens, clusters=1)


def test_clusters_of_vectors() -> None:
    """The rows of a layer, by default of the one that the head starts from."""
    linear, options = torch.nn.Linear(D, V), {"n_trees": 2, "clusters": 8, "seed": 4}
    head = ForestSoftmax(D, V, vectors=linear.weight, frequencies=FREQUENCIES, **options)
    built = build_ensemble("cluster", V, 2, FREQUENCIES, linear.weight.detach().numpy(), 4, 8)
    assert torch.equal(head.cluster, ForestSoftmax(D, V, trees=built).cluster)
    made = ForestSoftmax.from_linear(linear, frequencies=FREQUENCIES, **options)
    assert torch.equal(made.cluster, head.cluster)
    assert torch.equal(ForestSoftmax.from_linear(linear, trees=built).cluster, head.cluster)
    assert ForestSoftmax(D, 1, vectors=draw(1, 2)).cluster.tolist() == [[0] * 4]


def test_draws_follow_the_mixture() -> None:
    head = forest().eval()
    hidden = draw(1, D).expand(40_000, -1)
    drawn = head.sample(hidden, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=V).double() / len(drawn)
    probability = formula(head, hidden[:1])[0].exp().double()
    assert (share - probability).abs().max() < 5 * (0.25 / len(drawn)) ** 0.5


def test_dropout_of_the_trees() -> None:
    """In training, and only where the trees read the context."""
    head, hidden, target = forest(tree_dropout=0.5), draw(20, D), draw_targets(20)
    exact = head.eval()(hidden, target).output
    assert not torch.equal(head.train()(hidden, target).output, exact)
    with torch.no_grad():
        head.cluster_weight.zero_()
    assert torch.equal(head(hidden, target).output, head.eval()(hidden, target).output)


@pytest.mark.parametrize("size", [V - 9, V + 9])
def test_resized(size: int) -> None:
    """Every tree is renormalized; new classes have a cluster."""
    head, hidden, kept = make("forest").double().eval(), draw(6, D).double(), min(size, V)
    made = head.resized(size)
    torch.testing.assert_close(
        by_tree(made, hidden)[..., :kept].log_softmax(-1),
        by_tree(head, hidden)[..., :kept].log_softmax(-1),
    )
    assert torch.equal(made.gate(hidden), head.gate(hidden))
    assert torch.equal(made.cluster[:kept], head.cluster[:kept])
    assert made.cluster.max() < made.clusters == head.clusters
    torch.testing.assert_close(made.log_prob(hidden), formula(made, hidden))
    counts = np.arange(V + 3) + 1.0
    with torch.no_grad():
        for name in ("weight", "cluster_weight", "cluster_bias"):
            head.get_parameter(name).zero_()
    new = head.resized(V + 3, frequencies=counts).log_prob(hidden)[:, V:].exp()
    share = torch.from_numpy(counts[V:] / counts.sum())
    torch.testing.assert_close(new, share.expand_as(new))


def test_save_and_load(tmp_path: Path) -> None:
    head = forest(seed=5, gate="constant", tree_dropout=0.1, **SAMPLED).eval()
    head.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head").eval()
    assert isinstance(loaded, ForestSoftmax)
    assert loaded.config() == head.config()
    assert torch.equal(loaded.log_prob(draw(5, D)), head.log_prob(draw(5, D)))


def test_rank_exceeds_that_of_a_softmax() -> None:
    """Log-probabilities of a softmax have rank D + 1 at most."""
    head = forest(bias=False).double()
    log_prob = head.log_prob(draw(V, D).double())
    assert torch.linalg.matrix_rank(log_prob) > D + 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_trees": 0}, "n_trees: expected a whole number of at least 1, got 0"),
        ({"clusters": 0}, "clusters: expected a whole number of at least 1, got 0"),
        ({"gate": "mean"}, "gate: expected one of uniform, constant, context, got 'mean'"),
        ({"tree_dropout": 1.0}, "tree_dropout: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"trees": build_ensemble("random", V + 1, 2)}, rf"trees\[0\]: expected {V} classes"),
        (
            {"vectors": draw(V, 2), "trees": trees()},
            "vectors: .* together with trees, got Tensor",
        ),
        ({"vectors": draw(V, 2), "clusters": 1}, "clusters: expected a whole number of at least 2"),
        ({"vectors": draw(V + 1, 2)}, r"vectors: expected shape \(37, F\), got \(38, 2\)"),
        ({"sparse": True}, "sparse: expected False without negatives, got True"),
        ({"negatives": 9}, "frequencies: expected class counts for negatives"),
        ({"z_loss": 0.1}, "z_loss: expected 0 for ForestSoftmax"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hstree.ForestSoftmax(D, V, **options)


def test_weights_in_float64_are_not_rounded_under_autocast() -> None:
    head = ForestSoftmax(8, 50, n_trees=2, clusters=5).double()
    hidden = torch.randn(3, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        with pytest.raises(RuntimeError, match="same dtype"):
            head.log_prob(hidden)
        torch.testing.assert_close(
            head.log_prob(hidden.double()), head.log_prob(hidden.double()).log_softmax(1)
        )
        assert head.log_prob(hidden.double()).dtype == torch.float64
