"""The forest head: a mixture of softmaxes that add cluster vectors to one output embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hstree
from hstree.heads import ForestSoftmax, Softmax, load_head
from hstree.trees import build_ensemble

from .support import (
    FREQUENCIES,
    D,
    V,
    check_bfloat16,
    check_formula,
    check_unigram,
    draw,
    draw_targets,
    embedding,
    make,
    randomise,
)


def forest(**options: Any) -> ForestSoftmax:
    head = ForestSoftmax(D, V, **{"n_trees": 3, "clusters": 6} | options)
    return randomise(head)  # type: ignore[return-value]


def by_tree(head: ForestSoftmax, hidden: Tensor) -> Tensor:
    """Log-probabilities [T, N, V] in each tree: every class with a vector of its own."""
    row = (head.cluster + head.clusters * torch.arange(head.n_trees)).t()  # [T, V]
    weight, bias = head.weight + head.cluster_weight[row], head.cluster_bias[row]
    bias = bias if head.bias is None else bias + head.bias
    return (torch.einsum("nd,tvd->tnv", hidden, weight) + bias[:, None]).log_softmax(2)


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


def test_starts_as_the_softmax() -> None:
    check_unigram(ForestSoftmax(D, V, clusters=6, frequencies=FREQUENCIES), FREQUENCIES)
    head, plain = ForestSoftmax(D, V, clusters=6), Softmax(D, V)
    plain.load_state_dict({"weight": head.weight, "bias": head.bias})
    hidden, target = draw(20, D), draw_targets(20)
    torch.testing.assert_close(head(hidden, target).output, plain(hidden, target).output)
    head(hidden, target).loss.backward()
    assert head.cluster_weight.grad.any()  # although the trees are alike


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_from_linear(bias: bool, tied: bool) -> None:
    linear, hidden = nn.Linear(D, V, bias=bias).double(), draw(9, D).double()
    head = ForestSoftmax.from_linear(linear, tied=tied, clusters=6, reduction="sum")
    expected = linear(hidden).log_softmax(1)
    torch.testing.assert_close(head.log_prob(hidden), expected, rtol=0, atol=1e-12)
    assert (head.weight is linear.weight) == tied
    assert head.bias is not linear.bias or not bias
    assert (head.reduction, head.weight.dtype) == ("sum", torch.float64)
    with pytest.raises(TypeError, match="n_clusters"):
        ForestSoftmax.from_linear(linear, n_clusters=6)


def test_clusters() -> None:
    """Random ones are balanced and differ; those of trees are the children of the root."""
    head = ForestSoftmax(D, 1000, n_trees=3, clusters=10)
    for counts in (torch.bincount(c) for c in head.cluster.t()):
        assert counts.tolist() == [100] * 10
    same = [(a == b).float().mean() for a, b in zip(head.cluster.t(), head.cluster.t()[1:])]  # noqa: B905
    assert max(same) < 0.2
    trees = build_ensemble("cluster", V, 2, FREQUENCIES, draw(V, 4).numpy(), 1, 5, 1, 2)
    cluster = ForestSoftmax(D, V, trees=trees).cluster
    for t, tree in enumerate(trees):
        for k, child in enumerate(tree.to_nested()):
            classes = child if isinstance(child, tuple) else (child,)
            assert (cluster[list(classes), t] == k).all()
    assert ForestSoftmax(D, V).clusters == V
    assert ForestSoftmax(D, 1).cluster.tolist() == [[0] * 4]
    one = build_ensemble("random", 1, 2)
    assert ForestSoftmax(D, 1, trees=one).cluster.tolist() == [[0, 0]]


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
    head = forest(seed=5, gate="constant", tree_dropout=0.1).eval()
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
        ({"z_loss": 0.1}, "z_loss: expected 0 for ForestSoftmax"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hstree.ForestSoftmax(D, V, **options)
