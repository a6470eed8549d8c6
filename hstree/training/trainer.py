"""The training loop: truncated backpropagation through time, validation every epoch, the best
weights kept."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hstree.data import Corpus, CorpusStatistics, batchify, load_corpus
from hstree.heads import head_class
from hstree.models import (
    AWDLSTM,
    LanguageModel,
    State,
    activation_penalty,
    detach,
    evaluate_loss,
)

from .checkpoint import (
    CONFIG,
    CURVE,
    METRICS,
    MODEL,
    SUMMARY,
    VOCABULARY,
    Content,
    RunDirectory,
    load_model,
    load_run,
    model_writer,
)
from .config import ConfigError, TrainConfig
from .finetune import starting_model
from .optimizer import (
    averaged_weights,
    build_optimizers,
    clip_gradients,
    non_monotone,
    scheduled_learning_rate,
    set_learning_rate,
    window_lengths,
)
from .plot import learning_curve
from .progress import Reporter, Silent
from .records import EpochRecord, perplexity
from .summary import HeadCost, Summary, measure_head_cost, own_parameter_count

EVALUATION_STREAMS = 20


class TrainingError(RuntimeError):
    """Training cannot go on: the loss is not a number."""


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted.

    Attributes:
        run: the run folder, or None if no epoch had ended.
        best: record of the epoch whose weights it holds; epoch 0 is the start of fine-tuning.
    """

    def __init__(self, run: Path | None, best: EpochRecord | None) -> None:
        super().__init__("training was interrupted")
        self.run = run
        self.best = best


@dataclass(frozen=True)
class TrainResult:
    """What :func:`train` returns.

    Attributes:
        run: the run folder.
        summary: the final figures.
        records: one for each epoch.
        model: best weights, in evaluation mode.
    """

    run: Path
    summary: Summary
    records: list[EpochRecord]
    model: LanguageModel


def choose_device(name: str) -> torch.device:
    """The device of a ``--device`` setting. Raises ConfigError if there is no GPU but one is asked
    for."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda was asked for, but torch finds no GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def set_threads(config: TrainConfig) -> None:
    """Set torch's number of CPU threads, if the configuration says one."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def build_model(config: TrainConfig, n_classes: int, statistics: CorpusStatistics) -> LanguageModel:
    """The untrained model of a configuration; the same for the same seed.

    Raises:
        ConfigError: the head does not take the options it is given, or cannot be tied.
        ValueError: the head is unknown, or an option has a value that the head refuses.
    """
    head_type = head_class(config.head)
    torch.manual_seed(config.seed)
    backbone = AWDLSTM(
        n_classes,
        config.embedding_size,
        config.hidden_size,
        config.layers,
        context_size=config.context_size,
        all_layers=head_type.reads_layers,
        dropout=config.dropout,
        dropout_input=config.dropout_input,
        dropout_hidden=config.dropout_hidden,
        dropout_embedding=config.dropout_embedding,
        weight_dropout=config.weight_dropout,
    )
    layers = {"layer_sizes": backbone.layer_sizes} if head_type.reads_layers else {}
    try:
        head = head_type.from_corpus(
            backbone.out_features,
            n_classes,
            statistics,
            embedding=backbone.embedding,
            seed=config.seed,
            **layers,
            **config.head_options(),
        )
    except TypeError as error:
        if config.tied and "unexpected keyword argument 'tied'" in str(error):
            raise ConfigError(
                f"--tied: the head {config.head!r} cannot be tied to the word embeddings"
            ) from error
        raise ConfigError(
            f"--head-option: the head {config.head!r} does not take these options: {error}"
        ) from error
    except ValueError as error:
        if not config.tied or not str(error).startswith("embedding:"):
            raise
        advice = ""
        if f"shape {(n_classes, backbone.out_features)}" in str(error):
            advice = (
                f"; make --context-size (now {backbone.context_size}) and --embedding-size "
                f"(now {backbone.embedding_size}) equal"
            )
        raise ConfigError(f"--tied: {error}{advice}") from error
    return LanguageModel(backbone, head)


