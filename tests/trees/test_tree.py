"""Tree against plain-Python twins over nested tuples, its conversions, files and errors."""

from __future__ import annotations

import copy
import os
import pickle
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import save_file

from hstree.trees import MAX_DEPTH, Tree
from trees import support
from trees.support import nested_trees, trees_of_groups, trees_of_paths

frequency = st.one_of(
    st.just(0.0), st.integers(0, 9).map(float), st.floats(0, 1e6, allow_subnormal=False)
)


def chain(n_nodes):
    """((((0, 1), 2), 3) ...): n_nodes inner nodes on the longest path."""
    nested = 0
    for c in range(1, n_nodes + 1):
        nested = (nested, c)
    return nested


# Representation


@given(nested_trees())
def test_arrays_follow_the_definition(nested):
    tree = Tree.from_nested(nested)
    order, node_offset, boundary = support.arrays(nested)
    assert tree.order.tolist() == order
    assert tree.node_offset.tolist() == node_offset
    assert tree.boundary.tolist() == boundary
    assert [a.dtype for a in tree.arrays().values()] == [np.int32, np.int64, np.int32]
    nodes = support.preorder(nested)
    assert tree.n_classes == len(order)
    assert tree.n_nodes == len(nodes)
    assert tree.n_edges == sum(len(node) for node in nodes)
    assert tree.n_children.tolist() == [len(node) for node in nodes]
    assert tree.n_binary == sum(len(node) == 2 for node in nodes)
    assert tree.n_wide == sum(len(node) > 2 for node in nodes)
    assert tree.is_binary == all(len(node) == 2 for node in nodes)
    assert tree.root_width == (len(nested) if isinstance(nested, tuple) else 0)


@given(nested_trees())
def test_paths_codes_and_depths(nested):
    tree = Tree.from_nested(nested)
    expected = support.paths(nested)
    for c, path in expected.items():
        assert tree.path(c) == path
        assert tree.code(c) == tuple(k for _, k in path)
    depth = [len(expected[c]) for c in range(tree.n_classes)]
    assert tree.depth.tolist() == depth
    assert tree.height == max(depth)
    assert tree.average_depth() == pytest.approx(sum(depth) / len(depth))


@given(trees_of_paths())
def test_tables_of_paths(nested):
    """Binary nodes are numbered in preorder, without a wide root."""
    tree = Tree.from_nested(nested)
    tables, nodes = tree.tables(), support.preorder(nested)
    wide_root = bool(nodes) and len(nodes[0]) > 2
    binary = [m for m, node in enumerate(nodes) if len(node) == 2]
    assert (tables.n_binary, tables.max_group) == (len(binary), 0)
    assert tables.root_width == (len(nodes[0]) if wide_root else 0)
    assert (tables.root_child is None) == (not wide_root)
    order, depths = support.leaves(nested), []
    for c, path in support.paths(nested).items():
        assert tables.leaf_position[c] == order.index(c)
        expected = [binary.index(m) << 1 | (k == 0) for m, k in path if m in binary]
        assert tables.path[tables.path_offset[c] : tables.path_offset[c + 1]].tolist() == expected
        if wide_root:
            assert tables.root_child[c] == path[0][1]
        depths.append(len(expected))
    assert tables.max_depth == max(depths)
    assert tables.path_offset[0] == 0
    assert tables.path_offset[-1] == len(tables.path)
    assert tables.leaf_position.dtype == tables.path.dtype == np.int32
    assert tables.path_offset.dtype == np.int64


@given(trees_of_groups() | st.just(0))
def test_tables_of_groups(nested):
    """The root is wide even with two children, and there are no binary nodes."""
    tables, order = Tree.from_nested(nested).tables(groups=True), support.leaves(nested)
    children = nested if isinstance(nested, tuple) else ()
    assert tables.root_width == len(children)
    assert tables.max_group == max((len(c) for c in children if isinstance(c, tuple)), default=0)
    assert (tables.n_binary, tables.max_depth, len(tables.path)) == (0, 0, 0)
    assert not tables.path_offset.any()
    assert tables.leaf_position.tolist() == [order.index(c) for c in range(len(order))]
    for k, child in enumerate(children):
        assert (tables.root_child[support.leaves(child)] == k).all()


