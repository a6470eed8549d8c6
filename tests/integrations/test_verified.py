"""accelerate_lm_head: text of the model itself, of words that a screen drafts."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn

from hstree.decoding import agreement
from hstree.heads import ScreenedSoftmax, Softmax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from transformers import PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

    from hstree.integrations.transformers import (
        accelerate_lm_head,
        from_pretrained,
        replace_lm_head,
    )

V, D = 40, 16
BAD: dict[str, Any] = {"rank": 4, "bits": 4, "exact": 1}
"""A screen that misses many of the best words."""

SCALED: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "GraniteForCausalLM": {"logits_scaling": 0.5},
    "CohereForCausalLM": {"logit_scale": 0.25},
}


def small(name: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**(sizes | more | tokens | options))).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.7)
    return model


def ids(n: int, t: int) -> Tensor:
    return torch.randint(1, V, (n, t), generator=torch.Generator().manual_seed(3))


class Streamer:
    def __init__(self) -> None:
        self.words: list[Tensor] = []
        self.ended = False

    def put(self, words: Tensor) -> None:
        self.words.append(words)

    def end(self) -> None:
        self.ended = True


MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 8},
    "Gemma2ForCausalLM": SCALED["Gemma2ForCausalLM"] | {"sliding_window": 8},
    "GraniteForCausalLM": SCALED["GraniteForCausalLM"],
    "MambaForCausalLM": {"state_size": 4},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"eos_token_id": [7, 11, 23]}])
def test_greedy_text_is_the_models(name: str, options: dict[str, Any]) -> None:
    """Also in batches with padding on the left; with fewer products of the head than words."""
    reference = small(name, **MODELS[name])
    model = copy.deepcopy(reference)
    assert accelerate_lm_head(model, ids(8, 24), verify=True, **BAD) is model
    prompt = ids(3, 6)
    expected = reference(prompt).logits.log_softmax(-1)
    torch.testing.assert_close(model(prompt).logits, expected, atol=1e-5, rtol=1e-5)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    greedy = {"max_new_tokens": 30, "do_sample": False, "attention_mask": mask} | options
    text = reference.generate(prompt, **greedy)
    assert model.generate(prompt, **greedy).equal(text)
    sizes: list[int] = []
    head: Softmax = model.get_output_embeddings().head
    plain = head.log_prob
    head.log_prob = lambda hidden: [sizes.append(len(hidden)), plain(hidden)][1]  # type: ignore
    streamer = Streamer()
    greedy = {"max_new_tokens": 30, "do_sample": False} | options
    one = model.generate(prompt[:1], streamer=streamer, **greedy)
    assert one.equal(reference.generate(prompt[:1], **greedy))
    assert torch.cat([words.flatten() for words in streamer.words]).equal(one[0])
    assert streamer.ended
    if len(one[0]) == 36:
        cropped = not name.startswith("Mamba") or "use_cache" in options
        assert (max(sizes) > 1) == cropped


def test_a_good_screen_saves_products() -> None:
    reference = small("LlamaForCausalLM")
    model = accelerate_lm_head(copy.deepcopy(reference), verify=True, exact=V)
    sizes: list[int] = []
    head: Softmax = model.get_output_embeddings().head
    plain = head.log_prob
    head.log_prob = lambda hidden: [sizes.append(len(hidden)), plain(hidden)][1]  # type: ignore
    prompt = ids(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 50, "do_sample": False}
    assert model.generate(prompt, **options).equal(reference.generate(prompt, **options))
    assert sizes == [1, 9, 11, 13, 15, 1]


def word_probs(
    model: PreTrainedModel, prompt: Tensor, n: int, processors: list[Any]
) -> list[Tensor]:
    """Probabilities [V] of each of n words after a prompt, in the distribution of the model."""
    texts, prob, found = prompt, torch.ones(1), []
    for _ in range(n):
        with torch.no_grad():
            scores = model(texts).logits[:, -1]
        for process in processors:
            scores = process(texts, scores)
        joint = prob[:, None] * scores.softmax(1)
        found.append(joint.sum(0))
        texts = torch.cat(
            [texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], 1
        )
        texts, prob = texts[joint.flatten() > 0], joint.flatten()[joint.flatten() > 0]
    return found


@pytest.mark.parametrize(
    ("rows", "processors", "options"),
    [
        (1, [], {}),
        (
            3,
            [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)],
            {"temperature": 0.7, "top_p": 0.8},
        ),
    ],
)
def test_draws_have_the_models_distribution(
    rows: int, processors: list[Any], options: dict[str, Any]
) -> None:
    """Of drafts of which many are rejected."""
    reference = small("GPT2LMHeadModel")
    model = accelerate_lm_head(copy.deepcopy(reference), ids(8, 24), verify=True, **BAD)
    prompt, n, more = ids(1, 5), 600, {"do_sample": True, "top_k": 0, "max_new_tokens": 3}
    torch.manual_seed(1)
    texts = [model.generate(prompt.repeat(rows, 1), **(more | options)) for _ in range(n)]
    probs = word_probs(reference, prompt, 3, processors)
    for words, prob in zip(torch.cat(texts)[:, 5:].T, probs, strict=True):
        counts, expected = torch.bincount(words, minlength=V), prob.double() * n * rows
        often = expected >= 5
        seen = torch.cat([counts[often], counts[~often].sum()[None]])
        wanted = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9)
        assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3
    near = model.get_output_embeddings().draft[0]
    hidden = torch.randn(20, D)
    assert agreement(model.lm_head.head, near, hidden).acceptance.mean() < 0.9


@pytest.mark.parametrize("name", ["LlamaForCausalLM", *SCALED])
def test_a_screen_has_the_distribution_of_the_model(name: str, tmp_path: Path) -> None:
    """Its logit scale and soft cap, too, from tokens or from hidden states."""
    reference = small(name, **SCALED.get(name, {}))
    tokens = ids(8, 24)
    expected = reference(tokens).logits.log_softmax(-1)
    for contexts in (tokens, reference.base_model(tokens)[0]):
        model = accelerate_lm_head(copy.deepcopy(reference), contexts, exact=V)
        assert isinstance(model.lm_head.head, ScreenedSoftmax)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    options: dict[str, Any] = {"max_new_tokens": 9, "num_beams": 3, "do_sample": False}
    assert loaded.generate(tokens, **options).equal(reference.generate(tokens, **options))


def test_life() -> None:
    model = replace_lm_head(small("LlamaForCausalLM"))
    accelerate_lm_head(model.train(), ids(8, 24), verify=True)
    assert model.training
    assert model.get_output_embeddings().draft
    assert not any("draft" in name for name in model.state_dict())
    model(ids(2, 4), labels=ids(2, 4)).loss.backward()
    more = model.eval().generate(ids(1, 4), max_new_tokens=4, return_dict_in_generate=True)
    assert more.sequences.shape == (1, 8)
    model.resize_token_embeddings(V + 8)
    assert not model.get_output_embeddings().draft
    accelerate_lm_head(model, ids(8, 24))
    assert model.get_output_embeddings().head.n_classes == V + 8


def test_wrong_arguments() -> None:
    model = small("GPT2LMHeadModel")
    with pytest.raises(ValueError, match=r"contexts: expected tokens \[n, time\], got .*\[24\]"):
        accelerate_lm_head(model, ids(1, 24)[0])
    with pytest.raises(TypeError, match="model: expected a model of transformers, got Linear"):
        accelerate_lm_head(nn.Linear(3, 3))  # type: ignore[arg-type]
    trees = replace_lm_head(copy.deepcopy(model), "trees", frequencies=range(V, 0, -1))
    with pytest.raises(ValueError, match="model: expected a linear lm_head, got TreeEnsemble"):
        accelerate_lm_head(trees)
    for name, options in SCALED.items():
        scaled = small(name, **options)
        logits = scaled(ids(2, 4)).logits.log_softmax(-1)
        for head in ("forest", "sampled"):
            with pytest.raises(ValueError, match=f"head: expected None or 'softmax' for {name}"):
                replace_lm_head(scaled, head)
        again = replace_lm_head(scaled, "softmax")(ids(2, 4)).logits
        torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-5)


def test_an_old_version_of_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = accelerate_lm_head.__globals__["transformers"]  # other tests import the module anew
    monkeypatch.setattr(seen, "__version__", "5.23.1")
    model = small("GPT2LMHeadModel")
    lm_head = model.get_output_embeddings()
    with pytest.raises(RuntimeError, match=r"verify: expected .* 5\.24 or later, got 5\.23\.1$"):
        accelerate_lm_head(model, ids(4, 24), verify=True)
    assert model.get_output_embeddings() is lm_head
    accelerate_lm_head(model, ids(4, 24))
