"""Files of ensembles of trees: what is saved, the memory of loading, and damaged files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from heads.support import make, trees
from hstree.heads import ForestSoftmax, TreeEnsemble, load_head
from hstree.heads.state import EXTRA_STATE, saved_tables
from hstree.heads.trees import Groups, Paths
from hstree.trees import Tree, build_ensemble

SHAPES = ("trees, subset", "trees, groups")
TABLES = f"below.{EXTRA_STATE}"


def test_the_shape_is_saved(tmp_path: Path) -> None:
    """Trees of two classes in each cluster have both."""
    built = [Tree.from_nested(((0, 1), (2, 3), 4))]
    for groups, kind in ((False, Paths), (True, Groups)):
        TreeEnsemble(6, 5, built, groups=groups).save(tmp_path / "head")
        loaded = load_head(tmp_path / "head")
        assert isinstance(loaded, TreeEnsemble)
        assert isinstance(loaded.below, kind)


def test_a_group_above_the_bound_stays_as_it_was(tmp_path: Path) -> None:
    """Trees that were built without the bound, or with another one."""
    counts = [0] * 250 + list(range(1, 51))
    plain = build_ensemble("huffman", 300, 2, counts)
    built = [tree.collapse(16, frequencies=counts, max_group=300) for tree in plain]
    assert max(np.diff(tree.node_offset[1:]).max() - 1 for tree in built) > 200
    head = TreeEnsemble(8, 300, built, frequencies=counts)
    head.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert isinstance(loaded, TreeEnsemble)
    assert loaded.trees == built
    forest = ForestSoftmax(8, 300, trees=built)
    forest.save(tmp_path / "forest")
    assert torch.equal(load_head(tmp_path / "forest").cluster, forest.cluster)  # type: ignore[arg-type]


# Tables


@pytest.mark.parametrize("groups", [False, True])
def test_tables_of_several_trees(groups: bool) -> None:
    """Those of each tree, one after the other, and edges from both of their ends."""
    built = trees("huffman", 3, 7, not groups, n_classes=300)
    below = TreeEnsemble(4, 300, built).below
    tables = below.tables()
    assert below.max_depth == max(tree.tables(groups).max_depth for tree in built)
    path_begin = 0
    for t, tree in enumerate(built):
        of_tree, edges = tree.tables(groups), tree.edges()
        if groups:
            assert tables["order"][t].tolist() == tree.order.tolist()
            assert tables["begin"][t].tolist() == tree.boundary[:8].tolist()
        else:
            assert tables["leaf_position"][t].tolist() == of_tree.leaf_position.tolist()
            assert (tables["path_offset"][t] - path_begin).tolist() == of_tree.path_offset.tolist()
            path = tables["path"][path_begin : path_begin + len(of_tree.path)]
            assert path.tolist() == of_tree.path.tolist()
            path_begin += len(path)
        assert of_tree.root_child is not None
        assert tables["root_child"][t].tolist() == [*of_tree.root_child.tolist(), 7, -1]
        children = np.where(edges.child_node < 0, ~tree.order[edges.begin], edges.child_node)
        found = tables["edge"][t, : tree.n_edges].numpy()
        np.testing.assert_array_equal(found, np.stack([edges.node, children], 1))
        leaf_edge = tables["leaf_edge"][t].numpy()
        np.testing.assert_array_equal(tree.order[edges.begin[leaf_edge]], np.arange(300))
        assert (edges.child_node[leaf_edge] < 0).all()
        node = tables["node"][t, : tree.n_nodes].numpy()
        assert node[0].tolist() == [2, 0, 0, 7, -1]
        first = edges.begin[tree.node_offset[1:-1] - np.arange(1, tree.n_nodes)]
        above = np.flatnonzero(edges.child_node >= 0)
        above = above[np.argsort(edges.child_node[above])]
        np.testing.assert_array_equal(node[1:, 0], 1 if groups else 0)
        np.testing.assert_array_equal(node[1:, 1], first if groups else range(tree.n_nodes - 1))
        np.testing.assert_array_equal(node[:, 2], tree.node_offset[:-1] - np.arange(tree.n_nodes))
        np.testing.assert_array_equal(node[:, 3], tree.n_children)
        np.testing.assert_array_equal(node[1:, 4], above)
    assert groups or path_begin == len(tables["path"])


# Memory

STATUS = Path("/proc/self/status")
PEAK = """
import sys
from pathlib import Path

from hstree.heads import load_head


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