def check_size(corpus: Corpus, config: TrainConfig) -> None:
    """Raises ConfigError if a part of the corpus is too small to train on or to evaluate."""
    needed = {"train": config.batch_size + 1, "valid": 2, "test": 2}
    for split, least in needed.items():
        size = len(getattr(corpus, split))
        if size < least:
            flag = "--batch-size" if split == "train" else "--data"
            raise ConfigError(
                f"{flag}: the {split} part of {corpus.name} has {size} tokens, "
                f"at least {least} are needed"
            )


class Trainer:
    """Trains a model on a corpus.

    Args:
        model: on the device on which to train.
        corpus: ids of the model's classes.
        config: batch size, windows, optimiser, learning rates, schedule, clipping, penalties,
            averaging, epochs.
        reporter: told of every step.

    Attributes:
        averaging: whether averaged SGD has begun.

    Raises:
        ValueError: a part of the corpus is too small for the batch, or averaged SGD cannot take the
            head.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        config: TrainConfig,
        reporter: Reporter | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.reporter = reporter or Silent()
        self.device = model.backbone.embedding.weight.device
        check_size(corpus, config)
        ignore = model.head.ignore_index
        train = batchify(corpus.train, config.batch_size, ignore_index=ignore)
        self.train_stream = (train[0].to(self.device), train[1].to(self.device))
        windows = -(-len(train[0]) // config.bptt)
        self.total_steps = config.epochs * windows
        self.steps_per_epoch = windows  # about, where lengths are drawn
        if config.variable_bptt:
            self.steps_per_epoch = max(1, round(len(train[0]) / (0.975 * config.bptt)))
        self.lengths = np.random.default_rng(config.seed) if config.variable_bptt else None
        self.optimizers = build_optimizers(model, config)
        self.averaging = False
        self.valid_losses: list[float] = []
        if config.averaging != "none" or config.finetune is not None:
            averaged = build_optimizers(model, config, averaged=True)  # refuses sparse groups now
            from_start = config.averaging == "et" and config.averaging_epoch == 0
            if from_start or config.finetune is not None:
                self.optimizers, self.averaging = averaged, True
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.step = 0
        self.epoch = 0

    def run_epoch(self) -> tuple[float, float, float]:
        """One pass over the training text.

        Returns:
            Mean loss in nats per token without penalties, tokens per second, and the last learning
            rate, of a window of ``bptt`` steps.

        Raises:
            TrainingError: the loss is not finite.
        """
        self.epoch += 1
        self.model.train()
        total, count, rate = 0.0, 0, 0.0
        state: State | None = None
        inputs, targets = self.train_stream
        bptt, start = self.config.bptt, 0
        steps_before = (self.epoch - 1) * self.total_steps // self.config.epochs
        begin = time.perf_counter()
        for length in window_lengths(len(inputs), bptt, self.lengths):
            window = slice(start, start + length)
            tokens = int((targets[window] != self.model.head.ignore_index).sum())
            rate = scheduled_learning_rate(
                self.config, steps_before + start / bptt, self.total_steps
            )
            set_learning_rate(self.optimizers, rate * (length / bptt))
            loss, state = self._train_step(inputs[window], targets[window], state)
            start += length
            self.step += 1
            total += loss * tokens
            count += tokens
            self.reporter.step(self.epoch, loss, tokens)
        return total / count, count / (time.perf_counter() - begin), rate

    def note_validation(self, loss: float) -> bool:
        """Take note of the validation loss of the epoch, and begin to average if the time has come.

        Returns:
            Whether training ends here: fine-tuning has stopped to improve.
        """
        self.valid_losses.append(loss)
        worse = non_monotone(self.valid_losses, self.config.nonmono)
        if self.config.finetune is not None:
            return worse
        due = {
            "none": False,
            "nt": worse,
            "et": self.epoch >= self.config.averaging_epoch,
        }[self.config.averaging]
        if due and not self.averaging:
            self.averaging = True
            self.optimizers = build_optimizers(self.model, self.config, averaged=True)
            if self.epoch < self.config.epochs:
                self.reporter.message(f"averaging of the weights begins after epoch {self.epoch}")
        return False

    def _train_step(
        self, inputs: Tensor, targets: Tensor, state: State | None
    ) -> tuple[float, State]:
        output, state, read = self.model(inputs, targets, state)
        loss = output.loss.detach().item()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss} in epoch {self.epoch}, step {self.step + 1}; "
                f"try a lower --learning-rate (now {self.config.learning_rate:g}) "
                f"or a lower --clip (now {self.config.clip:g})"
            )
        penalty = activation_penalty(read, self.config.alpha, self.config.beta)
        (output.loss + penalty).backward()
        if self.config.clip > 0:
            clip_gradients(self.parameters, self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss, detach(state)


def evaluation_stream(
    tokens: Any, device: torch.device, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Inputs and targets [L, B] that make every token but the first a target, B at most
    ``EVALUATION_STREAMS``."""
    streams = max(1, min(EVALUATION_STREAMS, (len(tokens) - 1) // 50))
    inputs, targets = batchify(tokens, streams, ignore_index=ignore_index)
    return inputs.to(device), targets.to(device)


def evaluate(model: LanguageModel, tokens: Any) -> float:
    """Mean negative log-probability in nats per token of a token stream (numpy ids [n], n >= 2)."""
    device = model.backbone.embedding.weight.device
    return evaluate_loss(model, *evaluation_stream(tokens, device, model.head.ignore_index))


def train(config: TrainConfig, reporter: Reporter | None = None) -> TrainResult:
    """Train as configured and leave a run folder.

    The folder appears when the first epoch has ended, complete; from then on its files are replaced
    atomically, so it can be read at any time, whatever stops the training. While weights are
    averaged, it is the averages that are validated and kept.

    Raises:
        ValueError: a setting, the corpus or the run folder is not usable; nothing was written.
        TrainingError: the loss is not finite; the best epoch so far is kept.
        TrainingInterrupted: on Ctrl-C; the best epoch so far is kept.
    """
    reporter = reporter or Silent()
    head_class(config.head)
    device = choose_device(config.device)
    set_threads(config)
    kind = config.head if config.finetune is None else f"{config.head}-finetuned"
    directory = RunDirectory(config.run, f"{datetime.now():%Y%m%d-%H%M%S}-{kind}")
    begin = time.perf_counter()
    best: EpochRecord | None = None
    try:
        origin = None if config.finetune is None else load_run(config.finetune)
        corpus = load_corpus(
            config.data,
            min_count=config.min_count,
            max_vocabulary=config.max_vocabulary,
            vocabulary=None if origin is None else origin.vocabulary,
        )
        reporter.message(str(corpus))
        check_size(corpus, config)
        statistics = corpus.statistics()
        if origin is None:
            reporter.message(f"building the model with the head {config.head!r} ...")
            started = time.perf_counter()
            model = build_model(config, len(corpus.vocabulary), statistics).to(device)
            reporter.message(_describe(model, time.perf_counter() - started))
        else:
            torch.manual_seed(config.seed)
            model = starting_model(config, origin).to(device)
        trainer = Trainer(model, corpus, config, reporter)
        unigram = statistics.unigram_loss(corpus.valid[1:])
        records: list[EpochRecord] = []
        files: dict[str, Content] = {
            CONFIG: _saved_config(config).to_json().encode(),
            VOCABULARY: corpus.vocabulary.to_bytes(),
        }
        if origin is not None:
            best = _start(evaluate(model, corpus.valid))
            files[MODEL] = partial(shutil.copyfile, origin.path / MODEL)
            reporter.message(
                f"starting from {origin.path}, validation perplexity "
                f"{perplexity(best.valid_loss):.1f}"
            )
        reporter.start(config.epochs, trainer.steps_per_epoch)
        for epoch in range(1, config.epochs + 1):
            epoch_begin = time.perf_counter()
            train_loss, speed, rate = trainer.run_epoch()
            with averaged_weights(trainer.optimizers):
                valid_loss = evaluate(model, corpus.valid)
                if not math.isfinite(valid_loss):
                    raise TrainingError(
                        f"the validation loss became {valid_loss} in epoch {epoch}; "
                        f"try a lower --learning-rate"
                    )
                is_best = best is None or valid_loss < best.valid_loss
                record = EpochRecord(
                    epoch=epoch,
                    step=trainer.step,
                    learning_rate=rate,
                    train_loss=train_loss,
                    valid_loss=valid_loss,
                    best=is_best,
                    tokens_per_second=speed,
                    seconds=time.perf_counter() - epoch_begin,
                    averaged=trainer.averaging,
                )
                records.append(record)
                if is_best:
                    files[MODEL] = model_writer(model)
                title = f"{config.head} head, {corpus.name}"
                files[METRICS] = _json_lines([r.to_dict() for r in records])
                files[CURVE] = learning_curve(records, unigram, title)
                directory.write(files)
            files = {}
            best = record if is_best else best
            reporter.epoch(record)
            if trainer.note_validation(valid_loss):
                break
    except KeyboardInterrupt:
        raise TrainingInterrupted(directory.path if directory.published else None, best) from None
    except TrainingError as error:
        raise TrainingError(f"{error}; {_kept(directory, best)}") from None
    finally:
        reporter.stop()

    try:
        assert best is not None
        model = load_model(directory.path / MODEL).to(device)
        summary = Summary(
            corpus=corpus.name,
            head=config.head,
            classes=len(corpus.vocabulary),
            train_tokens=len(corpus.train),
            epochs=len(records),
            best_epoch=best.epoch,
            valid_perplexity=perplexity(best.valid_loss),
            test_perplexity=perplexity(evaluate(model, corpus.test)),
            unigram_valid_perplexity=perplexity(unigram),
            unigram_test_perplexity=perplexity(statistics.unigram_loss(corpus.test[1:])),
            backbone_parameters=sum(parameter.numel() for parameter in model.backbone.parameters()),
            head_parameters=own_parameter_count(model.head, model.backbone),
            cost=_head_cost(model, trainer.train_stream, config.bptt),
            seconds=time.perf_counter() - begin,
        )
        directory.write({SUMMARY: (json.dumps(summary.to_dict(), indent=2) + "\n").encode()})
    except KeyboardInterrupt:
        raise TrainingInterrupted(directory.path, best) from None
    return TrainResult(directory.path, summary, records, model)


def _saved_config(config: TrainConfig) -> TrainConfig:
    """The configuration with its paths made absolute, so that the run can be evaluated from
    anywhere."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).resolve())

    return replace(config, data=absolute(config.data), finetune=absolute(config.finetune))


def _start(valid_loss: float) -> EpochRecord:
    """A record of the weights that fine-tuning starts from."""
    return EpochRecord(0, 0, 0.0, math.nan, valid_loss, True, 0.0, 0.0)


def _json_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _kept(directory: RunDirectory, best: EpochRecord | None) -> str:
    if best is None or not directory.published:
        return "nothing was written"
    return f"the weights of epoch {best.epoch} are kept in {directory.path}"


def _describe(model: LanguageModel, seconds: float) -> str:
    backbone = sum(parameter.numel() for parameter in model.backbone.parameters())
    head = own_parameter_count(model.head, model.backbone)
    return (
        f"LSTM with {backbone:,} parameters, head {model.head.name!r} with {head:,} parameters, "
        f"built in {seconds:.1f} s"
    )


def _head_cost(model: LanguageModel, stream: tuple[Tensor, Tensor], bptt: int) -> HeadCost:
    """Cost of the head on context vectors of the first training batch."""
    with torch.no_grad():
        hidden, _ = model.hidden(stream[0][:bptt])
    targets = stream[1][:bptt].reshape(-1)
    model.head.train()
    try:
        return measure_head_cost(
            model.head,
            hidden.reshape(-1, hidden.shape[-1]),
            targets,
            flat_features=model.backbone.context_size,
        )
    finally:
        model.head.eval()
