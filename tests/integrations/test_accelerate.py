"""accelerate_lm_head: text of the plain model, from a screen of its output layer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn

import hstree
from hstree.heads import ScreenedSoftmax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    from integrations.small_models import (
        D,
        V,
        assert_same_weights,
        draw_ids,
        draw_labels,
        gpt2,
        gradients,
        llama,
        small,
    )
    from transformers import PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

    from hstree.transformers import accelerate_lm_head, replace_lm_head

pytestmark = pytest.mark.usefixtures("computed")

SCALED = ("CohereForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM")
ROUGH: dict[str, Any] = {"rank": 4, "bits": 4, "exact": 1}
"""A screen that misses many of the best words."""


def both(name: str = "LlamaForCausalLM", **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and the same one, accelerated."""
    reference = small(name)
    model = copy.deepcopy(reference)
    assert accelerate_lm_head(model, draw_ids(8, 24), **({"exact": V} | options)) is model
    return reference, model


# Text

PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition 1.05": {"repetition_penalty": 1.05},
    "repetition 1.5": {"repetition_penalty": 1.5},
    "repetition 3": {"repetition_penalty": 3.0},
    "encoder repetition": {"encoder_repetition_penalty": 2.0},
    "length": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 7},
    "guidance": {"guidance_scale": 1.5},
    "beams": {"num_beams": 3, "repetition_penalty": 1.2},
    "draws": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    "no cache": {"use_cache": False, "repetition_penalty": 1.1},
}


def words(model: PreTrainedModel, prompt: Tensor, **options: Any) -> Any:
    torch.manual_seed(5)
    defaults = {"max_new_tokens": 14, "do_sample": False, "top_k": 0}
    more = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(prompt, **(defaults | more | options))


@pytest.mark.parametrize("how", PENALTIES)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma2ForCausalLM", "GraniteForCausalLM"])
def test_text_of_a_screen_that_finds_every_word(name: str, how: str) -> None:
    """Penalties depend on the scale of the logits, and on a constant that is added to them."""
    reference, model = both(name)
    prompt = draw_ids(3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0  # padded on the left
    options = PENALTIES[how] | {"attention_mask": mask}
    own, expected = (words(each, prompt, **options) for each in (model, reference))
    assert own.sequences.equal(expected.sequences)
    for got, wanted in zip(own.logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)


def test_an_encoder_and_a_decoder() -> None:
    """It is screened for what its decoder gives, or without contexts."""
    reference, ids = small("T5ForConditionalGeneration"), draw_ids(3, 6)
    model = copy.deepcopy(reference)
    with pytest.raises(ValueError, match="contexts: expected the hidden vectors of the decoder"):
        accelerate_lm_head(model, ids)
    hidden = reference(ids, decoder_input_ids=ids, output_hidden_states=True).decoder_hidden_states
    for contexts in (None, hidden[-1] * reference.model_dim**-0.5):
        accelerate_lm_head(model, contexts, exact=V)
        for how in ("repetition 1.5", "encoder repetition", "beams", "draws"):
            own, expected = (words(each, ids, **PENALTIES[how]) for each in (model, reference))
            assert own.sequences.equal(expected.sequences)


def test_penalties_change_the_text() -> None:
    """What the test above would not see otherwise."""
    model, prompt = llama(), draw_ids(3, 6)
    texts = {str(words(model, prompt, **PENALTIES[how]).sequences.tolist()) for how in PENALTIES}
    assert len(texts) >= len(PENALTIES) - 2


@pytest.mark.parametrize("how", ["none", "repetition 1.05", "repetition 3", "length"])
def test_text_of_a_screen_that_finds_the_best_words(how: str) -> None:
    """Wherever the words that the model takes are scored exactly, it takes the same."""
    reference, model = both(rank=12, bits=8, exact=8)
    options, found = PENALTIES[how], 0
    for prompt in draw_ids(5, 6).split(1):
        own, expected = words(model, prompt, **options), words(reference, prompt, **options)
        text = expected.sequences[0, 6:]
        n = next(
            (i for i, (a, b) in enumerate(zip(own.sequences[0, 6:], text, strict=False)) if a != b),
            min(len(text), own.sequences.shape[1] - 6),
        )
        exact = [
            abs(own.logits[i][0, text[i]] - expected.logits[i][0, text[i]]) < 1e-4
            for i in range(min(n + 1, len(text), len(own.logits)))
        ]
        found += sum(exact[:n])
        if n < len(text):
            # The first other word is one that was not scored exactly, or stands beside such a one.
            other = own.sequences[0, 6 + n]
            apart = abs(own.logits[n][0, other] - expected.logits[n][0, other])
            assert not exact[n] or apart > 1e-4
    assert found > 25


def test_a_screen_scores_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's product is not computed in decoding."""
    reference, model = both(exact=4)
    calls: list[int] = []
    forward = nn.Linear.forward

    def count(self: nn.Linear, hidden: Tensor) -> Tensor:
        if self.out_features == V:
            calls.append(hidden.shape[-2])
        return forward(self, hidden)

    monkeypatch.setattr(nn.Linear, "forward", count)
    words(model, draw_ids(1, 6))
    assert calls == []
    monkeypatch.undo()
    out = words(model, draw_ids(1, 6))
    hidden = reference.model(out.sequences[:, :-1]).last_hidden_state[:, 5:]
    expected = reference.lm_head(hidden)[0]
    exact = (torch.cat(out.logits[1:]) - expected[1:]).abs() < 1e-5
    assert exact.sum(1).min() >= 4


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
        every = torch.arange(V).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(V, 0), every], 1)
        texts, prob = texts[joint.flatten() > 0], joint.flatten()[joint.flatten() > 0]
    return found


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_have_the_models_distribution(top_p: float) -> None:
    reference, model = both("GPT2LMHeadModel")
    prompt, n = draw_ids(1, 5), 2000
    torch.manual_seed(1)
    options = {"do_sample": True, "top_k": 0, "temperature": 1.5, "top_p": top_p}
    texts = model.generate(prompt.repeat(n, 1), max_new_tokens=2, **options)
    processors = [TemperatureLogitsWarper(1.5), TopPLogitsWarper(top_p)]
    for drawn, prob in zip(
        texts[:, 5:].T, word_probs(reference, prompt, 2, processors), strict=True
    ):
        counts, expected = torch.bincount(drawn, minlength=V), prob.double() * n
        assert counts[prob == 0].sum() == 0
        often = expected >= 5
        seen = torch.cat([counts[often], counts[~often].sum()[None]])
        wanted = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9)
        assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3


