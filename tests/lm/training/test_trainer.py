"""Training on a toy text: it learns, it is reproducible, it stops cleanly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lm.training.runs import Recorder
from lm.training.toy import small_config, write_corpus

from hstree.heads import head_names
from hstree.lm.config import ConfigError, choose_device
from hstree.lm.data import Streams, load_corpus
from hstree.lm.report import ConsoleReporter, EpochRecord, format_summary
from hstree.lm.run import load_run, read_epochs
from hstree.lm.train import (
    Trainer,
    TrainingError,
    build_model,
    evaluate,
    head_cost,
    train,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data")


@pytest.mark.parametrize("head", head_names())
def test_every_head_learns_and_is_read_back(head: str, data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    result = train(small_config(data, tmp_path / "run", head=head), recorder)
    summary = result.summary
    # The unigram model knows nothing of the last word; the chains have about 1.5 continuations.
    assert summary.unigram_valid_perplexity > 8
    assert summary.valid_perplexity < 0.5 * summary.unigram_valid_perplexity
    assert summary.test_perplexity < 0.5 * summary.unigram_test_perplexity
    assert recorder.losses[-1] < recorder.losses[0]
    assert recorder.stopped == 1
    assert recorder.records == result.records
    corpus = load_corpus(data)
    assert recorder.tokens == 2 * (len(corpus.train) - 1)
    # What is read back gives the validation loss of the best epoch, to the last bit.
    run = load_run(result.run)
    best = min(record.valid_loss for record in recorder.records)
    assert evaluate(run.model, corpus.valid) == best
    assert run.model.head.name == head
    assert not run.model.training


def test_training_figures_of_sampled_classes_are_marked(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the console, in the records and in the first message; those of other heads are not."""
    config = small_config(data, tmp_path / "run", head="sampled", sparse=True, epochs=1)
    result = train(config, ConsoleReporter())
    assert [record.sampled for record in read_epochs(result.run)] == [True]
    out = capsys.readouterr().out
    assert "the training perplexity is an estimate from sampled classes" in out
    assert f"train {f'~{result.records[0].train_perplexity:.1f}':>7}  valid" in out
    assert evaluate(result.model, load_corpus(data).valid) == result.records[0].valid_loss
    recorder = Recorder()
    train(small_config(data, tmp_path / "other", head="softmax", epochs=1), recorder)
    assert not recorder.records[0].sampled
    assert not any("sampled" in message for message in recorder.messages)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_all_classes_in_the_last_steps(data: Path, sparse: bool) -> None:
    """From three quarters of the steps on; the figures of an epoch say whether any was sampled."""
    changes = {"head": "sampled", "head_option": ("negatives=8",), "sparse": sparse}
    config = small_config(data, Path(), **changes, all_classes=0.25, epochs=3)
    corpus = load_corpus(data)
    trainer = Trainer(
        build_model(config, len(corpus.vocabulary), corpus.statistics()), corpus, config
    )
    head, sampled, epochs = trainer.model.head, [], []
    for _ in range(config.epochs):
        for step in trainer.steps():
            sampled.append(head.samples_in_training)
            if step.epoch > len(epochs):
                epochs.append(trainer.sampled)
        trainer.note_validation(1.0)
    first = math.ceil(0.75 * len(sampled))
    assert sampled == [True] * first + [False] * (len(sampled) - first)
    assert epochs == [True, True, True]
    assert 0 < first < len(sampled)
    whole = replace(config, all_classes=1.0)
    trainer = Trainer(trainer.model, corpus, whole)
    next(trainer.steps())
    assert not trainer.sampled