def test_tables_by_hand():
    tables = Tree.from_nested((7, (0, 1), (2, (3, 4)), 5, 6)).tables()
    assert tables.leaf_position.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert tables.root_child.tolist() == [1, 1, 2, 2, 2, 3, 4, 0]
    assert tables.path_offset.tolist() == [0, 1, 2, 3, 5, 7, 7, 7, 7]
    assert tables.path.tolist() == [1, 0, 3, 2, 5, 2, 4]
    assert (tables.root_width, tables.n_binary, tables.max_depth) == (5, 3, 2)


@pytest.mark.parametrize(
    ("nested", "groups", "message"),
    [
        ((0, (1, 2, 3)), False, "binary nodes below the root, got node 1 with 3 children"),
        (((0, 1), (2, 3, 4), 5), False, "binary nodes below the root, got node 2 with 3 children"),
        ((0, (1, (2, 3)), 4), True, "two levels, .*, got node 1 with 2 children, which are not"),
    ],
)
def test_trees_of_another_shape_have_no_tables(nested, groups, message):
    with pytest.raises(ValueError, match=f"trees: expected {message}"):
        Tree.from_nested(nested).tables(groups)


@given(nested_trees(), st.data())
def test_edges_and_masses(nested, data):
    tree = Tree.from_nested(nested)
    edges = tree.edges()
    nodes = support.preorder(nested)
    number = {id(node): m for m, node in enumerate(nodes)}
    order = support.leaves(nested)
    frequencies = data.draw(st.lists(frequency, min_size=tree.n_classes, max_size=tree.n_classes))
    masses = tree.edge_masses(frequencies)
    assert masses.dtype == np.float64
    above = {}
    e = 0
    for m, node in enumerate(nodes):
        for k, child in enumerate(node):
            below = support.leaves(child)
            begin = order.index(below[0])
            inner = isinstance(child, tuple)
            assert (edges.node[e], edges.ordinal[e]) == (m, k)
            assert edges.child_node[e] == (number[id(child)] if inner else -1)
            assert (edges.begin[e], edges.end[e]) == (begin, begin + len(below))
            assert edges.parent_edge[e] == above.get(m, -1)
            assert edges.depth[e] == (edges.depth[above[m]] + 1 if m else 0)
            assert tree.node_offset[m] - m + k == e
            assert masses[e] == pytest.approx(sum(frequencies[c] for c in below), rel=1e-12)
            if inner:
                above[number[id(child)]] = e
            e += 1
    assert e == tree.n_edges == len(edges.node) == len(masses)


def test_masses_do_not_cancel():
    tree = Tree.from_nested((0, (1, 2)))
    masses = tree.edge_masses([1e18, 1e-3, 2e-3])
    assert masses.tolist() == [1e18, 3e-3, 1e-3, 2e-3]


def test_average_depth():
    tree = Tree.from_nested((0, (1, (2, 3))))
    assert tree.average_depth() == 9 / 4
    assert tree.average_depth([8, 4, 2, 2]) == (8 * 1 + 4 * 2 + 4 * 3) / 16
    assert tree.average_depth(np.array([5e307, 0, 0, 5e307])) == 2
    with pytest.raises(ValueError, match=r"frequencies: expected a positive sum, got 0"):
        tree.average_depth([0, 0, 0, 0])
    assert Tree.from_nested(0).average_depth([3]) == 0


# Collapse


