"""What an ensemble holds, as its parts see it."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from hstree.heads.base import Head
from hstree.heads.trees.blocks import Block
from hstree.heads.trees.layout import Layout


class EnsembleState(Head):
    """Sizes, tables and parameters of an ensemble, which its gate, node vectors, search and
    sampling read; :class:`hstree.heads.trees.TreeEnsemble` is made of these parts."""

    n_trees: int
    subset_size: int
    sparse: bool
    tied: bool
    layout: Layout
    block_types: list[type[Block]]
    frequencies: npt.NDArray[np.float64]

    weight: Tensor | None
    wide_weight: Tensor | None
    root_weight: Tensor | None
    bias: Tensor | None
    wide_bias: Tensor | None
    root_bias: Tensor | None
    scale: Tensor | None
    wide_scale: Tensor | None
    root_scale: Tensor | None
    feature_index: Tensor | None
    output_embedding: Tensor
    mass: Tensor
    gate_logits: Tensor
    gate_linear: nn.Linear

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Vectors and biases of the kinds of nodes that the trees have, as they are now."""

    @abstractmethod
    def log_gate(self, hidden: Tensor) -> Tensor:
        """log pi [N, T]: hidden [N, D]."""
