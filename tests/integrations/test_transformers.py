"""Heads as the lm_head of small, randomly initialised models of transformers, and its Trainer."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hstree.heads import (
    AdaptiveSoftmax,
    Head,
    MixtureOfSoftmaxes,
    ScreenedSoftmax,
    Softmax,
    TreeEnsemble,
)
from hstree.optim import AdamW, clip_grad_norm_
from hstree.trees import build_ensemble

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import accelerate  # noqa: F401
    import transformers
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedModel,
        Trainer,
        TrainingArguments,
    )
    from transformers.modeling_outputs import CausalLMOutput

    from hstree.integrations.transformers import LMHead, from_pretrained, replace_lm_head
    from hstree.integrations.transformers.logits import scale_and_cap

V, D = 40, 16


def gpt2(**options: Any) -> PreTrainedModel:
    """Tied embeddings, no dropout."""
    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": V, "n_positions": 64, "n_embd": D, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(none | sizes | tokens | options))).eval()


def _small(**options: Any) -> dict[str, Any]:
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return sizes | heads | tokens | options


def llama(**options: Any) -> PreTrainedModel:
    """Embeddings that are not tied."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_small(**options))).eval()


def sharp(model: PreTrainedModel) -> PreTrainedModel:
    """The model with an lm_head of weights of order one: distributions far from uniform."""
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def clustered(model: PreTrainedModel, n_trees: int = 2, **options: Any) -> TreeEnsemble:
    linear = model.get_output_embeddings()
    vectors = [linear.weight.detach().float().numpy()]
    trees = build_ensemble("cluster", len(linear.weight), n_trees, None, vectors, 3, 8, 4)
    return TreeEnsemble.from_linear(linear, trees, **({"tied": False} | options))


