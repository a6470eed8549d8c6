"""The Trainer of transformers: the weights of the plain model after a few steps."""

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

from hstree.optim import AdamW, clip_grad_norm_

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import accelerate  # noqa: F401
    from integrations.small_models import (
        assert_same_weights,
        draw_ids,
        draw_labels,
        gpt2,
        llama,
        loaded,
        small,
    )
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    from hstree.transformers import from_pretrained, replace_lm_head

pytestmark = pytest.mark.usefixtures("computed")


def with_trees(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    replace_lm_head(model, "trees", n_trees=2, clusters=8, **options)
    with torch.no_grad():
        for parameter in model.lm_head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def examples(n: int = 8, ignored: bool = True) -> list[dict[str, Tensor]]:
    ids = draw_ids(n, 10)
    labels = draw_labels(ids) if ignored else ids
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    """Five steps over all examples in two parts, by plain gradient descent."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 5,
        "optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "max_grad_norm": 0.5,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True,
    }  # fmt: skip
    names = {"compute_metrics", "preprocess_logits_for_metrics", "optimizer_cls_and_kwargs"}
    own = {name: options.pop(name) for name in names & options.keys()}
    rows = options.pop("rows", examples())
    arguments = TrainingArguments(str(folder), **(defaults | options))
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, **own)


def history(made: Trainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


# The softmax of the model

WAYS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "one batch": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    "bf16": {"bf16": True},
    "checkpoints": {"activation_checkpointing": True},
    "reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None")  # reentrant
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (gpt2, "plainly"),
        (gpt2, "bf16"),
        *(
            pytest.param(llama, how, marks=[pytest.mark.slow] if how == "compiled" else [])
            for how in WAYS
        ),
    ],
)
def test_the_weights_of_the_plain_model(
    make: Callable[..., PreTrainedModel], how: str, tmp_path: Path, computed: list[int]
) -> None:
    reference = make()
    model = replace_lm_head(copy.deepcopy(reference))
    start = copy.deepcopy(reference)
    computed.clear()
    made = [trainer(each, tmp_path, **WAYS[how]) for each in (model, reference)]
    for each in made:
        each.train()
    low = {"atol": 2e-3, "rtol": 0} if how == "bf16" else {"atol": 2e-6, "rtol": 1e-5}
    assert_same_weights(model, reference, **low)
    before = start.state_dict()
    steps = [(p - before[name]).abs().max() for name, p in reference.state_dict().items()]
    assert max(steps) > 0.05
    assert history(made[0]) == pytest.approx(history(made[1]), rel=2e-3 if how == "bf16" else 1e-5)
    assert history(made[0])[-1] < history(made[0])[0]
    for each in made:
        each.args.prediction_loss_only = True
    losses = [each.evaluate()["eval_loss"] for each in made]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3 if how == "bf16" else 1e-5)
    # Smoothing means all log-probabilities.
    assert bool(computed) == (how == "label smoothing")


@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
def test_gradient_accumulation_equals_one_batch(change: Any, tmp_path: Path) -> None:
    """Also where the parts have different numbers of labels."""
    models = [change(llama()) for _ in range(3)]
    for model, parts in zip(models, (1, 2, 8), strict=True):
        sizes = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        trainer(model, tmp_path, **sizes).train()
    for model in models[1:]:
        assert_same_weights(model, models[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_learns_the_next_token(smoothing: float, tmp_path: Path) -> None:
    """Trainer shifts smoothed labels by the name of the class."""
    model = replace_lm_head(llama())
    ids = torch.arange(3, 33).repeat(16, 1)
    ids = ids.roll(3, 0)[:, :10] + torch.arange(16)[:, None]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {"label_smoothing_factor": smoothing, "num_train_epochs": 60, "rows": rows}
    parts = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    more = {"optim": "adamw_torch", "learning_rate": 0.02, "max_grad_norm": 1.0}
    trainer(model, tmp_path, **options, **parts, **more).train()
    best = model.eval()(ids).logits.argmax(-1)
    assert (best[:, 2:-1] == ids[:, 3:]).float().mean() > 0.9


@pytest.mark.parametrize("best", [False, True])
def test_metrics_of_the_models_logits(best: bool, tmp_path: Path, computed: list[int]) -> None:
    """The best classes alone are found without computing the logits of all rows."""
    reference = gpt2()
    model = replace_lm_head(copy.deepcopy(reference))
    seen: list[Any] = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {}

    options: dict[str, Any] = {"compute_metrics": measure}
    if best:
        options["preprocess_logits_for_metrics"] = lambda logits, _: logits.argmax(-1)
    computed.clear()
    losses = [trainer(each, tmp_path, **options).evaluate() for each in (model, reference)]
    assert bool(computed) == (not best)
    assert losses[0]["eval_loss"] == pytest.approx(losses[1]["eval_loss"], rel=1e-6)
    assert (seen[0] == seen[1]).all()


@pytest.mark.parametrize(
    "name", ["ModernBertForMaskedLM", "BertForMaskedLM", "T5ForConditionalGeneration",
             "BartForConditionalGeneration"]
)  # fmt: skip
def test_models_with_a_loss_of_their_own(name: str, tmp_path: Path) -> None:
    reference = small(name)
    model = replace_lm_head(copy.deepcopy(reference))
    for each in (model, reference):
        trainer(each, tmp_path).train()
    assert_same_weights(model, reference, atol=2e-6, rtol=1e-5)


def test_a_sampled_loss(tmp_path: Path) -> None:
    """Training samples, evaluation does not."""
    frequencies = torch.stack([row["input_ids"] for row in examples()]).flatten().bincount()
    options: dict[str, Any] = {"negatives": 8, "frequencies": frequencies.tolist()}
    model = llama(vocab_size=len(frequencies))
    reference = copy.deepcopy(model)
    replace_lm_head(model, "sampled", **options)
    for each in (model, reference):
        sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        each.made = trainer(each, tmp_path, num_train_epochs=30, **sizes)
        each.made.train()
        each.loss = each.made.evaluate()["eval_loss"]
    plain, own = history(reference.made), history(model.made)
    assert own != pytest.approx(plain, rel=1e-3)
    assert model.loss < plain[0] - 0.5 * (plain[0] - reference.loss)
    hidden = model.eval()(**trainer(model, tmp_path).data_collator(examples()))
    assert model.loss == pytest.approx(hidden.loss.item(), rel=1e-5)


# Heads with parameters of their own


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


@pytest.mark.parametrize("sparse", [False, True])
def test_trees_train_as_in_a_loop(sparse: bool, tmp_path: Path, computed: list[int]) -> None:
    model = with_trees(llama(), sparse=sparse)
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "weight_decay": 0.0}
    kind, clip = (
        (AdamW, clip_grad_norm_) if sparse else (torch.optim.AdamW, nn.utils.clip_grad_norm_)
    )
    made = trainer(model, tmp_path, learning_rate=1e-2, optimizer_cls_and_kwargs=(kind, options))
    if sparse:
        made.accelerator.clip_grad_norm_ = clip
    kinds = set()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: kinds.add(own.grad.is_sparse))
    computed.clear()
    made.train()
    assert not computed
    assert kinds == ({True, False} if sparse else {False})
    expected = by_hand(twin, kind(twin.parameters(), **options), clip, 5)
    assert history(made) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0] - 0.2
    made.args.prediction_loss_only = True
    assert made.evaluate()["eval_loss"] < expected[-1]
    assert not computed


def test_trees_with_smoothed_labels_and_metrics(tmp_path: Path) -> None:
    """What Trainer computes from logits, it computes from log-probabilities."""
    model, rows = with_trees(llama()), examples()
    ids, labels = (torch.stack([row[name] for row in rows]) for name in rows[0])
    hidden = model.model(ids).last_hidden_state[:, :-1].double()
    log_prob = copy.deepcopy(model.lm_head.head).double().log_prob(hidden).flatten(0, 1)
    target = labels[:, 1:].flatten()
    expected = F.cross_entropy(log_prob, target, label_smoothing=0.1)

    def accuracy(prediction: Any) -> dict[str, float]:
        best = torch.from_numpy(prediction.predictions).argmax(-1)[:, :-1].flatten()
        return {"accuracy": float((best == target)[target != -100].float().mean())}

    made = trainer(model, tmp_path, label_smoothing_factor=0.1, compute_metrics=accuracy)
    result = made.evaluate(rows)
    assert result["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)
    right = (log_prob.argmax(-1) == target)[target != -100]
    assert result["eval_accuracy"] == pytest.approx(right.float().mean().item())


# Checkpoints

SAVING = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 4, "optim": "adamw_torch"}


@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
def test_resumed_it_is_the_model_that_was_not_interrupted(change: Any, tmp_path: Path) -> None:
    first = trainer(change(llama()), tmp_path, **SAVING)
    first.train()
    second = trainer(change(llama()), tmp_path, **SAVING)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(second) == history(first)
    assert_same_weights(second.model, first.model)
    if change is with_trees:
        from_file = from_pretrained(tmp_path / "checkpoint-4")
        assert_same_weights(from_file, first.model)


@pytest.mark.parametrize("change", [replace_lm_head, with_trees])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_best_model_is_loaded_at_the_end(change: Any, make: Any, tmp_path: Path) -> None:
    model = change(make())
    options = SAVING | {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "optim": "sgd"}
    # A step that is far too long, after which the loss is high.
    made = trainer(
        model, tmp_path, **(options | best | {"num_train_epochs": 2, "rows": examples()})
    )
    made.create_optimizer()

    def lengthen(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if made.state.global_step:
            optimizer.param_groups[0]["lr"] = 1e3

    made.optimizer.register_step_pre_hook(lengthen)
    made.train()
    losses = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert losses[0] < losses[1]
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-5)


def test_a_checkpoint_under_other_names_is_refused(tmp_path: Path) -> None:
    """Transformers keeps the weights in memory, without a word, where it does not find their names
    in a checkpoint: those of GPT-NeoX are saved as they were loaded."""
    model = with_trees(loaded(small("GPTNeoXForCausalLM"), tmp_path / "plain"))
    trainer(model, tmp_path, **SAVING).train()
    again = with_trees(loaded(small("GPTNeoXForCausalLM"), tmp_path / "plain"))
    with pytest.raises(RuntimeError, match=r"state dict: .* load the folder with hstree"):
        trainer(again, tmp_path, **SAVING).train(str(tmp_path / "checkpoint-2"))
    assert_same_weights(from_pretrained(tmp_path / "checkpoint-4"), model)
