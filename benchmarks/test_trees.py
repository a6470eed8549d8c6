"""Building trees over many classes, on one core: recipes, and the tables that the kernels read.

pytest benchmarks/test_trees.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hstree.trees import cluster_tree, huffman_tree, random_tree

MILLION, WORDS = 1_000_000, 33_278


@pytest.mark.parametrize("recipe", ["random", "huffman", "cluster", "tables"])
def test_trees(benchmark: Any, recipe: str) -> None:
    """``tables``: those of a Huffman tree."""
    classes = WORDS if recipe == "cluster" else MILLION
    frequencies = 1.0 / np.arange(1, classes + 1)
    vectors = np.random.default_rng(0).normal(size=(WORDS, 100)).astype(np.float32)
    build = {
        "random": lambda: random_tree(classes),
        "huffman": lambda: huffman_tree(frequencies),
        "cluster": lambda: cluster_tree(vectors, frequencies),
        "tables": lambda tree: tree.tables(),
    }

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((huffman_tree(frequencies),) if recipe == "tables" else ()), {}

    benchmark.group = f"trees ({classes} classes)"
    made = benchmark.pedantic(build[recipe], setup=fresh, rounds=3)
    assert made.n_binary == classes - 1
