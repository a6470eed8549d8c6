"""Small language models with every kind of head."""

from __future__ import annotations

from typing import Any

import torch
from heads.support import HEADS, D, V, make

from hstree.lm.model import AWDLSTM, LanguageModel

KINDS = ["softmax", "plif", "monotonic", "mos", "doc", "mixtape", "adaptive", "trees, sparse"]
"""Heads that differ in how they compute probabilities and gradients."""

DROPOUTS: dict[str, Any] = {
    "dropout": 0.3,
    "dropout_input": 0.3,
    "dropout_hidden": 0.3,
    "dropout_embedding": 0.3,
    "weight_dropout": 0.3,
}
"""On, so that evaluation has to turn them off."""


def language_model(kind: str = "softmax", seed: int = 0, **options: Any) -> LanguageModel:
    """A model of V classes with random weights, in training mode."""
    torch.manual_seed(seed)
    sizes, all_layers = (3, 2, 5) if kind == "doc" else (D, 6, D), kind == "doc"
    backbone = AWDLSTM(
        V,
        sizes[0],
        sizes[1],
        layers=2,
        context_size=sizes[2],
        all_layers=all_layers,
        **DROPOUTS,
    )
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.normal_(0.0, 0.5)
    assert kind in HEADS
    return LanguageModel(backbone, make(kind, **options)).train()
