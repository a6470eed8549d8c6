"""Tables of the trees of an ensemble."""

from __future__ import annotations

import torch

from hstree.heads.state import EXTRA_STATE
from hstree.heads.trees.layout import BINARY, ROOT, WIDE, Layout, TreeLayout
from hstree.trees import Tree

NESTED = ((0, (1, 2)), 3, (4, (5, 6), (7, 8, 9)))  # a wide root, wide and binary nodes below it


def test_kinds_and_vectors_of_a_tree() -> None:
    """A binary node has one vector, a wide node one for each child; nodes in preorder."""
    layout = TreeLayout(Tree.from_nested(NESTED))
    assert layout.kind.tolist() == [ROOT, BINARY, BINARY, WIDE, BINARY, WIDE]
    assert layout.first_row.tolist() == [0, 0, 1, 0, 2, 3]
    assert [len(edge) for edge in layout.edge] == [3, 6, 0, 3]


def test_child_of_the_root_for_every_target() -> None:
    """Of a class, of V, which is none, and of -1."""
    layout = Layout([Tree.from_nested(NESTED)] * 2)
    target = torch.tensor([0, 3, 9, 10, -1])
    assert layout.root_child[:, target].tolist() == [[0, 1, 2, 3, -1]] * 2


def test_tables_are_no_buffers_and_move() -> None:
    trees = [Tree.from_nested(NESTED), Tree.from_nested((0, 1, (2, 3, 4, 5, 6, 7, 8, 9)))]
    layout = Layout(trees, leaf_groups=True)
    assert list(layout.state_dict()) == [EXTRA_STATE]
    assert not list(layout.buffers())
    assert layout.n_rows == [1, 3, 10, 3]
    names = list(layout.tables())
    assert {"path", "wide_path", "node", "edge", "leaf_class", "group"} <= set(names)
    assert all(getattr(layout.to("meta"), name).is_meta for name in names)
    layout.half().to_empty(device="cpu")
    for name, table in layout.tables().items():
        assert torch.equal(getattr(layout, name), table)
        assert getattr(layout, name).dtype == table.dtype
