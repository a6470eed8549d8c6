"""Random trees, and plain-Python twins of hstree.trees over nested tuples."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st

MAX_DEPTH = 64


def _number(shape, classes):
    if shape is None:
        return next(classes)
    return tuple(_number(child, classes) for child in shape)


@st.composite
def nested_trees(draw, max_leaves=40, max_children=5):
    """Nested tuples over classes 0 .. V - 1 in random order; an int for V = 1."""
    shape = draw(
        st.recursive(
            st.none(),
            lambda below: st.lists(below, min_size=2, max_size=max_children),
            max_leaves=max_leaves,
        )
    )
    n_classes = len(leaves(_number(shape, iter(range(10**6)))))
    return _number(shape, iter(draw(st.permutations(range(n_classes)))))


@st.composite
def trees_of_groups(draw):
    """A root, and below it classes and groups of classes."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=8))
    classes = iter(draw(st.permutations(range(sum(sizes)))))
    groups = [tuple(next(classes) for _ in range(size)) for size in sizes]
    return tuple(group if len(group) > 1 else group[0] for group in groups)


@st.composite
def trees_of_paths(draw):
    """A root of two or more children, and binary nodes below it; an int for V = 1."""
    below = st.recursive(st.none(), lambda half: st.tuples(half, half), max_leaves=12)
    shape = draw(st.none() | st.lists(below, min_size=2, max_size=6))
    n_classes = len(leaves(_number(shape, iter(range(10**6)))))
    return _number(shape, iter(draw(st.permutations(range(n_classes)))))


def leaves(nested):
    """Classes from left to right."""
    if not isinstance(nested, tuple):
        return [nested]
    return [c for child in nested for c in leaves(child)]


def preorder(nested):
    """The inner nodes (tuples) in preorder, by identity."""
    if not isinstance(nested, tuple):
        return []
    return [nested] + [node for child in nested for node in preorder(child)]


def paths(nested):
    """{class: [(node number in preorder, child ordinal), ...]}, root first."""
    found = {}
    counter = iter(range(10**6))

    def walk(item, above):
        if not isinstance(item, tuple):
            found[item] = above
            return
        number = next(counter)
        for k, child in enumerate(item):
            walk(child, [*above, (number, k)])

    walk(nested, [])
    return found


def arrays(nested):
    """(order, node_offset, boundary)."""
    order = leaves(nested)
    position = {c: i for i, c in enumerate(order)}
    offset, boundary = [0], []
    for node in preorder(nested):
        boundary += [position[leaves(child)[0]] for child in node]
        boundary.append(position[leaves(node)[-1]] + 1)
        offset.append(len(boundary))
    return order, offset, boundary


def group_bound(n_classes, clusters):
    """The default of max_group in Tree.collapse, at least 4 sqrt(V) and 4 V / C."""
    bound = 1
    while bound**2 < 16 * n_classes or bound * clusters < 4 * n_classes:
        bound += 1
    return bound


def collapse(nested, clusters, binary=False, frequencies=None, max_group=None):
    """Tree.collapse on nested tuples, step by step."""
    n_classes = len(leaves(nested))
    if n_classes == 1:
        return nested
    if binary:
        max_group = n_classes
    elif max_group is None:
        max_group = group_bound(n_classes, min(clusters, n_classes))
    position = {c: i for i, c in enumerate(leaves(nested))}
    children = list(nested)
    stuck = set()

    def parts(items):
        return sum(math.ceil(len(leaves(item)) / max_group) for item in items)

    while True:
        candidates = [
            i
            for i, child in enumerate(children)
            if isinstance(child, tuple) and id(child) not in stuck
        ]
        if not candidates:
            break

        def rank(i):
            below = leaves(children[i])
            mass = sum(frequencies[c] for c in below) if frequencies is not None else len(below)
            return (-mass, -len(below), position[below[0]])

        i = min(candidates, key=rank)
        opened = children[:i] + list(children[i]) + children[i + 1 :]
        if parts(children) < parts(opened) > clusters:
            stuck.add(id(children[i]))
        else:
            children[:] = opened

    def divided(child):
        """A child of the root as one, or as equal parts."""
        n = parts([child])
        if binary or not isinstance(child, tuple):
            return [child]
        classes = leaves(child)
        ends = [len(classes) * i // n for i in range(n + 1)]
        equal = [tuple(classes[a:b]) for a, b in pairwise(ends)]
        return [part if len(part) > 1 else part[0] for part in equal]

    return tuple(part for child in children for part in divided(child))


def is_valid(order, node_offset, boundary):
    """Whether three lists are a tree, by building it."""
    n_classes = len(order)
    if n_classes == 0 or sorted(order) != list(range(n_classes)):
        return False
    if not node_offset or node_offset[0] != 0 or node_offset[-1] != len(boundary):
        return False
    if any(b - a < 3 for a, b in pairwise(node_offset)):
        return False
    nodes = [boundary[a:b] for a, b in pairwise(node_offset)]
    counter = iter(nodes)

    def build(begin, end, depth):
        if end - begin == 1:
            return True
        node = next(counter, None)
        if node is None or depth > MAX_DEPTH or node[0] != begin or node[-1] != end:
            return False
        pairs = list(pairwise(node))
        return all(a < b for a, b in pairs) and all(build(a, b, depth + 1) for a, b in pairs)

    return build(0, n_classes, 1) and next(counter, None) is None
