"""Losses of trees and mixtures against single trees walked from their roots, and the correlation of
their losses; the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from heads.support import HEADS, V, make, probabilities

from hstree.__main__ import main
from hstree.heads import TreeEnsemble
from hstree.lab import tree_loss
from hstree.lm.run import load_run
from hstree.lm.train import evaluate
from hstree.trees import Tree
from lab.toy_models import all_contexts, toy_model, toy_text


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind.startswith("trees")])
def test_losses_of_trees_and_mixtures(kind: str) -> None:
    head = make(kind)
    assert isinstance(head, TreeEnsemble)
    model, text = toy_model(head), toy_text(V)
    found = tree_loss(model, text)
    assert found.tokens == len(text) - 1
    assert found.mixture == pytest.approx(evaluate(model, text, 1), rel=1e-5)
    hidden, target = all_contexts(model, text)
    place = np.arange(len(target)), target.numpy()
    gates = head.log_gate(hidden).exp().detach()
    trees = []
    for t in range(head.n_trees):  # each tree by itself, walked from its root
        single = make(kind)
        assert isinstance(single, TreeEnsemble)
        single.log_gate = lambda h, t=t: torch.full((len(h), head.n_trees), -np.inf).index_fill(  # type: ignore[method-assign]
            1, torch.tensor(t), 0.0
        )
        log_prob = single.class_log_prob(hidden).detach().numpy()[place]
        trees.append(-log_prob.astype(np.float64))
    np.testing.assert_allclose(found.trees, np.mean(trees, axis=1), rtol=1e-5)
    expected = np.corrcoef(np.stack(trees)).reshape(head.n_trees, head.n_trees)
    np.testing.assert_allclose(found.correlation, expected, atol=1e-5)
    walked = np.log(probabilities(head, hidden)[place]).mean()
    assert found.mixture == pytest.approx(-walked, rel=1e-5)
    uniform = -np.log(np.exp(-np.stack(trees)).mean(0)).mean()
    assert found.uniform == pytest.approx(uniform, rel=1e-5)
    np.testing.assert_allclose(found.gate, gates.mean(0), rtol=1e-5)
    entropy = -(gates * gates.log()).sum(1)
    assert found.gate_perplexity == pytest.approx(entropy.exp().mean().item(), rel=1e-5)


def test_an_untrained_tree_is_the_unigram_model() -> None:
    """Two equal trees err alike, so mixing gains nothing."""
    counts = [5, 1, 9, 30, 2, 2, 6, 7, 8]
    tree = Tree.from_nested(((0, 1, 2), 3, (4, 5, 6), (7, 8)))
    head = TreeEnsemble(4, 9, [tree, tree], frequencies=counts)
    text = np.array([3, 0, 1, 2, 3, 8, 6])
    found = tree_loss(toy_model(head), text)
    unigram = -np.log(np.array(counts)[text[1:]] / sum(counts)).mean()
    assert found.trees == pytest.approx([unigram] * 2, rel=1e-6)
    assert found.mixture == pytest.approx(found.uniform) == pytest.approx(unigram, rel=1e-6)
    assert found.correlation == pytest.approx(np.ones((2, 2)))


# The command


@pytest.mark.usefixtures("runs")
def test_page_figures_and_picture(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert main(["analyze", "tree", "trees", "--output", str(folder)]) == 0
    names = {"tree.md", "tree.json", "tree-loss.png"}
    assert {path.name for path in folder.iterdir()} == names
    data = json.loads((folder / "tree.json").read_text())
    run = load_run("trees")
    assert data["mixture"] == pytest.approx(evaluate(run.model, run.corpus().test, 1), rel=1e-5)
    rows = data["Losses, and what mixing gains (nats per token)"]
    assert [row["loss"] for row in rows[:2]] == data["trees"]
    assert rows[-1]["loss"] == data["mixture"]
    gains = rows[-2]["gain"] + rows[-1]["gain"]
    assert gains == pytest.approx(np.mean(data["trees"]) - data["mixture"])
    assert "**Correlation of the losses**" in (folder / "tree.md").read_text()
