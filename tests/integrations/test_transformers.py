"""Output layers of small models of transformers, beside the same models untouched."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hstree
from hstree.deferred import DeferredHead, DeferredLogits
from hstree.heads import PLIF, Head, SampledSoftmax, Softmax, TreeEnsemble, head_names
from hstree.trees import build_ensemble

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
    from transformers import LlamaForCausalLM, PreTrainedModel

    from hstree.transformers import replace_lm_head

pytestmark = pytest.mark.usefixtures("computed")

MODELS = pytest.mark.parametrize("make", [gpt2, llama])
Make = Callable[..., PreTrainedModel]


def with_trees(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    weight = model.get_output_embeddings().weight.detach().float().numpy()
    trees = build_ensemble("cluster", len(weight), 2, None, [weight], 3, 8)
    head = TreeEnsemble(weight.shape[1], len(weight), trees, **options)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=random)
    return replace_lm_head(model, head)


# The softmax of the model: its loss, and all of its numbers

CAUSAL = ("GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM",
          "MambaForCausalLM", "MixtralForCausalLM")  # fmt: skip
SCALED = ("CohereForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM")
OWN_LOSS = ("ModernBertForMaskedLM", "BertForMaskedLM", "BartForCausalLM",
            "T5ForConditionalGeneration", "BartForConditionalGeneration")  # fmt: skip
ADDS_TO_LOGITS = "BartForConditionalGeneration"


@pytest.mark.parametrize("name", [*CAUSAL, *SCALED, *OWN_LOSS])
def test_nothing_but_memory_changes(name: str, computed: list[int]) -> None:
    """Class, layer, loss, every gradient and every logit, without computing logits for a loss."""
    model = small(name)
    reference, layer = copy.deepcopy(model), model.get_output_embeddings()
    assert replace_lm_head(model) is model
    assert type(model) is type(reference)
    assert model.get_output_embeddings() is layer
    assert_same_weights(model, reference)
    ids = draw_ids(3, 9)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": draw_labels(ids)}
    computed.clear()
    for training in (True, False):
        own = gradients(model.train(training), **inputs)
        expected = gradients(reference.train(training), **inputs)
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**inputs).loss, expected["loss"])
    assert bool(computed) == (name == ADDS_TO_LOGITS)
    out, plain = model(**inputs), reference.eval()(**inputs)
    assert out.logits.equal(plain.logits)
    for key in plain:
        assert type(out[key]) is type(plain[key]) or key == "logits"
    if "aux_loss" in plain:
        assert out.aux_loss.equal(plain.aux_loss) > 0
    torch.testing.assert_close(model(**inputs, return_dict=False)[0], plain.loss)


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(9)},
        {"shift_labels": draw_labels(draw_ids(3, 9)).clamp(min=0), "ignore_index": 0},
        {"attention_mask": torch.tensor([[0] * 3 + [1] * 6] * 3)},
        {"logits_to_keep": torch.tensor([7, 8])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_the_loss(options: dict[str, Any], computed: list[int]) -> None:
    model = llama()
    reference, ids = copy.deepcopy(model), draw_ids(3, 9)
    replace_lm_head(model)
    computed.clear()
    labels = ids[:, -2:] if "logits_to_keep" in options else ids
    own, expected = (
        gradients(m, input_ids=ids, labels=labels, **options) for m in (model, reference)
    )
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
    assert not computed


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0},
    "beams": {"num_beams": 3, "repetition_penalty": 1.1},
    "guidance": {"guidance_scale": 1.5},
    "several": {"do_sample": True, "num_return_sequences": 3, "output_scores": True},
}


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "T5ForConditionalGeneration"],
)
def test_generated_text(name: str) -> None:
    model = small(name)
    reference = copy.deepcopy(model)
    replace_lm_head(model)
    ids = draw_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded on the left
    for how, options in GENERATION.items():
        found: list[Any] = []
        if how == "guidance" and model.config.is_encoder_decoder:
            continue
        for each in (model, reference):
            torch.manual_seed(5)
            more = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}
            found.append(each.generate(ids, attention_mask=mask, **(more | options)))
        assert found[0].sequences.equal(found[1].sequences), how
        for own, expected in zip(found[0].scores or (), found[1].scores or (), strict=True):
            assert own.equal(expected)


def test_assisted_generation() -> None:
    """The text is that of the model alone, in fewer calls; and the other way round."""
    model, ids = llama(), draw_ids(1, 5)
    assistant = copy.deepcopy(model)
    head = Softmax.from_linear(assistant.get_output_embeddings())
    with torch.no_grad():
        head.weight += 0.2 * torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    replace_lm_head(assistant, head)
    for each, other in ((model, assistant), (assistant, model)):
        texts, calls = [], []
        for options in ({}, {"assistant_model": other}):
            n = Counter[str]()
            hook = each.register_forward_hook(lambda *_, n=n: n.update(["calls"]))
            texts.append(each.generate(ids, max_new_tokens=12, do_sample=False, **options))
            calls.append(n["calls"])
            hook.remove()
        assert texts[0].equal(texts[1])
        assert calls[1] < calls[0] == 12


def test_a_sampled_loss_of_the_layers_own_weight() -> None:
    model = llama()
    reference, ids = copy.deepcopy(model), draw_ids(3, 9)
    options: dict[str, Any] = {"frequencies": range(V, 0, -1), "negatives": 8}
    replace_lm_head(model, "sampled", **options)
    head = SampledSoftmax(D, V, embedding=reference.lm_head, bias=False, **options)
    torch.manual_seed(5)
    hidden = reference.model(ids).last_hidden_state[:, :-1]
    expected = head(hidden, ids[:, 1:]).loss
    torch.manual_seed(5)
    own = gradients(model.train(), input_ids=ids, labels=ids)
    torch.testing.assert_close(own["loss"], expected)
    assert (expected - reference(ids, labels=ids).loss).abs() > 1e-2
    expected.backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(own[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert model(ids).logits.equal(reference(ids).logits)  # in training mode, too
    torch.testing.assert_close(model.eval()(ids, labels=ids).loss, reference(ids, labels=ids).loss)


def test_options_of_the_loss_are_of_training() -> None:
    model = llama()
    reference, ids = copy.deepcopy(model), draw_ids(3, 9)
    replace_lm_head(model, z_loss=0.1, label_smoothing=0.2)
    logits, target = reference(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    smooth = F.cross_entropy(logits, target, label_smoothing=0.2)
    expected = smooth + 0.1 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(model.train()(ids, labels=ids).loss, expected)
    exact = F.cross_entropy(logits, target)
    torch.testing.assert_close(model.eval()(ids, labels=ids).loss, exact)


def test_undefer_gives_the_plain_model() -> None:
    model = llama()
    reference, ids = copy.deepcopy(model), draw_ids(3, 9)
    hstree.undefer(replace_lm_head(model, "softmax").lm_head)
    assert vars(model.lm_head).keys() == vars(reference.lm_head).keys()
    assert type(model.lm_head) is nn.Linear
    assert type(model(ids).logits) is Tensor
    replace_lm_head(model)


@pytest.mark.parametrize("read", [False, True])
def test_a_step_leaves_no_memory(read: bool) -> None:
    """When the output of a model goes, what its loss was computed from goes at once."""
    model, ids, seen = replace_lm_head(llama()), draw_ids(3, 9), []
    model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(weakref.ref(given[0])))
    gc.collect()
    gc.disable()
    try:
        out = model(ids, labels=ids)
        if read:
            out.logits.max()
        out.loss.backward()
        del out
        assert seen.pop()() is None
    finally:
        gc.enable()


# Heads with parameters of their own


def log_prob64(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of all next tokens, [N, T, V], from the hidden vectors in float64."""
    hidden = model.base_model(ids).last_hidden_state
    head = copy.deepcopy(model.get_output_embeddings().head)
    return head.double().log_prob(hidden.double())