def with_trees(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    return replace_lm_head(sharp(model), clustered(model, **options))


def draw_ids(*size: int, seed: int = 3) -> Tensor:
    """Without 0, the token that pads."""
    return torch.randint(1, V, size, generator=torch.Generator().manual_seed(seed))


def draw_labels(ids: Tensor) -> Tensor:
    """The ids, some of them ignored."""
    ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    return ids.masked_fill(ignored, -100)


MODELS = pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
Make = Callable[..., PreTrainedModel]


# One model, two lm_heads: transformers' own, and the softmax of hstree with the same weights


@MODELS
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(9)])
def test_a_softmax_gives_the_loss_and_gradients_of_the_lm_head(
    make: Make, num_items: Tensor | int | None
) -> None:
    reference = sharp(make())
    model = copy.deepcopy(reference)
    assert replace_lm_head(model) is model
    ids = draw_ids(3, 9)
    calls = {"labels": draw_labels(ids), "num_items_in_batch": num_items}
    losses = []
    for each in (reference, model):
        losses.append(each.train()(ids, **calls).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert len(gradients) == len(list(reference.parameters()))
    for name, parameter in reference.named_parameters():
        own = gradients[name.replace("lm_head.", "lm_head.head.")]
        torch.testing.assert_close(own, parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@MODELS
def test_logits_are_log_probabilities(make: Make) -> None:
    reference = sharp(make())
    model = copy.deepcopy(reference)
    replace_lm_head(model)
    ids = draw_ids(3, 9)
    own, expected = model(ids, labels=draw_labels(ids)), reference(ids, labels=draw_labels(ids))
    torch.testing.assert_close(own.logits, expected.logits.log_softmax(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own.loss, expected.loss)
    some = model(ids, logits_to_keep=2).logits
    torch.testing.assert_close(some, own.logits[:, -2:], atol=1e-5, rtol=1e-5)


def test_labels_that_are_shifted_already() -> None:
    reference = sharp(llama())
    model = copy.deepcopy(reference)
    replace_lm_head(model)
    ids = draw_ids(3, 9)
    shifted = draw_labels(ids).clamp(min=0)
    options = {"labels": ids, "shift_labels": shifted, "ignore_index": 0}
    expected = F.cross_entropy(reference(ids).logits.transpose(1, 2), shifted, ignore_index=0)
    torch.testing.assert_close(model(ids, **options).loss, expected)
    torch.testing.assert_close(reference(ids, **options).loss, expected)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0},
    "beam": {"num_beams": 3, "do_sample": False},
}


@MODELS
@pytest.mark.parametrize("how", GENERATION)
def test_generation_is_that_of_the_lm_head(make: Make, how: str) -> None:
    reference = sharp(make())
    model = copy.deepcopy(reference)
    replace_lm_head(model)
    ids = draw_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded on the left
    texts = []
    for each in (reference, model):
        torch.manual_seed(5)
        texts.append(each.generate(ids, attention_mask=mask, max_new_tokens=8, **GENERATION[how]))
    assert texts[0].shape == (2, 13)
    assert texts[0].equal(texts[1])


def greedy(model: PreTrainedModel, ids: Tensor, **options: Any) -> tuple[Tensor, int]:
    """Twelve tokens more, and how often the model was called."""
    calls: list[nn.Module] = []
    hook = model.register_forward_hook(lambda module, *_: calls.append(module))
    text = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
    hook.remove()
    return text, len(calls)


@MODELS
def test_a_screened_lm_head_generates_the_same_text(make: Make, tmp_path: Path) -> None:
    model = sharp(make())
    tokens = torch.randint(V, (8, 32))
    beams: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    with torch.no_grad():
        hidden, logits = model.base_model(tokens)[0], model(tokens).logits
    expected = model.generate(tokens[:, :4], **beams)
    tied = make is gpt2
    head = ScreenedSoftmax.from_linear(model.lm_head, hidden, exact=V, tied=tied)
    replace_lm_head(model, head)
    assert torch.equal(model.generate(tokens[:, :4], **beams), expected)
    torch.testing.assert_close(model(tokens).logits, logits.log_softmax(-1), rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert (loaded.lm_head.head.weight is loaded.get_input_embeddings().weight) == tied


@MODELS
def test_trees_assist_generation(make: Make) -> None:
    """The greedy text of a model that a copy with trees assists is that of the model alone, in
    fewer calls; and the other way round."""
    model = sharp(make())
    assistant = with_trees(copy.deepcopy(model))
    ids = draw_ids(1, 5)
    for each, other in ((model, assistant), (assistant, model)):
        expected, alone = greedy(each, ids)
        text, assisted = greedy(each, ids, assistant_model=other)
        assert text.equal(expected)
        assert assisted < alone == 12
    torch.manual_seed(5)
    drawn = model.generate(ids, max_new_tokens=12, do_sample=True, assistant_model=assistant)
    assert drawn.shape == (1, 17)


# Trees


def log_prob64(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of all next tokens, [N, T, V], from the hidden vectors in float64."""
    hidden = model.base_model(ids).last_hidden_state
    head = copy.deepcopy(model.get_output_embeddings().head)
    return head.double().log_prob(hidden.double())


@MODELS
def test_the_loss_of_trees_is_the_mean_over_the_labels(make: Make) -> None:
    model, ids = with_trees(make()), draw_ids(3, 9)
    labels = draw_labels(ids)
    log_prob, target = log_prob64(model, ids)[:, :-1], labels[:, 1:]
    expected = F.nll_loss(log_prob.flatten(0, 1), target.flatten())
    trained = model.train()(ids, labels=labels)
    assert trained.logits is None
    assert "logits" not in trained
    torch.testing.assert_close(trained.loss.double(), expected, atol=1e-5, rtol=1e-5)
    evaluated = model.eval()(ids, labels=labels)
    torch.testing.assert_close(evaluated.loss, trained.loss)
    torch.testing.assert_close(evaluated.logits[:, :-1].double(), log_prob, atol=1e-4, rtol=1e-4)
    assert model(ids, labels=labels, skip_logits=True).logits is None
    assert model.train()(ids, labels=labels, skip_logits=False).logits.shape == (3, 9, V)
    assert model(ids).logits.shape == (3, 9, V)


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


@MODELS
def test_without_a_head_the_distribution_and_the_weight_stay(make: Make) -> None:
    model, ids = make(), draw_ids(4, 16)
    expected, weight = model(ids).logits.log_softmax(-1), model.get_output_embeddings().weight
    tied = weight is model.get_input_embeddings().weight
    head = replace_lm_head(model, z_loss=0.5).get_output_embeddings().head
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert type(head) is Softmax
    assert head.weight is weight
    assert (head.tied, head.z_loss) == (tied, 0.5)


@pytest.mark.parametrize("cap", [0.5, 30.0, None])
@pytest.mark.parametrize("scale", [0.0625, 1.0, 3.0])
def test_scale_and_soft_cap(scale: float, cap: float | None) -> None:
    class Scaled(GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **options: Any) -> Any:
            logits = self.lm_head(self.transformer(input_ids)[0]) * scale
            logits = logits if cap is None else torch.tanh(logits / cap) * cap
            return CausalLMOutput(loss=self.loss_function, logits=logits)

    model = Scaled(gpt2().config).to(torch.bfloat16).train()
    frozen = model.transformer.h[0].eval()
    found = scale_and_cap(model, model.lm_head)
    assert found == (pytest.approx(scale, rel=1e-5), cap and pytest.approx(cap, rel=1e-5))
    assert model.training
    assert not frozen.training
    assert not model.lm_head._forward_hooks


@pytest.mark.parametrize("change", [Tensor.sinh, Tensor.neg, lambda x: x[..., :-1]])
def test_logits_that_are_no_scaled_and_capped_ones_are_refused(change: Any) -> None:
    class Changed(GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **options: Any) -> Any:
            logits = change(self.lm_head(self.transformer(input_ids)[0]))
            return CausalLMOutput(loss=self.loss_function, logits=logits)

    model = Changed(gpt2().config)
    with pytest.raises(ValueError, match=r"model: expected logits that are those .* got Changed"):
        replace_lm_head(model)
    assert type(model) is Changed
    assert isinstance(model.lm_head, nn.Linear)


def test_a_name_is_a_new_head_tied_as_the_lm_head_was() -> None:
    counts = np.arange(V, 0, -1.0)
    for make, tied in ((gpt2, True), (llama, False)):
        head = replace_lm_head(make(), "trees", frequencies=counts, root=8)
        head = head.get_output_embeddings().head
        assert isinstance(head, TreeEnsemble)
        assert head.tied is tied
        expected = torch.from_numpy(counts / counts.sum()).float()
        torch.testing.assert_close(head.log_prob(torch.zeros(D)).exp(), expected)
    assert not replace_lm_head(gpt2(), "softmax", embedding=None).lm_head.head.tied
    assert replace_lm_head(gpt2(), "adaptive", cutoffs=[4]).lm_head.head.name == "adaptive"


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("name", ["softmax", "sampled", "forest"])
def test_heads_that_start_as_the_lm_head(name: str, make: Any) -> None:
    """Whatever frequencies and tokens they are built with; tied as it was."""
    model, tokens, ids = make().eval(), torch.randint(V, (4000,)), torch.arange(8)[None]
    expected = model(ids).logits.log_softmax(-1)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    options: dict[str, Any] = {"frequencies": range(V, 0, -1), "tokens": tokens}
    if name == "forest":
        options |= {"clusters": 4, "negatives": 8}
    head = replace_lm_head(model, name, **options).lm_head.head
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert head.name == name
    assert head.tied == tied == (head.weight is model.get_input_embeddings().weight)
    model.train()(ids, labels=ids).loss.backward()


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.n = max(self.n, value.numel())
        return out


def test_training_makes_no_logits() -> None:
    n_classes, rows = 1000, 4 * 32
    model = with_trees(gpt2(vocab_size=n_classes)).train()
    ids = draw_ids(4, 32)
    with _Largest() as mode:
        model(ids, labels=ids).loss.backward()
    largest_parameter = max(parameter.numel() for parameter in model.parameters())
    assert largest_parameter <= mode.n < rows * n_classes / 2
    with _Largest() as mode:
        model.eval()(ids)
    assert mode.n >= rows * n_classes


# Saving


def _adaptive(model: PreTrainedModel) -> Head:
    order = torch.arange(V).flip(0)
    return AdaptiveSoftmax(D, V, cutoffs=(5, 20), div_value=2.0, order=order)


def _tied_trees(model: PreTrainedModel) -> Head:
    trees = build_ensemble("huffman", V, 2, np.arange(1, V + 1), root=8, leaf=4)
    embedding = model.get_input_embeddings()
    return TreeEnsemble(D, V, trees, node_vectors="leaves", embedding=embedding, subset_size=8)


SAVED: dict[str, Callable[[PreTrainedModel], Head]] = {
    "trees": lambda model: clustered(model, gate="context", subset_size=8, sparse=True),
    "trees, tied": _tied_trees,
    "softmax, tied": lambda model: Softmax(D, V, embedding=model.get_input_embeddings()),
    "mos": lambda model: MixtureOfSoftmaxes(D, V, components=2),
    "adaptive": _adaptive,
}


@MODELS
@pytest.mark.parametrize("kind", SAVED)
def test_saved_and_loaded_it_is_the_same_model(make: Make, kind: str, tmp_path: Path) -> None:
    model = make()
    replace_lm_head(model, SAVED[kind](model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    ids = draw_ids(2, 7)
    assert loaded(ids).logits.equal(model(ids).logits)
    assert type(loaded) is type(model)
    assert isinstance(loaded, type(make()))
    assert not loaded.training
    head = loaded.get_output_embeddings().head
    assert not head.training
    tied = [p for p in head.parameters() if p is loaded.get_input_embeddings().weight]
    assert len(tied) == ("tied" in kind) == loaded.config.tie_word_embeddings
    losses = []
    for each in (model, loaded):
        losses.append(each.train()(ids, labels=ids).loss)
        losses[-1].backward()
    assert losses[0].equal(losses[1])
    for own, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert own.requires_grad
        assert own.grad.to_dense().equal(other.grad.to_dense())
    loaded.save_pretrained(tmp_path / "again")
    assert from_pretrained(tmp_path / "again")(ids).logits.equal(model.eval()(ids).logits)


def test_shards_and_dtypes(tmp_path: Path) -> None:
    model = with_trees(gpt2().to(torch.bfloat16))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 2
    loaded, report = from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    ids = draw_ids(2, 7)
    assert loaded(ids).logits.dtype == torch.float32
    assert loaded(ids).logits.equal(model(ids).logits)
    wide = from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    torch.testing.assert_close(wide(ids).logits, loaded(ids).logits, atol=0.3, rtol=0.1)


def test_a_model_without_a_head_of_hstree_is_not_loaded(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="path: expected a model with a head of hstree"):
        from_pretrained(tmp_path)


def test_copied_and_pickled() -> None:
    model, ids = with_trees(gpt2()), draw_ids(2, 6)
    logits = model(ids).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert twin(ids).logits.equal(logits)
        assert twin.train()(ids, labels=ids).logits is None
    with pytest.raises(AttributeError, match="has no attribute 'AutoConfig'"):
        importlib.import_module("hstree.integrations.transformers").AutoConfig  # noqa: B018


# Embeddings


def test_trees_untie_the_embedding() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    with_trees(model)
    assert not model.config.tie_word_embeddings
    before = {name: p.detach().clone() for name, p in model.lm_head.named_parameters()}
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    model.tie_weights()
    for name, parameter in model.lm_head.named_parameters():
        assert parameter.equal(before[name])


def test_a_vocabulary_is_resized_before_the_head_is_made() -> None:
    model = llama()
    model.resize_token_embeddings(V + 3)
    with_trees(model)
    assert model(draw_ids(1, 4)).logits.shape == (1, 4, V + 3)
    for size in (None, V + 3):
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    assert len(model.get_input_embeddings().weight) == V + 3 == model.config.vocab_size


class _Resizable(Softmax):
    """The interface of every head that ``resize_token_embeddings`` calls."""

    def resized(
        self, num_classes: int, *, frequencies: Any = None, embedding: Any = None
    ) -> Softmax:
        head = Softmax(self.in_features, num_classes, bias=False, embedding=embedding)
        if embedding is None:
            kept = min(num_classes, self.n_classes)
            with torch.no_grad():
                head.weight[:kept] = self.weight[:kept]
        return head.train(self.training)


@MODELS
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "multiple", "expected"), [(V + 3, None, V + 3), (30, 16, 32)])
def test_the_vocabulary_of_a_model_with_a_head_is_resized(
    make: Make, tied: bool, size: int, multiple: int | None, expected: int, tmp_path: Path
) -> None:
    """It then is a model with a linear lm_head whose rows were resized."""
    model = sharp(make())
    rows = model.get_input_embeddings() if tied else model.get_output_embeddings()
    before, kept = rows.weight.detach().clone(), min(V, expected)
    embedding = model.get_input_embeddings() if tied else None
    head = _Resizable(D, V, bias=False, embedding=embedding)
    if not tied:
        head.load_state_dict({"weight": before})
    replace_lm_head(model, head)
    ids = draw_ids(2, 6) % kept
    with torch.no_grad():
        logits = model(ids).logits[..., :kept].log_softmax(-1)
    resized = model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
    assert resized is model.get_input_embeddings()
    assert model.config.vocab_size == expected
    own = model.get_output_embeddings()
    assert own.out_features == own.head.n_classes == expected == len(resized.weight)
    assert own.head.weight[:kept].equal(before[:kept])
    assert (own.head.weight is resized.weight) == tied == model.config.tie_word_embeddings
    assert not own.head.training
    out = model(ids)
    assert out.logits.shape == (2, 6, expected)
    torch.testing.assert_close(out.logits[..., :kept].log_softmax(-1), logits)
    model.train()(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded(ids).logits.equal(model.eval()(ids).logits)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 8)


def test_replacing_leaves_the_config_of_another_model() -> None:
    config = gpt2().config
    first, second = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    with_trees(first)
    assert config.tie_word_embeddings
    assert not hasattr(config, "hstree_head")
    assert second.config is config
    assert not first.config.tie_word_embeddings
    assert first.transformer.config is first.config


# Trainer


def examples(n: int = 8) -> list[dict[str, Tensor]]:
    ids = draw_ids(n, 10)
    return [
        {"input_ids": row, "labels": label}
        for row, label in zip(ids, draw_labels(ids), strict=True)
    ]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Steps over all examples in two parts."""
    defaults = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 5,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "logging_steps": 1,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **(defaults | options))


def history(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any, steps: int
) -> list[float]:
    """The loop that Trainer is asked for, over all examples at once."""
    rows = examples()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for _ in range(steps):
        loss = model.train()(**batch).loss
        loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@MODELS
def test_trainer_does_what_a_loop_does(make: Make, tmp_path: Path) -> None:
    model = with_trees(make())
    twin = copy.deepcopy(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=examples())
    trainer.train()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    expected = by_hand(twin, optimizer, torch.nn.utils.clip_grad_norm_, 5)
    assert history(trainer) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0] - 0.2
    result = trainer.evaluate(examples())
    assert result["eval_loss"] < expected[-1]


def test_trainer_with_row_sparse_gradients(tmp_path: Path) -> None:
    model = with_trees(gpt2(), sparse=True)
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.0}
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=examples(),
        optimizer_cls_and_kwargs=(AdamW, options),
    )
    trainer.accelerator.clip_grad_norm_ = clip_grad_norm_
    kinds = set()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: kinds.add(own.grad.is_sparse))
    trainer.train()
    assert kinds == {True, False}
    expected = by_hand(twin, AdamW(twin.parameters(), **options), clip_grad_norm_, 5)
    assert history(trainer) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0] - 0.2


