"""Model classes of transformers that docs/transformers.md lists, with the softmax they have."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers

    from hstree.integrations.transformers import from_pretrained, replace_lm_head

V, D = 40, 16
PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"

OPTIONS: dict[str, dict[str, Any]] = {
    "BertLMHeadModel": {"is_decoder": True},
    "BloomForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "FalconForCausalLM": {},
    "FalconMambaForCausalLM": {"state_size": 4},
    "GPT2LMHeadModel": {},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": {"head_dim": 8},
    "GraniteForCausalLM": {"logits_scaling": 8.0},
    "LlamaForCausalLM": {},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "MambaForCausalLM": {"state_size": 4},
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 2},
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": D},
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "PhiForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "RobertaForCausalLM": {"is_decoder": True},
    "SmolLM3ForCausalLM": {},
    "StableLmForCausalLM": {},
}


def small(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model_class = getattr(transformers, name)
    config = model_class.config_class(**(sizes | more | tokens | OPTIONS[name]))
    return model_class(config).eval()


def draw(n: int, t: int) -> Tensor:
    return torch.randint(1, V, (n, t), generator=torch.Generator().manual_seed(3))


FAST = {"BertLMHeadModel", "LlamaForCausalLM", "MambaForCausalLM"}  # one of each kind


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in OPTIONS]
)
def test_a_softmax_is_the_lm_head(name: str, tmp_path: Path) -> None:
    """Loss, gradients of the norms, logits, text, and the saved model."""
    reference = small(name)
    with torch.no_grad():
        reference.get_output_embeddings().weight.normal_()
    model = copy.deepcopy(reference)
    replace_lm_head(model)
    ids = draw(2, 6)
    gradients = []
    for each, options in ((reference, {}), (model, {"skip_logits": True})):
        loss = each(ids, labels=ids, **options).loss
        loss.backward()
        norms = [p for n, p in each.named_parameters() if "norm" in n.lower() or "ln_f" in n]
        gradients.append((loss, [p.grad for p in norms]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)
    assert gradients[0][1]
    expected = reference(ids).logits.log_softmax(-1)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(ids, **greedy).equal(reference.generate(ids, **greedy))
    model.save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)(ids).logits.equal(model(ids).logits)


def test_the_page_lists_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = page.partition("## Tested models")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", listed)) == set(OPTIONS)
