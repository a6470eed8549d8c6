"""TRL's trainers on models whose logits are deferred, beside the plain models. TRL computes losses
from the weight of the output layer itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    from integrations.small_models import assert_same_weights, llama
    from transformers import LlamaForCausalLM, PreTrainedModel

    from hstree.transformers import accelerate_lm_head, replace_lm_head

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("computed"),
    pytest.mark.filterwarnings(  # TRL uses old names of transformers
        "ignore:.[a-z_]*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"
    ),
]

V = 60
OPTIONS: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd",
    "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "report_to": [],
    "disable_tqdm": True,
}  # fmt: skip


def small() -> PreTrainedModel:
    return llama(vocab_size=V, eos_token_id=1, num_hidden_layers=1)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **tokens)


def words(*numbers: int) -> str:
    return " ".join(f"w{3 + number % (V - 3)}" for number in numbers)


def dataset(kind: str) -> Any:
    from datasets import Dataset

    rows: dict[str, list[Any]] = {}
    if kind == "text":
        rows["text"] = [words(*range(7 * i, 7 * i + 5 + i % 4)) for i in range(16)]
    else:
        rows["prompt"] = [words(i, i + 3) for i in range(16)]
    if kind == "preferences":
        rows["chosen"] = [" " + words(*range(2 * i, 2 * i + 3)) for i in range(16)]
        rows["rejected"] = [" " + words(*range(5 * i, 5 * i + 4)) for i in range(16)]
    if kind == "labels":
        rows["completion"] = [" " + words(*range(2 * i, 2 * i + 3)) for i in range(16)]
        rows["label"] = [i % 2 == 0 for i in range(16)]
    return Dataset.from_dict(rows)


def reward(completions: list[str], **options: Any) -> list[float]:
    return [float(len(completion) % 5) for completion in completions]


def supervised(model: Any, folder: Path, peft_config: Any = None, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model,
        args=SFTConfig(str(folder), **(OPTIONS | options)),
        train_dataset=dataset("text"),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def preferences(model: Any, folder: Path, **options: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model,
        args=DPOConfig(str(folder), **(OPTIONS | options)),
        train_dataset=dataset("preferences"),
        processing_class=tokenizer(),
    )


def labelled(model: Any, folder: Path, **options: Any) -> Any:
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer(
        model,
        args=KTOConfig(str(folder), **(OPTIONS | options)),
        train_dataset=dataset("labels"),
        processing_class=tokenizer(),
    )


def rewarded(model: Any, folder: Path, name: str = "GRPO", **options: Any) -> Any:
    import trl

    sizes = {"num_generations": 4, "max_completion_length": 6}
    arguments = getattr(trl, f"{name}Config")(str(folder), **(OPTIONS | sizes | options))
    return getattr(trl, f"{name}Trainer")(
        model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=dataset("prompts"),
        processing_class=tokenizer(),
    )


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SFT": (supervised, {}),
    "SFT dft": (supervised, {"loss_type": "dft"}),
    "DPO": (preferences, {}),
    "DPO computed before": (preferences, {"precompute_ref_log_probs": True}),
    "KTO": (labelled, {}),
    "GRPO": (rewarded, {"temperature": 0.7, "repetition_penalty": 1.2}),
    "GRPO with a reference": (rewarded, {"beta": 0.5}),
    "RLOO": (rewarded, {"name": "RLOO"}),
}


def loaded(folder: Path) -> PreTrainedModel:
    """TRL loads the reference again by the path of the model."""
    small().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def run(how: str, model: Any, folder: Path) -> tuple[PreTrainedModel, list[dict[str, float]]]:
    make, options = WAYS[how]
    torch.manual_seed(3)
    trainer = make(model, folder, **options)
    trainer.train()
    names = {"loss", "grad_norm", "entropy", "kl", "mean_token_accuracy", "logps/chosen", "reward"}
    history = [
        {k: e[k] for k in names & e.keys()} for e in trainer.state.log_history if "loss" in e
    ]
    return trainer.model, history


@pytest.mark.parametrize("how", WAYS)
def test_the_weights_of_the_plain_model(how: str, tmp_path: Path) -> None:
    reference = loaded(tmp_path / "model")
    start = copy.deepcopy(reference)
    model = replace_lm_head(copy.deepcopy(reference))
    _, expected = run(how, reference, tmp_path / "plain")
    _, own = run(how, model, tmp_path / "own")
    assert len(own) == 3
    assert own == [pytest.approx(step, rel=1e-4, abs=1e-5) for step in expected]
    assert_same_weights(model, reference, atol=1e-6, rtol=1e-4)
    before, after = start.state_dict().values(), reference.state_dict().values()
    assert max((a - b).abs().max() for a, b in zip(after, before, strict=True)) > 1e-3


@pytest.mark.parametrize("how", ["SFT", "DPO", "GRPO with a reference"])
def test_models_by_their_path(how: str, tmp_path: Path) -> None:
    """The folder of a model that was replaced is that of the plain model."""
    reference = loaded(tmp_path / "plain")
    replace_lm_head(copy.deepcopy(reference), "softmax").save_pretrained(tmp_path / "own")
    _, expected = run(how, reference, tmp_path / "a")
    found, own = run(how, str(tmp_path / "own"), tmp_path / "b")
    assert type(found) is LlamaForCausalLM
    assert own == [pytest.approx(step, rel=1e-4, abs=1e-5) for step in expected]
    assert_same_weights(found, reference, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("adapter", [{}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter(adapter: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig

    models = []
    for change in (replace_lm_head, lambda model: model):
        torch.manual_seed(1)
        options = {"peft_config": LoraConfig(target_modules=["q_proj"], r=2, **adapter)}
        trainer = supervised(change(small()), tmp_path, **options)
        trainer.train()
        models.append(trainer.model)
    assert_same_weights(*models, atol=1e-6, rtol=1e-4)


def test_an_accelerated_model(tmp_path: Path) -> None:
    """It is not screened in training mode, in which TRL generates and its weight changes."""
    reference = loaded(tmp_path / "model")
    contexts = torch.randint(3, V, (8, 24))
    model = accelerate_lm_head(copy.deepcopy(reference), contexts, rank=4, bits=4, exact=4)
    for each, folder in ((model, "own"), (reference, "plain")):
        run("GRPO", each, tmp_path / folder)
    assert_same_weights(model, reference, atol=1e-6, rtol=1e-4)
    with pytest.raises(RuntimeError, match="layer: expected the weight that was screened"):
        model.eval().generate(torch.tensor([[3, 4]]), max_new_tokens=4)


@pytest.mark.parametrize("how", ["SFT", "DPO", "GRPO", "KTO", "RLOO"])
def test_a_head_without_a_matrix_is_refused(how: str, tmp_path: Path) -> None:
    model = replace_lm_head(loaded(tmp_path / "model"), "trees", clusters=8)
    with pytest.raises(AttributeError, match=r"weight: expected .* one matrix, got TreeEnsemble"):
        run(how, model, tmp_path / "own")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        run(how, str(tmp_path / "saved"), tmp_path / "own")