def test_trainer_resumes_and_loads(tmp_path: Path) -> None:
    start = with_trees(gpt2())
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3}
    first = Trainer(copy.deepcopy(start), arguments(tmp_path, **options), train_dataset=examples())
    first.train()
    second = Trainer(with_trees(gpt2()), arguments(tmp_path, **options), train_dataset=examples())
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(second) == pytest.approx(history(first), rel=1e-3)
    ids = draw_ids(2, 6)
    torch.testing.assert_close(
        from_pretrained(tmp_path / "checkpoint-3")(ids).logits, second.model.eval()(ids).logits
    )


def test_trainer_smooths_labels_and_measures(tmp_path: Path) -> None:
    """What Trainer computes from logits, it computes from log-probabilities."""
    model = with_trees(gpt2())
    rows = examples()
    ids, labels = (torch.stack([row[name] for row in rows]) for name in rows[0])
    log_prob = log_prob64(model, ids)[:, :-1].flatten(0, 1)
    target = labels[:, 1:].flatten()
    expected = F.cross_entropy(log_prob, target, label_smoothing=0.1)

    def accuracy(prediction: Any) -> dict[str, float]:
        best = torch.from_numpy(prediction.predictions).argmax(-1)[:, :-1].flatten()
        return {"accuracy": float((best == target)[target != -100].float().mean())}

    trainer = Trainer(
        model,
        arguments(tmp_path, label_smoothing_factor=0.1),
        train_dataset=rows,
        compute_metrics=accuracy,
    )
    result = trainer.evaluate(rows)
    assert result["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)
    right = (log_prob.argmax(-1) == target)[target != -100]
    assert result["eval_accuracy"] == pytest.approx(right.float().mean().item())


def test_trainer_evaluates_without_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        return transformers.default_data_collator(rows) | {"skip_logits": True}

    model, rows = with_trees(gpt2()), examples()
    expected = Trainer(model, arguments(tmp_path)).evaluate(rows)["eval_loss"]
    monkeypatch.setattr(TreeEnsemble, "log_prob", None)
    trainer = Trainer(model, arguments(tmp_path), data_collator=collate)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected)


