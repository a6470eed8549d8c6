"""Heads of every registered name with random options and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import nn

from fuzz.forests import PATHS, nested_tree
from hstree import heads
from hstree.trees import Tree


@dataclass(frozen=True)
class HeadSetting:
    """What a head is drawn from; shown where a test fails."""

    name: str
    in_features: int
    n_classes: int
    scale: float
    tied: bool
    reduction: str
    ignore_index: int
    weighted: bool
    label_smoothing: float
    z_loss: float
    seed: int


HEAD_SETTINGS = st.builds(
    HeadSetting,
    name=st.sampled_from(heads.head_names()),
    in_features=st.integers(1, 10),
    n_classes=st.one_of(st.integers(1, 9), st.integers(10, 60)),
    scale=st.sampled_from([0.0, 0.5, 3.0]),
    tied=st.booleans(),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    ignore_index=st.sampled_from([-100, -1, 0, 4, 10**6]),
    weighted=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 0.0, 1e-2]),
    seed=st.integers(0, 2**32 - 1),
)
NO_Z_LOSS = ("trees", "forest", "adaptive", "mos", "mos-plif")


def some_trees(n_classes: int, groups: bool, random: np.random.Generator) -> list[Tree]:
    """One to three trees with roots of the same width."""
    root = int(random.integers(min(n_classes, 2), n_classes + 1))
    shapes = ("groups",) if groups else PATHS
    nested = [
        nested_tree(str(random.choice(shapes)), n_classes, root, random)
        for _ in range(random.integers(1, 4))
    ]
    return [Tree.from_nested(tree) for tree in nested]


def special_options(setting: HeadSetting, random: np.random.Generator) -> dict[str, Any]:
    """Options that only heads of this name have."""
    name, d, v = setting.name, setting.in_features, setting.n_classes
    counts = random.integers(0, 9, v) if random.random() < 0.5 else None
    order = torch.from_numpy(random.permutation(v)) if random.random() < 0.5 else None
    plif = {"intervals": int(random.integers(1, 30)), "radius": float(random.uniform(0.5, 6))}
    embedding = nn.Embedding(v, d) if setting.tied else None
    latent = {"latent_features": int(random.integers(1, 9))} if not setting.tied else {}
    decoder = {"bias": bool(random.integers(2)), "frequencies": counts, "embedding": embedding}
    decoder["frequencies"] = counts if decoder["bias"] else None
    every = {"negatives": v, "distribution": "uniform", "in_batch": False}
    sparse = not (setting.label_smoothing or setting.z_loss) and bool(random.integers(2))
    if name == "gss":
        return decoder | {"c": float(random.normal()), "k": float(random.uniform(0.2, 4))}
    if name in ("plif", "plif-frozen"):
        return decoder | plif
    if name == "monotonic":
        return decoder | {"units": int(random.integers(1, 9)), "intervals": 40_000}
    if name in ("mos", "moc", "mos-plif"):
        options = decoder | latent | {"components": int(random.integers(1, 5))}
        if name == "mos-plif":
            return options | {"function_options": plif}
        return options | {"function": str(random.choice(["softmax", "sigsoftmax", "gss"]))}
    if name == "forest":
        gate = str(random.choice(["uniform", "constant", "context"]))
        numbers = {"n_trees": int(random.integers(1, 5)), "clusters": int(random.integers(1, 9))}
        numbers |= {"gate": gate, "seed": int(random.integers(100))}
        if random.integers(2):
            numbers |= every | {"sparse": sparse}
        return decoder | numbers
    if name == "mixtape":
        own = {"own_gates": int(random.integers(0, v + 1)), "order": order}
        return decoder | latent | own | {"gate_features": int(random.integers(1, 6))}
    if name == "adaptive":
        size = int(random.integers(1, min(3, v - 1) + 1))
        cutoffs = 1 + np.sort(random.choice(v - 1, size, replace=False))
        return {"cutoffs": cutoffs.tolist(), "div_value": 1.0, "order": order}
    if name == "sampled":
        return decoder | every | {"sparse": sparse}
    if name == "trees":
        groups = setting.tied or bool(random.integers(2))
        return {
            "trees": some_trees(v, groups, random),
            "groups": groups,
            "subset_size": int(random.integers(1, d + 1)),
            "gate": str(random.choice(["uniform", "constant", "context"])),
            "embedding": embedding,
            "frequencies": counts,
            "sparse": not setting.label_smoothing and bool(random.integers(2)),
            "seed": int(random.integers(100)),
        }
    return decoder


def make(name: str, **arguments: Any) -> heads.Head:
    """The head with these arguments, from its constructor."""
    return (
        heads.TreeEnsemble(**arguments) if name == "trees" else heads.build_head(name, **arguments)
    )


def build(setting: HeadSetting) -> tuple[heads.Head, dict[str, Any]]:
    """A head in float64 with random parameters, and its options."""
    random = np.random.default_rng(setting.seed)
    d, v = setting.in_features, setting.n_classes
    if setting.name == "adaptive":
        v = max(v, 3)
    options: dict[str, Any] = {
        "ignore_index": setting.ignore_index,
        "reduction": setting.reduction,
        "label_smoothing": setting.label_smoothing,
        "z_loss": 0.0 if setting.name in NO_Z_LOSS else setting.z_loss,
    }
    if setting.weighted:
        options["class_weight"] = random.integers(0, 9, v) / 4  # exact in any dtype
    options |= special_options(HeadSetting(**vars(setting) | {"n_classes": v}), random)
    head = make(setting.name, in_features=d, n_classes=v, **options).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            values = random.standard_normal(tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(setting.scale * np.asarray(values)))
    return head, options
