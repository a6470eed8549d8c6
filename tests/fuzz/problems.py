"""Random arguments of the tree operators, and what the operators compute from them in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from reference.tree_mixture import all_log_probs
from torch import Tensor

from fuzz.forests import PATHS, SIZES, nested_tree
from fuzz.tensors import DTYPES, LAYOUTS, laid_out, sums, truth
from hstree.trees import Tree
from hstree.trees.ensemble_tables import ensemble_tables
from hstree.trees.tables import table_sizes


@dataclass(frozen=True)
class Setting:
    """What a problem is drawn from; shown where a test fails."""

    n_trees: int
    n_classes: int
    shapes: list[str]
    groups: bool
    wide_root: bool
    rows: int
    features: int
    subset: int | None
    bias: bool
    dtype: str
    layout: str
    scale: float
    ignored: float
    seed: int


SETTINGS = st.builds(
    Setting,
    n_trees=st.integers(1, 5),
    n_classes=SIZES,
    shapes=st.lists(st.sampled_from(PATHS), min_size=1, max_size=3),
    groups=st.booleans(),
    wide_root=st.booleans(),
    rows=st.one_of(st.integers(0, 20), st.sampled_from([33, 64, 130])),
    features=st.integers(1, 24),
    subset=st.one_of(st.none(), st.integers(1, 24)),
    bias=st.booleans(),
    dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from([*LAYOUTS, "expanded"]),
    scale=st.sampled_from([0.0, 1e-3, 0.5, 2.0]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)


class Problem:
    """The trees, weights and contexts of a setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = s = setting
        self.random = np.random.default_rng(s.seed)
        self.dtype = DTYPES[s.dtype]
        root = int(self.random.integers(min(s.n_classes, 2 if s.groups else 3), s.n_classes + 1))
        root = root if s.groups or s.wide_root else 0
        shapes = ["groups"] if s.groups else s.shapes
        self.trees = [
            Tree.from_nested(nested_tree(shapes[t % len(shapes)], s.n_classes, root, self.random))
            for t in range(s.n_trees)
        ]
        sizes = [table_sizes((t.order, t.node_offset, t.boundary), s.groups) for t in self.trees]
        tables = ensemble_tables(self.trees, sizes, s.groups)
        self.tables = {name: torch.from_numpy(table) for name, table in tables.items()}
        if s.groups and s.n_classes == 1:  # one group of one class
            self.tables["root_child"] = torch.zeros(s.n_trees, 1, dtype=torch.int32)
            self.tables["begin"] = torch.tensor([[0, 1]] * s.n_trees, dtype=torch.int32)
        self.root_width = sizes[0].root_width
        self.n_binary = max(of_tree.n_binary for of_tree in sizes)
        self.feature_index: Tensor | None = None
        size = s.features if s.subset is None else min(s.subset, s.features)
        if s.subset is not None:
            chosen = [
                np.sort(self.random.choice(s.features, size, replace=False)) for _ in self.trees
            ]
            self.feature_index = torch.tensor(np.stack(chosen), dtype=torch.int32)
        self.hidden = self.draw(s.rows, s.features)
        if s.layout == "expanded" and s.rows:
            self.hidden = self.hidden[:1].expand(s.rows, -1)
        own = (s.n_trees, self.n_binary, size)
        self.weight = self.draw(*((s.n_classes, s.features) if s.groups else own))
        rows = s.n_classes if s.groups else self.n_binary
        self.bias = self.draw(s.n_trees, rows) if s.bias else None
        self.target = torch.from_numpy(self.random.integers(0, s.n_classes, s.rows))
        self.target[torch.from_numpy(self.random.random(s.rows) < s.ignored)] = -1
        self.root_log_prob = self.log_softmax(s.n_trees, s.rows, max(1, self.root_width))
        self.log_gate = self.log_softmax(s.rows, s.n_trees)

    def draw(self, *size: int) -> Tensor:
        values = torch.from_numpy(self.setting.scale * self.random.standard_normal(size))
        return self.laid(values.to(self.dtype))

    def log_softmax(self, *size: int) -> Tensor:
        values = torch.from_numpy(self.random.standard_normal(size)).log_softmax(-1)
        return self.laid(values.to(sums(self.dtype)))

    def laid(self, tensor: Tensor) -> Tensor:
        layout = self.setting.layout
        return laid_out(tensor, "contiguous" if layout == "expanded" else layout)

    def magnitude(self) -> float:
        """The largest sum of magnitudes in a score, times the number of nodes on a path."""
        s = self.setting
        longest = max(tree.height for tree in self.trees)
        norm = np.abs(truth(self.hidden)).sum(1).max(initial=0.0) * s.scale * 4
        return (1 + longest) * (1 + norm + 4 * s.scale + np.log(s.n_classes))

    def log_prob(self, temperature: float = 1.0) -> Any:
        """log P [N, V] of the mixture of trees."""
        exact = [
            x.detach().double() if x is not None and x.is_floating_point() else x
            for x in self.search_arguments()
        ]
        return truth(all_log_probs(*exact, temperature=temperature))

    def search_arguments(self) -> list[Any]:
        """The arguments that tree_topk and sample share."""
        groups, n_classes = self.setting.groups, self.setting.n_classes
        there = self.root_width < n_classes > 1 if groups else self.n_binary
        own = [self.weight, self.bias] if there else [None, None]
        blocks = [None, None, *own] if groups else [*own, None, None]
        root = self.root_log_prob if self.root_width else None
        tables = [self.tables[name] for name in ("node", "edge", "leaf_edge")]
        return [self.hidden, *blocks, root, self.log_gate, self.feature_index, *tables]