def test_run_folder_is_complete(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "deep" / "run")
    result = train(config)
    assert result.run == tmp_path / "deep" / "run"
    assert {path.name for path in result.run.iterdir()} == {
        "config.json",
        "vocabulary.txt",
        "tokenizer.json",
        "metrics.jsonl",
        "model.safetensors",
        "last.safetensors",
        "summary.json",
        "learning_curve.png",
    }
    assert [path.name for path in result.run.parent.iterdir()] == ["run"]
    assert (result.run / "learning_curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    lines = (result.run / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert list(read_epochs(result.run)) == result.records
    assert [record["epoch"] for record in metrics] == [1, 2]
    assert metrics[1]["step"] == 2 * metrics[0]["step"]
    for record in metrics:
        assert record["valid_perplexity"] == pytest.approx(math.exp(record["valid_loss"]))
    summary = json.loads((result.run / "summary.json").read_text())
    assert summary["valid_perplexity"] == min(record["valid_perplexity"] for record in metrics)
    cost = summary["cost"]
    assert cost["rows"] == config.batch_size * config.bptt
    assert cost["ratio"] == pytest.approx(cost["flat_seconds"] / cost["head_seconds"])
    text = format_summary(result.summary)
    assert f"{summary['head_parameters']:,}" in text
    assert "flat softmax" in text


def test_head_cost_is_held_against_a_softmax(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", head="trees")
    corpus = load_corpus(data)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    cost = head_cost(model, config, Streams(corpus.train, 8))
    assert cost.rows == config.batch_size * config.bptt
    assert min(cost.head_seconds, cost.flat_seconds) > 1e-6
    assert max(cost.head_seconds, cost.flat_seconds) < 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_tied_names_the_flags(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        ConfigError,
        match=r"--tied: .*expected a weight of shape \(\d+, 16\) .*got \(\d+, 12\); "
        r"make --context-size \(now 16\) and --embedding-size \(now 12\) equal",
    ):
        train(small_config(data, run, tied=True))
    with pytest.raises(ConfigError, match="--tied: the head 'adaptive' cannot be tied to the word"):
        train(small_config(data, run, tied=True, head="adaptive"))
    with pytest.raises(ConfigError, match=r"--tied: .* shape \(\d+, 7\) .*got \(\d+, 12\)$"):
        train(small_config(data, run, tied=True, head="mos", head_option=("latent_features=7",)))
    with pytest.raises(ConfigError, match=r"--tied: .* binary nodes"):
        train(small_config(data, run, tied=True, head="trees", binary=True))
    assert not run.exists()


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.01)])
def test_steps_are_those_of_a_plain_loop(
    label_smoothing: float, z_loss: float, data: Path, tmp_path: Path
) -> None:
    """Ten steps against truncated backpropagation written out with torch alone. The losses told are
    negative log-likelihoods, whatever is minimised."""
    config = small_config(
        data,
        tmp_path / "run",
        head_option=(f"label_smoothing={label_smoothing}", f"z_loss={z_loss}"),
        dropout=0.0,
        dropout_input=0.0,
        clip=0.25,
        schedule="constant",
        warmup=0,
    )
    corpus = load_corpus(data)
    statistics = corpus.statistics()
    trainer = Trainer(build_model(config, len(corpus.vocabulary), statistics), corpus, config)
    losses = [step.loss for step in trainer.steps()]

    model = build_model(config, len(corpus.vocabulary), statistics)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": config.learning_rate},
            {"params": model.head.parameters(), "lr": 8 * config.learning_rate},
        ],
        weight_decay=config.weight_decay,
    )
    length = -(-(len(corpus.train) - 1) // config.batch_size)
    state = None
    for step in range(10):
        rows = range(step * config.bptt, (step + 1) * config.bptt)
        places = torch.tensor([[b * length + t for b in range(config.batch_size)] for t in rows])
        tokens = torch.tensor(corpus.train)[places].long()
        targets = torch.tensor(corpus.train)[places + 1].long()
        embedded = model.backbone.embedding(tokens)
        hidden, state = model.backbone.lstms[0](embedded, state)
        state = (state[0].detach(), state[1].detach())
        logits = (hidden @ model.head.weight.T + model.head.bias).flatten(0, 1)
        nll = F.cross_entropy(logits, targets.flatten())
        loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=label_smoothing)
        loss = loss + z_loss * logits.logsumexp(1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        assert losses[step] == pytest.approx(nll.item(), rel=1e-4)


def test_every_epoch_begins_without_a_state(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, corpus = small_config(data, tmp_path / "run"), load_corpus(data)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    trainer, given = Trainer(model, corpus, config), []
    objective = trainer.objective

    def watched(tokens: Any, target: Any, state: Any, *shares: float) -> Any:
        given.append(state)
        return objective(tokens, target, state, *shares)

    monkeypatch.setattr(trainer, "objective", watched)
    for _ in range(2):
        given.clear()
        assert len(list(trainer.steps())) == len(given) > 2
        assert given[0] is None
        assert all(state is not None for state in given[1:])
        trainer.in_epoch = False


def test_diverging_later_keeps_the_best(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poison(Recorder):
        def epoch(self, record: EpochRecord) -> None:
            super().epoch(record)
            with torch.no_grad():
                trainers[0].model.head.bias.fill_(math.nan)

    trainers: list[Trainer] = []
    original = Trainer.__init__

    def spy(self: Trainer, *args: object) -> None:
        trainers.append(self)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "__init__", spy)
    recorder = Poison()
    with pytest.raises(
        TrainingError,
        match=r"weights are no longer finite in epoch 1, .*the weights of epoch 1 and the last",
    ):
        train(small_config(data, tmp_path / "run", save_interval=0.0), recorder)
    corpus = load_corpus(data)
    loss = evaluate(load_run(tmp_path / "run").model, corpus.valid)
    assert loss == recorder.records[0].valid_loss


def test_what_cannot_work_is_refused_early(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        ConfigError,
        match=r"--batch-size: expected at least 100001 tokens in the train part of data",
    ):
        train(small_config(data, run, batch_size=100_000))
    with pytest.raises(ValueError, match=r"head: expected one of .*, got 'none'"):
        train(small_config(data, run, head="none"))
    with pytest.raises(
        ConfigError, match=r"head 'softmax' does not accept these options.*'colour'"
    ):
        train(small_config(data, run, head_option=("colour=1",)))
    with pytest.raises(ValueError, match="no such file or folder"):
        train(small_config(tmp_path / "absent", run))
    assert list(tmp_path.iterdir()) == []
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device: expected cpu or auto"):
            choose_device("cuda")


def test_drawn_lengths_follow_the_schedule(data: Path, tmp_path: Path) -> None:
    """The schedule goes by time steps, so it ends near 0 however long the windows were."""
    config = small_config(data, tmp_path / "run", variable_bptt=True, epochs=3)
    recorder = Recorder()
    result = train(config, recorder)
    rates = [record.learning_rate for record in result.records]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.01 * config.learning_rate
    corpus = load_corpus(data)
    assert recorder.tokens == 3 * (len(corpus.train) - 1)
    assert len(recorder.losses) == result.records[-1].step
    assert result.summary.valid_perplexity < 0.5 * result.summary.unigram_valid_perplexity


def test_validation_of_a_part(data: Path, tmp_path: Path) -> None:
    """It is recorded, and said where its perplexities are; the test text is scored as a whole."""
    corpus = load_corpus(data)
    recorder = Recorder()
    whole = train(small_config(data, tmp_path / "whole"))
    config = small_config(data, tmp_path / "part", validation_tokens=60)
    result = train(config, recorder)
    part = evaluate(result.model, corpus.valid, n_targets=60)
    assert part == min(record.valid_loss for record in result.records)
    assert part != evaluate(result.model, corpus.valid)
    assert result.summary.test_perplexity == math.exp(evaluate(result.model, corpus.test))
    assert [record.train_loss for record in result.records] == [
        record.train_loss for record in whole.records
    ]
    share = 60 / (len(corpus.valid) - 1)
    assert result.summary.valid_share == share
    said = f"validation: 60 of {len(corpus.valid) - 1} tokens, spread evenly over the text"
    assert said in "".join(recorder.messages)
    line = f"valid: {share:.1%} of the validation text"
    assert line in format_summary(result.summary)
    assert line not in format_summary(whole.summary)
    assert whole.summary.valid_share == 1.0
    everything = replace(config, run=str(tmp_path / "all"), validation_tokens=10**9)
    assert train(everything).summary.valid_perplexity == whole.summary.valid_perplexity
