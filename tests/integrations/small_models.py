"""Small random models of transformers, and texts for them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from transformers import PreTrainedModel

V, D = 40, 16
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "dropout", "dropout_rate",
     "attention_probs_dropout_prob", "attention_dropout", "activation_dropout"), 0.0
)  # fmt: skip
_BART = {
    "d_model": D, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "decoder_start_token_id": 2,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "BartForCausalLM": _BART,
    "BartForConditionalGeneration": _BART,
    "CohereForCausalLM": {"logit_scale": 0.25},
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "GraniteForCausalLM": {"logits_scaling": 0.5},
    "MambaForCausalLM": {"state_size": 4},
    "MixtralForCausalLM": {"num_local_experts": 4, "output_router_logits": True},
    "ModernBertForMaskedLM": {"cls_token_id": 1, "sep_token_id": 2},
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": D},
    "T5ForConditionalGeneration": {
        "d_model": D, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 8,
        "decoder_start_token_id": 2,
    },
}  # fmt: skip


def small(name: str, **options: Any) -> PreTrainedModel:
    """A model of this class without dropout, in evaluation mode. Its output layer has weights of
    order one: distributions far from uniform."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    given = SIZES | _NO_DROPOUT | OPTIONS.get(name, {}) | options
    model = model_class(model_class.config_class(**given)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


def gpt2(**options: Any) -> PreTrainedModel:
    """Tied embeddings."""
    return small("GPT2LMHeadModel", **options)


def llama(**options: Any) -> PreTrainedModel:
    """Embeddings that are not tied."""
    return small("LlamaForCausalLM", **options)


def loaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model as a user has it, from files: it is then saved under their names."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def draw_ids(*size: int, seed: int = 3) -> Tensor:
    """Without 0, the token that pads."""
    return torch.randint(3, V, size, generator=torch.Generator().manual_seed(seed))


def draw_labels(ids: Tensor) -> Tensor:
    """The ids, some of them ignored."""
    ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    return ids.masked_fill(ignored, -100)


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor | None]:
    """Of the loss, with respect to all parameters; and the loss."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach()} | found


def assert_same_weights(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    own, expected = model.state_dict(), reference.state_dict()
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        if tolerance:
            torch.testing.assert_close(own[name], tensor, **tolerance, msg=name)
        else:
            assert own[name].equal(tensor), name
