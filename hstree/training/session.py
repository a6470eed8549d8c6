"""What happens between a run's start, or its resumption, and its end: epochs, validation, what is
kept."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hstree._files import Content
from hstree.data import Subwords, load_corpus
from hstree.models import LanguageModel, cpu_has_lstm
from hstree.runs import (
    RESUMABLE,
    CheckpointError,
    ConfigError,
    EpochRecord,
    HeadCost,
    RunDirectory,
    Summary,
    TrainConfig,
    load_model,
    load_run,
    load_tokenizer,
    load_vocabulary,
    perplexity,
    set_threads,
)
from hstree.runs.checkpoint import load_state, model_writer, state_writer
from hstree.runs.names import CONFIG, CURVE, METRICS, MODEL, STATE, SUMMARY, TOKENIZER, VOCABULARY
from hstree.runs.records import read_record

from .build import build_model, check_size
from .distributed import Processes
from .finetune import starting_model
from .interruption import Interruption
from .optimizer import averaged_weights
from .plot import learning_curve
from .progress import Reporter, Reporters, Silent
from .summary import measure_head_cost, own_parameter_count
from .tensorboard import TensorBoardLog, require_tensorboard
from .trainer import Trainer, TrainingError, evaluate, process_seed

COST_LOGITS = 2**26  # at most, of the flat softmax against which the head is timed


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted.

    Attributes:
        run: the run folder, from which :func:`resume` goes on; None if training had not begun.
        best: record of the epoch whose weights it holds, None if none has ended; epoch 0 is the
            start of fine-tuning.
        signal: number of the signal that came, or None.
    """

    def __init__(
        self, run: Path | None, best: EpochRecord | None, signal: int | None = None
    ) -> None:
        super().__init__("training was interrupted")
        self.run = run
        self.best = best
        self.signal = signal


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