@given(nested_trees(), st.integers(2, 50), st.booleans(), st.data())
def test_collapse(nested, clusters, binary, data):
    tree = Tree.from_nested(nested)
    n = tree.n_classes
    frequencies = data.draw(
        st.none() | st.lists(st.integers(0, 5), min_size=n, max_size=n), label="frequencies"
    )
    max_group = None if binary else data.draw(st.none() | st.integers(1, 50))
    collapsed = tree.collapse(clusters, binary=binary, frequencies=frequencies, max_group=max_group)
    by_hand = support.collapse(nested, clusters, binary, frequencies, max_group)
    assert collapsed.to_nested() == by_hand
    assert Tree(**collapsed.arrays()) == collapsed  # validates again
    assert collapsed.order.tolist() == tree.order.tolist()
    assert collapsed.height <= (tree.height if binary else min(tree.height, 2))
    bound = n if binary else max_group or support.group_bound(n, min(clusters, n))
    children = nested if n > 1 else ()
    least = sum(-(-len(support.leaves(child)) // bound) for child in children)
    assert collapsed.root_width <= max(clusters, -(-n // bound), least)
    if not binary:
        assert collapsed.tables(groups=True).max_group <= bound
    flat = tree.collapse(n, binary=binary, frequencies=frequencies)
    assert flat.to_nested() == (tuple(support.leaves(nested)) if n > 1 else 0)


def test_collapse_by_hand():
    tree = Tree.from_nested((((0, 1), (2, 3)), ((4, 5), (6, 7))))
    assert tree.collapse(2).to_nested() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert tree.collapse(3).to_nested() == ((0, 1), (2, 3), (4, 5, 6, 7))
    rare_first = [0, 0, 0, 0, 0, 0, 9, 1]
    expected = ((0, 1, 2, 3), (4, 5), 6, 7)
    assert tree.collapse(4, frequencies=rare_first).to_nested() == expected
    assert tree.collapse(8).to_nested() == tuple(range(8))
    assert tree.collapse(10**12).to_nested() == tuple(range(8))


def test_collapse_to_binary_nodes_by_hand():
    tree = Tree.from_nested((((0, 1), (2, 3)), ((4, 5), (6, 7))))
    assert tree.collapse(2, binary=True) is tree
    assert tree.collapse(3, binary=True).to_nested() == ((0, 1), (2, 3), ((4, 5), (6, 7)))
    rare_first = [0, 0, 0, 0, 0, 0, 9, 1]
    collapsed = tree.collapse(4, binary=True, frequencies=rare_first)
    assert collapsed.to_nested() == (((0, 1), (2, 3)), (4, 5), 6, 7)
    assert tree.collapse(10**12, binary=True).to_nested() == tuple(range(8))
    assert Tree.from_nested(0).collapse(2, binary=True).to_nested() == 0


def test_collapse_to_groups_of_bounded_size_by_hand():
    """A cluster above the bound is replaced by its children where they need no more groups than
    itself, and otherwise divided equally. Without room the root becomes wider."""
    even = Tree.from_nested((((0, 1), (2, 3)), ((4, 5), (6, 7))))
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert even.collapse(2, max_group=4).root_width == 2
    assert even.collapse(2, max_group=3).to_nested() == pairs
    assert even.collapse(2, max_group=2).to_nested() == pairs
    assert even.collapse(2, max_group=1).to_nested() == tuple(range(8))
    chain = Tree.from_nested((0, (1, (2, (3, (4, (5, (6, 7))))))))
    divided = (0, 1, (2, 3, 4), (5, 6, 7))
    assert chain.collapse(4, max_group=3).to_nested() == divided
    assert chain.collapse(4, max_group=8).to_nested() == (0, 1, 2, (3, 4, 5, 6, 7))
    last_first = [0, 0, 0, 0, 0, 0, 0, 1]
    assert chain.collapse(4, frequencies=last_first, max_group=3).to_nested() == divided
    wide = Tree.from_nested((tuple(range(5)), (5, 6, 7), 8))
    expected = (0, (1, 2), (3, 4), 5, (6, 7), 8)
    assert wide.collapse(2, max_group=2).to_nested() == expected


def test_groups_have_up_to_four_times_the_square_root():
    tree = Tree.from_nested(chain(24))
    assert tree.collapse(6).n_children.tolist() == [6, 20]  # 4 sqrt(25)
    assert tree.collapse(5).n_children.tolist() == [5, 11, 11]  # 21 classes are divided
    few = Tree.from_nested((tuple(range(30)), (30, 31), (32, 33), (34, 35), 36))
    assert few.collapse(5) == few  # 4 * 37 / 5, rounded up


def test_collapse_passes_over_a_node_with_too_many_children():
    tree = Tree.from_nested(((0, 1, 2, 3), (4, 5), 6))
    for binary in (False, True):
        assert tree.collapse(4, binary=binary).to_nested() == ((0, 1, 2, 3), 4, 5, 6)
        assert tree.collapse(2, binary=binary) == tree  # a wider root stays


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"clusters": 1}, ValueError, "clusters: expected a whole number of at least 2, got 1"),
        ({"clusters": 2.0}, ValueError, r"clusters: expected a whole .* at least 2, got 2\.0"),
        ({"max_group": 0}, ValueError, "max_group: expected a whole .* 1, got 0"),
        ({"binary": True, "max_group": 2}, ValueError, "max_group: expected None with binary=True"),
        ({"frequencies": [1, 2]}, ValueError, r"shape \(3,\), got shape \(2,\)"),
        ({"frequencies": [1, -2, 0]}, ValueError, r"frequencies\[1\]: .* at least 0, got -2"),
        ({"frequencies": [1, 0, np.nan]}, ValueError, r"frequencies\[2\]: .* got nan"),
        ({"frequencies": [np.inf, 0, 1]}, ValueError, r"frequencies\[0\]: .* got inf"),
        ({"frequencies": [1e308] * 3}, ValueError, "frequencies: expected a finite sum, got inf"),
        ({"frequencies": ["a", "b", "c"]}, TypeError, "frequencies: expected real numbers"),
    ],
)
def test_collapse_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        Tree.from_nested((0, 1, 2)).collapse(**{"clusters": 2} | arguments)


