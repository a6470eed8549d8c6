"""Adapters of PEFT on models whose logits are deferred, beside the plain models."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import peft
    from integrations.small_models import assert_same_weights, draw_ids, draw_labels, llama
    from transformers import PreTrainedModel

    from hstree.deferred import DeferredHead
    from hstree.transformers import accelerate_lm_head, from_pretrained, replace_lm_head

pytestmark = [
    pytest.mark.usefixtures("computed"),
    # Of transformers, in what PEFT reads; and what PEFT says of adapters of an output layer.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
]

IDS = draw_ids(4, 9)


def with_adapter(model: PreTrainedModel, **options: Any) -> peft.PeftModel:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options))


def train(model: nn.Module, steps: int = 4, lr: float = 0.05) -> list[float]:
    """A few steps of plain gradient descent."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.train()(input_ids=IDS, labels=draw_labels(IDS)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def trees(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    replace_lm_head(model, "trees", n_trees=2, clusters=8, gate="context", embedding=None)
    with torch.no_grad():
        for parameter in model.lm_head.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


# The softmax of the model

ADAPTERS: dict[str, dict[str, Any]] = {
    "the body": {},
    "the layer": {"more": ["lm_head"]},
    "dora": {"more": ["lm_head"], "use_dora": True},
    "all linear layers": {"target_modules": "all-linear"},
    "a copy of the layer": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 9]},
    "tokens of the layer": {"trainable_token_indices": {"lm_head": [3, 9]}},
}


@pytest.mark.parametrize("how", ADAPTERS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_of_the_plain_model(
    tied: bool, how: str, tmp_path: Path, computed: list[int]
) -> None:
    """After a few steps; and logits, text, saved adapter and merged model."""
    reference = llama(tie_word_embeddings=tied)
    model = replace_lm_head(copy.deepcopy(reference))
    options = dict(ADAPTERS[how])
    options = {"target_modules": ["q_proj", *options.pop("more", [])]} | options
    own, expected = with_adapter(model, **options), with_adapter(reference, **options)
    start = copy.deepcopy(expected)
    computed.clear()
    lr = 0.01 if how == "all linear layers" else 0.1
    losses, wanted = train(own, lr=lr), train(expected, lr=lr)
    # LoRA adds to the numbers of the layer that it adapts.
    assert len(computed) == (4 if how in ("the layer", "dora") else 0)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same_weights(own, expected, atol=1e-5, rtol=1e-4)
    before, after = start.state_dict().values(), expected.state_dict().values()
    assert max((a - b).abs().max() for a, b in zip(after, before, strict=True)) > 1e-4
    expected.load_state_dict(own.state_dict())
    assert own(input_ids=IDS).logits.equal(expected(input_ids=IDS).logits)
    greedy = {"input_ids": IDS[:, :4], "max_new_tokens": 4, "do_sample": False}
    assert own.generate(**greedy).equal(expected.generate(**greedy))
    with own.disable_adapter(), expected.disable_adapter():
        assert own(input_ids=IDS).logits.equal(expected(input_ids=IDS).logits)
    for each, folder in ((own, "own"), (expected, "plain")):
        each.save_pretrained(tmp_path / folder)
    name = "adapter_model.safetensors"
    assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    merged, plain = own.merge_and_unload(), expected.merge_and_unload()
    assert merged(IDS).logits.equal(plain(IDS).logits)
    assert type(merged) is type(plain)


def test_a_sampled_loss_of_a_copy_of_the_layer() -> None:
    """The copy has the layer's deferral, and trains."""
    options: dict[str, Any] = {"frequencies": [3] * 40, "negatives": 8}
    model = replace_lm_head(llama(), "sampled", **options)
    exact = model(input_ids=IDS, labels=draw_labels(IDS)).loss.item()
    own = with_adapter(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    losses = train(own, 8)
    assert losses[0] != pytest.approx(exact, rel=1e-3)
    assert own(input_ids=IDS, labels=draw_labels(IDS)).loss < exact - 0.2


def test_a_screen_sees_a_merged_adapter() -> None:
    """It refuses to generate: its previews are those of the layer before."""
    model = accelerate_lm_head(llama(), draw_ids(8, 24), rank=4, bits=4, exact=4)
    own = with_adapter(model, target_modules=["q_proj", "lm_head"])
    train(own)
    merged = own.merge_and_unload()
    with pytest.raises(RuntimeError, match="expected the weight that was screened"):
        merged.generate(IDS[:, :4], max_new_tokens=4)


# Heads with parameters of their own


def test_an_adapter_that_saves_the_head(tmp_path: Path, computed: list[int]) -> None:
    """Without training it is the model; it trains a copy of the head; it generates; it is saved,
    loaded and merged."""
    base = trees(llama())
    before = copy.deepcopy(base)
    model = with_adapter(base, target_modules=["q_proj"], modules_to_save=["lm_head"])
    expected = before(IDS, labels=IDS)
    own = model(input_ids=IDS, labels=IDS)
    assert own.loss.equal(expected.loss)
    assert own.logits.equal(expected.logits)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(input_ids=IDS, **greedy).equal(before.generate(IDS, **greedy))

    computed.clear()
    losses = train(model)
    assert not computed
    assert losses[-1] < losses[0]
    trained = {
        n.removeprefix("base_model.model.")
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    copies = {f"lm_head.modules_to_save.default.{n}" for n, _ in before.lm_head.named_parameters()}
    assert copies < trained
    assert all("lora" in name for name in trained - copies)
    logits = model(input_ids=IDS).logits
    assert not torch.allclose(logits, expected.logits)
    own = model(input_ids=IDS, labels=IDS)
    nll = F.nll_loss(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(own.loss, nll)
    with model.disable_adapter():
        assert model(input_ids=IDS).logits.equal(expected.logits)

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(before), tmp_path / "adapter").eval()
    assert again(input_ids=IDS).logits.equal(logits)
    with pytest.raises(TypeError, match=r"save_pretrained: expected the head of hstree .* got Mod"):
        model.base_model.model.save_pretrained(tmp_path / "wrapped")
    merged = model.merge_and_unload()
    assert isinstance(merged.lm_head, DeferredHead)
    torch.testing.assert_close(merged(IDS).logits, logits, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert from_pretrained(tmp_path / "merged")(IDS).logits.equal(merged(IDS).logits)


def test_adapters_of_all_linear_layers() -> None:
    """Those in the head, such as a gate, are adapted as the others are."""
    model = with_adapter(trees(llama()), target_modules="all-linear")
    losses = train(model, lr=0.01)
    assert losses[-1] < losses[0]
    lora = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert any("q_proj" in name for name in lora)
    for name, parameter in lora.items():
        assert parameter.grad.count_nonzero() > 0, name
    logits = model(input_ids=IDS).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["lm_head"]}, "Target module DeferredHead"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3]}}, "_NoWeight"),
    ],
)
def test_adapters_of_a_matrix_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        train(with_adapter(trees(llama()), **options))