class Session:
    """One process's part in a run, from its start or its resumption to its end or interruption."""

    def __init__(self, config: TrainConfig, reporter: Reporter | None, group: Processes) -> None:
        set_threads(config)
        if config.tensorboard:
            require_tensorboard()
        self.config = config
        self.processes = group
        self.reporter = Reporters([reporter or Silent()] if group.main else [])
        self.directory: RunDirectory | None = None
        self.records: list[EpochRecord] = []
        self.best: EpochRecord | None = None
        self.ended = False
        self.seconds = 0.0  # of earlier sessions
        self.begin_time = self.saved_time = time.perf_counter()

    # Start and resumption

    @contextmanager
    def folder(self, path: Path | None) -> Iterator[None]:
        """Holds the run folder, new or at ``path``; errors say what is kept in it."""
        if self.processes.main and path is not None:
            self.directory = RunDirectory.open(path)
        elif self.processes.main:
            kind = self.config.head + ("-finetuned" if self.config.finetune is not None else "")
            name = f"{datetime.now():%Y%m%d-%H%M%S}-{kind}"
            self.directory = RunDirectory(self.config.run, name)
        try:
            yield
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._kept()}") from None
        except OSError as error:
            if self._published() is None:
                raise
            raise OSError(f"{error}; {self._kept()}") from error
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt:
            raise TrainingInterrupted(self._published(), self.best) from None
        finally:
            self.reporter.stop()
            if self.directory is not None:
                self.directory.close()

    def begin(self) -> None:
        """Make corpus, model and trainer, and the run folder."""
        config, reporter = self.config, self.reporter
        origin = None if config.finetune is None else load_run(config.finetune)
        with self.processes.main_first():  # the others find the tokenised text in the cache
            self.corpus = load_corpus(
                config.data,
                min_count=config.min_count,
                max_vocabulary=config.max_vocabulary,
                vocabulary=None if origin is None else origin.vocabulary,
                tokenizer=config.tokenizer if origin is None else origin.tokenizer,
            )
        reporter.message(str(self.corpus))
        check_size(self.corpus, config, self.processes.size)
        self._take_statistics()
        if config.averaging == "et" and config.averaging_epoch >= config.epochs:
            reporter.message(
                f"weights will not be averaged: --averaging-epoch is {config.averaging_epoch}, and "
                f"--epochs {config.epochs}"
            )
        self._say_lstm_precision()
        device = self.processes.device
        if origin is None:
            reporter.message(f"building the model with the head {config.head!r} ...")
            started = time.perf_counter()
            classes = len(self.corpus.vocabulary)
            self.model = build_model(config, classes, self.statistics).to(device)
            reporter.message(_describe(self.model, time.perf_counter() - started))
        else:
            torch.manual_seed(config.seed)
            self.model = starting_model(config, origin).to(device)
        if self.processes.rank > 0:
            torch.manual_seed(process_seed(config.seed, self.processes.rank))
        self.trainer = Trainer(self.model, self.corpus, config, reporter, self.processes)
        files: dict[str, Content] = {VOCABULARY: self.corpus.vocabulary.to_bytes()}
        if isinstance(self.corpus.tokenizer, Subwords):
            files[TOKENIZER] = self.corpus.tokenizer.to_bytes()
        if origin is not None:
            self.best = _start(evaluate(self.model, self.corpus.valid))
            files[MODEL] = partial(shutil.copyfile, origin.path / MODEL)
            reporter.message(
                f"starting from {origin.path}, validation perplexity "
                f"{perplexity(self.best.valid_loss):.1f}"
            )
        self.save(files)

    def load(self, folder: Path) -> None:
        """Make corpus, model and trainer as they were when the state in ``folder`` was saved."""
        config = self.config
        model, tensors, values = load_state(folder / STATE)
        try:
            self.records = [read_record(EpochRecord, record) for record in values["records"]]
            best = values["best"]
            self.best = None if best is None else read_record(EpochRecord, best)
            self.ended = values["ended"]
            self.seconds = values["seconds"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / STATE}: not a consistent state: {error}") from None
        vocabulary = load_vocabulary(folder)
        with self.processes.main_first():
            self.corpus = load_corpus(
                config.data, vocabulary=vocabulary, tokenizer=load_tokenizer(folder)
            )
        self._take_statistics()
        try:
            settings = _fixed_settings(config)
            other = [name for name in settings if values["settings"][name] != settings[name]]
            if other:
                raise ValueError(
                    f"the state of a run with another {', '.join(other)} than {CONFIG}"
                )
            if values["corpus"] != self.fingerprint:
                raise ValueError(
                    f"--resume: the text {self.corpus.name} is not the one of this run: it has "
                    f"changed, or --data names another"
                )
            if config.epochs < len(self.records):
                raise ConfigError(
                    f"--epochs: expected at least {len(self.records)}, which are done, "
                    f"got {config.epochs}"
                )
            self.model = model.to(self.processes.device)
            self.trainer = Trainer(self.model, self.corpus, config, self.reporter, self.processes)
            self.trainer.restore(tensors, values["trainer"])
        except ConfigError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{folder / STATE}: {error}") from None
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{folder / STATE}: not a consistent state: {reason}") from None
        if self.done and (folder / SUMMARY).is_file():
            raise ConfigError(
                f"--resume: the {len(self.records)} epochs of {folder} are done"
                + ("; fine-tuning has ended" if self.ended else "; go on with more --epochs")
            )
        if self.directory is not None:
            self.directory.write({CONFIG: self._config_json()})
            self.directory.remove(SUMMARY)  # of fewer epochs
        position = self.trainer.position
        self.reporter.message(
            f"going on with {folder} in epoch {position.epoch + (not self.trainer.in_epoch)}, "
            f"after step {position.step}"
        )
        self._say_lstm_precision()

    def _say_lstm_precision(self) -> None:
        lowered = self.config.precision == "bfloat16" and self.processes.device.type == "cpu"
        if lowered and not cpu_has_lstm(torch.bfloat16):
            self.reporter.message(
                "--precision bfloat16: the LSTM layers run in float32, since oneDNN has no "
                "bfloat16 LSTM for this CPU"
            )

    def _take_statistics(self) -> None:
        self.statistics = self.corpus.statistics()
        self.unigram = self.statistics.unigram_loss(self.corpus.valid[1:])
        self.fingerprint = self.corpus.fingerprint()

    # Epochs

    @property
    def done(self) -> bool:
        """Whether no epoch remains."""
        return self.ended or len(self.records) >= self.config.epochs

    def run(self) -> TrainResult:
        """The epochs that remain, and the final figures."""
        trainer, main = self.trainer, self.processes.main
        if self.config.tensorboard and self.directory is not None:
            self.reporter.add(TensorBoardLog(self.directory.path))
        trainer.reporter = Reporters([self.reporter, _EveryStep(self)])
        with Interruption() as self.interruption:
            try:
                self.reporter.start(
                    self.config.epochs, trainer.steps_per_epoch, trainer.position.step
                )
                while not self.done:
                    self._epoch()
                    self.after_step()
            except KeyboardInterrupt:
                if trainer.between_steps:
                    self.save()
                raise TrainingInterrupted(
                    self._published(), self.best, self.interruption.signal
                ) from None
        path = self.processes.from_main(self.directory.path if self.directory else Path())
        model, summary = self.trainer.model.eval(), None
        if main:
            model = load_model(path / MODEL).to(self.processes.device)
            summary = self._summary(model)
            self._write({SUMMARY: summary.to_json().encode()})
        self.processes.weights_from_main(model)
        summary = self.processes.from_main(summary)
        assert summary is not None
        return TrainResult(path, summary, self.records, model)

    def _epoch(self) -> None:
        train_loss, speed, rate = self.trainer.run_epoch()
        begin = time.perf_counter()
        position = self.trainer.position
        with averaged_weights(self.trainer.optimizers):
            valid_loss = self.processes.from_main(
                evaluate(self.model, self.corpus.valid) if self.processes.main else math.nan
            )
            # Far beyond the loss of a guess, log V, nothing comes back.
            if not valid_loss <= 3.0 * math.log(len(self.corpus.vocabulary)):
                raise TrainingError(
                    f"the validation loss became {valid_loss:.4g} nats per token in epoch "
                    f"{position.epoch}; try a lower --learning-rate "
                    f"(now {self.config.learning_rate:g})"
                )
            is_best = self.best is None or valid_loss < self.best.valid_loss
            if is_best:
                self._write({MODEL: model_writer(self.model)})
        record = EpochRecord(
            epoch=position.epoch,
            step=position.step,
            learning_rate=rate,
            train_loss=train_loss,
            valid_loss=valid_loss,
            best=is_best,
            tokens_per_second=speed,
            seconds=position.seconds + time.perf_counter() - begin,
            averaged=self.trainer.averaging,
        )
        self.records.append(record)
        self.best = record if is_best else self.best
        averaging = self.trainer.averaging
        self.ended = self.trainer.note_validation(valid_loss)
        files: dict[str, Content] = {}
        if self.processes.main:
            title = f"{self.config.head} head, {self.corpus.name}"
            files[METRICS] = "".join(record.to_json() for record in self.records).encode()
            files[CURVE] = learning_curve(self.records, self.unigram, title)
        self.save(files)
        self.reporter.epoch(record)
        if self.trainer.averaging and not averaging and not self.done:
            self.reporter.message(f"averaging of the weights begins after epoch {position.epoch}")

    def after_step(self) -> None:
        """Stop if that was asked for, save if it is time: all processes at the same step.

        Raises:
            KeyboardInterrupt: to stop.
        """
        stop = self.interruption.signal is not None
        waited = time.perf_counter() - self.saved_time
        due = self.processes.main and waited >= self.config.save_interval
        stops, dues = self.processes.sum(stop, due)
        if stops:
            raise KeyboardInterrupt
        if dues:
            self.save()

    # What is kept

    def save(self, files: dict[str, Content] | None = None) -> None:
        """Write files, and after them the state of the training.

        Raises:
            TrainingError: weights are not finite; the state that was saved before is kept.
        """
        self.trainer.check_weights()
        tensors, values = self.trainer.state()
        state = {
            "settings": _fixed_settings(self.config),
            "corpus": self.fingerprint,
            "records": [dataclasses.asdict(record) for record in self.records],
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "ended": self.ended,
            "seconds": self._elapsed(),
            "trainer": values,
        }
        files = dict(files or {})
        if self.directory is not None and not self.directory.published:
            files = {CONFIG: self._config_json(), **files}
        self._write(files | {STATE: state_writer(self.model, tensors, state)})
        self.saved_time = time.perf_counter()

    def _write(self, files: dict[str, Content]) -> None:
        if self.directory is not None:
            self.directory.write(files)

    def _config_json(self) -> bytes:
        return self.config.with_absolute_paths().to_json().encode()

    def _published(self) -> Path | None:
        if self.directory is None or not self.directory.published:
            return None
        return self.directory.path

    def _kept(self) -> str:
        path = self._published()
        if path is None:
            return "nothing was written"
        if self.best is None:
            kept = f"no epoch had ended; the last good state is kept in {path}"
        else:
            kept = (
                f"the weights of epoch {self.best.epoch} and the last good state are kept in {path}"
            )
        return f"{kept}, from which hstree train --resume {path} goes on"

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.begin_time

    def _summary(self, model: LanguageModel) -> Summary:
        assert self.best is not None
        corpus = self.corpus
        return Summary(
            corpus=corpus.name,
            head=self.config.head,
            classes=len(corpus.vocabulary),
            train_tokens=len(corpus.train),
            epochs=len(self.records),
            best_epoch=self.best.epoch,
            valid_perplexity=perplexity(self.best.valid_loss),
            test_perplexity=perplexity(evaluate(model, corpus.test)),
            unigram_valid_perplexity=perplexity(self.unigram),
            unigram_test_perplexity=perplexity(self.statistics.unigram_loss(corpus.test[1:])),
            backbone_parameters=sum(parameter.numel() for parameter in model.backbone.parameters()),
            head_parameters=own_parameter_count(model.head, model.backbone),
            cost=_head_cost(model, self.trainer, self.config),
            seconds=self._elapsed(),
        )