@MODELS
def test_trees_are_the_loss_and_the_logits(make: Make, computed: list[int]) -> None:
    model, ids = with_trees(make()), draw_ids(3, 9)
    computed.clear()
    assert type(model) is type(make())
    assert isinstance(model.lm_head, DeferredHead)
    labels = draw_labels(ids)
    log_prob = log_prob64(model, ids)
    expected = F.nll_loss(log_prob[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    trained = model.train()(ids, labels=labels)
    torch.testing.assert_close(trained.loss.double(), expected, atol=1e-5, rtol=1e-5)
    evaluated = model.eval()(ids, labels=labels)
    torch.testing.assert_close(evaluated.loss, trained.loss)
    assert not computed
    for out in (trained, evaluated):
        torch.testing.assert_close(out.logits.double(), log_prob, atol=1e-4, rtol=1e-4)
    some = model(ids, logits_to_keep=2).logits
    torch.testing.assert_close(some, evaluated.logits[:, -2:], atol=1e-5, rtol=1e-5)


def test_trees_train_as_their_head_alone() -> None:
    model, ids = with_trees(llama(), gate="context"), draw_ids(3, 9)
    twin = copy.deepcopy(model)
    own = gradients(model.train(), input_ids=ids, labels=ids)
    hidden = twin.train().model(ids).last_hidden_state
    loss = twin.lm_head.head(hidden[:, :-1], ids[:, 1:]).loss
    loss.backward()
    torch.testing.assert_close(own.pop("loss"), loss)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(own[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@MODELS
def test_trees_generate_what_they_find_probable(make: Make) -> None:
    model, ids = with_trees(make()), draw_ids(1, 5)
    greedy = ids
    for _ in range(4):
        greedy = torch.cat([greedy, log_prob64(model, greedy)[:, -1].argmax(-1, keepdim=True)], 1)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).equal(greedy)

    first = log_prob64(model, ids)[0, -1]
    every = torch.cat([ids.expand(V, -1), torch.arange(V)[:, None]], 1)
    pairs = first[:, None] + log_prob64(model, every)[:, -1]
    beam = model.generate(ids, max_new_tokens=2, num_beams=V, do_sample=False)[0, -2:]
    assert beam.tolist() == list(divmod(int(pairs.argmax()), V))

    torch.manual_seed(6)
    drawn = model.generate(
        ids, max_new_tokens=1, do_sample=True, top_k=0, temperature=2.0, num_return_sequences=4000
    )[:, -1]
    shares = torch.bincount(drawn, minlength=V) / 4000
    assert (shares - (first / 2.0).softmax(-1)).abs().sum() < 0.12


def test_a_name_is_a_new_head_tied_as_the_layer_was() -> None:
    counts = np.arange(V, 0, -1.0)
    for make, tied in ((gpt2, True), (llama, False)):
        head = replace_lm_head(make(), "trees", frequencies=counts, clusters=8).lm_head.head
        assert isinstance(head, TreeEnsemble)
        assert head.tied is tied
        expected = torch.from_numpy(counts / counts.sum()).float()
        torch.testing.assert_close(head.log_prob(torch.zeros(D)).exp(), expected)
    assert replace_lm_head(gpt2(), "adaptive", cutoffs=[4]).lm_head.head.name == "adaptive"


@MODELS
def test_a_forest_starts_as_the_layer(make: Make) -> None:
    model, ids = make(), draw_ids(2, 8)
    expected = model(ids).logits.log_softmax(-1)
    options = {"clusters": 4, "negatives": 8, "tokens": torch.randint(V, (4000,))}
    replace_lm_head(model, "forest", **options)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    tied = model.lm_head.head.weight is model.get_input_embeddings().weight
    assert tied == model.lm_head.head.tied == (make is gpt2)
    model.train()(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("name", ["ModernBertForMaskedLM", "T5ForConditionalGeneration"])
def test_trees_in_models_with_a_loss_of_their_own(name: str, computed: list[int]) -> None:
    """The cross-entropy that they compute is that of the log-probabilities."""
    model, ids = with_trees(small(name)), draw_ids(3, 9)
    labels = draw_labels(ids)
    computed.clear()
    out = model(input_ids=ids, labels=labels)
    assert not computed
    expected = F.cross_entropy(out.logits.detach().flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss.detach(), expected)


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    n = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor) and value.device.type != "meta":
                self.n = max(self.n, value.numel())
        return out


@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
def test_a_step_makes_no_logits(change: Any) -> None:
    """A dispatch mode turns deferring off, so it begins behind the output layer."""
    n_classes, rows = 4000, 64 * 32
    model = change(llama(vocab_size=n_classes)).train()
    ids, mode = draw_ids(64, 32), _Largest()

    def enter(*_: Any) -> None:
        mode.__enter__()

    model.lm_head.register_forward_hook(enter)
    try:
        model(ids, labels=ids).loss.backward()
    finally:
        mode.__exit__(None, None, None)
    largest_parameter = max(parameter.numel() for parameter in model.parameters())
    assert largest_parameter <= mode.n < rows * n_classes / 2


# The vocabulary


@MODELS
@pytest.mark.parametrize("kind", ["softmax", "sampled"])
@pytest.mark.parametrize("size", [V, V + 3, V - 5])
def test_a_resized_vocabulary(make: Make, kind: str, size: int) -> None:
    model = make()
    reference = copy.deepcopy(model)
    options = {"frequencies": range(V, 0, -1)} if kind == "sampled" else {}
    replace_lm_head(model, kind, **options)
    for each in (model, reference):
        torch.manual_seed(1)
        each.resize_token_embeddings(size)
    assert model.config.vocab_size == size == len(model.get_input_embeddings().weight)
    assert_same_weights(model, reference)
    ids = draw_ids(2, 8) % size
    ids[0, -1] = size - 1
    inputs = {"input_ids": ids, "labels": ids}
    if kind == "softmax" or size != V:
        own, expected = gradients(model.train(), **inputs), gradients(reference.train(), **inputs)
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
    model.eval(), reference.eval()
    assert model(**inputs).logits.equal(reference(**inputs).logits)
    torch.testing.assert_close(model(**inputs).loss, reference(**inputs).loss)


@MODELS
def test_a_head_of_its_own_stays_at_the_same_size(make: Make) -> None:
    model, ids = with_trees(make()), draw_ids(2, 8)
    layer, expected = model.lm_head, model(ids).logits
    assert model.resize_token_embeddings(V) is model.get_input_embeddings()
    assert model.lm_head is layer
    assert model(ids).logits.equal(expected)


@MODELS
def test_a_head_of_its_own_cannot_be_resized(make: Make) -> None:
    model, ids = with_trees(make()), draw_ids(2, 8)
    expected = model(ids).logits
    with pytest.raises((TypeError, ValueError, AttributeError), match=r"expected .* got TreeEns"):
        model.resize_token_embeddings(V + 3)
    # Refused before anything has changed.
    assert model(ids).logits.equal(expected)


@MODELS
def test_trees_untie_the_embedding(make: Make) -> None:
    """Trainer calls tie_weights where it loads a checkpoint."""
    model = with_trees(make())
    before = copy.deepcopy(model.lm_head.state_dict())
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.tie_weights()
    for name, tensor in model.lm_head.state_dict().items():
        assert tensor.equal(before[name])


# The check, and what is refused


class Odd(LlamaForCausalLM):  # type: ignore[misc]
    """Its loss is another one for a tensor that is not quite a tensor. It counts its calls."""

    kind = DeferredLogits

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Any = None, **options: Any) -> Any:
        self.calls += 1
        out = super().forward(input_ids, labels=labels)
        out.loss = out.loss * (2 if type(out.logits) is self.kind else 1)
        return out


class Images(LlamaForCausalLM):  # type: ignore[misc]
    def forward(self, input_ids: Tensor, pixels: Tensor, labels: Any = None) -> Any:
        return super().forward(input_ids, labels=labels)


def assert_untouched(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    assert_same_weights(model, reference)
    assert type(model.lm_head) is nn.Linear
    assert vars(model).keys() == vars(reference).keys()
    assert model.all_tied_weights_keys == reference.all_tied_weights_keys
    assert model.config.to_dict() == reference.config.to_dict()
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks
    assert [m.training for m in model.modules()] == [m.training for m in reference.modules()]
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings


SAMPLED: dict[str, Any] = {"frequencies": range(V, 0, -1)}


@pytest.mark.parametrize(
    ("name", "head", "options", "message"),
    [
        ("GraniteForCausalLM", "trees", {}, "'softmax' or 'sampled' for Granite"),
        ("CohereForCausalLM", "mos", {"components": 2}, "'softmax' or 'sampled' for Cohere"),
        ("Gemma2ForCausalLM", "trees", {}, "'softmax' or 'sampled' for Gemma2"),
        ("Gemma2ForCausalLM", "sampled", SAMPLED, "without a soft cap .* head=None"),
        ("BartForConditionalGeneration", "trees", {}, None),
    ],
)
def test_a_model_that_cannot_take_a_head_is_given_back(
    name: str, head: str, options: dict[str, Any], message: str | None
) -> None:
    model = small(name).train()
    model.get_input_embeddings().eval()
    if message is None:
        # Not all of its rows are of one matrix product: it adds a bias.
        model.final_logits_bias.normal_()
        message = "'softmax' or 'sampled' for Bart"
    reference = copy.deepcopy(model)
    with pytest.raises((TypeError, ValueError), match=message):
        replace_lm_head(model, head, **options)
    assert_untouched(model, reference)


def test_the_check_finds_another_loss() -> None:
    model = Odd(llama().config)
    reference = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"the loss of Odd to stay .* got .* for .*given b"):
        replace_lm_head(model)
    assert_untouched(model, reference)


def test_the_check_changes_neither_buffers_nor_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Odd, "kind", None)
    model = Odd(llama().config).train()
    frozen = model.model.layers[0].eval()
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    replace_lm_head(model)
    assert torch.rand(3).equal(expected)
    assert model.calls == 0
    assert model.training
    assert not frozen.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["softmax", "trees"])
