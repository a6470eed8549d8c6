"""Building trees over many classes, on one core: recipes, and the tables that the kernels read.

pytest benchmarks/test_trees.py --benchmark-only
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hstree.trees import cluster_tree, huffman_tree, random_tree

MILLION = 1_000_000


def zipf(classes: int) -> np.ndarray[Any, Any]:
    return 1.0 / np.arange(1, classes + 1)


@pytest.mark.parametrize("recipe", ["random", "huffman"])
def test_million_classes(benchmark: Any, recipe: str) -> None:
    benchmark.group = "trees (1000000 classes)"
    frequencies = zipf(MILLION)
    build = {"random": lambda: random_tree(MILLION), "huffman": lambda: huffman_tree(frequencies)}
    tree = benchmark.pedantic(build[recipe], rounds=3, warmup_rounds=1)
    assert tree.n_classes == MILLION


def test_tables_of_a_million_classes(benchmark: Any) -> None:
    benchmark.group = "trees (1000000 classes)"
    frequencies = zipf(MILLION)

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        return (huffman_tree(frequencies),), {}

    tables = benchmark.pedantic(lambda tree: tree.tables(), setup=fresh, rounds=3)
    assert tables.n_binary == MILLION - 1


def test_cluster(benchmark: Any) -> None:
    benchmark.group = "trees (33278 classes, 100 features)"
    classes = 33_278
    vectors = np.random.default_rng(0).normal(size=(classes, 100)).astype(np.float32)
    frequencies = zipf(classes)
    tree = benchmark.pedantic(lambda: cluster_tree(vectors, frequencies), rounds=3)
    assert tree.n_classes == classes