# Threads


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Call all at the same time, and raise the first error."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result()


def test_two_calls_at_the_same_time() -> None:
    """Each waits until both have hidden vectors, and again until both have logits; one has labels
    and skips the logits."""
    model = with_trees(gpt2())
    ids = [draw_ids(2, 7, seed=seed) for seed in (1, 2)]
    options = [{"labels": draw_labels(ids[0]), "skip_logits": True}, {}]
    expected = [model(each, **given) for each, given in zip(ids, options, strict=True)]
    barrier = threading.Barrier(2)

    def wait(*_: Any) -> None:
        barrier.wait()

    model.transformer.register_forward_hook(wait)
    model.lm_head.register_forward_hook(wait)
    own: list[Any] = [None, None]

    def call(i: int) -> None:
        own[i] = model(ids[i], **options[i])

    in_threads([partial(call, 0), partial(call, 1)])
    assert own[0].loss.equal(expected[0].loss)
    assert own[0].logits is None
    assert own[1].logits.equal(expected[1].logits)


@pytest.mark.slow
def test_eight_threads() -> None:
    model = with_trees(gpt2())
    ids = [draw_ids(1, 4, seed=seed) for seed in range(8)]
    expected = [model(each, labels=each) for each in ids]
    greedy = {"max_new_tokens": 6, "do_sample": False}
    texts = [model.generate(each, **greedy) for each in ids]

    def call(i: int) -> None:
        for _ in range(100):
            out = model(ids[i], labels=ids[i])
            assert out.loss.equal(expected[i].loss)
            assert out.logits.equal(expected[i].logits)
            assert model(ids[i]).logits.equal(expected[i].logits)
        for _ in range(5):
            assert model.generate(ids[i], **greedy).equal(texts[i])

    in_threads([partial(call, i) for i in range(8)])


