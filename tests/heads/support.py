"""Small heads of every kind, and probabilities of a TreeEnsemble by walking its trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.heads import AdaptiveSoftmax, Head, Softmax, TreeEnsemble
from hstree.trees import Tree, build_ensemble

D, V = 10, 37
FREQUENCIES = np.random.default_rng(0).zipf(1.5, V).astype(np.int64)


def vectors(n_classes: int = V) -> npt.NDArray[np.float64]:
    return np.random.default_rng(1).standard_normal((n_classes, 6))


def trees(
    recipe: str = "huffman", n_trees: int = 1, root: int = 1, leaf: int = 1, n_classes: int = V
) -> list[Tree]:
    frequencies = np.resize(FREQUENCIES, n_classes)
    return build_ensemble(
        recipe, n_classes, n_trees, frequencies, vectors(n_classes), 3, root, leaf
    )


def embedding() -> nn.Embedding:
    return nn.Embedding(V, D)


def _trees(n_trees: int, root: int, leaf: int, **options: Any) -> Callable[..., Head]:
    def build(**more: Any) -> Head:
        return TreeEnsemble(
            D,
            V,
            trees("huffman", n_trees, root, leaf),
            frequencies=FREQUENCIES,
            **options,
            **more,
        )

    return build


def _tied(**more: Any) -> Head:
    shared = trees("huffman", 2, 8, 4)
    return TreeEnsemble(D, V, shared, node_vectors="shared", embedding=embedding(), **more)


HEADS: dict[str, Callable[..., Head]] = {
    "softmax": lambda **more: Softmax(D, V, frequencies=FREQUENCIES, **more),
    "softmax, no bias": lambda **more: Softmax(D, V, bias=False, **more),
    "softmax, tied": lambda **more: Softmax(D, V, embedding=embedding(), **more),
    "adaptive": lambda **more: AdaptiveSoftmax(
        D, V, cutoffs=(5, 20), div_value=2.0, order=torch.arange(V).flip(0), **more
    ),
    "trees": _trees(1, 1, 1),
    "trees, sparse": _trees(2, 8, 4, sparse=True, gate="constant"),
    "trees, wide, subset, context": _trees(3, 8, 5, subset_size=4, gate="context", seed=5),
    "trees, shared": _trees(2, 1, 6, node_vectors="shared", subset_size=7, gate="context"),
    "trees, shared, tied": _tied,
}
"""By description, which begins with the registered name; each takes the options of Head."""


def randomise(head: Head, seed: int = 0, scale: float = 0.5) -> Head:
    """Fills every parameter with random numbers."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=random))
    return head


def make(kind: str, device: torch.device | str = "cpu", **options: Any) -> Head:
    return randomise(HEADS[kind](**options)).to(device)


def draw(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_targets(*size: int, n_classes: int = V) -> Tensor:
    return torch.randint(n_classes, size, generator=torch.Generator().manual_seed(1))


def _leaves(nested: Any) -> list[int]:
    return (
        [c for child in nested for c in _leaves(child)] if isinstance(nested, tuple) else [nested]
    )


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def _softmax(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def probabilities(head: TreeEnsemble, hidden: Tensor, mass: Any = None) -> Any:
    """P [N, V] in float64: every tree walked from its root, every node's vectors by definition.

    mass: frequencies [V] for the means of shared vectors.
    """
    h = _array(hidden)
    result = np.zeros((len(h), head.n_classes))
    if head.n_trees == 1 or head.gate == "uniform":
        gate = np.full((len(h), head.n_trees), 1 / head.n_trees)
    elif head.gate == "constant":
        gate = _softmax(_array(head.gate_logits))[None].repeat(len(h), 0)
    else:
        gate = _softmax(h @ _array(head.gate_linear.weight).T + _array(head.gate_linear.bias))
    blocks = ("", "wide_", "root_")
    biases = [_array(getattr(head, f"{block}bias")) for block in blocks]
    free = head.node_vectors == "free"
    scales = [_array(getattr(head, f"{block}{'weight' if free else 'scale'}")) for block in blocks]
    for t, tree in enumerate(head.trees):
        features = slice(None) if head.feature_index is None else head.feature_index[t].tolist()
        x = h[:, features]
        used = [0, 0, 0]

        def mean(nested: Any, features: Any = features) -> Any:
            rows = _leaves(nested)
            weight = np.ones(len(rows)) if mass is None else np.asarray(mass, float)[rows]
            return weight @ _array(head.output_embedding)[rows][:, features] / weight.sum()

        def visit(item: Any, p: Any, root: bool, t: int = t, x: Any = x, used: Any = used) -> None:
            if not isinstance(item, tuple):
                result[:, item] += gate[:, t] * p
                return
            block = 0 if len(item) == 2 else 2 if root else 1
            rows = slice(used[block], used[block] + (1 if block == 0 else len(item)))
            used[block] = rows.stop
            if free:
                w = scales[block][t, rows]
            elif block == 0:
                w = scales[0][t, rows, None] * (mean(item[0]) - mean(item[1]))
            else:
                w = scales[block][t, rows, None] * np.stack([mean(child) for child in item])
            z = x @ w.T + biases[block][t, rows]
            share = _softmax(np.concatenate([z, 0 * z], 1) if block == 0 else z)
            for k, child in enumerate(item):
                visit(child, p * share[:, k], False)

        visit(tree.to_nested(), np.ones(len(h)), True)
    return result
