"""The attributes of an ensemble that its parts read."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.heads.base import Head
from hstree.heads.buffers import SavedTables
from hstree.heads.trees.blocks import Block
from hstree.heads.trees.layout import Layout
from hstree.heads.trees.tree_layout import LEAF
from hstree.trees import Tree


class EnsembleState(SavedTables, Head):
    """Sizes, tables and parameters of an ensemble. The parts of
    :class:`hstree.heads.trees.TreeEnsemble` (gate, node vectors, search, sampling) read them."""

    n_trees: int
    seed: int
    subset_size: int
    sparse: bool
    tied: bool
    trees: list[Tree]
    node_vectors: str
    layout: Layout
    block_types: list[type[Block]]
    frequencies: npt.NDArray[np.float64]

    weight: Tensor | None
    wide_weight: Tensor | None
    root_weight: Tensor | None
    bias: Tensor | None
    wide_bias: Tensor | None
    root_bias: Tensor | None
    leaf_bias: Tensor | None
    feature_index: Tensor | None
    output_embedding: Tensor
    gate_logits: Tensor
    gate_linear: nn.Linear

    def _encoded(self, hidden: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                f"head {self.name!r}: the operators of trees have no ONNX form; export the model "
                "that makes hidden and compute the head in PyTorch, use torch.export, or a flat "
                "head such as hstree.Softmax, whose log_prob and predict ONNX can express"
            )
        return super()._encoded(hidden)

    @abstractmethod
    def set_trees(self, trees: list[Tree]) -> None:
        """Set the trees and their tables. The parameters stay as they are."""

    def class_vectors(self) -> Tensor:
        """The output embedding E [V, D], as :meth:`blocks` reads it, once each time."""
        return self.output_embedding

    @abstractmethod
    def blocks(self) -> list[Block]:
        """One block for each kind of node in the trees, with the current vectors and biases."""

    def numbers_of_a_row(self, device: torch.device) -> int:
        """Scores and log-probabilities that :meth:`class_log_prob` holds for a row: those of the
        blocks, all of them together, and those of the classes. Kernels for the CPU and CUDA read
        the products of the classes in leaf groups where they are."""
        of_leaves = self.layout.n_rows[LEAF]
        scores = 2 * self.n_trees * (sum(self.layout.n_rows) - of_leaves)
        scores += of_leaves if device.type in ("cpu", "cuda") else 2 * self.n_trees * of_leaves
        return scores + self.n_classes

    @abstractmethod
    def records_gradients(self, hidden: Tensor) -> bool:
        """Whether what is computed from ``hidden`` and the parameters is differentiated."""

    @abstractmethod
    def mixed_log_prob(self, hidden: Tensor, log_gate: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, D], log_gate [N, T]."""

    @abstractmethod
    def log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""