def test_a_model_of_more_than_tokens_is_not_checked(kind: str) -> None:
    model = Images(llama().config)
    with pytest.warns(UserWarning, match="Images was not compared .* tokens and labels alone"):
        replace_lm_head(model, kind)
    ids = draw_ids(2, 6)
    model(ids, ids, labels=ids).loss.backward()


def test_models_it_cannot_change() -> None:
    with pytest.raises(TypeError, match="model: expected a model of transformers, got Linear"):
        replace_lm_head(nn.Linear(2, 3))
    with pytest.raises(TypeError, match=r"model: expected a .* linear .* got GPT2Model with none"):
        replace_lm_head(gpt2().transformer)
    for change in (replace_lm_head, with_trees):
        for head in (None, "trees"):
            with pytest.raises(ValueError, match="model: expected a model with its own output"):
                replace_lm_head(change(gpt2()), head)


def test_a_layer_with_a_forward_method_of_its_own() -> None:
    """Dory has a factor of each token in it."""
    dory = small("DoryForCausalLM")
    layer, before = dory.lm_head, copy.deepcopy(dory.state_dict())
    with pytest.raises(TypeError, match=r"layer: expected a torch\.nn\.Linear, or a sub"):
        replace_lm_head(dory)
    assert dory.lm_head is layer
    assert all(tensor.equal(before[name]) for name, tensor in dory.state_dict().items())


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        (Softmax(D, V + 1), {}, f"head: expected n_classes={V}, got {V + 1}"),
        (PLIF(D + 1, V, intervals=9), {}, f"head: expected in_features={D}, got {D + 1}"),
        (PLIF(D, V, intervals=9, embedding=nn.Embedding(V, D)), {}, "head: expected a head tied"),
        (Softmax(D, V), {"bias": False}, "bias: expected no options together"),
        ("nothing", {}, "head: expected one of .*, got 'nothing'"),
        *((name, {"frequencies": [1] * (V - 1)}, rf"frequencies: expected {V} .*, got {V - 1}")
          for name in head_names()),
    ],
    ids=lambda value: value.name if isinstance(value, Head) else None,
)  # fmt: skip
def test_heads_that_do_not_fit(head: Head | str, options: dict[str, Any], message: str) -> None:
    model = gpt2()
    reference = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        replace_lm_head(model, head, **options)
    assert_untouched(model, reference)