# Validation


@pytest.mark.parametrize(
    ("order", "node_offset", "boundary", "message"),
    [
        ([], [0], [], "order: expected at least one class, got an empty array"),
        ([0, 3, 1], [0, 3, 6], [0, 1, 3, 1, 2, 3], "order[1]: expected a class from 0 to 2, got 3"),
        ([0, -1], [0, 3], [0, 1, 2], "order[1]: expected a class from 0 to 1, got -1"),
        ([2, 0, 2], [0, 4], [0, 1, 2, 3], "order[2]: class 2 appears twice (first at order[0])"),
        ([0, 1], [], [], "node_offset: expected n_nodes + 1 entries, got an empty array"),
        ([0, 1], [1, 4], [0, 1, 2], "node_offset[0]: expected 0, got 1"),
        ([0, 1], [0], [], "node_offset: expected at least one inner node for 2 classes, got none"),
        (
            [0, 1, 2],
            [0, 3, 5],
            [0, 1, 3, 1, 3],
            "node_offset[2]: expected at least node_offset[1] + 3 = 6 (at least two children), got",
        ),
        ([0, 1], [0, -(2**63)], [0, 1, 2], "node_offset[1]: expected at least node_offset[0] + 3"),
        ([0, 1], [0, 4], [0, 1, 2], "node_offset[1]: expected at most the length of boundary, 3"),
        ([0, 1], [0, 3], [0, 1, 2, 3], "node_offset[1]: expected the length of boundary, 4, got 3"),
        ([0, 1, 2], [0, 4], [0, 2, 2, 3], "boundary[2]: expected more than 2, got 2"),
        (
            [0, 1, 2],
            [0, 3, 6],
            [0, 1, 3, 0, 2, 3],
            "boundary[3]: node 1 in preorder owns [1, 3), expected it to begin at 1, got 0",
        ),
        (
            [0, 1, 2],
            [0, 3, 6],
            [0, 1, 3, 1, 2, 9],
            "boundary[5]: node 1 in preorder owns [1, 3), expected it to end at 3, got 9",
        ),
        (
            [0, 1, 2],
            [0, 3],
            [0, 1, 3],
            "node_offset: expected another inner node for the child [1, 3) of node 0, got 1 nodes",
        ),
        (
            [0, 1],
            [0, 3, 6],
            [0, 1, 2, 0, 1, 2],
            "node_offset: expected 1 inner nodes, which reach all 2 leaves, got 2",
        ),
        (
            [0],
            [0, 3],
            [0, 1, 2],
            "node_offset: expected 0 inner nodes, which reach all 1 leaves, got 1",
        ),
    ],
)
def test_invalid_arrays(order, node_offset, boundary, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Tree(order, node_offset, boundary)


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([0.0, 1.0], TypeError, "order: expected integers, got dtype float64"),
        ([True, False], TypeError, "order: expected integers, got dtype bool"),
        ([[0, 1]], ValueError, r"order: expected a 1-D array, got shape \(1, 2\)"),
        ([0, 2**31], ValueError, r"order\[1\]: expected a value that fits int32, got 2147483648"),
    ],
)
def test_invalid_dtypes(order, error, message):
    with pytest.raises(error, match=message):
        Tree(order, [0, 3], [0, 1, 2])


