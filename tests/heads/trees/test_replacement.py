"""Other trees for an ensemble whose leaf groups share one output embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads.support import FREQUENCIES, D, V, draw, draw_targets, probabilities, randomise, trees
from hstree.heads import TreeEnsemble, load_head
from hstree.optim import AdamW
from hstree.trees import Tree, build_ensemble, random_tree


def ensemble(root: int = 8, leaf: int = 1, n_trees: int = 2, **options: Any) -> TreeEnsemble:
    built = trees("huffman", n_trees, root, leaf)
    options = {"gate": "context", "frequencies": FREQUENCIES} | options
    head = TreeEnsemble(D, V, built, node_vectors="leaves", **options)
    randomise(head)
    return head


def others(root: int = 8, leaf: int = 1, n_trees: int = 2, **options: Any) -> list[Tree]:
    return build_ensemble("random", V, n_trees, None, None, 7, root, leaf, **options)


def softmaxes(head: TreeEnsemble, bias: Tensor, hidden: Tensor) -> Tensor:
    """log P [N, V] of a mixture of softmaxes over E h + b_t with the gate of the head."""
    scores = (hidden @ head.output_embedding.t()).unsqueeze(1) + bias
    return (scores.log_softmax(2) + head.log_gate(hidden).unsqueeze(2)).logsumexp(1)


@pytest.mark.parametrize("shape", [
    {"root": 8},
    {"root": 8, "leaf": 5},
    {"root": 1, "leaf": 4},
    {"root": 6, "levels": 2},
    {"root": 6, "leaf": 3, "levels": 3},
], ids=str)  # fmt: skip
def test_is_the_softmax_of_the_leaves_to_first_order(shape: dict[str, Any]) -> None:
    """Value and derivative at a hidden vector. No class was a child of the old roots."""
    old = trees("huffman", 2, shape["root"], 3)
    head = TreeEnsemble(D, V, old, node_vectors="leaves", gate="context")
    randomise(head).double()
    bias, at = head.nodes.leaf_bias.detach().clone(), draw(D, dtype=torch.float64)
    for t, layout in enumerate(head.layout.trees):
        row, classes = layout.root_classes()
        if len(row):
            bias[t, torch.from_numpy(classes.astype(np.int64))] = head.nodes.root_bias[
                t, row
            ].detach()
    head.replace_trees(others(**shape), at=at)
    assert torch.equal(head.nodes.leaf_bias, bias)
    hidden = at[None].clone().requires_grad_()
    got, expected = head.log_prob(hidden), softmaxes(head, bias, hidden)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    weight = torch.linspace(-1, 1, V).double()
    derivatives = [torch.autograd.grad((x * weight).sum(), hidden)[0] for x in (got, expected)]
    torch.testing.assert_close(*derivatives, rtol=1e-9, atol=1e-9)


def test_everything_follows_the_new_trees(tmp_path: Path) -> None:
    """Probabilities, losses, the most probable classes, samples; saved and loaded."""
    head = ensemble(leaf=3, subset_size=6)
    built = others(leaf=4)
    head.replace_trees(built, at=draw(D))
    randomise(head)
    assert head.trees == built
    hidden, target = draw(6, D), draw_targets(6)
    expected = probabilities(head, hidden)
    log_prob = head.log_prob(hidden)
    np.testing.assert_allclose(log_prob.detach().exp(), expected, rtol=1e-4, atol=1e-7)
    output = head(hidden, target).output
    torch.testing.assert_close(output, log_prob.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(head.topk(hidden, 5)[0], log_prob.topk(5)[0])
    assert head.sample(hidden).shape == (6,)
    head.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert torch.equal(loaded.log_prob(hidden), log_prob)
    head.reset_parameters()
    assert head.log_prob(hidden).isfinite().all()


def test_parameters_stay_the_same_objects() -> None:
    """E, leaf biases and gate with their values and gradients; the others are named."""
    head = ensemble(leaf=3)
    head(draw(9, D), draw_targets(9)).loss.backward()
    before = dict(head.named_parameters())
    values = {name: (p.detach().clone(), p.grad.clone()) for name, p in before.items()}
    restarted = head.replace_trees(others(leaf=4))
    after = dict(head.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    kept = {"nodes.output_embedding", "nodes.leaf_bias", "gate.linear.weight", "gate.linear.bias"}
    assert set(restarted) == set(before) - kept
    classes = {int(c) for layout in head.layout.trees for c in layout.leaf_classes}
    for name in kept - {"nodes.leaf_bias"}:
        assert torch.equal(after[name], values[name][0])
        assert torch.equal(after[name].grad, values[name][1])
    assert classes
    assert all(after[name].grad is None for name in restarted)
    head(draw(9, D), draw_targets(9)).loss.backward()
    assert all(p.grad.shape == p.shape for p in after.values())


def test_training_goes_on() -> None:
    """Without the state of the parameters that start anew."""
    head = ensemble(leaf=3, sparse=True)
    optimizer = AdamW(head.parameter_groups(lr=0.01, weight_decay=0.0))
    hidden, target = draw(30, D), draw_targets(30)
    losses = []
    for step in range(12):
        if step == 6:
            for name in head.replace_trees(others(leaf=3), at=hidden.mean(0)):
                optimizer.state.pop(head.get_parameter(name))
        loss = head(hidden, target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[6] < losses[0]


def test_kinds_of_nodes_come_and_go() -> None:
    head = ensemble(root=6)
    assert head.nodes.binary_weight is not None
    assert head.replace_trees(others(root=6, levels=2)) == ["nodes.root_weight", "nodes.root_bias"]
    assert head.nodes.binary_weight is None
    assert head.nodes.binary_bias is None
    names = head.replace_trees(others(root=6))
    assert names == [
        "nodes.binary_weight",
        "nodes.binary_bias",
        "nodes.root_weight",
        "nodes.root_bias",
    ]
    assert head.nodes.binary_weight.requires_grad
    hidden = draw(3, D)
    np.testing.assert_allclose(
        head.log_prob(hidden).detach().exp(), probabilities(head, hidden), rtol=1e-4, atol=1e-7
    )


def test_roots_over_all_classes() -> None:
    """The same distribution in another order."""
    head = ensemble(root=V)
    expected = head.log_prob(draw(5, D)).detach()
    assert head.replace_trees(others(root=V), at=draw(D)) == ["nodes.root_bias"]
    torch.testing.assert_close(head.log_prob(draw(5, D)), expected)


def test_the_same_trees_with_a_class_below_the_root() -> None:
    """Its bias is that of the root, before and after."""
    tree = Tree.from_nested((0, (1, 2), (3, 4, 5)))
    head = TreeEnsemble(D, 6, [tree], node_vectors="leaves")
    randomise(head)
    with torch.no_grad():
        head.nodes.root_weight.zero_()
        head.output_embedding.zero_()
    expected = head.nodes.root_bias[0, 0].item()
    head.replace_trees([Tree.from_nested(((0, 5), 1, (2, 3, 4)))])
    assert head.nodes.leaf_bias[0, 0].item() == pytest.approx(expected)
    head.replace_trees([tree])
    assert head.nodes.root_bias[0, 0].item() == pytest.approx(expected)


def test_relearn() -> None:
    """Clusters of the vectors, in the shape of the present trees or another one."""
    head = ensemble(n_trees=3)
    head.replace_trees(others(n_trees=3, levels=2))
    vectors = np.random.default_rng(0).standard_normal((V, 5))
    head.relearn(torch.from_numpy(vectors), seed=4)
    options: dict[str, Any] = {"root": 8, "noise": 0.3}
    wanted = build_ensemble("cluster", V, 3, FREQUENCIES, vectors, 4, levels=2, **options)
    assert head.trees == wanted
    head.relearn(vectors, seed=4)
    assert head.trees == wanted
    wanted = build_ensemble("cluster", V, 3, FREQUENCIES, vectors, 4, leaf=3, **options)
    for levels in ({}, {"levels": None}):
        head.replace_trees(others(n_trees=3, levels=2))
        head.relearn(vectors, seed=4, leaf=3, **levels)
        assert head.trees == wanted


def test_from_linear_with_shared_leaves() -> None:
    """Exact where the derivative of the approximation is: value and derivative at ``at``."""
    linear, at = torch.nn.Linear(D, V).double(), draw(D, dtype=torch.float64)
    head = TreeEnsemble.from_linear(
        linear, trees("cluster", 2, 6, 4), tied=False, at=at, node_vectors="leaves"
    ).double()
    assert head.node_vectors == "leaves"
    torch.testing.assert_close(head.output_embedding, linear.weight, rtol=1e-6, atol=1e-6)
    expected = linear(at).log_softmax(0)
    torch.testing.assert_close(head.log_prob(at[None])[0], expected, rtol=1e-5, atol=1e-5)
    flat = TreeEnsemble.from_linear(linear, trees(root=V)).double()
    hidden = draw(5, D, dtype=torch.float64)
    wanted = linear(hidden).log_softmax(1)
    torch.testing.assert_close(flat.log_prob(hidden), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "trees", "at", "match"),
    [
        ({"node_vectors": "free"}, [random_tree(V)] * 2, None, "node_vectors='leaves'.*got 'free'"),
        ({}, others(n_trees=3), None, "expected 2 trees, got 3"),
        ({}, others(root=7), None, "expected roots of 8 children, got 7"),
        ({}, [random_tree(V - 1, root=8)] * 2, None, r"trees\[0\]: expected 37 classes, got 36"),
        ({}, others(), torch.zeros(3), r"at: expected shape \[10\], got \[3\]"),
    ],
    ids=["free", "number", "root", "classes", "at"],
)
def test_refused(options: dict[str, Any], trees: Any, at: Any, match: str) -> None:
    built = others()
    head = TreeEnsemble(D, V, built, **({"node_vectors": "leaves"} | options))
    with pytest.raises(ValueError, match=match):
        head.replace_trees(trees, at=at)
    assert head.trees == built


def test_refused_on_the_meta_device() -> None:
    with torch.device("meta"):
        head = TreeEnsemble(D, V, others(), node_vectors="leaves")
    with pytest.raises(ValueError, match="trees: expected a head with data, got one on the meta"):
        head.replace_trees(others())


def test_fitted_roots_are_logistic_regressions() -> None:
    """Of the clusters, by LBFGS. Leaves and gate stay."""
    head = ensemble(root=6)
    head.replace_trees(others(root=6, levels=2))
    kept = ("nodes.output_embedding", "nodes.leaf_bias", "gate.linear.weight", "gate.linear.bias")
    before = {name: head.get_parameter(name).clone() for name in kept}
    hidden, target = draw(400, D), draw_targets(400).clamp(min=0)
    head.fit_nodes(hidden, target, epochs=100, batch_size=100, learning_rate=0.05, seed=3)
    assert all(torch.equal(head.get_parameter(name), value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in head.parameters())
    (root,) = (block for block in head.nodes(head.layout) if block.bias_name == "root_bias")
    fitted = -root.target_log_prob(hidden, target, None).mean(0)
    for t, tree in enumerate(head.trees):
        place = np.argsort(tree.order)
        cluster = torch.from_numpy(np.searchsorted(tree.boundary[1:7], place, "right"))
        linear = torch.nn.Linear(D, 6)
        optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=300)

        def loss(linear: torch.nn.Linear = linear, of: Tensor = cluster[target]) -> Tensor:
            linear.zero_grad()
            value = torch.nn.functional.cross_entropy(linear(hidden), of)
            value.backward()
            return value

        optimizer.step(loss)
        assert fitted[t].item() == pytest.approx(loss().item(), rel=2e-3)


@pytest.mark.parametrize("shape", [{"leaf": 3, "levels": 3}, {"leaf": 4}, {}], ids=str)
def test_fitting_lowers_the_loss_and_is_deterministic(shape: dict[str, Any]) -> None:
    hidden, target = draw(300, D), draw_targets(300)
    states = []
    for _ in range(2):
        head = ensemble(subset_size=6)
        head.replace_trees(others(**shape), at=draw(D))
        before = head(hidden, target).loss.item()
        head.fit_nodes(hidden, target, batch_size=64)
        assert head(hidden, target).loss.item() < before
        states.append(head.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_fitting_a_root_over_all_classes_moves_its_bias_alone() -> None:
    head = ensemble(root=V)
    expected = {name: value.clone() for name, value in head.state_dict().items()}
    head.fit_nodes(draw(9, D), draw_targets(9))
    del expected["nodes.root_bias"]
    assert all(torch.equal(head.state_dict()[name], value) for name, value in expected.items())


def test_fitting_is_refused() -> None:
    head = TreeEnsemble(D, V, others())
    with pytest.raises(ValueError, match=r"node_vectors: expected 'leaves'.*got 'free'"):
        head.fit_nodes(draw(9, D), draw_targets(9))
    with pytest.raises(ValueError, match=r"hidden: expected floating point of shape \[8, 10\]"):
        ensemble().fit_nodes(draw(9, D), draw_targets(8))