def test_a_rough_screen_draws_from_its_own_distribution() -> None:
    """That of its head, which previews the words that it has not scored."""
    reference, model = both(**ROUGH)
    text = draw_ids(1, 5)
    with torch.no_grad():
        one = model(text, logits_to_keep=1).logits
        hidden = reference.model(text).last_hidden_state[:, -1:]
    expected = model.lm_head.deferral.head.log_prob(hidden)
    torch.testing.assert_close(one.log_softmax(-1), expected, atol=1e-5, rtol=1e-5)
    assert (one - reference(text, logits_to_keep=1).logits).abs().max() > 0.1


@pytest.mark.parametrize("contexts", ["tokens", "hidden vectors", None])
@pytest.mark.parametrize("name", SCALED)
def test_what_is_screened(name: str, contexts: str | None) -> None:
    """A layer is screened for the hidden vectors that it reads."""
    reference = small(name)
    model, tokens = copy.deepcopy(reference).train(), draw_ids(8, 24)
    frozen = model.base_model.layers[0].eval()
    given = {"tokens": tokens, "hidden vectors": reference.base_model(tokens)[0]}.get(str(contexts))
    accelerate_lm_head(model, given, exact=V // 2, rank=D, bits=8)
    assert model.training
    assert not frozen.training
    head = model.get_output_embeddings().deferral.head
    assert isinstance(head, ScreenedSoftmax)
    assert (head.agreement is not None) == (contexts is not None)
    with torch.no_grad():
        own = model.eval()(tokens[:, :4], logits_to_keep=1).logits
    expected = reference(tokens[:, :4], logits_to_keep=1).logits
    torch.testing.assert_close(own, expected, atol=0.1, rtol=0.1)
    assert own.argmax(-1).equal(expected.argmax(-1))


# All but text


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", *SCALED])
def test_loss_gradients_and_logits_of_texts_are_exact(name: str, computed: list[int]) -> None:
    reference, model = both(name, **ROUGH)
    assert type(model) is type(reference)
    assert_same_weights(model, reference)
    ids = draw_ids(3, 9)
    inputs = {"input_ids": ids, "labels": draw_labels(ids)}
    computed.clear()
    for training in (True, False):
        own = gradients(model.train(training), **inputs)
        expected = gradients(reference.train(training), **inputs)
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        out = model(**inputs)
    torch.testing.assert_close(out.loss, expected["loss"])
    assert not computed
    assert out.logits.equal(reference(**inputs).logits)
    # One position with gradients, which is no decoding.
    assert model(ids, logits_to_keep=1).logits.equal(reference(ids, logits_to_keep=1).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_model(dtype: torch.dtype) -> None:
    reference, model = both()
    prompt, options = draw_ids(2, 6), PENALTIES["repetition 1.5"]
    expected = words(reference.to(dtype), prompt, **options)
    for each in (model.to(dtype), model.to("cpu"), copy.deepcopy(model).to(dtype)):
        own = words(each, prompt, **options)
        assert own.sequences.equal(expected.sequences)
        low = {"atol": 1e-1, "rtol": 1e-2} if dtype.itemsize == 2 else {"atol": 1e-12, "rtol": 0}
        torch.testing.assert_close(own.logits[1], expected.logits[1], **low)
    model.float()
    if dtype == torch.float64:
        assert words(model, prompt).sequences.equal(words(reference.float(), prompt).sequences)
    else:  # its weight has lost bits
        with pytest.raises(RuntimeError, match="layer: expected the weight that was screened"):
            words(model, prompt)


def step(model: PreTrainedModel) -> None:
    model.train()(draw_ids(2, 6), labels=draw_ids(2, 6)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()


def add(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight[V // 2] += 1


def load(model: PreTrainedModel) -> None:
    state = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def assign(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)


def write(model: PreTrainedModel) -> None:
    model.lm_head.weight.data += 1


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("change", [step, add, load, assign, write])
def test_a_weight_that_changed(change: Any, make: Any) -> None:
    """Generation is refused, all else is right, and the model can be screened again."""
    reference = make()
    model, prompt = copy.deepcopy(reference), draw_ids(1, 6)
    accelerate_lm_head(model, draw_ids(8, 24), **ROUGH)
    change(model)
    if change is step:  # of the same gradient but for its last bits
        reference.load_state_dict(model.state_dict())
    else:
        change(reference)
    message = r"layer: expected the weight that was screened, got one that has changed .* again"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model.generate(prompt, max_new_tokens=4)
    assert model(prompt).logits.equal(reference(prompt).logits)
    accelerate_lm_head(model, draw_ids(8, 24), exact=V)
    assert words(model, prompt).sequences.equal(words(reference, prompt).sequences)


def test_screened_again_and_undone() -> None:
    model = replace_lm_head(llama(), "softmax")
    reference, prompt = copy.deepcopy(model), draw_ids(1, 6)
    for options in (ROUGH, {"exact": V}):
        accelerate_lm_head(model, draw_ids(8, 24), **options)
    assert words(model, prompt).sequences.equal(words(reference, prompt).sequences)
    accelerate_lm_head(model, draw_ids(8, 24), **ROUGH)
    assert not words(model, prompt).sequences.equal(words(reference, prompt).sequences)
    assert type(hstree.undefer(model.lm_head)) is nn.Linear
    assert words(model, prompt).sequences.equal(words(reference, prompt).sequences)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_resized_vocabulary_is_not_screened(make: Any) -> None:
    reference = make()
    model, prompt = copy.deepcopy(reference), draw_ids(1, 6)
    accelerate_lm_head(model, draw_ids(8, 24), **ROUGH)
    for each in (model, reference):
        torch.manual_seed(1)
        each.resize_token_embeddings(V + 3)
    assert words(model, prompt).sequences.equal(words(reference, prompt).sequences)


def test_wrong_arguments() -> None:
    model = gpt2()
    with pytest.raises(ValueError, match=r"contexts: expected tokens \[n, time\], got .*\[24\]"):
        accelerate_lm_head(model, draw_ids(24))
    with pytest.raises(ValueError, match=r"expected .*16.* got .*17"):
        accelerate_lm_head(model, torch.randn(4, D + 1))
    for texts in ("a text", ["a text", "another"]):
        with pytest.raises(TypeError, match=r"contexts: .* tokenizer: AutoTokenizer\.from_pretr"):
            accelerate_lm_head(model, texts)  # type: ignore[arg-type]
    model.name_or_path = "someone/small"
    with pytest.raises(TypeError, match=r"from_pretrained\('someone/small'\)\(text, return_tens"):
        accelerate_lm_head(model, "a text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: expected a model of transformers, got Linear"):
        accelerate_lm_head(nn.Linear(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exact: expected"):
        accelerate_lm_head(model, exact=V + 1)
    assert type(model.lm_head) is nn.Linear
    trees = replace_lm_head(copy.deepcopy(model), "trees", frequencies=range(V, 0, -1))
    with pytest.raises(ValueError, match="model: expected a model with its own output layer"):
        accelerate_lm_head(trees)