def test_another_layer_is_no_head() -> None:
    with pytest.raises(TypeError, match=r"head: expected a head of hstree, .* got Linear"):
        replace_lm_head(gpt2(), nn.Linear(D, V))  # type: ignore[arg-type]


def test_without_transformers_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hstree.transformers")
    with pytest.raises(ImportError, match=r"pip install 'hstree\[transformers\]'"):
        importlib.import_module("hstree.transformers")


# What users do with a model


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Call all at the same time, and raise the first error."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result()


@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
def test_two_calls_at_the_same_time(change: Any) -> None:
    """Each waits until both have hidden vectors, and again until both have logits."""
    model = change(gpt2())
    ids = [draw_ids(2, 7, seed=seed) for seed in (1, 2)]
    options: list[dict[str, Any]] = [{"labels": draw_labels(ids[0])}, {}]
    expected = [model(each, **given) for each, given in zip(ids, options, strict=True)]
    barrier = threading.Barrier(2)

    def wait(*_: Any) -> None:
        barrier.wait()

    model.transformer.register_forward_hook(wait)
    model.lm_head.register_forward_hook(wait)
    own: list[Any] = [None, None]

    def call(i: int) -> None:
        own[i] = model(ids[i], **options[i])
        own[i].logits.max()

    in_threads([partial(call, 0), partial(call, 1)])
    assert own[0].loss.equal(expected[0].loss)
    for got, wanted in zip(own, expected, strict=True):
        assert got.logits.equal(wanted.logits)


@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(change: Any, reentrant: bool) -> None:
    model, ids = change(llama()).train(), draw_ids(2, 8)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    expected = gradients(model, **inputs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(model, **inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
def test_compiled_whole(change: Any) -> None:
    model, ids = change(llama()), draw_ids(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(logits, model(ids).logits + 0, atol=1e-5, rtol=1e-5)
    model.train()
    own = gradients(compiled, input_ids=ids, labels=ids, use_cache=False)
    expected = gradients(model, input_ids=ids, labels=ids, use_cache=False)
    own = {name.removeprefix("_orig_mod."): value for name, value in own.items()}
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