def test_a_call_that_fails_leaves_no_trace() -> None:
    model, ids = with_trees(gpt2()), draw_ids(1, 5)
    expected = model.lm_head(model.transformer(ids).last_hidden_state)
    with pytest.raises(ValueError, match="target"):
        model(ids, labels=torch.full_like(ids, V), skip_logits=True)
    assert model.lm_head(model.transformer(ids).last_hidden_state).equal(expected)


def test_the_loss_function_outside_of_a_call() -> None:
    model, ids = with_trees(gpt2()), draw_ids(2, 6)
    out = model(ids, labels=draw_labels(ids))
    loss = model.loss_function(out.logits, draw_labels(ids), vocab_size=V)
    torch.testing.assert_close(loss, out.loss)


# The rest of what transformers does with a model


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing() -> None:
    model = with_trees(llama()).train()
    ids, gradients = draw_ids(2, 8), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


@MODELS
def test_autocast(make: Make) -> None:
    model, ids = with_trees(make()).train(), draw_ids(2, 8)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
        logits = model(ids).logits
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.05)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 8), atol=1e-3, rtol=0)
    loss.backward()


@pytest.mark.slow
def test_compiled_whole() -> None:
    model, ids = with_trees(llama()), draw_ids(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    model.train()
    loss = compiled(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)


def test_other_heads_have_no_soft_cap() -> None:
    options = _small(head_dim=8, final_logit_softcapping=0.5)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**options)).eval()
    with_trees(model)
    ids = draw_ids(2, 8)
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.logits.double(), log_prob64(model, ids), atol=1e-4, rtol=1e-4)
    expected = F.nll_loss(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(model.train()(ids, labels=ids).loss, expected)


def test_a_mixture_of_experts_keeps_its_auxiliary_loss() -> None:
    options = _small(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    reference = sharp(transformers.MixtralForCausalLM(transformers.MixtralConfig(**options)))
    model = copy.deepcopy(reference)
    replace_lm_head(model)
    ids = draw_ids(2, 8)
    own, expected = model.train()(ids, labels=ids), reference.train()(ids, labels=ids)
    torch.testing.assert_close(own.loss, expected.loss)
    assert own.aux_loss.equal(expected.aux_loss)
    assert own.aux_loss > 0
    as_tuple = model(ids, labels=ids, return_dict=False)
    torch.testing.assert_close(as_tuple[0], own.loss)


def test_an_lm_head_of_another_name(tmp_path: Path) -> None:
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_small())).eval()
    slopes = {"intervals": 9}
    replace_lm_head(model, "mos-plif", components=2, function_options=slopes)
    assert isinstance(model.get_output_embeddings(), LMHead)
    model.save_pretrained(tmp_path)
    ids, loaded = draw_ids(2, 8), from_pretrained(tmp_path)
    assert loaded(ids).logits.equal(model(ids).logits)
    assert loaded.lm_head.head.name == "mos-plif"