def test_depth_limit():
    deepest = Tree.from_nested(chain(MAX_DEPTH))
    assert deepest.height == MAX_DEPTH == 64
    assert Tree(**deepest.arrays()).tables().max_depth == MAX_DEPTH
    with pytest.raises(ValueError, match=r"nested\[0\].*at most MAX_DEPTH = 64 nested tuples"):
        Tree.from_nested(chain(MAX_DEPTH + 1))
    order, node_offset, boundary = support.arrays(chain(MAX_DEPTH + 1))
    with pytest.raises(ValueError, match=r"boundary\[192\]: node 64 is the 65th inner node"):
        Tree(order, node_offset, boundary)
    parent = [*range(-1, 64), *range(65), 64]
    with pytest.raises(ValueError, match="parent: node 64 is the 65th inner node on its path"):
        Tree.from_parents(parent)


@given(nested_trees(max_leaves=8), st.data())
def test_validation_agrees_with_the_definition(nested, data):
    """A few entries of a valid tree are overwritten: refused exactly where no tree is left."""
    arrays = [list(a) for a in support.arrays(nested)]
    for _ in range(data.draw(st.integers(1, 3))):
        array = arrays[data.draw(st.integers(0, 2))]
        edit = data.draw(st.sampled_from(["set", "drop", "add"]))
        i = data.draw(st.integers(0, max(0, len(array) - 1)))
        value = data.draw(st.integers(-2, 12))
        if edit == "add":
            array.insert(i, value)
        elif array and edit == "set":
            array[i] = value
        elif array:
            del array[i]
    if support.is_valid(*arrays):
        assert support.arrays(Tree(*arrays).to_nested()) == tuple(arrays)
    else:
        with pytest.raises(ValueError, match=r"^(order|node_offset|boundary)"):
            Tree(*arrays)


# Conversions


@given(nested_trees())
def test_round_trips(nested):
    tree = Tree.from_nested(nested)
    assert tree.to_nested() == nested
    assert Tree(**tree.arrays()) == tree
    assert Tree.from_parents(*tree.to_parents()) == tree
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert copy.deepcopy(tree) is copy.copy(tree) is tree


@given(nested_trees())
def test_parents_follow_the_definition(nested):
    parent, leaf_class = (a.tolist() for a in Tree.from_nested(nested).to_parents())
    expected = []

    def walk(item, above):
        number = len(expected)
        inner = isinstance(item, tuple)
        expected.append((above, -1 if inner else item))
        for child in item if inner else ():
            walk(child, number)

    walk(nested, -1)
    assert list(zip(parent, leaf_class, strict=True)) == expected


