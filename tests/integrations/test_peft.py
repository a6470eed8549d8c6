"""LoRA adapters of PEFT that train and save the head of a model of transformers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.heads import MixtureOfSoftmaxes, Softmax, TreeEnsemble
from hstree.trees import build_ensemble

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from hstree.integrations.transformers import LMHead, from_pretrained, replace_lm_head

V, D = 40, 16

pytestmark = pytest.mark.filterwarnings(  # of transformers, in what PEFT reads
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def llama(head: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 1}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **tokens, num_attention_heads=2, max_position_embeddings=32)
    model = LlamaForCausalLM(config).eval()
    replace_lm_head(model, HEADS[head](model))
    with torch.no_grad():
        for parameter in model.lm_head.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def _trees(model: nn.Module) -> TreeEnsemble:
    vectors = [model.lm_head.weight.detach().numpy()]
    trees = build_ensemble("cluster", V, 2, None, vectors, 3, 8, 4)
    return TreeEnsemble.from_linear(model.lm_head, trees, tied=False, gate="context")


HEADS: dict[str, Callable[[nn.Module], Any]] = {
    "trees": _trees,
    "softmax": lambda model: Softmax(D, V),
    "mos": lambda model: MixtureOfSoftmaxes(D, V, components=2),
}
EVERY_HEAD = pytest.mark.parametrize(
    "head", [pytest.param(n, marks=[] if n == "trees" else pytest.mark.slow) for n in HEADS]
)


def with_lora(model: nn.Module, **options: Any) -> peft.PeftModel:
    torch.manual_seed(1)
    defaults = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, **(defaults | options))
    return peft.get_peft_model(model, config)


def draw(seed: int = 3) -> Tensor:
    return torch.randint(1, V, (4, 9), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int = 5) -> list[float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model.train()(input_ids=draw(), labels=draw())
        assert out.logits is None
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    model.eval()
    return losses


@EVERY_HEAD
def test_an_adapter_that_saves_the_head(head: str, tmp_path: Path) -> None:
    """Without training it is the model; it trains a copy of the head; it generates; it is saved,
    loaded and merged."""
    base = llama(head)
    before, ids = copy.deepcopy(base), draw()
    model = with_lora(base)
    expected = before(ids, labels=ids)
    own = model(input_ids=ids, labels=ids)
    assert own.loss.equal(expected.loss)
    assert own.logits.equal(expected.logits)
    assert model(input_ids=ids).logits.equal(expected.logits)
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(input_ids=ids, **greedy).equal(before.generate(ids, **greedy))

    losses = train(model)
    assert losses[0] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert losses[-1] < losses[0] - 0.2
    trained = {
        n.removeprefix("base_model.model.")
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    copies = {f"lm_head.modules_to_save.default.{n}" for n, _ in before.lm_head.named_parameters()}
    assert copies < trained
    assert all("lora" in name for name in trained - copies)
    logits = model(input_ids=ids).logits
    assert not torch.allclose(logits, expected.logits)
    own = model(input_ids=ids, labels=ids)
    nll = F.nll_loss(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(own.loss, nll)
    with model.disable_adapter():
        assert model(input_ids=ids).logits.equal(expected.logits)
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected.loss)

    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(before), tmp_path / "adapter").eval()
    assert loaded(input_ids=ids).logits.equal(logits)
    merged = model.merge_and_unload()
    assert isinstance(merged.lm_head, LMHead)
    torch.testing.assert_close(merged(ids).logits, logits, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert from_pretrained(tmp_path / "merged")(ids).logits.equal(merged(ids).logits)


def test_the_adapter_of_a_trainer(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in draw()]
    options = {"num_train_epochs": 5, "learning_rate": 0.02, "logging_steps": 1}
    arguments = TrainingArguments(
        str(tmp_path), save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    model = with_lora(llama("trees"))
    twin = copy.deepcopy(model)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    expected = twin.train()(input_ids=draw(), labels=draw()).loss.item()
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1


@EVERY_HEAD
def test_adapters_of_all_linear_layers(head: str) -> None:
    """Those in the head, such as a gate, are adapted as the others are."""
    model = with_lora(llama(head), target_modules="all-linear", modules_to_save=None)
    losses = train(model, 10)
    assert losses[-1] < losses[0]
    lora = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert any("q_proj" in name for name in lora)
    for name, parameter in lora.items():
        assert parameter.grad.count_nonzero() > 0, name
    logits = model(input_ids=draw()).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(draw()).logits, logits, atol=1e-4, rtol=1e-4)


def test_the_head_as_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="Target module LMHead"):
        with_lora(llama("trees"), target_modules=["lm_head"], modules_to_save=None)


def test_resizing_a_wrapped_head_is_refused() -> None:
    model = with_lora(llama("softmax"))
    with pytest.raises(TypeError, match="expected the head of hstree as lm_head, got ModulesTo"):
        model.base_model.model.resize_token_embeddings(V + 1)