# What it refuses


def test_models_it_cannot_change() -> None:
    with pytest.raises(TypeError, match="model: expected a model of transformers, got Linear"):
        replace_lm_head(nn.Linear(2, 3))
    sizes = {"vocab_size": V, "d_model": D, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(
        TypeError, match=r"model: expected a causal .* got T5ForConditionalGeneration"
    ):
        replace_lm_head(t5, "softmax")
    with pytest.raises(TypeError, match=r"model: expected a causal .* got GPT2Model"):
        replace_lm_head(gpt2().transformer, "softmax")
    with pytest.raises(ValueError, match="model: expected a linear lm_head, got TreeEnsemble"):
        replace_lm_head(with_trees(gpt2()), "softmax")


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        (Softmax(D, V + 1), {}, f"head: expected n_classes={V}, got {V + 1}"),
        (Softmax(D + 1, V), {}, f"head: expected in_features={D}, got {D + 1}"),
        (Softmax(D, V, ignore_index=0), {}, "head: expected ignore_index=-100, got 0"),
        (Softmax(D, V, embedding=nn.Embedding(V, D)), {}, "head: expected a head tied"),
        (Softmax(D, V), {"bias": False}, "bias: expected no options together"),
        ("nothing", {}, "head: expected one of .*, got 'nothing'"),
    ],
)
def test_heads_that_do_not_fit(head: Head | str, options: dict[str, Any], message: str) -> None:
    model = gpt2()
    with pytest.raises(ValueError, match=message):
        replace_lm_head(model, head, **options)
    assert type(model) is GPT2LMHeadModel
    assert isinstance(model.lm_head, nn.Linear)


