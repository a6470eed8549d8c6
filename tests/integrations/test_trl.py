"""TRL's trainers on models with a head. The reference of a softmax with the weights of the lm_head
is the same model without hstree, whose losses TRL computes itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hstree.heads import SampledSoftmax, Softmax, TreeEnsemble
from hstree.trees import build_ensemble

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(  # TRL uses old names of transformers
        "ignore:.[a-z_]*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"
    ),
]

V, D = 60, 16
PLAIN = {"save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True}
OPTIONS = PLAIN | {"bf16": False, "per_device_train_batch_size": 4, "logging_steps": 1}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 1}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_attention_heads=2)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_()
    return model


def with_head(model: Any, kind: str) -> Any:
    from hstree.integrations.transformers import replace_lm_head

    if kind == "softmax":
        head: Any = Softmax(D, V, bias=False)
        head.load_state_dict({"weight": model.lm_head.weight.detach().clone()})
    else:
        trees = build_ensemble("huffman", V, 2, list(range(1, V + 1)), root=8, leaf=4)
        head = TreeEnsemble(D, V, trees, gate="context")
        for parameter in head.parameters():
            parameter.data.normal_(std=0.3)
    return replace_lm_head(model, head)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1")


def words(*numbers: int) -> str:
    return " ".join(f"w{number % V}" for number in numbers)


def texts() -> Any:
    from datasets import Dataset

    rows = [words(*range(7 * i, 7 * i + 5 + i % 4)) for i in range(16)]
    return Dataset.from_dict({"text": rows})


def preferences() -> Any:
    from datasets import Dataset

    prompts = [words(i, i + 3) for i in range(16)]
    chosen = [words(*range(2 * i, 2 * i + 3)) for i in range(16)]
    rejected = [words(*range(5 * i, 5 * i + 4)) for i in range(16)]
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def history(trainer: Any, names: tuple[str, ...]) -> list[list[float]]:
    trainer.train()
    return [[e[n] for n in names] for e in trainer.state.log_history if "loss" in e]


def draw() -> dict[str, Tensor]:
    """Tokens, labels and mask; the last row has no label, the first is padded."""
    ids = torch.randint(2, V, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[0, 5:], mask[0, 5:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :3], labels[2] = -100, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("count", [None, torch.tensor(5)])
@pytest.mark.parametrize("shift", [False, True])
def test_the_fused_lm_head_of_a_softmax_is_that_of_trl(count: Any, shift: bool) -> None:
    from trl.trainer.utils import add_fused_lm_head

    batch: dict[str, Any] = draw() | {"num_items_in_batch": count}
    if shift:
        batch["shift_labels"] = batch.pop("labels")
    reference = llama()
    model = with_head(copy.deepcopy(reference), "softmax")
    outputs = []
    for each in (reference, model):
        add_fused_lm_head(each, outputs=FIELDS)
        out = each(**batch, fused_lm_head=True)
        (out.loss + out.entropy.sum() + (out.log_probs**2).sum()).backward()
        outputs.append(out)
    expected, own = outputs
    assert type(own) is type(expected)
    for name in ("loss", "log_probs", "entropy", "log_sum_sq_probs", "is_top1", "label_mask"):
        torch.testing.assert_close(own[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)
    # TRL means the scores of the lm_head; those of a head are log-probabilities.
    hidden = reference.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    mean = reference.lm_head(hidden).log_softmax(-1).mean(-1)
    mean = (mean if shift else mean[:, :-1]) * expected.label_mask
    torch.testing.assert_close(own.mean_logits, mean, atol=1e-4, rtol=1e-5)
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-4, rtol=1e-4, msg=name)
    assert model(batch["input_ids"]).logits.shape == (3, 7, V)


def test_the_fused_lm_head_of_trees() -> None:
    from trl.trainer.utils import add_fused_lm_head

    model, batch = with_head(llama(), "trees"), draw()
    hidden = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state[:, :-1]
    log_prob = copy.deepcopy(model.lm_head.head).double().log_prob(hidden.double())
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    add_fused_lm_head(model, outputs=FIELDS)
    for each in (model.eval(), model.train()):
        out = each(**batch, fused_lm_head=True)
        expected = {
            "log_probs": log_prob.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
            "entropy": -(log_prob.exp() * log_prob).sum(-1),
            "log_sum_sq_probs": (2 * log_prob).logsumexp(-1),
            "mean_logits": log_prob.mean(-1),
        }
        for name, values in expected.items():
            own = out[name].double()
            torch.testing.assert_close(own, values * mask, atol=1e-4, rtol=1e-4, msg=name)
        assert out.is_top1.equal((log_prob.argmax(-1) == labels) & mask)
        nll = -(expected["log_probs"] * mask).sum() / mask.sum()
        torch.testing.assert_close(out.loss.double(), nll, atol=1e-5, rtol=1e-5)
    empty = draw() | {"labels": torch.full((3, 7), -100)}
    out = model(**empty, fused_lm_head=True)
    assert out.loss == 0
    out.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_supervised_fine_tuning(loss_type: str, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    names = ("loss", "entropy", "mean_token_accuracy", "grad_norm")
    runs = []
    for kind in (None, "softmax", "trees"):
        model = llama() if kind is None else with_head(llama(), kind)
        options = OPTIONS | {"max_steps": 4, "learning_rate": 0.01, "loss_type": loss_type}
        trainer = SFTTrainer(
            model,
            args=SFTConfig(str(tmp_path), **options),
            train_dataset=texts(),
            processing_class=tokenizer(),
        )
        runs.append(history(trainer, names))
    assert len(runs[0]) == 4
    assert runs[1] == [pytest.approx(step, rel=1e-3, abs=1e-5) for step in runs[0]]
    if loss_type == "nll":
        assert runs[2][-1][0] < runs[2][0][0]


def test_supervised_fine_tuning_of_an_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
    model = with_head(llama(), "trees")
    before = copy.deepcopy(model.lm_head)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(tmp_path), **OPTIONS, num_train_epochs=5, learning_rate=0.01),
        train_dataset=texts(),
        processing_class=tokenizer(),
        peft_config=adapter,
    )
    losses = [loss for (loss,) in history(trainer, ("loss",))]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.4  # epochs of four steps
    trained = trainer.model.base_model.model.lm_head.modules_to_save["default"]
    for own, old in zip(trained.parameters(), before.parameters(), strict=True):
        assert not own.equal(old)


@pytest.mark.parametrize("precompute", [False, True])
def test_direct_preference_optimisation(precompute: bool, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    names = ("loss", "rewards/chosen", "rewards/rejected", "logps/chosen", "entropy", "grad_norm")
    runs = []
    for kind in (None, "softmax", "trees"):
        model = llama() if kind is None else with_head(llama(), kind)
        steps, rate = (16, 0.002) if kind == "trees" else (4, 0.01)
        options = OPTIONS | {"max_steps": steps, "learning_rate": rate}
        trainer = DPOTrainer(
            model,
            ref_model=copy.deepcopy(model),
            args=DPOConfig(
                str(tmp_path / str(kind)), **options, precompute_ref_log_probs=precompute
            ),
            train_dataset=preferences(),
            processing_class=tokenizer(),
        )
        runs.append(history(trainer, names))
    assert runs[0][0][0] == pytest.approx(0.6931, abs=1e-3)
    assert runs[0][-1][0] != pytest.approx(0.6931, abs=1e-3)
    assert runs[1] == [pytest.approx(step, rel=2e-3, abs=1e-4) for step in runs[0]]
    assert runs[2][0][0] == pytest.approx(0.6931, abs=1e-3)
    margins = [chosen - rejected for _, chosen, rejected, *_ in runs[2]]
    assert sum(margins[8:]) / 8 > 0.3


def test_options_of_a_linear_lm_head_are_refused() -> None:
    from trl.trainer.utils import add_fused_lm_head

    for option in ({"temperature": 0.7}, {"cast_lm_head_to_fp32": True}, {"outputs": ("nothing",)}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}: expected .* got"):
            add_fused_lm_head(with_head(llama(), "trees"), **option)


def test_a_head_that_samples_classes_is_refused_in_training() -> None:
    from trl.trainer.utils import add_fused_lm_head

    from hstree.integrations.transformers import replace_lm_head

    model = replace_lm_head(llama(), SampledSoftmax(D, V, frequencies=range(V, 0, -1)))
    add_fused_lm_head(model)
    assert model(**draw(), fused_lm_head=True).log_probs.shape == (3, 6)
    with pytest.raises(TypeError, match=r"exact log-probabilities, .* got SampledSoftmax"):
        model.train()(**draw(), fused_lm_head=True)
