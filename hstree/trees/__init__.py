"""Trees over classes: representation, recipes, class vectors and drawings."""

from hstree.trees.describe import describe
from hstree.trees.labels import label_means, padded_labels
from hstree.trees.nested import Nested
from hstree.trees.recipes import (
    build_ensemble,
    build_tree,
    cluster_tree,
    huffman_tree,
    random_tree,
    recipe_names,
    tree_seed,
)
from hstree.trees.tables import MAX_DEPTH, TreeEdges, TreeTables
from hstree.trees.tree import Tree
from hstree.trees.vectors import word_vectors

__all__ = [
    "MAX_DEPTH",
    "Nested",
    "Tree",
    "TreeEdges",
    "TreeTables",
    "build_ensemble",
    "build_tree",
    "cluster_tree",
    "describe",
    "huffman_tree",
    "label_means",
    "padded_labels",
    "random_tree",
    "recipe_names",
    "tree_seed",
    "word_vectors",
]