@given(nested_trees(), st.randoms(use_true_random=False))
def test_from_parents_takes_any_numbering(nested, random):
    """With shuffled node numbers, children stand in the order of their numbers."""
    tree = Tree.from_nested(nested)
    parent, leaf_class = (a.tolist() for a in tree.to_parents())
    new = list(range(len(parent)))
    random.shuffle(new)
    shuffled = [(-1, -1)] * len(parent)
    for i, (above, c) in enumerate(zip(parent, leaf_class, strict=True)):
        shuffled[new[i]] = (-1 if above < 0 else new[above], c)
    found = Tree.from_parents(*map(list, zip(*shuffled, strict=True)))

    def sort(item, number):
        """`item`, which is node `number` of the preorder, with its children by new number."""
        if not isinstance(item, tuple):
            return item, number + 1
        children = []
        following = number + 1
        for child in item:
            here = following
            built, following = sort(child, following)
            children.append((new[here], built))
        return tuple(built for _, built in sorted(children)), following

    assert found.to_nested() == sort(nested, 0)[0]


def test_from_parents_by_hand():
    # Leaves first, as scipy's linkage numbers them: 5 = (0, 1), 6 = (2, 4), root 7 = (3, 5, 6).
    tree = Tree.from_parents([5, 5, 6, 7, 6, 7, 7, -1])
    assert tree.to_nested() == (3, (0, 1), (2, 4))
    tree = Tree.from_parents([-1, 0, 0, 1, 1], [-1, -1, 0, 2, 1])
    assert tree.to_nested() == ((2, 1), 0)
    assert Tree.from_parents([-1]).to_nested() == 0