class _EveryStep(Silent):
    """Lets the session look up after every step."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.session.after_step()


def _fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that make the run what it is; JSON-able."""
    changing = (*RESUMABLE, "run", "finetune")
    settings: dict[str, Any] = json.loads(config.to_json())
    return {name: value for name, value in settings.items() if name not in changing}


def _start(valid_loss: float) -> EpochRecord:
    """A record of the weights that fine-tuning starts from."""
    return EpochRecord(0, 0, 0.0, math.nan, valid_loss, True, 0.0, 0.0)


def _describe(model: LanguageModel, seconds: float) -> str:
    backbone = sum(parameter.numel() for parameter in model.backbone.parameters())
    head = own_parameter_count(model.head, model.backbone)
    return (
        f"LSTM with {backbone:,} parameters, head {model.head.name!r} with {head:,} parameters, "
        f"built in {seconds:.1f} s"
    )


def _head_cost(model: LanguageModel, trainer: Trainer, config: TrainConfig) -> HeadCost:
    """Cost of the head on context vectors of the first training batch of one process."""
    streams = min(config.batch_size, max(1, COST_LOGITS // (config.bptt * model.head.n_classes)))
    inputs, targets = (
        part[:, :streams].to(trainer.device) for part in trainer.streams.window(0, config.bptt)
    )
    with torch.no_grad():
        hidden, _ = model.hidden(inputs)
    model.head.train()
    try:
        return measure_head_cost(
            model.head,
            hidden.reshape(-1, hidden.shape[-1]),
            targets.reshape(-1),
            flat_features=model.backbone.context_size,
        )
    finally:
        model.head.eval()
