"""A run from its start, or its resumption, to its end: epochs, validation, saved files."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from hstree._files import Content
from hstree._memory import ran_out
from hstree.lm._packages import has_pictures
from hstree.lm.models import LanguageModel, cpu_has_lstm
from hstree.lm.runs import (
    ConfigError,
    EpochRecord,
    RunDirectory,
    Summary,
    TrainConfig,
    load_model,
    perplexity,
    read_run,
    set_threads,
)
from hstree.lm.runs.checkpoint import model_writer
from hstree.lm.runs.names import CONFIG, CURVE, METRICS, MODEL, STATE, SUMMARY

from .distributed import Processes
from .interruption import Interruption
from .optimizer import averaged_weights
from .plot import learning_curve
from .progress import Reporter, Reporters, Silent
from .state import Training, begin, load
from .summary import summarize
from .tensorboard import TensorBoardLog, require_tensorboard
from .trainer import TrainingError, TrainingMemoryError
from .validation import evaluate


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted.

    Attributes:
        run: the run folder, for :func:`resume`; None if training had not begun.
        best: record of the epoch whose weights it holds, None if no epoch has finished; epoch 0 is
            the start of fine-tuning.
        signal: number of the received signal, or None.
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
    """The result of :func:`train`.

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
    """The part of one process in a run, from its start or resumption to its end or interruption.

    Call :meth:`begin` or :meth:`load`, then :meth:`run`, within the context :meth:`folder`.
    """

    def __init__(self, config: TrainConfig, reporter: Reporter | None, group: Processes) -> None:
        set_threads(config)
        if config.tensorboard:
            require_tensorboard()
        self.config = config
        self.processes = group
        self.reporter = Reporters([reporter or Silent()] if group.main else [])
        self.directory: RunDirectory | None = None
        self.training: Training | None = None
        self.interruption = Interruption()
        self.begin_time = self.saved_time = time.perf_counter()

    # Start and resumption

    @contextmanager
    def folder(self, path: Path | None) -> Iterator[None]:
        """A context that locks the run folder, new or at ``path``; errors say what is kept in
        it."""
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
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            raise TrainingMemoryError(
                "memory ran out; a run with a smaller --batch-size or --bptt, or a larger "
                f"--accumulate, needs less; {self._kept()}"
            ) from error
        except OSError as error:
            if self._published() is None:
                raise
            raise OSError(f"{error}; {self._kept()}") from error
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt as interrupt:
            received = getattr(interrupt, "signal", None)
            raise TrainingInterrupted(self._published(), self._best(), received) from None
        finally:
            self.reporter.stop()
            if self.directory is not None:
                self.directory.close()

    def begin(self) -> Training:
        """Begin training, and write the first files of the folder."""
        self._say_lstm_precision()
        self.training, files = begin(self.config, self.processes, self.reporter)
        self._save(self.training, {CONFIG: self._config_json(), **files})
        return self.training

    def load(self, folder: Path) -> Training:
        """Resume the training whose state is in ``folder``."""
        training = self.training = load(folder, self.config, self.processes)
        if training.done and (folder / SUMMARY).is_file():
            raise ConfigError(
                f"--resume: the {len(training.records)} epochs of {folder} are done"
                + (
                    "; fine-tuning has ended"
                    if training.ended
                    else "; to continue, give more --epochs"
                )
            )
        if self.directory is not None:
            self.directory.write({CONFIG: self._config_json()})
            self.directory.remove(SUMMARY)  # of fewer epochs
        position = training.trainer.position
        self.reporter.message(
            f"resuming {folder} in epoch "
            f"{position.epoch + (not training.trainer.in_epoch)}, after step {position.step}"
        )
        self._say_lstm_precision()
        return training

    def _config_json(self) -> bytes:
        return self.config.with_absolute_paths().to_json().encode()

    def _say_lstm_precision(self) -> None:
        lowered = self.config.precision == "bfloat16" and self.processes.device.type == "cpu"
        if lowered and not cpu_has_lstm(torch.bfloat16):
            self.reporter.message(
                "--precision bfloat16: the LSTM layers run in float32, since oneDNN has\n"
                "no bfloat16 LSTM for this CPU"
            )

    # Epochs

    def run(self, training: Training) -> TrainResult:
        """Train the remaining epochs and compute the final figures."""
        trainer = training.trainer
        if self.config.tensorboard and self.directory is not None:
            self.reporter.add(TensorBoardLog(self.directory.path))
        if training.model.head.samples_in_training:
            self.reporter.message(
                f"head {self.config.head}: the training perplexity is an estimate from sampled "
                "classes,\ntoo low on average; that of the validation text is exact"
            )
        with self.interruption:
            try:
                self.reporter.start(
                    self.config.epochs, trainer.steps_per_epoch, trainer.position.step
                )
                while not training.done:
                    self._steps(training)
                    self._end_epoch(training)
                    self._stop_or_save(training)
            except KeyboardInterrupt:
                raise TrainingInterrupted(
                    self._published(), training.best, self.interruption.signal
                ) from None
        path = self.processes.from_main(self.directory.path if self.directory else Path())
        result = None
        if self.processes.main:
            model = load_model(path / MODEL).to(self.processes.device)
            summary = summarize(training, model, self._seconds(training))
            self._write({SUMMARY: summary.to_json().encode()})
            result = model.cpu(), summary
        result = self.processes.from_main(result)  # the best model may have other trees
        assert result is not None
        model, summary = result
        model.to(self.processes.device)
        return TrainResult(path, summary, training.records, model)

    def _steps(self, training: Training) -> None:
        """Make the remaining steps of the epoch."""
        trainer = training.trainer
        if trainer.begin_epoch():
            self.reporter.message(
                f"trees re-learned before epoch {trainer.position.epoch}, "
                f"{trainer.position.relearn_seconds:.1f} s"
                + ("; averaging of the weights begins again" if trainer.averaging else "")
            )
        for step in trainer.steps():
            try:
                self.reporter.step(step.epoch, step.loss, step.tokens)
                self._stop_or_save(training)
            except KeyboardInterrupt:
                self._save(training)
                raise

    def _stop_or_save(self, training: Training) -> None:
        """Stop if a signal was received, save if it is time: all processes at the same step.

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
            self._save(training)

    def _end_epoch(self, training: Training) -> None:
        """Validate, and save the results of the epoch."""
        trainer, corpus, position = training.trainer, training.corpus, training.trainer.position
        begin_time = time.perf_counter()
        with averaged_weights(trainer.optimizers):
            valid_loss = self.processes.from_main(
                evaluate(training.model, corpus.valid) if self.processes.main else math.nan
            )
            self._check_validation(training, valid_loss)
            is_best = training.best is None or valid_loss < training.best.valid_loss
            if is_best:
                self._write({MODEL: model_writer(training.model)})
        record = EpochRecord(
            epoch=position.epoch,
            step=position.step,
            learning_rate=position.learning_rate,
            train_loss=position.train_loss,
            valid_loss=valid_loss,
            best=is_best,
            tokens_per_second=position.tokens_per_second,
            seconds=position.relearn_seconds + position.seconds + time.perf_counter() - begin_time,
            averaged=trainer.averaging,
            sampled=training.model.head.samples_in_training,
            relearn_seconds=position.relearn_seconds,
        )
        training.records.append(record)
        training.best = record if is_best else training.best
        averaged = trainer.averaging
        training.ended = trainer.note_validation(valid_loss)
        files: dict[str, Content] = {}
        if self.processes.main:
            files[METRICS] = "".join(record.to_json() for record in training.records).encode()
            if has_pictures():
                title = f"{self.config.head} head, {corpus.name}"
                files[CURVE] = learning_curve(training.records, training.unigram_loss, title)
        self._save(training, files)
        self.reporter.epoch(record)
        if trainer.averaging and not averaged and not training.done:
            self.reporter.message(f"averaging of the weights begins after epoch {position.epoch}")

    def _check_validation(self, training: Training, valid_loss: float) -> None:
        """Training does not recover from a loss far above log V, that of a uniform guess, unless
        the loss is there on the validation text alone, which is then of another kind."""
        corpus = training.corpus
        limit = 3.0 * math.log(len(corpus.vocabulary))
        if valid_loss <= limit:
            return
        train_loss = self.processes.from_main(
            evaluate(training.model, corpus.train[: max(len(corpus.valid), 1000)])
            if self.processes.main
            else math.nan
        )
        if not (train_loss <= limit and math.isfinite(perplexity(valid_loss))):
            raise TrainingError(
                f"the validation loss became {valid_loss:.4g} nats per token in epoch "
                f"{training.trainer.position.epoch}; try a lower --learning-rate "
                f"(now {self.config.learning_rate:g})"
            )
        if all(record.valid_loss <= limit for record in training.records):
            self.reporter.message(
                f"the validation text is unlike the training text: {valid_loss:.2f} nats per "
                f"token, but {train_loss:.2f} on training text"
            )

    # Saved files

    def _save(self, training: Training, files: dict[str, Content] | None = None) -> None:
        """Write files, and then the training state.

        Raises:
            TrainingError: weights are not finite; the previously saved state is kept.
        """
        state = training.state(self._seconds(training))
        self._write({**(files or {}), STATE: state})
        self.saved_time = time.perf_counter()

    def _write(self, files: dict[str, Content]) -> None:
        if self.directory is not None:
            self.directory.write(files)

    def _seconds(self, training: Training) -> float:
        return training.seconds + time.perf_counter() - self.begin_time

    def _best(self) -> EpochRecord | None:
        if self.training is not None:
            return self.training.best
        path = self._published()  # being loaded
        return None if path is None else read_run(path).best

    def _published(self) -> Path | None:
        if self.directory is None or not self.directory.published:
            return None
        return self.directory.path

    def _kept(self) -> str:
        path, best = self._published(), self._best()
        if path is None:
            return "nothing was written"
        if best is None:
            kept = f"no epoch had finished; the last good state is kept in {path}"
        else:
            kept = f"the weights of epoch {best.epoch} and the last good state are kept in {path}"
        return f"{kept}; resume with hstree train --resume {path}"
