"""``hstree convert``: what it writes and prints, and how it fails."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.decoding import agreement
from hstree.heads import TreeEnsemble, load_head
from hstree.lm.models import read_stream
from hstree.lm.runs import load_run
from hstree.lm.training import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs: ``softmax``, ``tied`` to the word embeddings, and ``trees``."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data")
    train(small_config(data, folder / "softmax"))
    train(small_config(data, folder / "tied", tied=True, context_size=12))
    train(small_config(data, folder / "trees", head="trees"))
    return folder


@pytest.mark.parametrize("name", ["softmax", "tied"])
def test_draft(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(runs / name), "--root", "4", "--epochs", "40", "--seed", "1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    run = load_run(runs / name)
    softmax = run.model.head
    draft = load_head(runs / name / "draft.safetensors", embedding=softmax)
    assert isinstance(draft, TreeEnsemble)
    assert draft.output_embedding is softmax.weight
    assert [(tree.root_width, tree.height) for tree in draft.trees] == [(4, 2)]

    hidden = torch.cat(list(read_stream(run.model, run.corpus().valid)))
    found = agreement(softmax, draft, hidden)
    figures = re.findall(r"^(first order|fitted) +(\S+) +(\S+)$", out, re.MULTILINE)
    (_, *first), (_, *fitted) = figures
    assert float(fitted[1]) < 0.8 * float(first[1])
    # The command reads several streams, whose first words have less context.
    assert float(fitted[0]) == pytest.approx(found.acceptance.mean().item(), abs=0.02)

    classes, dim = softmax.weight.shape
    assert f"{4 * dim + 4 + classes}  beside {classes * dim} of" in out
    share = run.vocabulary.frequencies / run.vocabulary.frequencies.sum()
    tree = draft.trees[0]
    rows = [
        sum(int(tree.n_children[node]) if tree.n_children[node] > 2 else 1 for node, _ in path)
        for path in map(tree.path, range(classes))
    ]
    assert re.search(rf"rows for a draw +{np.round(share @ rows):.0f} ", out)

    again = runs / f"{name}-again"
    assert main([*command, "--output", str(again)]) == 0
    assert again.read_bytes() == (runs / name / "draft.safetensors").read_bytes()


def test_options(runs: Path, tmp_path: Path) -> None:
    """Several trees, fitted to few hidden states."""
    output = tmp_path / "draft"
    command = ["convert", str(runs / "softmax"), "--root", "3", "--n-trees", "2"]
    assert main([*command, "--hidden-states", "50", "--output", str(output)]) == 0
    draft = load_head(output, embedding=load_run(runs / "softmax").model.head)
    assert draft.config()["n_trees"] == 2
    assert draft.trees[0] != draft.trees[1]


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("trees", "", "expected a run with the head 'softmax', got 'trees'"),
        ("none", "", "no such run folder"),
        ("softmax", "--output {runs}/trees", "already exists; name a new file with --output"),
        ("softmax", "--output {runs}/no/draft", "--output: there is no folder"),
        ("softmax", "--root 0", "--root: expected at least 1, got 0"),
        ("softmax", "--epochs 0", "--epochs: expected at least 1, got 0"),
        ("softmax", "--seed -1 --output {runs}/new", "--seed: expected at least 0, got -1"),
    ],
)
def test_wrong_input(
    run: str, options: str, message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(runs / run), *options.format(runs=runs).split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (runs / "new").exists()
