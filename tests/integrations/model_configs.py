"""Small random models: every causal language model class of transformers 5.24, and models of text
with images or sound; model_configs.json has their configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MAPPING

NAMES = sorted({c for v in MAPPING.values() for c in (v if isinstance(v, (tuple, list)) else (v,))})

CONFIGS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Fields for every config that has them by default, and those of each model class, where
``"is"`` names parts to begin with."""
TEXT, VLMS = CONFIGS["text"], CONFIGS["images or sound"]
NO_DROPOUT = ("dropout", "pdrop", "layerdrop", "jitter_noise")


def whole(value: Any) -> Any:
    """A value with its parts put in."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    if not isinstance(value, dict):
        return value
    result: dict[str, Any] = {}
    for part in value.get("is", ()):
        result |= whole(CONFIGS["parts"][part])
    return result | {name: whole(item) for name, item in value.items() if name != "is"}


def small_values(config_class: type, own: dict[str, Any]) -> dict[str, Any]:
    try:
        fields = config_class().to_dict()
    except Exception:
        fields = {}
    general = {} if "text_config" in own else CONFIGS["every config"]
    values: dict[str, Any] = {k: v for k, v in general.items() if k in fields}
    for name, value in fields.items():
        if any(part in name for part in NO_DROPOUT) and isinstance(value, float):
            values[name] = 0.0
    return values | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def build(name: str, **more: Any) -> Any:
    model_class = getattr(transformers, name)
    own = whole(TEXT.get(name, VLMS.get(name, {})))
    values = small_values(model_class.config_class, own)
    config = model_class.config_class(**(values | own | more))
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # nothing may be equal by its initial value alone
            if parameter.is_floating_point() and parameter.dim() <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        layer = model.get_output_embeddings()
        for each in layer if isinstance(layer, torch.nn.ModuleList) else [layer]:
            if getattr(each, "weight", None) is not None:
                each.weight.normal_()
            if isinstance(getattr(each, "bias", None), torch.Tensor):
                each.bias.normal_()
    return model
