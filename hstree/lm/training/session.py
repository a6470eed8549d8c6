"""A run from its start, or its resumption, to its end: its folder, epochs, saving and stopping."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hstree._files import Content
from hstree._memory import ran_out
from hstree.heads import head_class
from hstree.lm._packages import has_pictures, optional_package
from hstree.lm.data import Corpus, CorpusStatistics, load_corpus
from hstree.lm.data.tokenizer import tokenizer_to_bytes
from hstree.lm.models import LanguageModel, cpu_has_lstm
from hstree.lm.runs import (
    RESUMABLE,
    CheckpointError,
    ConfigError,
    EpochRecord,
    RunDirectory,
    Summary,
    TrainConfig,
    load_config,
    load_model,
    load_run,
    load_tokenizer,
    load_vocabulary,
    names,
    perplexity,
    read_run,
    set_threads,
)
from hstree.lm.runs.checkpoint import load_state, model_writer, state_writer
from hstree.lm.runs.records import read_record
from hstree.lm.runs.settings import flag_name

from .build import build_model, check_size, own_parameter_count
from .distributed import Processes, processes
from .finetune import starting_model
from .interruption import Interruption
from .optimizer import averaged_weights
from .plot import learning_curve
from .progress import Reporter
from .summary import head_cost
from .tensorboard import TensorBoardLog
from .trainer import Trainer, TrainingError, process_seed
from .validation import evaluate


class TrainingMemoryError(TrainingError):
    """Memory ran out; a run that had begun can be resumed where there is more."""


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
    """The result of :func:`train`: the run folder, the final figures, a record for each epoch, and
    the best weights, in evaluation mode."""

    run: Path
    summary: Summary
    records: list[EpochRecord]
    model: LanguageModel


def train(config: TrainConfig, reporter: Reporter | None = None) -> TrainResult:
    """Train as configured and write a run folder.

    The folder appears, complete, when training begins. Its files are then replaced atomically, so
    it can be read at any time. The state is saved at the start, at the end of every epoch, every
    ``config.save_interval`` seconds within an epoch, and when Ctrl-C or SIGTERM stops the training;
    :func:`resume` continues from the last saved state. While weights are averaged, the averages are
    validated and saved.

    With ``torchrun``, each process trains on ``config.batch_size`` streams of its own, with the
    mean of their gradients. The first process validates, reports and writes.

    Raises:
        ValueError: a setting, the corpus or the run folder is not valid; nothing was written.
        TrainingError: the loss is not finite; the best epoch so far is kept.
        TrainingMemoryError: memory ran out.
        TrainingInterrupted: on Ctrl-C or SIGTERM.
    """
    head_class(config.head)
    with processes(config.device) as group:
        session = Session(config, reporter, group)
        with session.folder(None):
            session.begin()
            return session.run()


def resume(
    run: str | os.PathLike[str], /, reporter: Reporter | None = None, **changes: Any
) -> TrainResult:
    """Resume a run from its last saved state.

    On the same CPU, with the same number of threads and processes and unchanged settings, the
    weights are bitwise identical to those of a run that was never interrupted.

    Args:
        run: the folder.
        reporter: receives every further step.
        **changes: new values of settings in :data:`~hstree.lm.runs.RESUMABLE`. With more ``epochs``
            the rest of the learning rate schedule is that of a run planned for that many.

    Raises:
        CheckpointError: the state cannot be read, the text has changed, or another process trains
            in the folder.
        ConfigError: a setting that cannot change, or all epochs are done.
        TrainingError, TrainingInterrupted: as :func:`train`.
    """
    for name in changes:
        if name not in RESUMABLE:
            raise ConfigError(
                f"--{flag_name(name)}: expected a setting that can change with --resume "
                f"({', '.join('--' + flag_name(n) for n in RESUMABLE)}), got {changes[name]!r}"
            )
    folder = Path(run)
    config = replace(load_config(folder), **changes)
    with processes(config.device) as group:
        session = Session(config, reporter, group)
        with session.folder(folder):
            session.load(folder)
            return session.run()


class Session:
    """The part of one process in a run, from its start or resumption to its end or interruption:
    call :meth:`begin` or :meth:`load`, then :meth:`run`, within the context :meth:`folder`."""

    corpus: Corpus
    trainer: Trainer

    def __init__(self, config: TrainConfig, reporter: Reporter | None, group: Processes) -> None:
        set_threads(config)
        if config.tensorboard:
            optional_package("tensorboard", "--tensorboard", "tensorboard")
        self.config = config
        self.processes = group
        self.reporter = reporter if reporter is not None and group.main else Reporter()
        self.followers = [self.reporter]  # of the steps and epochs
        self.records: list[EpochRecord] = []  # of the finished epochs
        self.best: EpochRecord | None = None  # whose weights are kept; epoch 0: before fine-tuning
        self.ended = False  # fine-tuning has stopped improving
        self._directory: RunDirectory | None = None
        self._interruption = Interruption()
        self._seconds_before = 0.0
        self._begin_time = self._saved_time = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.ended or len(self.records) >= self.config.epochs

    @contextmanager
    def folder(self, path: Path | None) -> Iterator[None]:
        """A context that locks the run folder, new or at ``path``; errors say what is kept in
        it."""
        if self.processes.main and path is not None:
            self._directory = RunDirectory.open(path)
        elif self.processes.main:
            kind = self.config.head + ("-finetuned" if self.config.finetune is not None else "")
            name = f"{datetime.now():%Y%m%d-%H%M%S}-{kind}"
            self._directory = RunDirectory(self.config.run, name)
        try:
            yield
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._kept()}") from None
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            raise TrainingMemoryError(
                f"memory ran out; a {self._smaller()}, needs less; {self._kept()}"
            ) from error
        except OSError as error:
            if self._published() is None:
                raise
            raise OSError(f"{error}; {self._kept()}") from error
        except KeyboardInterrupt as interrupt:
            received = self._interruption.signal or getattr(interrupt, "signal", None)
            raise TrainingInterrupted(self._published(), self._best(), received) from None
        finally:
            for follower in self.followers:
                follower.stop()
            if self._directory is not None:
                self._directory.close()

    # Start and resumption

    def begin(self) -> None:
        """Read the text, build the model, and write the first files of the folder. Raises
        ValueError if a setting, the text or the run to fine-tune is not valid."""
        config, group = self.config, self.processes
        self._say_lstm_precision()
        origin = None if config.finetune is None else load_run(config.finetune)
        with group.main_first():  # the others find the tokenized text in the cache
            corpus = load_corpus(
                config.data,
                column=config.column,
                min_count=config.min_count,
                max_vocabulary=config.max_vocabulary,
                vocabulary=None if origin is None else origin.vocabulary,
                tokenizer=config.tokenizer if origin is None else origin.tokenizer,
            )
        self.reporter.message(
            f"corpus: {corpus.name}\n        {len(corpus.train):,} training, "
            f"{len(corpus.valid):,} validation, {len(corpus.test):,} test tokens; "
            f"{len(corpus.vocabulary):,} classes"
        )
        check_size(corpus, config, group.size)
        self._say_what_is_too_late()
        statistics = corpus.statistics()
        if origin is None:
            started = time.perf_counter()
            model = build_model(config, len(corpus.vocabulary), statistics)
            seconds = time.perf_counter() - started
            self.reporter.message(
                f"model:  LSTM with {_count(model.backbone):,} parameters\n"
                f"        head {model.head.name!r} with "
                f"{own_parameter_count(model.head, model.backbone):,} parameters, built in "
                f"{seconds:.1f} s"
            )
        else:
            torch.manual_seed(config.seed)
            model = starting_model(config, origin)
        model.to(group.device)
        if group.rank > 0:
            torch.manual_seed(process_seed(config.seed, group.rank))
        self._fingerprint = corpus.fingerprint()
        self._train_on(corpus, statistics, model)
        files: dict[str, Content] = {
            names.CONFIG: self._config_json(),
            names.VOCABULARY: corpus.vocabulary.to_bytes(),
            names.TOKENIZER: tokenizer_to_bytes(corpus.tokenizer),
        }
        if origin is not None:
            valid_loss = evaluate(model, corpus.valid, n_targets=config.validation_tokens)
            self.best = EpochRecord(0, 0, 0.0, math.nan, valid_loss, True, 0.0, 0.0)
            files[names.MODEL] = partial(shutil.copyfile, origin.path / names.MODEL)
            self.reporter.message(
                f"starting from {origin.path}, validation perplexity {perplexity(valid_loss):.1f}"
            )
        self._save(files)

    def load(self, folder: Path) -> None:
        """Continue from the state that is saved in ``folder``. Raises as :func:`resume`."""
        model, tensors, values = load_state(folder / names.STATE)
        vocabulary, tokenizer = load_vocabulary(folder), load_tokenizer(folder)
        with self.processes.main_first():
            corpus = load_corpus(
                self.config.data,
                column=self.config.column,
                vocabulary=vocabulary,
                tokenizer=tokenizer,
            )
        try:
            self._restore(corpus, model, tensors, values)
        except ConfigError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{folder / names.STATE}: {error}") from None
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{folder / names.STATE}: inconsistent training state: {reason}"
            ) from None
        if self.done and (folder / names.SUMMARY).is_file():
            raise ConfigError(
                f"--resume: the {len(self.records)} epochs of {folder} are done"
                + ("; fine-tuning has ended" if self.ended else "; to continue, give more --epochs")
            )
        if self._directory is not None:
            self._directory.write({names.CONFIG: self._config_json()})
            self._directory.remove(names.SUMMARY)  # of fewer epochs
        position = self.trainer.position
        self.reporter.message(
            f"resuming {folder} in epoch "
            f"{position.epoch + (not self.trainer.in_epoch)}, after step {position.step}"
        )
        self._say_lstm_precision()

    def _restore(
        self,
        corpus: Corpus,
        model: LanguageModel,
        tensors: dict[str, torch.Tensor],
        values: dict[str, Any],
    ) -> None:
        """Take over the parts of a saved state. Raises as :meth:`load`, without the file."""
        settings = _fixed_settings(self.config)
        # A setting that is newer than the state has its default, as in a file of settings.
        saved = _fixed_settings(TrainConfig()) | values["settings"]
        other = [name for name in settings if saved[name] != settings[name]]
        if other:
            raise ValueError(
                f"the state of a run whose {', '.join(other)} differs from {names.CONFIG}"
            )
        self._fingerprint = corpus.fingerprint()
        if values["corpus"] != self._fingerprint:
            raise ValueError(
                f"--resume: the text {corpus.name} is not the text of this run: it has changed, or "
                f"--data names another one"
            )
        records = [read_record(EpochRecord, record) for record in values["records"]]
        if self.config.epochs < len(records):
            raise ConfigError(
                f"--epochs: expected at least {len(records)}, the number of finished epochs, "
                f"got {self.config.epochs}"
            )
        best = values["best"]
        best = None if best is None else read_record(EpochRecord, best)
        self._train_on(corpus, corpus.statistics(), model.to(self.processes.device))
        self.trainer.restore(tensors, values["trainer"])
        self.records, self.best, self.ended = records, best, values["ended"]
        self._seconds_before = values["seconds"]

    def _train_on(self, corpus: Corpus, statistics: CorpusStatistics, model: LanguageModel) -> None:
        self.corpus = corpus
        self._unigram = {
            split: statistics.unigram_loss(tokens[1:])
            for split, tokens in corpus.held_out().parts.items()
        }
        self.trainer = Trainer(model, corpus, self.config, self.processes)

    def _config_json(self) -> bytes:
        return self.config.with_absolute_paths().to_json().encode()

    def _say_lstm_precision(self) -> None:
        lowered = self.config.precision == "bfloat16" and self.processes.device.type == "cpu"
        if lowered and not cpu_has_lstm(torch.bfloat16):
            self.reporter.message(
                "--precision bfloat16: the LSTM layers run in float32, since oneDNN has\n"
                "no bfloat16 LSTM for this CPU"
            )

    def _say_what_is_too_late(self) -> None:
        config = self.config
        if config.averaging == "et" and config.averaging_epoch >= config.epochs:
            self.reporter.message(
                f"weights will not be averaged: --averaging-epoch is {config.averaging_epoch}, "
                f"--epochs is {config.epochs}"
            )

    # Epochs

    def run(self) -> TrainResult:
        """Train the remaining epochs and compute the final figures."""
        trainer, model = self.trainer, self.trainer.model
        if self.config.tensorboard and self._directory is not None:
            self.followers.append(TensorBoardLog(self._directory.path))
        if model.head.samples_in_training:
            self.reporter.message(
                f"head {self.config.head}: the training perplexity is an estimate from sampled "
                "classes,\ntoo low on average; that of the validation text is exact"
            )
        if self._valid_share < 1:
            self.reporter.message(
                f"validation: {self.config.validation_tokens:,} of {len(self.corpus.valid) - 1:,} "
                "tokens, spread evenly over the text"
            )
        with self._interruption:
            for follower in self.followers:
                follower.start(self.config.epochs, trainer.steps_per_epoch, trainer.position.step)
            while not self.done:
                self._steps()
                self._end_epoch()
                self._stop_or_save()
        path = self.processes.from_main(self._directory.path if self._directory else Path())
        result = None
        if self.processes.main:
            best = load_model(path / names.MODEL).to(self.processes.device)
            summary = self._summarize(best)
            self._write({names.SUMMARY: summary.to_json().encode()})
            result = best.cpu(), summary
        result = self.processes.from_main(result)
        assert result is not None
        model, summary = result
        model.to(self.processes.device)
        return TrainResult(path, summary, self.records, model)

    def _steps(self) -> None:
        trainer = self.trainer
        for step in trainer.steps():
            try:
                for follower in self.followers:
                    follower.step(step.epoch, step.loss, step.tokens)
                self._stop_or_save()
            except KeyboardInterrupt:
                self._save()
                raise

    def _stop_or_save(self) -> None:
        """Stop, by KeyboardInterrupt, if a signal was received; save if it is time. All processes
        do so at the same step."""
        stop = self._interruption.signal is not None
        waited = time.perf_counter() - self._saved_time
        due = self.processes.main and waited >= self.config.save_interval
        stops, dues = self.processes.sum(stop, due)
        if stops:
            raise KeyboardInterrupt
        if dues:
            self._save()

    def _end_epoch(self) -> None:
        """Validate, and save the results of the epoch."""
        trainer, position = self.trainer, self.trainer.position
        begin_time = time.perf_counter()
        with averaged_weights(trainer.optimizers):
            valid_loss = self._loss(self.corpus.valid)
            self._check_validation(valid_loss)
            is_best = self.best is None or valid_loss < self.best.valid_loss
            if is_best:
                self._write({names.MODEL: model_writer(trainer.model)})
        record = EpochRecord(
            epoch=position.epoch,
            step=position.step,
            learning_rate=position.learning_rate,
            train_loss=position.train_loss,
            valid_loss=valid_loss,
            best=is_best,
            tokens_per_second=position.tokens_per_second,
            seconds=position.seconds + time.perf_counter() - begin_time,
            averaged=trainer.averaging,
            sampled=trainer.sampled,
        )
        self.records.append(record)
        self.best = record if is_best else self.best
        self.ended = trainer.note_validation(valid_loss)
        files: dict[str, Content] = {}
        if self.processes.main:
            files[names.METRICS] = "".join(record.to_json() for record in self.records).encode()
            if has_pictures():
                title = f"{self.config.head} head, {self.corpus.name}"
                files[names.CURVE] = learning_curve(self.records, self._unigram["valid"], title)
        self._save(files)
        for follower in self.followers:
            follower.epoch(record)
        if trainer.averaging and not record.averaged and not self.done:
            self.reporter.message(f"averaging of the weights begins after epoch {position.epoch}")

    def _loss(self, tokens: Any) -> float:
        """The loss on a text, or on a part of it as --validation-tokens says."""
        model, part = self.trainer.model, self.config.validation_tokens
        loss = evaluate(model, tokens, n_targets=part) if self.processes.main else math.nan
        return self.processes.from_main(loss)

    @property
    def _valid_share(self) -> float:
        total = len(self.corpus.valid) - 1
        return min(1.0, (self.config.validation_tokens or total) / total)

    def _check_validation(self, valid_loss: float) -> None:
        """Training does not recover from a loss far above log V, that of a uniform guess, unless
        the loss is there on the validation text alone, which is then of another kind."""
        corpus = self.corpus
        limit = 3.0 * math.log(len(corpus.vocabulary))
        if valid_loss <= limit:
            return
        train_loss = self._loss(corpus.train[: max(len(corpus.valid), 1000)])
        if not (train_loss <= limit and math.isfinite(perplexity(valid_loss))):
            raise TrainingError(
                f"the validation loss became {valid_loss:.4g} nats per token in epoch "
                f"{self.trainer.position.epoch}; try a lower --learning-rate "
                f"(now {self.config.learning_rate:g})"
            )
        if all(record.valid_loss <= limit for record in self.records):
            self.reporter.message(
                f"the validation text is unlike the training text: {valid_loss:.2f} nats per "
                f"token, but {train_loss:.2f} on training text"
            )

    def _summarize(self, model: LanguageModel) -> Summary:
        assert self.best is not None
        seconds, corpus = self._seconds(), self.corpus
        return Summary(
            corpus=corpus.name,
            head=self.config.head,
            classes=len(corpus.vocabulary),
            train_tokens=len(corpus.train),
            epochs=len(self.records),
            best_epoch=self.best.epoch,
            valid_perplexity=self.best.valid_perplexity,
            test_perplexity=perplexity(evaluate(model, corpus.test)),
            unigram_valid_perplexity=perplexity(self._unigram["valid"]),
            unigram_test_perplexity=perplexity(self._unigram["test"]),
            backbone_parameters=_count(model.backbone),
            head_parameters=own_parameter_count(model.head, model.backbone),
            cost=head_cost(model, self.config, self.trainer.streams),
            seconds=seconds,
            valid_share=self._valid_share,
        )

    # Saved files

    def _save(self, files: Mapping[str, Content] | None = None) -> None:
        """Write files, and then the training state. Raises TrainingError if weights are not finite;
        the previously saved state is kept."""
        self.trainer.check_weights()
        tensors, values = self.trainer.state()
        state = {
            "settings": _fixed_settings(self.config),
            "corpus": self._fingerprint,
            "records": [asdict(record) for record in self.records],
            "best": None if self.best is None else asdict(self.best),
            "ended": self.ended,
            "seconds": self._seconds(),
            "trainer": values,
        }
        writer = state_writer(self.trainer.model, tensors, state)
        self._write({**(files or {}), names.STATE: writer})
        self._saved_time = time.perf_counter()

    def _write(self, files: Mapping[str, Content]) -> None:
        if self._directory is not None:
            self._directory.write(files)

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._begin_time

    def _published(self) -> Path | None:
        if self._directory is None or not self._directory.published:
            return None
        return self._directory.path

    def _best(self) -> EpochRecord | None:
        path = self._published()
        if self.best is None and path is not None:  # while the state is loaded
            return read_run(path).best
        return self.best

    def _smaller(self) -> str:
        """A run that takes less memory: of what training has begun with, or of the model."""
        if self._published() is not None:
            return "run with a smaller --batch-size or --bptt, or a larger --accumulate"
        return (
            "model with smaller --embedding-size, --hidden-size, --context-size, --layers or "
            "--n-trees, or smaller sizes in --head-option"
        )

    def _kept(self) -> str:
        path, best = self._published(), self._best()
        if path is None:
            return "nothing was written"
        if best is None:
            kept = f"no epoch had finished; the last good state is kept in {path}"
        else:
            kept = f"the weights of epoch {best.epoch} and the last good state are kept in {path}"
        return f"{kept}; resume with hstree train --resume {path}"


def _fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that cannot change when a run is resumed; JSON-able."""
    changing = (*RESUMABLE, "run", "finetune")
    settings: dict[str, Any] = json.loads(config.to_json())
    return {name: value for name, value in settings.items() if name not in changing}


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