load_head(sys.argv[1])
before = peak()
load_head(sys.argv[2])
print(peak() - before)
"""


def groups_of_equal_size(n_classes: int, clusters: int, seed: int) -> Tree:
    """In random order."""
    order = np.random.default_rng(seed).permutation(n_classes)
    ends = np.arange(clusters + 1) * (n_classes // clusters)
    sizes = np.array([clusters, *np.diff(ends)])
    places = [np.arange(begin, end + 1) for begin, end in pairwise(ends)]
    return Tree(order, np.append(0, np.cumsum(sizes + 1)), np.concatenate([ends, *places]))


@pytest.mark.skipif(not STATUS.exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("kind", SHAPES)
def test_memory_is_at_most_three_times_the_file(kind: str, tmp_path: Path) -> None:
    """Of a process of its own, beyond what it takes for a small head."""
    n_classes, n_trees = 2**19, 4
    if kind == "trees, groups":
        built = [groups_of_equal_size(n_classes, 512, seed) for seed in range(n_trees)]
    else:
        built = build_ensemble("random", n_classes, n_trees, clusters=512, binary=True)
    head = TreeEnsemble(16, n_classes, built)
    head.save(tmp_path / "large")
    make(kind).save(tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "small", tmp_path / "large"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    size = (tmp_path / "large").stat().st_size
    assert int(done.stdout) < 3 * size, int(done.stdout) / size


# Damaged files


def set_entry(place: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(table: Tensor) -> Tensor:
        table[place] = value
        return table

    return change


def write_with(path: Path, kind: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """A saved head with other tables."""
    make(kind).save(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tables = {name: value.clone() for name, value in saved_tables(tensors, "below.").items()}
    change(tables)
    tensors[TABLES] = torch.frombuffer(bytearray(save(tables)), dtype=torch.uint8)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("order", set_entry(3, 37), r"order\[3\]: expected a class from 0 to 36, got 37"),
        ("order", lambda order: order[[0, 0, *range(2, 37)]], r"order\[1\]: class .* twice \(.*0"),
        ("order", lambda order: order[:-1], "35"),
        ("order", lambda order: order.float(), "order: expected integers, got dtype float32"),
        ("node_offset", set_entry(-1, 2**40), r"node_offset\[.*\]: expected at most the length"),
        ("boundary", set_entry(0, -5), r"boundary\[0\]: .* expected it to begin at 0, got -5"),
    ],
)
def test_damaged_trees_are_refused(
    kind: str, table: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    def damage(tables: dict[str, Tensor]) -> None:
        tables[f"trees.1.{table}"] = change(tables[f"trees.1.{table}"]).contiguous()

    write_with(tmp_path / "damaged", kind, damage)
    with pytest.raises(ValueError, match=f"damaged, which is damaged .*{message}"):
        load_head(tmp_path / "damaged")


@pytest.mark.parametrize("kind", SHAPES)
def test_a_tree_of_the_other_shape_is_refused(kind: str, tmp_path: Path) -> None:
    (other,) = trees("huffman", 1, 8, kind == "trees, groups")

    def replace(tables: dict[str, Tensor]) -> None:
        for name, array in other.arrays().items():
            tables[f"trees.1.{name}"] = torch.tensor(array)

    write_with(tmp_path / "damaged", kind, replace)
    message = "two levels, a root and below it" if kind == "trees, groups" else "binary nodes below"
    with pytest.raises(ValueError, match=f"damaged, which is damaged .*trees: expected {message}"):
        load_head(tmp_path / "damaged")


@pytest.mark.parametrize("value", [-1, 10, 2**31 - 1])
def test_damaged_subsets_are_refused(value: int, tmp_path: Path) -> None:
    def damage(tables: dict[str, Tensor]) -> None:
        tables["feature_index"][1, -1] = value

    write_with(tmp_path / "damaged", "trees, subset", damage)
    with pytest.raises(ValueError, match=r"feature_index\[1, .*\]: expected increasing in \[0, 10"):
        load_head(tmp_path / "damaged")


def change_header(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert old in content
        assert len(old) == len(new)
        return content.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"[1, 2]".ljust(len(content) - 8),
        change_header(b'"data_offsets":[0,', b'"data_offsets":[9,'),
        change_header(b'"data_offsets":[0,', b'"data_offsets":[],'),
        change_header(b'"dtype":"I64"', b'"dtype":"I63"'),
        change_header(b'"dtype":"I64"', b'"dtype":"I32"'),
        change_header(b'"shape":[37]', b'"shape":[73]'),
        change_header(b'"shape":[37]', b'"shape":"37"'),
        change_header(b"trees.0.order", b"trees.9.order"),
    ],
)
def test_damaged_tables_are_refused(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    head = make("trees, groups")
    state: dict[str, Any] = head.state_dict()
    content = bytearray(change(state[TABLES].numpy().tobytes()))
    damaged = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
    head.save(tmp_path / "head")
    with safe_open(tmp_path / "head", "pt") as file:
        metadata = file.metadata()
    save_file(state | {TABLES: damaged}, tmp_path / "damaged", metadata)
    with pytest.raises(ValueError, match="damaged, which is damaged"):
        load_head(tmp_path / "damaged")
    with pytest.raises(ValueError, match="tables"):
        head.load_state_dict(state | {TABLES: damaged})
