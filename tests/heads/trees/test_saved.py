"""Ensembles of trees saved by earlier versions, with what they computed then, under the names that
parameters have today.

``saved/NAME.safetensors`` is what :meth:`hstree.heads.Head.save` wrote,
``saved/NAME.expected.safetensors`` holds hidden vectors, results, the state of the head as it was
built from its seed, and the order of its parameters, by which the state of an optimiser is stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from heads.support import HEADS
from hstree._files import read_tensors
from hstree.heads import ForestSoftmax, TreeEnsemble, load_head
from hstree.heads.state import saved_tables
from hstree.trees import build_ensemble

SAVED = Path(__file__).parent / "saved"
KINDS = {
    "one-tree": "trees",
    "sparse-constant": "trees, sparse",
    "subset-context": "trees, wide, subset, context",
    "leaves-subset": "trees, leaves",
    "leaves-sparse": "trees, leaves, sparse",
}


def test_every_file_has_a_test() -> None:
    names = {path.name.split(".")[0] for path in SAVED.iterdir()}
    assert names == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_results_of_a_saved_head(name: str) -> None:
    head = load_head(SAVED / f"{name}.safetensors")
    expected, order = read_tensors(SAVED / f"{name}.expected.safetensors")
    hidden, target = expected["hidden"], expected["target"]
    with torch.no_grad():
        torch.testing.assert_close(head.log_prob(hidden), expected["log_prob"])
        torch.testing.assert_close(head(hidden, target).output, expected["output"])
    assert torch.equal(head.topk(hidden, 3)[1], expected["topk"])
    assert [name for name, _ in head.named_parameters()] == json.loads(order["parameters"])


@pytest.mark.parametrize("name", KINDS)
def test_saved_again_it_is_the_same(name: str, tmp_path: Path) -> None:
    path = SAVED / f"{name}.safetensors"
    load_head(path).save(tmp_path / "head")
    tensors, metadata = read_tensors(tmp_path / "head")
    wanted, wanted_metadata = read_tensors(path)
    assert metadata == wanted_metadata
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)


def test_a_group_above_the_bound_stays_as_it_was(tmp_path: Path) -> None:
    """Trees that were built without the bound, or with another one."""
    counts = [0] * 250 + list(range(1, 51))
    plain = build_ensemble("huffman", 300, 2, counts)
    trees = [tree.collapse(16, levels=2, frequencies=counts, max_group=300) for tree in plain]
    assert max(np.diff(tree.node_offset[1:]).max() - 1 for tree in trees) > 200
    head = TreeEnsemble(8, 300, trees, node_vectors="leaves", frequencies=counts)
    head.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert isinstance(loaded, TreeEnsemble)
    assert loaded.trees == trees
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "head").read_bytes()
    forest = ForestSoftmax(8, 300, trees=trees)
    forest.save(tmp_path / "forest")
    assert torch.equal(load_head(tmp_path / "forest").cluster, forest.cluster)


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_gives_the_head_that_it_gave(name: str) -> None:
    expected, order = read_tensors(SAVED / f"{name}.expected.safetensors")
    torch.manual_seed(0)
    head = HEADS[KINDS[name]]()
    state = head.state_dict()
    state |= saved_tables(state, "layout.")
    for key, value in expected.items():
        if key.startswith("initial."):
            assert torch.equal(state[key.removeprefix("initial.")], value)
    assert [name for name, _ in head.named_parameters()] == json.loads(order["parameters"])
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    sparse = {names[id(p)] for p in head.sparse_parameters()}
    own = list(names.values())
    groups = [[name for name in own if (name in sparse) == kind] for kind in (True, False)]
    assert [names for names in groups if names] == json.loads(order["groups"])
