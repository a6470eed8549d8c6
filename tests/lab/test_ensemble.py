"""Words, agreement and losses of trees, against definitions on small cases; the command."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from heads.support import FREQUENCIES, HEADS, V, make, probabilities
from heads.support import trees as build_trees
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.heads import Softmax, TreeEnsemble
from hstree.lab import frequency_loss, tree_agreement, tree_loss
from hstree.lab.ensemble.clusters import (
    adjusted_rand_index,
    heaviest_clusters,
    nearest_words,
    root_partition,
)
from hstree.lab.ensemble.report import (
    agreement_picture,
    agreement_table,
    cluster_table,
    frequency_picture,
    frequency_table,
    level_picture,
    level_table,
    mixture_table,
    nearest_table,
    tree_table,
)
from hstree.lm.data import Vocabulary
from hstree.lm.evaluation import evaluate_stream
from hstree.lm.runs import load_run
from hstree.lm.training import train
from hstree.trees import Tree, random_tree
from lab.commands import csv_rows, refused
from lab.toy_models import all_contexts, toy_model, toy_text

NESTED = ((0, (1, 2)), 3, (4, 5, 6), (7, 8))
COUNTS = [5, 1, 9, 30, 2, 2, 6, 7, 8]
WORDS = Vocabulary([*"abcdefg", "<unk>", "<eos>"], COUNTS)


# Words


def test_root_partition() -> None:
    assert root_partition(Tree.from_nested(NESTED)).tolist() == [0, 0, 0, 1, 2, 2, 2, 3, 3]
    assert root_partition(Tree.from_nested(0)).tolist() == [0]
    binary = Tree.from_nested((((0, 1), (2, 3)), ((4, 5), ((6, 7), 8))))
    weight = [1, 1, 9, 1, 1, 1, 1, 1, 1]  # the left half is the heaviest, so sqrt(9) = 3 clusters
    assert root_partition(binary, weight).tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 2]


def test_heaviest_clusters() -> None:
    found = heaviest_clusters(Tree.from_nested(NESTED), WORDS, 2, 2)
    assert [(c.size, c.words) for c in found] == [(3, ("c", "a")), (2, ("<eos>", "<unk>"))]
    assert [c.share for c in found] == [15 / 70, 15 / 70]
    assert len(heaviest_clusters(Tree.from_nested(NESTED), WORDS, 99, 1)) == 3


def test_nearest_words() -> None:
    tree = Tree.from_nested(NESTED)
    assert nearest_words(tree, WORDS, "b", 9) == [("c", 2), ("a", 1)]
    assert nearest_words(tree, WORDS, "a", 9) == [("c", 1), ("b", 1)]
    assert nearest_words(tree, WORDS, "f", 1) == [("g", 1)]
    assert nearest_words(tree, WORDS, "d", 9) == []


# Agreement


def pairs_together(labels: list[int]) -> set[tuple[int, int]]:
    return {
        (i, j) for i, j in itertools.combinations(range(len(labels)), 2) if labels[i] == labels[j]
    }


def test_adjusted_rand_index_counts_pairs() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b = random.integers(4, size=30).tolist(), random.integers(6, size=30).tolist()
        one, other, n = pairs_together(a), pairs_together(b), math.comb(30, 2)
        chance = len(one) * len(other) / n
        expected = (len(one & other) - chance) / ((len(one) + len(other)) / 2 - chance)
        assert adjusted_rand_index(a, b) == pytest.approx(expected, rel=1e-12)
        assert adjusted_rand_index(b, a) == pytest.approx(expected, rel=1e-12)


def test_adjusted_rand_index_of_known_partitions() -> None:
    assert adjusted_rand_index([0, 0, 1, 1], [1, 1, 0, 0]) == 1
    assert adjusted_rand_index([0, 0, 1, 2], [0, 0, 1, 1]) == pytest.approx(4 / 7)
    assert adjusted_rand_index([0, 0, 0, 0], [0, 1, 2, 3]) == 0
    assert adjusted_rand_index([0, 1, 2, 3], [3, 2, 1, 0]) == 1
    assert adjusted_rand_index([0, 0, 0], [5, 5, 5]) == 1
    assert adjusted_rand_index([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(-0.5)
    with pytest.raises(ValueError, match=r"second: expected shape \(2,\) as first has, got \(3,\)"):
        adjusted_rand_index([0, 1], [0, 1, 2])


def test_agreement() -> None:
    trees = [*build_trees("cluster", 2, 6), build_trees("huffman", 1, 6)[0]]
    found = tree_agreement([*trees, trees[0]], FREQUENCIES, pairs=500, seed=3)
    parts = [pairs_together(root_partition(t, FREQUENCIES).tolist()) for t in trees]
    assert found.adjusted_rand[0, 3] == found.depth_correlation[0, 3] == found.together[3, 0] == 1
    np.testing.assert_allclose(found.chance[:3], [len(p) / math.comb(V, 2) for p in parts])
    for i, j in itertools.permutations(range(3), 2):
        shared = len(parts[i] & parts[j]) / len(parts[i])
        assert found.together[i, j] == pytest.approx(shared)
        labels = [root_partition(t, FREQUENCIES) for t in (trees[i], trees[j])]
        assert found.adjusted_rand[i, j] == pytest.approx(adjusted_rand_index(*labels))
    random = np.random.default_rng(3)
    one = random.integers(V, size=500)
    other = (one + random.integers(1, V, size=500)) % V
    depths = []
    for tree in trees:
        codes = [tree.code(c) for c in range(V)]
        depths.append(
            [
                next(d for d, (x, y) in enumerate(zip(codes[a], codes[b], strict=False)) if x != y)
                for a, b in zip(one, other, strict=True)
            ]
        )
    for i, j in itertools.combinations(range(3), 2):
        expected = scipy.stats.spearmanr(depths[i], depths[j]).statistic
        assert found.depth_correlation[i, j] == pytest.approx(expected)
        assert found.depth_correlation[j, i] == found.depth_correlation[i, j]


def test_random_trees_agree_by_chance() -> None:
    trees = [random_tree(2000, seed, root=45) for seed in (0, 1)]
    found = tree_agreement(trees, pairs=50_000)
    assert abs(found.adjusted_rand[0, 1]) < 0.003
    assert abs(found.depth_correlation[0, 1]) < 0.02
    assert found.together[0, 1] == pytest.approx(found.chance[0], rel=0.2)


def test_flat_trees_have_no_depths() -> None:
    flat = Tree.from_nested((0, 1, 2, 3))
    found = tree_agreement([flat, flat], pairs=50)
    assert np.isnan(found.depth_correlation).all()
    assert (found.adjusted_rand == 1).all()
    assert [text.get_text() for text in agreement_picture(found).axes[1].texts] == list("1--1")
    with pytest.raises(ValueError, match="pairs: expected at least 2, got 1"):
        tree_agreement([flat], pairs=1)
    with pytest.raises(ValueError, match=r"two classes or more, got \[4, 9\]"):
        tree_agreement([flat, Tree.from_nested(NESTED)])


# Losses


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind.startswith("trees")])
def test_levels_sum_to_the_loss(kind: str) -> None:
    head = make(kind)
    assert isinstance(head, TreeEnsemble)
    model, text = toy_model(head), toy_text(V)
    found = tree_loss(model, text)
    assert found.tokens == len(text) - 1
    assert found.mixture == pytest.approx(evaluate_stream(model, text), rel=1e-5)
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
    np.testing.assert_allclose(found.parts.sum(1), found.trees)
    assert found.levels[:2] == ("root", "level 2")
    assert found.levels[-1] == "leaf groups"
    assert len(found.levels) == found.parts.shape[1]
    walked = np.log(probabilities(head, hidden)[place]).mean()
    assert found.mixture == pytest.approx(-walked, rel=1e-5)
    uniform = -np.log(np.exp(-np.stack(trees)).mean(0)).mean()
    assert found.uniform == pytest.approx(uniform, rel=1e-5)
    np.testing.assert_allclose(found.gate, gates.mean(0), rtol=1e-5)
    entropy = -(gates * gates.log()).sum(1)
    assert found.gate_perplexity == pytest.approx(entropy.exp().mean().item(), rel=1e-5)
    for t, tree in enumerate(head.trees):  # how many paths come to a level, by walking them
        leaves = np.bincount(tree.edges().node[tree.edges().child_node < 0], minlength=tree.n_nodes)
        group = tree.n_children > 2
        if head.node_vectors == "leaves":
            group |= leaves == tree.n_children
        nodes = [[bool(group[node]) for node, _ in tree.path(c)] for c in range(V)]
        reached = np.zeros(found.reached.shape[1])
        for c in target.tolist():
            for level, of_group in enumerate(nodes[c]):
                reached[-1 if of_group and level else level] += 1
        np.testing.assert_allclose(found.reached[t], reached / len(target))


def test_levels_of_an_untrained_head_are_those_of_the_unigram_model() -> None:
    tree = Tree.from_nested(NESTED)
    head = TreeEnsemble(4, 9, [tree], frequencies=COUNTS)
    text = np.array([3, 0, 1, 2, 3, 8, 6])
    found = tree_loss(toy_model(head), text)
    total, mass = 70, [15, 30, 10, 15]
    child = root_partition(tree)[text[1:]]
    assert found.parts[0, 0] == pytest.approx(np.mean([-np.log(mass[k] / total) for k in child]))
    below = [-np.log(5 / 15), -np.log(10 / 15), -np.log(10 / 15), 0, -np.log(8 / 15), 0]
    assert found.parts[0, 1] == pytest.approx(np.mean(below), rel=1e-6)
    assert found.parts[0, 2] == pytest.approx((-np.log(1 / 10) - np.log(9 / 10)) / 6, rel=1e-6)
    assert found.parts[0, -1] == pytest.approx(-np.log(6 / 10) / 6, rel=1e-6)
    assert found.reached[0].tolist() == pytest.approx([1, 4 / 6, 2 / 6, 1 / 6])
    assert found.mixture == found.uniform == pytest.approx(found.trees[0])


def test_only_trees_have_levels() -> None:
    with pytest.raises(ValueError, match="expected a head of trees, got the head 'mos'"):
        tree_loss(toy_model(make("mos")), toy_text(V))


@pytest.mark.parametrize("kind", ["softmax", "mos", "adaptive", "trees, leaves", "mixtape"])
def test_bins_sum_to_the_loss(kind: str) -> None:
    model, text = toy_model(make(kind)), toy_text(V)
    loss = evaluate_stream(model, text)
    hidden, target = all_contexts(model, text)
    log_prob = model.head.log_prob(hidden).detach().double()
    each = -log_prob.gather(1, target[:, None])[:, 0].numpy()
    bins = frequency_loss(model, text, FREQUENCIES)
    assert [(f.first, f.last, f.label) for f in bins] == [
        (1, 10, "1-10"),
        (11, 30, "11-30"),
        (31, 37, "31-37"),
    ]
    assert sum(f.loss for f in bins) / (len(text) - 1) == pytest.approx(loss, rel=1e-6)
    assert sum(f.tokens for f in bins) == len(text) - 1
    order = sorted(range(V), key=lambda c: (-FREQUENCIES[c], c))
    for f in bins:
        classes = order[f.first - 1 : f.last]
        assert f.tokens == np.isin(text[1:], classes).sum()
        assert (f.most, f.least) == (FREQUENCIES[classes[0]], FREQUENCIES[classes[-1]])
        if f.tokens:
            assert f.mean == pytest.approx(each[np.isin(target, classes)].mean(), rel=1e-4)
        else:
            assert math.isnan(f.mean)


def test_bins_of_a_large_vocabulary() -> None:
    model = toy_model(Softmax(4, 1001))
    bins = frequency_loss(model, np.array([0, *range(1001)]), np.arange(1001))
    assert [f.label for f in bins] == ["1-10", "11-30", "31-100", "101-300", "301-1,000", "1,001"]
    assert [f.tokens for f in bins] == [10, 20, 70, 200, 700, 1]
    assert (bins[0].most, bins[0].least, bins[-1].most) == (1000, 991, 0)
    with pytest.raises(ValueError, match="frequencies: expected 1001, one for each class"):
        frequency_loss(model, np.arange(3), [1, 2])


# Tables and pictures


def test_tables_and_pictures() -> None:
    head = make("trees, wide, subset, context")
    assert isinstance(head, TreeEnsemble)
    model, text = toy_model(head), toy_text(V)
    vocabulary = Vocabulary([*(f"w{c}" for c in range(V - 2)), "<unk>", "<eos>"], FREQUENCIES)
    loss = tree_loss(model, text)
    shapes = tree_table(loss, head.trees, FREQUENCIES)
    assert [row[0] for row in shapes.rows] == ["1", "2", "3"]
    assert [float(row[6]) for row in shapes.rows] == pytest.approx(loss.trees.tolist(), abs=1e-4)
    levels = level_table(loss)
    assert (levels.rows[0][0], levels.rows[-2][0], levels.rows[-1][0]) == (
        "root",
        "leaf groups",
        "all",
    )
    for column in range(2, 6):
        cells = [float(row[column]) for row in levels.rows]
        assert sum(cells[:-1]) == pytest.approx(cells[-1], abs=0.03 if column == 5 else 0.001)
    mixing = [float(row[1]) for row in mixture_table(loss).rows]
    assert mixing[0] >= mixing[1]  # Jensen
    agreement = tree_agreement(head.trees, FREQUENCIES, pairs=100)
    assert [row[0] for row in agreement_table(agreement).rows] == ["1, 2", "1, 3", "2, 3"]
    clusters = [heaviest_clusters(tree, vocabulary, 2, 3) for tree in head.trees]
    assert len(cluster_table(clusters).rows) == 6
    near = {"w1": [nearest_words(tree, vocabulary, "w1", 3) for tree in head.trees], "w2": [()]}
    rows = nearest_table(near).rows
    assert rows[-1] == ("w2", "1", "- (directly under the root)")
    bins = {
        name: frequency_loss(toy_model(make(name)), text, FREQUENCIES)
        for name in ("trees, sparse", "softmax")
    }
    table = frequency_table(bins)
    assert float(table.rows[-1][4]) == pytest.approx(
        sum(f.loss for f in bins["trees, sparse"]) / (len(text) - 1), abs=1e-4
    )
    stacked, visits = level_picture(loss).axes
    losses = [*loss.trees, loss.uniform, loss.mixture]
    assert sum(bar.get_width() for bar in stacked.patches) == pytest.approx(sum(losses))
    assert [text.get_text() for text in stacked.texts] == [f" {value:.2f}" for value in losses]
    assert len(visits.lines) == 4  # of the trees, and log 2
    level_picture(tree_loss(toy_model(make("trees")), text))
    assert len(agreement_picture(agreement).axes[0].texts) == 9
    means, shares, difference = frequency_picture(bins).axes
    heights = [bar.get_height() for bar in means.patches]
    np.testing.assert_allclose(heights, [f.mean for found in bins.values() for f in found])
    assert sum(bar.get_height() for bar in shares.patches) == pytest.approx(200)
    assert difference.get_title() == "loss above that of trees, sparse"
    assert len(difference.patches) == len(bins["softmax"])
    assert len(frequency_picture({"softmax": bins["softmax"]}).axes) == 2


# The command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, runs ``trees``, ``one-tree`` and ``softmax`` on it, and a
    run ``others`` on another."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data", sentences=100)
    for name, options in (
        ("trees", {"head": "trees", "gate": "context", "leaf": 2}),
        ("one-tree", {"head": "trees", "n_trees": 1, "root": 1}),
        ("softmax", {"head": "softmax"}),
    ):
        train(small_config(data, folder / name, epochs=1, **options))
    other = write_corpus(folder / "other", sentences=60, seed=3)
    train(small_config(other, folder / "others", epochs=1))
    return folder


@pytest.fixture
def among_the_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return refused(capsys, "analyze", "tree", *arguments, "--output", "no", left="no")


def stream_loss(name: str) -> float:
    run = load_run(name)
    return evaluate_stream(run.model, run.corpus().test)


@pytest.mark.usefixtures("among_the_runs")
def test_losses_are_those_of_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    options = ["--against", "softmax", "one-tree", "--word", "cat", "--clusters", "3"]
    assert main(["analyze", "tree", "trees", *options, "--output", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Agreement of pairs of trees" in out
    assert {path.name for path in folder.iterdir()} == {
        "tree.md",
        "tree.json",
        "tree.csv",
        "tree-loss-by-level.png",
        "tree-agreement.png",
        "tree-loss-by-frequency.png",
    }
    data: dict[str, Any] = json.loads((folder / "tree.json").read_text())
    assert data["loss"]["mixture"] == pytest.approx(stream_loss("trees"), rel=1e-5)
    assert set(data["nearest"]) == {"cat"}
    tokens = data["loss"]["tokens"]
    rows = csv_rows(folder / "tree.csv")
    for name in ("trees", "softmax", "one-tree"):
        bins = data["frequency"][name]
        assert sum(f["tokens"] for f in bins) == tokens
        assert sum(f["loss"] for f in bins) / tokens == pytest.approx(stream_loss(name), rel=1e-5)
        of_run = [r for r in rows if r["run"] == name and r["kind"] == "frequency"]
        assert [float(r["loss"]) for r in of_run] == [f["loss"] for f in bins]
    for t, parts in enumerate(data["loss"]["parts"]):
        of_tree = [float(r["loss"]) for r in rows if r["tree"] == str(t + 1)]
        assert sum(of_tree) / tokens == pytest.approx(sum(parts))


@pytest.mark.usefixtures("among_the_runs")
def test_one_tree_and_words_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "tree", "one-tree", "--output", str(tmp_path)]) == 0
    assert "Agreement" not in capsys.readouterr().out
    assert not (tmp_path / "tree-agreement.png").exists()
    data = json.loads((tmp_path / "tree.json").read_text())
    loss = data["loss"]
    assert sum(loss["parts"][0]) == pytest.approx(loss["mixture"]) == loss["uniform"]
    run = load_run("one-tree")
    frequencies = dict(zip(run.vocabulary.words, run.vocabulary.frequencies, strict=True))
    shown = [frequencies[word] for word in data["nearest"]]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) > 2


@pytest.mark.usefixtures("among_the_runs")
def test_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "softmax: model: expected a head of trees, got the head 'softmax'"
    assert expected in fails(capsys, "softmax")
    assert "--word: 'zebra' is not in the vocabulary" in fails(capsys, "trees", "--word", "zebra")
    others = fails(capsys, "trees", "--against", "softmax", "others")
    assert "--against: expected the words of trees, got others in others" in others
    assert "trees: expected every run and file once, got this one twice" in fails(
        capsys, "trees", "--against", "trees"
    )
    assert "absent: no such run folder" in fails(capsys, "trees", "--against", "absent")
    assert "--clusters: expected at least 1, got 0" in fails(capsys, "trees", "--clusters", "0")
