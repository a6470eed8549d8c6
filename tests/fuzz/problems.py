"""Random arguments of the tree operators, and what the operators compute from them in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

from fuzz.forests import BINARY, GROUP, PATHS, ROOT, SIZES, Forest, random_forest
from fuzz.tensors import DTYPES, LAYOUTS, laid_out, sums, truth
from fuzz.truth import class_log_prob, log_softmax, mixture


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
        self.setting = setting
        self.random = np.random.default_rng(setting.seed)
        self.dtype = DTYPES[setting.dtype]
        self.forest: Forest = random_forest(
            setting.n_trees,
            setting.n_classes,
            setting.shapes,
            self.random,
            groups=setting.groups,
            wide_root=setting.wide_root,
        )
        s, forest = setting, self.forest
        size = s.features if s.subset is None else min(s.subset, s.features)
        self.feature_index: Tensor | None = None
        if s.subset is not None:
            chosen = [
                np.sort(self.random.choice(s.features, size, replace=False))
                for _ in range(s.n_trees)
            ]
            self.feature_index = torch.tensor(np.stack(chosen), dtype=torch.int32)
        self.hidden = self.draw(s.rows, s.features)
        if s.layout == "expanded" and s.rows:
            self.hidden = self.hidden[:1].expand(s.rows, -1)
        self.kind = GROUP if s.groups else BINARY
        binary = (s.n_trees, forest.n_rows[BINARY], size)
        self.weight = self.draw(*((s.n_classes, s.features) if s.groups else binary))
        self.bias = self.draw(s.n_trees, forest.n_rows[self.kind]) if s.bias else None
        self.target = torch.from_numpy(self.random.integers(0, s.n_classes, s.rows))
        self.target[torch.from_numpy(self.random.random(s.rows) < s.ignored)] = -1
        root = log_softmax(
            self.random.standard_normal((s.n_trees, s.rows, max(1, forest.n_rows[ROOT])))
        )
        self.root_log_prob = self.laid(torch.from_numpy(root).to(sums(self.dtype)))
        gate = log_softmax(self.random.standard_normal((s.rows, s.n_trees)))
        self.log_gate = self.laid(torch.from_numpy(gate).to(sums(self.dtype)))

    def draw(self, *size: int) -> Tensor:
        values = torch.from_numpy(self.setting.scale * self.random.standard_normal(size))
        return self.laid(values.to(self.dtype))

    def laid(self, tensor: Tensor) -> Tensor:
        layout = self.setting.layout
        return laid_out(tensor, "contiguous" if layout == "expanded" else layout)

    def features(self, t: int) -> Any:
        """Features [N, S] that the nodes below the root read in a tree."""
        x = truth(self.hidden)
        if self.feature_index is None or self.kind == GROUP:
            return x
        return x[:, self.feature_index[t].numpy()]

    def scores(self, t: int, temperature: float = 1.0) -> dict[int, Any]:
        """Scores [N, R] of every kind of node in tree t."""
        weight, bias = truth(self.weight), 0 if self.bias is None else truth(self.bias)[t]
        z = self.features(t) @ (weight if self.kind == GROUP else weight[t]).T + bias
        return {ROOT: truth(self.root_log_prob)[t], self.kind: z / temperature}

    def magnitude(self) -> float:
        """The largest sum of magnitudes in a score, times the number of nodes on a path."""
        s = self.setting
        longest = max(len(p) for t in range(s.n_trees) for p in self.forest.paths(t).values())
        norm = np.abs(truth(self.hidden)).sum(1).max(initial=0.0) * s.scale * 4
        return (1 + longest) * (1 + norm + 4 * s.scale + np.log(s.n_classes))

    def log_prob(self, temperature: float = 1.0) -> Any:
        """log P [N, V] of the mixture of trees."""
        rows = self.setting.rows
        each = [
            class_log_prob(self.forest, t, self.scores(t, temperature), rows)
            for t in range(self.setting.n_trees)
        ]
        return mixture(each, truth(self.log_gate))[0]

    def search_arguments(self) -> list[Any]:
        """The arguments that tree_topk and sample share."""
        there = any(node.kind == self.kind for tree in self.forest.trees for node in tree)
        own = [self.weight, self.bias] if there else [None, None]
        blocks = [None, None, *own] if self.kind == GROUP else [*own, None, None]
        root = self.root_log_prob if self.forest.n_rows[ROOT] else None
        tables = [torch.from_numpy(table) for table in self.forest.node_tables()]
        return [self.hidden, *blocks, root, self.log_gate, self.feature_index, *tables]