def test_another_layer_is_no_head() -> None:
    with pytest.raises(TypeError, match=r"head: expected a head of hstree, .* got Linear"):
        replace_lm_head(gpt2(), nn.Linear(D, V))


def test_no_logits_without_labels() -> None:
    with pytest.raises(ValueError, match="skip_logits: expected labels"):
        with_trees(gpt2())(draw_ids(1, 3), skip_logits=True)


def test_a_model_with_a_loss_of_its_own_is_refused() -> None:
    class OwnLoss(GPT2LMHeadModel):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Any = None, return_dict: Any = None) -> Any:
            out = super().forward(input_ids)
            out.loss = out.logits.sum()
            return out

    model = OwnLoss(gpt2().config)
    with_trees(model)
    with pytest.raises(TypeError, match="loss by loss_function, got OwnLoss"):
        model(draw_ids(1, 3), labels=draw_ids(1, 3))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertForMaskedLM", {}),
        ("BartForCausalLM", {"d_model": D, "decoder_layers": 1, "decoder_attention_heads": 2}),
        ("TrOCRForCausalLM", {"d_model": D, "decoder_layers": 1, "decoder_attention_heads": 2}),
    ],
)
def test_a_model_with_another_loss_is_refused_at_once(name: str, options: dict[str, Any]) -> None:
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**(_small() | options)))
    model.config.is_encoder_decoder = False
    linear = model.get_output_embeddings()
    with pytest.raises(TypeError, match=f"loss by loss_function, got {name}"):
        replace_lm_head(model, "softmax")
    assert type(model) is model_class
    assert model.get_output_embeddings() is linear


def test_no_weight_is_exposed() -> None:
    lm_head = with_trees(gpt2().to(torch.bfloat16)).lm_head
    assert lm_head.weight.dtype == torch.bfloat16
    assert lm_head.weight.device == torch.device("cpu")
    assert (lm_head.in_features, lm_head.out_features, lm_head.bias) == (D, V, None)
    hidden = torch.zeros(2, D)
    uses: list[Callable[[], Any]] = [
        lambda: F.linear(hidden, lm_head.weight),
        lambda: hidden @ lm_head.weight,
        lambda: lm_head.weight[:2],
        lambda: lm_head.weight.T,
        lambda: lm_head.weight.detach(),
        lambda: torch.matmul(hidden, lm_head.weight),
    ]
    for use in uses:
        with pytest.raises((TypeError, AttributeError), match=r"linear lm_head, got TreeEnsemble"):
            use()
    with pytest.raises((TypeError, KeyError)):
        lm_head.weight = nn.Parameter(torch.zeros(V, D))


def test_without_transformers_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hstree.integrations.transformers"
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'hstree\[transformers\]'"):
        importlib.import_module(name)
