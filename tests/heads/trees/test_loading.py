"""Loading trees: memory, and files whose trees are damaged."""

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

from heads.support import make
from hstree.heads import TreeEnsemble, load_head
from hstree.heads.state import EXTRA_STATE, saved_tables
from hstree.heads.trees.layout import LEAF, WIDE, Layout
from hstree.trees import Tree

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


def two_levels(n_classes: int, clusters: int, seed: int) -> Tree:
    """Clusters of equal size in random order."""
    order = np.random.default_rng(seed).permutation(n_classes)
    ends = np.arange(clusters + 1) * (n_classes // clusters)
    sizes = np.array([clusters, *np.diff(ends)])
    places = [np.arange(begin, end + 1) for begin, end in pairwise(ends)]
    return Tree(order, np.append(0, np.cumsum(sizes + 1)), np.concatenate([ends, *places]))


@pytest.mark.skipif(not STATUS.exists(), reason="the peak of a process is read from /proc")
def test_memory_is_at_most_three_times_the_file(tmp_path: Path) -> None:
    """Of a process of its own, beyond what it takes for a small head."""
    n_classes, small = 2**19, make("trees, leaves")
    trees = [two_levels(n_classes, 512, seed) for seed in range(4)]
    head = TreeEnsemble(16, n_classes, trees, node_vectors="leaves")
    head.save(tmp_path / "large")
    small.save(tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "small", tmp_path / "large"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    size = (tmp_path / "large").stat().st_size
    assert int(done.stdout) < 3 * size, int(done.stdout) / size
    loaded = load_head(tmp_path / "large")
    assert isinstance(loaded, TreeEnsemble)
    assert loaded.trees == head.trees
    for name, table in head.layout.tables().items():
        assert torch.equal(getattr(loaded.layout, name), table), name


def drawn_tree(random: np.random.Generator, n_classes: int, width: int) -> Any:
    """Nested tuples with nodes of 2 to 5 children below a root of this width."""

    def split(classes: list[int], parts: int) -> Any:
        if len(classes) == 1:
            return classes[0]
        cuts = np.sort(random.choice(np.arange(1, len(classes)), parts - 1, replace=False))
        ends = pairwise([0, *cuts, len(classes)])
        below = [classes[begin:end] for begin, end in ends]
        return tuple(split(part, int(random.integers(2, min(5, max(len(part), 2)) + 1)))
                     for part in below)  # fmt: skip

    return split(random.permutation(n_classes).tolist(), width)


@pytest.mark.parametrize("leaf_groups", [False, True])
def test_tables_of_several_trees(leaf_groups: bool) -> None:
    """Those of each tree, one after the other, and edges from both of their ends."""
    trees = [Tree.from_nested(drawn_tree(np.random.default_rng(seed), 300, 7)) for seed in range(3)]
    layout = Layout(trees, leaf_groups=leaf_groups)
    assert layout.max_depth == max(tree.tables(leaf_groups).max_depth for tree in trees)
    leaf_begin = layout.n_rows[WIDE]
    empty = torch.zeros(3, 301, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int32)
    group_offset, group = (layout.group_offset, layout.group) if leaf_groups else empty
    for t, tree in enumerate(trees):
        of_tree, edges = tree.tables(leaf_groups), tree.edges()
        for offset, entries, own_offset, own in (
            (layout.path_offset, layout.path, of_tree.path_offset, of_tree.path),
            (layout.wide_offset, layout.wide_path, of_tree.wide_offset, of_tree.wide_path),
            (group_offset, group, of_tree.group_offset, of_tree.group),
        ):
            begin = int(offset[t, 0])
            assert (offset[t] - begin).tolist() == own_offset.tolist()
            assert entries[begin : begin + len(own)].tolist() == own.tolist()
        assert layout.leaf_position[t].tolist() == of_tree.leaf_position.tolist()
        assert of_tree.root_child is not None
        assert layout.root_child[t, :-2].tolist() == of_tree.root_child.tolist()
        below = np.where(edges.child_node < 0, ~tree.order[edges.begin], edges.child_node)
        found = layout.edge[t, : tree.n_edges].numpy()
        np.testing.assert_array_equal(found, np.stack([edges.node, below], 1))
        leaf_edge = layout.leaf_edge[t].numpy()
        np.testing.assert_array_equal(tree.order[edges.begin[leaf_edge]], np.arange(300))
        assert (edges.child_node[leaf_edge] < 0).all()
        node, of_layout = layout.node[t, : tree.n_nodes].numpy(), layout.trees[t]
        row = of_layout.first_row + np.where(of_layout.kind == LEAF, leaf_begin, 0)
        np.testing.assert_array_equal(node[:, 0], np.array([0, 1, 1, 2])[of_layout.kind])
        np.testing.assert_array_equal(node[:, 1], row)
        np.testing.assert_array_equal(node[:, 2], tree.node_offset[:-1] - np.arange(tree.n_nodes))
        np.testing.assert_array_equal(node[:, 3], tree.n_children)
        above = np.flatnonzero(edges.child_node >= 0)
        of_preorder = above[np.argsort(edges.child_node[above])]
        assert node[:, 4].tolist() == [-1, *of_preorder]
    n_last = sum(len(np.unique(e.node[e.child_node < 0])) for e in (t.edges() for t in trees))
    assert layout.mean_group == 300 * 3 / n_last


def set_entry(place: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(table: Tensor) -> Tensor:
        table[place] = value
        return table

    return change


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("order", set_entry(3, 37), r"order\[3\]: expected a class from 0 to 36, got 37"),
        ("order", set_entry(3, -1), r"order\[3\]: expected a class from 0 to 36, got -1"),
        ("order", lambda order: order[[0, 0, *range(2, 37)]], r"order\[1\]: class .* twice \(.*0"),
        ("order", lambda order: order[:-1], "35"),
        ("order", lambda order: order.float(), "order: expected integers, got dtype float32"),
        ("order", lambda order: order.view(37, 1), "order: expected a 1-D array"),
        ("node_offset", set_entry(0, 1), r"node_offset\[0\]: expected 0, got 1"),
        ("node_offset", set_entry(-1, 2**40), r"node_offset\[.*\]: expected at most the length"),
        ("node_offset", set_entry(1, -(2**60)), r"node_offset\[1\]: expected at least"),
        ("boundary", set_entry(0, -5), r"boundary\[0\]: .* expected it to begin at 0, got -5"),
        ("boundary", set_entry(1, 2**31 - 1), r"boundary\[2\]: expected more than 2147483647"),
    ],
)
def test_damaged_trees_are_refused(
    table: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    make("trees, leaves").save(tmp_path / "head")
    with safe_open(tmp_path / "head", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tables = {name: value.clone() for name, value in saved_tables(tensors, "layout.").items()}
    tables[f"trees.1.{table}"] = change(tables[f"trees.1.{table}"]).contiguous()
    content = bytearray(save(tables))
    tensors[f"layout.{EXTRA_STATE}"] = torch.frombuffer(content, dtype=torch.uint8)
    save_file(tensors, tmp_path / "damaged", metadata)
    with pytest.raises(ValueError, match=f"damaged, which is damaged .*{message}"):
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
        lambda content: content[:7],
        lambda content: content[:100],
        lambda content: content[:-1],
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
    head = make("trees, leaves")
    state: dict[str, Any] = head.state_dict()
    key = f"layout.{EXTRA_STATE}"
    content = bytearray(change(state[key].numpy().tobytes()))
    damaged = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
    head.save(tmp_path / "head")
    with safe_open(tmp_path / "head", "pt") as file:
        metadata = file.metadata()
    save_file(state | {key: damaged}, tmp_path / "damaged", metadata)
    with pytest.raises(ValueError, match="damaged, which is damaged"):
        load_head(tmp_path / "damaged")
    with pytest.raises(ValueError, match="tables"):
        head.load_state_dict(state | {key: damaged})
