"""Every causal language model class of transformers, and models of text with images or sound: the
same before and after, as users load them from files."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from integrations.model_configs import NAMES, VLMS, V, build

    from hstree.deferred import Source
    from hstree.transformers import accelerate_lm_head, from_pretrained, replace_lm_head

BATCH, TIME = 2, 12
PENALTIES = {"repetition_penalty": 1.3, "max_new_tokens": 12}
"""With a penalty, a text depends on a constant that is added to the logits."""

NO_LINEAR_LAYER = {
    "DoryForCausalLM": "a factor of each token in a forward method of its own",
    "MusicgenForCausalLM": "a layer for each codebook",
    "MusicgenMelodyForCausalLM": "a layer for each codebook",
}
"""Refused."""


def inputs(name: str) -> tuple[dict[str, Any], Tensor]:
    generator = torch.Generator().manual_seed(3)
    high = 256 if name.startswith("Blt") else 300
    ids = torch.randint(5, high, (BATCH, TIME), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, -2:] = -100
    given: dict[str, Any] = {"input_ids": ids}
    if name == "GitForCausalLM":
        given["pixel_values"] = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return given, labels


def load(name: str, folder: Path) -> Any:
    """The model as a user loads it: some classes then save under other names."""
    build(name).save_pretrained(folder)
    return getattr(transformers, name).from_pretrained(folder)