@pytest.mark.parametrize(
    ("parent", "leaf_class", "message"),
    [
        ([], None, "parent: expected at least one node, got an empty array"),
        ([-1, 0, 7], None, "parent[2]: expected a node from 0 to 2, or -1 for the root, got 7"),
        ([-1, 0, -2], None, "parent[2]: expected a node from 0 to 2, or -1 for the root, got -2"),
        ([-1, 0, 0, -1], None, "parent[3]: a second root (the first is node 0), expected one"),
        ([1, 0], None, "parent: expected one root, marked -1, got none"),
        ([-1, 0], None, "parent[1]: node 1 is the only child of node 0, expected at least two"),
        (
            [-1, 0, 0, 4, 3, 3, 4],
            None,
            "parent[3]: node 3 does not descend from the root 0 (its parents form a cycle)",
        ),
        ([-1, 0, 0], [-1, 0], "leaf_class: expected 3 entries, as many as parent, got 2"),
        ([-1, 0, 0], [0, 0, 1], "leaf_class[0]: expected -1 for an inner node, got 0"),
        ([-1, 0, 0], [-1, 0, 2], "leaf_class[2]: expected a class from 0 to 1, got 2"),
        ([-1, 0, 0], [-1, 0, -1], "leaf_class[2]: expected a class from 0 to 1, got -1"),
        (
            [-1, 0, 0],
            [-1, 1, 1],
            "leaf_class[2]: class 1 appears twice (first at leaf_class[1])",
        ),
    ],
)
def test_from_parents_errors(parent, leaf_class, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Tree.from_parents(parent, leaf_class)


@pytest.mark.parametrize(
    ("nested", "error", "message"),
    [
        ((), ValueError, "nested: expected two entries or more, got ()"),
        ((0, (1,)), ValueError, "nested[1]: expected two entries or more, got (1,)"),
        ((0, (1, 3)), ValueError, "nested[1][1]: expected a class from 0 to 2, got 3"),
        ((0, (1, 0)), ValueError, "nested[1][1]: class 0 appears twice (first at nested[0])"),
        ((0, (-1, 1)), ValueError, "nested[1][0]: expected a whole number from 0 to"),
        ((0, (1, "a")), TypeError, "nested[1][1]: expected an integer or a tuple, got 'a'"),
        ((0, True), TypeError, "nested[1]: expected an integer or a tuple, got True"),
        (1, ValueError, "nested: expected a class from 0 to 0, got 1"),
    ],
)
def test_from_nested_errors(nested, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Tree.from_nested(nested)


def test_from_nested_takes_lists_and_numpy_integers():
    assert Tree.from_nested([np.int64(1), [0, np.int32(2)]]).to_nested() == (1, (0, 2))


@pytest.mark.parametrize("class_id", [-1, 3])
def test_path_of_no_class(class_id):
    with pytest.raises(
        ValueError, match=f"class_id: expected a whole number from 0 to 2, got {class_id}"
    ):
        Tree.from_nested((0, 1, 2)).path(class_id)


# Identity


def test_immutable():
    given = np.array([1, 0], np.int32)
    tree = Tree(given, [0, 3], [0, 1, 2])
    given[0] = 0  # the tree has its own copy
    assert tree.order.tolist() == [1, 0]
    arrays = [*tree.arrays().values(), tree.depth, tree.tables().path, tree.edges().node]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        tree.order = given
    with pytest.raises(AttributeError):
        tree.other = 1


def test_equality_and_hash():
    a, b = Tree.from_nested((0, (1, 2))), Tree.from_nested([0, [1, 2]])
    assert a == b
    assert hash(a) == hash(b)
    others = [(0, (2, 1)), ((1, 2), 0), (0, 1, 2), ((0, 1), 2), (0, 1)]
    assert all(a != Tree.from_nested(other) for other in others)
    assert len({Tree.from_nested(other) for other in others} | {a, b}) == 6
    assert a != (0, (1, 2))


def test_fingerprint_is_the_same_everywhere():
    assert Tree.from_nested((0, (1, 2))).fingerprint == "4f26672fc850276fda7bbb3dcd2f169a"


def test_repr():
    small = Tree.from_nested((2, (0, 1)))
    assert repr(small) == "Tree.from_nested((2, (0, 1)))"
    assert eval(repr(small)) == small
    large = Tree.from_nested(tuple((2 * i, 2 * i + 1) for i in range(10)))
    assert repr(large) == "Tree(n_classes=20, n_binary=10, n_wide=1, root_width=10, height=2)"


# Files


@given(nested=nested_trees())
def test_save_and_load(tmp_path_factory, nested):
    path = tmp_path_factory.mktemp("trees") / "tree.safetensors"
    tree = Tree.from_nested(nested)
    tree.save(path)
    tree.save(str(path))  # replaces
    assert Tree.load(path) == Tree.load(str(path)) == tree
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_load_a_file_that_is_cut_off(tmp_path, keep):
    path = tmp_path / "tree"
    Tree.from_nested((0, (1, 2))).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="tree: expected a tree saved by hstree, got a file that"):
        Tree.load(path)


def test_load_something_else(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="file: no such file"):
        Tree.load(path)
    with pytest.raises(ValueError, match="expected a file, got a folder"):
        Tree.load(tmp_path)
    path.write_text("once upon a time")
    with pytest.raises(ValueError, match="not safetensors"):
        Tree.load(path)
    arrays = Tree.from_nested((0, (1, 2))).arrays()
    save_file(arrays, path)
    with pytest.raises(ValueError, match=r"format 'hstree\.Tree'\), got format None"):
        Tree.load(path)
    save_file(arrays, path, {"format": "hstree.Tree", "version": "99"})
    with pytest.raises(ValueError, match=r"expected version '1' of hstree\.Tree, got '99'"):
        Tree.load(path)
    metadata = {"format": "hstree.Tree", "version": "1"}
    save_file({**arrays, "order": arrays["order"].astype(np.float32)}, path, metadata)
    with pytest.raises(ValueError, match="expected arrays"):
        Tree.load(path)
    save_file({**arrays, "order": arrays["order"][::-1].copy() * 0}, path, metadata)
    with pytest.raises(ValueError, match=r"file: order\[1\]: class 0 appears twice"):
        Tree.load(path)


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "tree"
    Tree.from_nested((0, 1)).save(path)

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        Tree.from_nested((0, (1, 2))).save(path)
    monkeypatch.undo()
    assert Tree.load(path).to_nested() == (0, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["tree"]
    with pytest.raises(FileNotFoundError):
        Tree.from_nested((0, 1)).save(tmp_path / "absent" / "tree")
