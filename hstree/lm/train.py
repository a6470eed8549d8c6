"""Training: ``train`` and ``resume`` enter the loop of :class:`hstree.lm.train.Trainer`."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hstree._checks import check_int
from hstree._files import Content
from hstree._memory import ran_out
from hstree._progress import track
from hstree.heads import Head, build_head, head_class, head_options
from hstree.heads.sampled import SampledSoftmax
from hstree.heads.state import Tables, TyingError
from hstree.lm.config import (
    MODEL_SETTINGS,
    RESUMABLE,
    SHORTEST_WINDOW,
    TRAINING_NOISE,
    ConfigError,
    TrainConfig,
    choose_device,
    flag_name,
    set_threads,
)
from hstree.lm.data import Corpus, CorpusStatistics, Streams, load_corpus, tokenizer_to_bytes
from hstree.lm.model import (
    AWDLSTM,
    BackboneOutput,
    LanguageModel,
    State,
    activation_penalty,
    cpu_has_lstm,
    detach,
)
from hstree.lm.report import (
    EpochRecord,
    HeadCost,
    Reporter,
    Summary,
    TensorBoardLog,
    has_pictures,
    learning_curve,
    optional_package,
    perplexity,
    read_record,
)
from hstree.lm.run import (
    CONFIG,
    CURVE,
    METRICS,
    MODEL,
    STATE,
    SUMMARY,
    TOKENIZER,
    VOCABULARY,
    CheckpointError,
    Run,
    RunDirectory,
    all_settings,
    load_config,
    load_model,
    load_run,
    load_state,
    load_tokenizer,
    load_vocabulary,
    model_writer,
    read_run,
    state_writer,
)
from hstree.optim import AdamW, clip_grad_norm_

__all__ = [
    "Processes",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "TrainingMemoryError",
    "build_model",
    "evaluate",
    "head_cost",
    "is_main_process",
    "processes",
    "resume",
    "train",
]


class TrainingError(RuntimeError):
    """Training cannot continue: the loss or a weight is not finite, or memory ran out."""


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
    with processes(config.device) as group, _run_folder(config, group) as directory:
        return Trainer.begun(config, group, directory, reporter).run()


def resume(
    run: str | os.PathLike[str], /, reporter: Reporter | None = None, **changes: Any
) -> TrainResult:
    """Resume a run from its last saved state.

    On the same CPU, with the same number of threads and processes and unchanged settings, the
    weights are bitwise identical to those of a run that was never interrupted.

    Args:
        run: the folder.
        reporter: receives every further step.
        **changes: new values of settings in :data:`~hstree.lm.config.RESUMABLE`. With more
            ``epochs`` the rest of the learning rate schedule is that of a run planned for that
            many.

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
    config = dataclasses.replace(load_config(folder), **changes)
    with processes(config.device) as group, _run_folder(config, group, folder) as directory:
        return Trainer.resumed(folder, config, group, directory, reporter).run()


@contextmanager
def _run_folder(
    config: TrainConfig, group: Processes, path: Path | None = None
) -> Iterator[RunDirectory | None]:
    """A context that locks the run folder, new or at ``path``, for the first process, the only one
    that writes; errors say what is kept in it."""
    set_threads(config)
    for flag, sparse in (
        ("--sparse", config.head_options().get("sparse")),
        ("--sparse-embedding", config.sparse_embedding),
    ):
        if sparse and group.size > 1:
            raise ConfigError(
                f"{flag}: expected one process, since row-sparse gradients are not averaged over "
                f"several, got {group.size}"
            )
    if config.tensorboard:
        optional_package("tensorboard", "--tensorboard", "tensorboard")
    directory = None
    if group.main and path is not None:
        directory = RunDirectory.open(path)
    elif group.main:
        kind = config.head + ("-finetuned" if config.finetune is not None else "")
        directory = RunDirectory(config.run, f"{datetime.now():%Y%m%d-%H%M%S}-{kind}")

    def kept() -> tuple[Path | None, EpochRecord | None]:
        """The folder, if it is there, and the epoch whose weights it holds."""
        if directory is None or not directory.published:
            return None, None
        return directory.path, directory.best or read_run(directory.path).best

    def then(text: object) -> str:
        """The text, and what is kept."""
        run, best = kept()
        if run is None:
            return f"{text}; nothing was written"
        state = "no epoch had finished; the last good state is"
        if best is not None:
            state = f"the weights of epoch {best.epoch} and the last good state are"
        return f"{text}; {state} kept in {run}; resume with hstree train --resume {run}"

    try:
        yield directory
    except TrainingError as error:
        raise TrainingError(then(error)) from None
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        smaller = (
            "model with smaller --embedding-size, --hidden-size, --context-size, --layers or "
            "--n-trees, or smaller sizes in --head-option"
        )
        if kept()[0] is not None:
            smaller = "run with a smaller --batch-size or --bptt, or a larger --accumulate"
        raise TrainingMemoryError(then(f"memory ran out; a {smaller}, needs less")) from error
    except OSError as error:
        if kept()[0] is None:
            raise
        raise OSError(then(error)) from error
    except KeyboardInterrupt as interrupt:
        raise TrainingInterrupted(*kept(), getattr(interrupt, "signal", None)) from None
    finally:
        if directory is not None:
            directory.close()


# The loop


@dataclass
class Position:
    """The position of training, between two steps."""

    epoch: int = 0  # counted from 1; 0 before the first
    time_step: int = 0  # of the streams, at which the next window begins
    step: int = 0  # optimizer steps since the beginning
    loss: float = 0.0  # sum over the targets of the epoch so far, in nats
    tokens: int = 0  # number of these targets
    seconds: float = 0.0  # of the steps of the epoch
    learning_rate: float = 0.0  # of the last step, for a window of ``bptt`` time steps


class Step(NamedTuple):
    """A finished optimizer step: its epoch, counted from 1, the mean negative log-likelihood of its
    window, in nats per token, without penalties and options of the loss, and its targets."""

    epoch: int
    loss: float
    tokens: int


class Trainer:
    """Trains a model on a corpus: ``run`` is the loop, over epochs and their ``steps``.

    Args:
        model: the model, on the training device.
        corpus: class ids of the model.
        config: batch size, windows, optimizer, learning rates, schedule, clipping, penalties,
            averaging, epochs, the share of steps with all classes.
        processes: the processes that share the batch; each calls the same methods.
        directory: the folder of the run, which the first process writes.
        reporter: receives every step and epoch.

    Attributes:
        position: position in the training text, and figures of the current epoch.
        in_epoch: whether the current epoch has begun and has not been validated yet.
        averaging: whether averaged SGD has begun.
        records: of the finished epochs.
        best: record of the epoch whose weights are kept; epoch 0: before fine-tuning.
        ended: whether fine-tuning has stopped improving.
        start: time at which the run, or its resumption, began.

    Raises:
        ValueError: the training text is too small for the batch, averaged SGD does not support the
            head, or it samples no classes to begin with.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        config: TrainConfig,
        processes: Processes | None = None,
        directory: RunDirectory | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.model, self.corpus, self.config = model, corpus, config
        self.device = model.backbone.embedding.weight.device
        self.processes = processes or Processes(0, 1, self.device)
        self.directory = directory
        self.reporter = reporter or Reporter()
        self.position = Position()
        self.in_epoch = self.averaging = self.ended = False
        self.records: list[EpochRecord] = []
        self.valid_losses: list[float] = []
        self.best: EpochRecord | None = None
        head = model.head
        self._samples = isinstance(head, SampledSoftmax) and head.negatives is not None
        # Other heads do not read the setting.
        if config.all_classes and isinstance(head, SampledSoftmax) and not self._samples:
            raise ConfigError(
                "--all-classes: expected --head-option negatives=N with the head "
                f"{config.head!r}, got it without negatives"
            )
        streams = config.batch_size * self.processes.size
        self.streams = Streams(corpus.train, streams, ignore_index=head.ignore_index)
        self.windows = -(-len(self.streams) // config.bptt)
        self.steps_per_epoch = self.windows
        if config.variable_bptt:  # an estimate
            self.steps_per_epoch = max(1, round(len(self.streams) / (0.975 * config.bptt)))
        self.lengths = np.random.default_rng(config.seed) if config.variable_bptt else None
        self.states: list[State | None] = [None] * config.accumulate
        self.optimizers = build_optimizers(model, config)
        if config.averaging != "none" or config.finetune is not None:
            averaged = build_optimizers(model, config, averaged=True)  # raises if a group is sparse
            from_start = config.averaging == "et" and config.averaging_epoch == 0
            if from_start or config.finetune is not None:
                self.optimizers, self.averaging = averaged, True
        full_streams = (len(corpus.train) - 1) // len(self.streams)
        width = config.batch_size // config.accumulate
        always_targets = full_streams > self.streams.batch_size - width
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.objective = self.processes.wrap(
            _Objective(model, config),
            may_skip_parameters=head.may_skip_parameters or not always_targets,
        )
        self._seconds_before = 0.0  # of the run, before it was resumed
        self.start = self._saved = time.perf_counter()

    @classmethod
    def begun(
        cls,
        config: TrainConfig,
        group: Processes,
        directory: RunDirectory | None = None,
        reporter: Reporter | None = None,
    ) -> Trainer:
        """The trainer of a new run: read the text, build the model, and write the first files of
        the folder. Raises ValueError if a setting, the text or the run to fine-tune is not
        valid."""
        start = time.perf_counter()
        reporter = reporter if reporter is not None and group.main else Reporter()
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
        reporter.message(
            f"corpus: {corpus.name}\n        {len(corpus.train):,} training, "
            f"{len(corpus.valid):,} validation, {len(corpus.test):,} test tokens; "
            f"{len(corpus.vocabulary):,} classes"
        )
        check_size(corpus, config, group.size)
        if origin is None:
            building = time.perf_counter()
            model = build_model(config, len(corpus.vocabulary), corpus.statistics())
            reporter.message(
                f"model:  LSTM with {_count(model.backbone):,} parameters\n"
                f"        head {model.head.name!r} with "
                f"{own_parameter_count(model.head, model.backbone):,} parameters, built in "
                f"{time.perf_counter() - building:.1f} s"
            )
        else:
            torch.manual_seed(config.seed)
            model = starting_model(config, origin)
        model.to(group.device)
        if group.rank > 0:
            torch.manual_seed(process_seed(config.seed, group.rank))
        trainer = cls(model, corpus, config, group, directory, reporter)
        trainer.start = start
        files: dict[str, Content] = {
            CONFIG: config.with_absolute_paths().to_json().encode(),
            VOCABULARY: corpus.vocabulary.to_bytes(),
            TOKENIZER: tokenizer_to_bytes(corpus.tokenizer),
        }
        if origin is not None:
            valid_loss = evaluate(model, corpus.valid, n_targets=config.validation_tokens)
            trainer.keep_best(EpochRecord(0, 0, 0.0, math.nan, valid_loss, True, 0.0, 0.0))
            files[MODEL] = partial(shutil.copyfile, origin.path / MODEL)
            reporter.message(
                f"starting from {origin.path}, validation perplexity {perplexity(valid_loss):.1f}"
            )
        trainer.save(files)
        return trainer

    @classmethod
    def resumed(
        cls,
        folder: Path,
        config: TrainConfig,
        group: Processes,
        directory: RunDirectory | None = None,
        reporter: Reporter | None = None,
    ) -> Trainer:
        """The trainer of a run, at its last saved state. Raises as :func:`resume`."""
        start = time.perf_counter()
        reporter = reporter if reporter is not None and group.main else Reporter()
        model, tensors, values = load_state(folder / STATE)
        vocabulary, tokenizer = load_vocabulary(folder), load_tokenizer(folder)
        with group.main_first():
            corpus = load_corpus(
                config.data, column=config.column, vocabulary=vocabulary, tokenizer=tokenizer
            )
        try:
            trainer = cls(model.to(group.device), corpus, config, group, directory, reporter)
            trainer.start = start
            trainer.restore(tensors, values)
        except ConfigError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{folder / STATE}: {error}") from None
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            reason = f"inconsistent training state: {' '.join(str(error).split())}"
            raise CheckpointError(f"{folder / STATE}: {reason}") from None
        if trainer.done and (folder / SUMMARY).is_file():
            more = "fine-tuning has ended" if trainer.ended else "to continue, give more --epochs"
            raise ConfigError(
                f"--resume: the {len(trainer.records)} epochs of {folder} are done; {more}"
            )
        if directory is not None:
            directory.write({CONFIG: config.with_absolute_paths().to_json().encode()})
            directory.remove(SUMMARY)  # of fewer epochs
        position = trainer.position
        reporter.message(
            f"resuming {folder} in epoch {position.epoch + (not trainer.in_epoch)}, "
            f"after step {position.step}"
        )
        return trainer

    # Epochs

    def run(self) -> TrainResult:
        """Train the remaining epochs and compute the final figures."""
        followers = [self.reporter]  # of the steps and epochs
        if self.config.tensorboard and self.directory is not None:
            followers.append(TensorBoardLog(self.directory.path))
        self._say_what_to_know()
        try:
            with Interruption() as self._interruption:
                for follower in followers:
                    follower.start(self.config.epochs, self.steps_per_epoch, self.position.step)
                while not self.done:
                    for step in self.steps():
                        try:
                            for follower in followers:
                                follower.step(step.epoch, step.loss, step.tokens)
                            self._stop_or_save()
                        except KeyboardInterrupt:
                            self.save()
                            raise
                    record = self._end_epoch()
                    for follower in followers:
                        follower.epoch(record)
                    if self.averaging and not record.averaged and not self.done:
                        self.reporter.message(
                            f"averaging of the weights begins after epoch {record.epoch}"
                        )
                    self._stop_or_save()
        finally:
            for follower in followers:
                follower.stop()
        path = self.processes.from_main(self.directory.path if self.directory else Path())
        result = None
        if self.processes.main:
            best = load_model(path / MODEL).to(self.device)
            summary = self._summarize(best)
            self._write({SUMMARY: summary.to_json().encode()})
            result = best.cpu(), summary
        result = self.processes.from_main(result)
        assert result is not None
        model, summary = result
        return TrainResult(path, summary, self.records, model.to(self.device))

    @property
    def done(self) -> bool:
        return self.ended or len(self.records) >= self.config.epochs

    def _end_epoch(self) -> EpochRecord:
        """Validate, and save the results of the epoch."""
        position, begin = self.position, time.perf_counter()
        with averaged_weights(self.optimizers):
            valid_loss = self._validate()
            if not math.isfinite(perplexity(valid_loss)):
                raise self._diverged(f"the validation loss became {valid_loss:.4g} nats per token")
            is_best = self.best is None or valid_loss < self.best.valid_loss
            if is_best:
                self._write({MODEL: model_writer(self.model)})
        record = EpochRecord(
            epoch=position.epoch,
            step=position.step,
            learning_rate=position.learning_rate,
            train_loss=position.loss / position.tokens,
            valid_loss=valid_loss,
            best=is_best,
            tokens_per_second=position.tokens / position.seconds,
            seconds=position.seconds + time.perf_counter() - begin,
            averaged=self.averaging,
            sampled=self.sampled,
        )
        self.records.append(record)
        if is_best:
            self.keep_best(record)
        self.ended = self.note_validation(valid_loss)
        files: dict[str, Content] = {}
        if self.processes.main:
            files[METRICS] = "".join(record.to_json() for record in self.records).encode()
            if has_pictures():
                title = f"{self.config.head} head, {self.corpus.name}"
                files[CURVE] = learning_curve(self.records, self._unigram["valid"], title)
        self.save(files)
        return record

    def keep_best(self, record: EpochRecord) -> None:
        """Note the epoch whose weights the run folder holds."""
        self.best = record
        if self.directory is not None:
            self.directory.best = record

    def note_validation(self, loss: float) -> bool:
        """End the epoch, record its validation loss, and start averaging if it is time. Returns
        whether training ends, since fine-tuning has stopped improving."""
        self.in_epoch = False
        self.valid_losses.append(loss)
        worse = non_monotone(self.valid_losses, self.config.nonmono)
        if self.config.finetune is not None:
            return worse
        late = self.position.epoch >= self.config.averaging_epoch
        if {"none": False, "nt": worse, "et": late}[self.config.averaging]:
            self._average()
        return False

    def _average(self) -> None:
        if not self.averaging:
            self.averaging = True
            self.optimizers = build_optimizers(self.model, self.config, averaged=True)

    def _stop_or_save(self) -> None:
        """Stop, by KeyboardInterrupt, if a signal was received; save if it is time. All processes
        do so at the same step."""
        waited = time.perf_counter() - self._saved
        due = self.processes.main and waited >= self.config.save_interval
        stops, dues = self.processes.sum(self._interruption.signal is not None, due)
        if stops:
            raise Interrupted(self._interruption.signal)
        if dues:
            self.save()

    # Steps

    def steps(self) -> Iterator[Step]:
        """Make one pass over the training text, or the rest of a pass after :meth:`restore`. The
        state can be saved between two steps. Raises TrainingError if the loss is not finite."""
        config, position = self.config, self.position
        if not self.in_epoch:
            self.in_epoch = True
            position.epoch += 1
            position.time_step = position.tokens = 0
            position.loss = position.seconds = 0.0
            self.states = [None] * config.accumulate
        self.model.train()
        remaining = len(self.streams) - position.time_step
        for length in window_lengths(remaining, config.bptt, self.lengths, config.bptt_margin):
            yield self._step(length)

    def _step(self, length: int) -> Step:
        config, position, begin = self.config, self.position, time.perf_counter()
        windows_before = (position.epoch - 1) * self.windows + position.time_step / config.bptt
        rate = scheduled_learning_rate(config, windows_before, config.epochs * self.windows)
        set_learning_rate(self.optimizers, rate * (length / config.bptt))
        if self._samples:
            self.model.head.samples_in_training = self._samples_after(windows_before)
        tokens, target = self.streams.window(position.time_step, length)
        counted = target != self.model.head.ignore_index
        n_targets = int(counted.sum())
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        width = config.batch_size // config.accumulate
        size = self.processes.size
        for part in range(config.accumulate):
            first = self.processes.rank * config.batch_size + part * width
            columns = slice(first, first + width)
            # Gradients are averaged over the processes; the factor turns the mean into a sum.
            loss_share = size * (int(counted[:, columns].sum()) / n_targets)
            with self._no_exchange() if part + 1 < config.accumulate else nullcontext():
                objective, values, self.states[part] = self.objective(
                    tokens[:, columns].to(self.device),
                    target[:, columns].to(self.device),
                    self.states[part],
                    loss_share,
                    1.0 / config.accumulate,
                )
                objective.backward()
            total += values
        if config.clip > 0:
            clip_grad_norm_(self.parameters, config.clip)
        objective_value, loss = (value / size for value in self.processes.sum(*total.tolist()))
        if not math.isfinite(objective_value):
            raise self._diverged(f"the loss became {objective_value}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        position.time_step += length
        position.step += 1
        position.loss += loss * n_targets
        position.tokens += n_targets
        position.seconds += time.perf_counter() - begin
        position.learning_rate = rate
        return Step(position.epoch, loss, n_targets)

    def _samples_after(self, windows: float) -> bool:
        """Whether the step after these windows samples classes."""
        config = self.config
        return self._samples and windows < (1 - config.all_classes) * config.epochs * self.windows

    @property
    def sampled(self) -> bool:
        """Whether steps of the current epoch sampled classes."""
        return self._samples_after((self.position.epoch - 1) * self.windows)

    def _no_exchange(self) -> Any:
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _diverged(self, what: str) -> TrainingError:
        position, config = self.position, self.config
        return TrainingError(
            f"{what} in epoch {position.epoch}, step {position.step + 1}; "
            f"try a lower --learning-rate (now {config.learning_rate:g}) "
            f"or a lower --clip (now {config.clip:g})"
        )

    # Validation and figures

    def _validate(self) -> float:
        """The loss on the validation text, or on a part of it as --validation-tokens says."""
        loss, part = math.nan, self.config.validation_tokens
        if self.processes.main:
            loss = evaluate(self.model, self.corpus.valid, n_targets=part)
        return self.processes.from_main(loss)

    def _say_what_to_know(self) -> None:
        config, say = self.config, self.reporter.message
        lowered = config.precision == "bfloat16" and self.device.type == "cpu"
        if lowered and not cpu_has_lstm(torch.bfloat16):
            say(
                "--precision bfloat16: the LSTM layers run in float32, since oneDNN has\n"
                "no bfloat16 LSTM for this CPU"
            )
        if config.averaging == "et" and config.averaging_epoch >= config.epochs:
            say(
                f"weights will not be averaged: --averaging-epoch is {config.averaging_epoch}, "
                f"--epochs is {config.epochs}"
            )
        if self.model.head.samples_in_training:
            say(
                f"head {config.head}: the training perplexity is an estimate from sampled "
                "classes,\ntoo low on average; that of the validation text is exact"
            )
        if self._valid_share < 1:
            say(
                f"validation: {config.validation_tokens:,} of {len(self.corpus.valid) - 1:,} "
                "tokens, spread evenly over the text"
            )

    @property
    def _valid_share(self) -> float:
        total = len(self.corpus.valid) - 1
        return min(1.0, (self.config.validation_tokens or total) / total)

    @cached_property
    def _unigram(self) -> dict[str, float]:
        counted = self.corpus.statistics()
        parts = self.corpus.held_out().parts
        return {split: counted.unigram_loss(tokens[1:]) for split, tokens in parts.items()}

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
            cost=head_cost(model, self.config, self.streams),
            seconds=seconds,
            valid_share=self._valid_share,
        )

    # What is saved

    def save(self, files: Mapping[str, Content] | None = None) -> None:
        """Write files of the run, and then the training state: the optimizers with their averages,
        random states and LSTM states of all processes, the position and the figures. Raises
        TrainingError if weights are not finite; the previously saved state is kept."""
        finite = [parameter.isfinite().all() for parameter in self.parameters]
        if not bool(torch.stack(finite).all()):
            raise self._diverged("weights are no longer finite")
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for i, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    kept = tensors if isinstance(value, Tensor) else numbers
                    kept[f"optimizer.{i}.{index}.{key}"] = value
        own: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}  # of this process
        if self.device.type == "cuda":
            own["random.cuda"] = torch.cuda.get_rng_state(self.device)
        for part, state in enumerate(self.states):
            for layer, pair in enumerate(state or ()):
                own |= {
                    f"lstm.{part}.{layer}.{name}": t for name, t in zip("hc", pair, strict=True)
                }
        for name, tensor in own.items():
            tensors[name] = torch.stack(self.processes.gather(tensor.cpu()))
        trainer = {
            "processes": self.processes.size,
            "position": asdict(self.position),
            "in_epoch": self.in_epoch,
            "averaging": self.averaging,
            "valid_losses": list(self.valid_losses),
            "optimizers": numbers,
            "lengths": None if self.lengths is None else self.lengths.bit_generator.state,
        }
        run = {
            "settings": _fixed_settings(self.config),
            "corpus": self._fingerprint,
            "records": [asdict(record) for record in self.records],
            "best": None if self.best is None else asdict(self.best),
            "ended": self.ended,
            "seconds": self._seconds(),
            "trainer": trainer,
        }
        self._write({**(files or {}), STATE: state_writer(self.model, tensors, run)})
        self._saved = time.perf_counter()

    def restore(self, tensors: dict[str, Tensor], run: dict[str, Any]) -> None:
        """Continue from what :meth:`save` wrote. The caller restores the weights of the model.

        Raises:
            ConfigError: fewer epochs than have ended.
            ValueError: the state belongs to other settings, another text or number of processes.
            KeyError, IndexError, TypeError, RuntimeError: the state belongs to another model.
        """
        settings = _fixed_settings(self.config)
        # A setting that is newer than the state has its default, as in a file of settings.
        saved = _fixed_settings(TrainConfig()) | run["settings"]
        other = [name for name in settings if saved[name] != settings[name]]
        if other:
            raise ValueError(f"the state of a run whose {', '.join(other)} differs from {CONFIG}")
        if run["corpus"] != self._fingerprint:
            raise ValueError(
                f"--resume: the text {self.corpus.name} is not the text of this run: it has "
                "changed, or --data names another one"
            )
        self.records = [read_record(EpochRecord, record) for record in run["records"]]
        if self.config.epochs < len(self.records):
            raise ConfigError(
                f"--epochs: expected at least {len(self.records)}, the number of finished epochs, "
                f"got {self.config.epochs}"
            )
        values, rank = run["trainer"], self.processes.rank
        if values["processes"] != self.processes.size:
            raise ValueError(
                f"--resume: expected {values['processes']} processes as before, "
                f"got {self.processes.size}"
            )
        self.ended, self._seconds_before = run["ended"], run["seconds"]
        if run["best"] is not None:
            self.keep_best(read_record(EpochRecord, run["best"]))
        self.position = Position(**values["position"])
        self.in_epoch = values["in_epoch"]
        self.valid_losses = list(values["valid_losses"])
        if values["averaging"]:
            self._average()
        if self.lengths is not None:
            self.lengths.bit_generator.state = values["lengths"]
        states: list[dict[int, dict[str, Any]]] = [{} for _ in self.optimizers]
        found = {name: t for name, t in tensors.items() if name.startswith("optimizer.")}
        for name, value in (found | values["optimizers"]).items():
            _, i, index, key = name.split(".", 3)
            states[int(i)].setdefault(int(index), {})[key] = value
        for optimizer, state in zip(self.optimizers, states, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        for part in range(self.config.accumulate):
            layers = range(self.model.backbone.layers if f"lstm.{part}.0.h" in tensors else 0)
            pairs = [[tensors[f"lstm.{part}.{layer}.{n}"][rank] for n in "hc"] for layer in layers]
            copies = [tuple(t.to(self.device, copy=True) for t in pair) for pair in pairs]
            self.states[part] = tuple((h, c) for h, c in copies) or None
        torch.set_rng_state(tensors["random.cpu"][rank].clone())
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"][rank].clone(), self.device)
        elif self.device.type == "cuda":  # saved on a CPU
            torch.cuda.manual_seed(process_seed(self.config.seed, rank))

    @cached_property
    def _fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def _write(self, files: Mapping[str, Content]) -> None:
        if self.directory is not None:
            self.directory.write(files)

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self.start


def _fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that cannot change when a run is resumed; JSON-able."""
    changing = (*RESUMABLE, "run", "finetune")
    return {k: v for k, v in all_settings(config).items() if k not in changing}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def process_seed(seed: int, rank: int) -> int:
    """A different seed for every process, so that dropout masks differ."""
    return seed + 1_000_003 * rank


class _Objective(nn.Module):
    """What a step minimizes, for the streams of one process or a part of them: a module, as
    DistributedDataParallel wants."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

        def head_loss(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            output, loss = model.head(hidden, target)
            return loss, -output.detach().sum() / (target != model.head.ignore_index).sum()

        self.head_loss = torch.compile(head_loss, dynamic=True) if config.compile else head_loss

    def forward(
        self, tokens: Tensor, target: Tensor, state: State | None, loss_share: float, share: float
    ) -> tuple[Tensor, Tensor, State]:
        """``loss_share`` times the mean loss plus ``share`` times the penalties; its value and
        ``loss_share`` times the mean negative log-likelihood, float64 [2]; the state without its
        history."""
        with torch.autocast(
            tokens.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"
        ):
            read: BackboneOutput = self.model.backbone(tokens, state)
            loss, nll = self.head_loss(read.hidden, target)
        objective = share * activation_penalty(read, self.config.alpha, self.config.beta)
        # The mean over no targets is NaN, but DistributedDataParallel needs a graph.
        if loss_share > 0:
            loss, nll = loss_share * loss, loss_share * nll
        else:
            loss = nll = 0.0 * read.dropped.sum()
        objective = objective + loss
        values = torch.stack([objective.detach(), nll.detach()]).double()
        return objective, values, detach(read.state)


# What a run needs before its first step: a model and a large enough text.


def build_model(config: TrainConfig, n_classes: int, statistics: CorpusStatistics) -> LanguageModel:
    """The untrained model of a configuration; the same for the same seed.

    Raises:
        ConfigError: the head does not accept the given options, or cannot be tied.
        ValueError: the head is unknown, or an option has a value that the head rejects.
    """
    torch.manual_seed(config.seed)
    backbone = AWDLSTM(
        n_classes,
        config.embedding_size,
        config.hidden_size,
        config.layers,
        context_size=config.context_size,
        dropout=config.dropout,
        dropout_input=config.dropout_input,
        dropout_hidden=config.dropout_hidden,
        dropout_embedding=config.dropout_embedding,
        weight_dropout=config.weight_dropout,
        embedding_noise=config.embedding_noise,
        sparse_embedding=config.sparse_embedding,
    )
    if config.tied and "embedding" not in head_options(config.head):
        raise ConfigError(f"--tied: the head {config.head!r} cannot be tied to the word embeddings")
    try:
        head = build_head(
            config.head,
            backbone.out_features,
            n_classes,
            frequencies=statistics.frequencies,
            tokens=statistics.tokens,
            embedding=backbone.embedding if config.tied else None,
            seed=config.seed,
            **config.head_options(),
        )
    except TypeError as error:
        raise ConfigError(
            f"--head-option: the head {config.head!r} does not accept these options: {error}"
        ) from error
    except TyingError as error:
        advice = ""
        if error.expected == (n_classes, backbone.out_features):
            advice = (
                f"; make --context-size (now {backbone.context_size}) and --embedding-size "
                f"(now {backbone.embedding_size}) equal"
            )
        raise ConfigError(f"--tied: {error}{advice}") from error
    return LanguageModel(backbone, head)


def own_parameter_count(head: Head, backbone: nn.Module) -> int:
    """Number of parameters of the head that it does not share with the backbone."""
    shared = {id(parameter) for parameter in backbone.parameters()}
    return sum(parameter.numel() for parameter in head.parameters() if id(parameter) not in shared)


def check_size(corpus: Corpus, config: TrainConfig, processes: int = 1) -> None:
    streams = config.batch_size * processes
    needed = {"train": streams + 1, "valid": 2, "test": 2}
    for split, least in needed.items():
        size = len(getattr(corpus, split))
        if size < least:
            flag = "--batch-size" if split == "train" else "--data"
            raise ConfigError(
                f"{flag}: expected at least {least} tokens in the {split} part of {corpus.name}, "
                f"got {size}"
            )


# Fine-tuning


def starting_model(config: TrainConfig, run: Run) -> LanguageModel:
    """The model of a run, with the dropouts and the noise of a configuration. Raises ConfigError if
    another setting of the model or the head differs."""
    for name in MODEL_SETTINGS:
        mine, theirs = getattr(config, name), getattr(run.config, name)
        if mine != theirs:
            raise ConfigError(
                f"--{flag_name(name)}: expected {theirs!r} as in {run.path}, the run to "
                f"fine-tune, got {mine!r}"
            )
    model = run.model
    for name in TRAINING_NOISE:
        setattr(model.backbone, name, getattr(config, name))
    return model


# Optimizers for dense and row-sparse parameters, averaging, the lengths of windows and
# learning-rate schedules.


def build_optimizers(
    model: LanguageModel, config: TrainConfig, *, averaged: bool = False
) -> list[Optimizer]:
    """Optimizers of the parameter groups of the backbone and the head: one for dense gradients,
    another for row-sparse ones.

    Every parameter group holds ``factor``, by which :func:`set_learning_rate` multiplies the
    backbone's learning rate. For a group with a learning rate of its own it is this rate over
    ``config.learning_rate``: the top of the schedule gives the rate itself, and warm-up and decay
    scale it as they scale the backbone's. A parameter that head and backbone share counts as the
    backbone's. Biases have the weight decay of the weights, as in the training of published
    perplexities, a function of the logits has its own, row-sparse parameters have none.

    ``averaged``: :class:`torch.optim.ASGD` with t0 = 0 and lambd = 0, which keeps the mean of the
    weights after each of its steps except the first; from the second step on, it uses the learning
    rate of the previous step. Raises ConfigError with row-sparse gradients, since averages change
    in every row.
    """
    rate, decay, head = config.learning_rate, config.weight_decay, model.head
    embedding = model.backbone.embedding
    kinds = {id(p): (1.0, decay) for p in model.backbone.parameters()}  # factor, weight decay
    # The gradient of a shared matrix is dense, unless both parts of it are row-sparse.
    row_sparse = {id(p) for p in head.sparse_parameters()} - kinds.keys()
    if embedding.sparse:
        row_sparse.add(id(embedding.weight))
    of_function = {id(p) for p in getattr(head, "function", nn.Module()).parameters()}
    for group in head.parameter_groups(rate, decay, factor=config.head_learning_rate_factor):
        for p in group["params"]:
            own_decay = group["weight_decay"] if id(p) in of_function else decay
            kinds.setdefault(id(p), (group["lr"] / rate, own_decay))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    forgotten = [name for name, p in trained.items() if id(p) not in kinds]
    if forgotten:
        raise ValueError(f"head {head.name}: parameter_groups() leaves out {', '.join(forgotten)}")

    def groups(sparse: bool) -> list[dict[str, Any]]:
        """Parameters of one kind together. Saved runs store optimizer states in this order."""
        found: dict[tuple[float, float], list[nn.Parameter]] = {}
        for p in trained.values():
            factor, own_decay = kinds[id(p)]
            if (id(p) in row_sparse) == sparse:
                found.setdefault((factor, 0.0 if sparse else own_decay), []).append(p)
        return [{"params": ps, "factor": f, "weight_decay": d} for (f, d), ps in found.items()]

    dense, sparse = groups(False), groups(True)
    if averaged and sparse:
        raise ConfigError(
            "--averaging, --finetune: averaged SGD does not support row-sparse gradients; train "
            "without --sparse and --sparse-embedding from the start"
        )
    optimizers: list[Optimizer]
    if averaged:
        optimizers = [torch.optim.ASGD(dense, lr=rate, lambd=0.0, t0=0.0)]
    else:
        kind = torch.optim.SGD if config.optimizer == "sgd" else AdamW
        optimizers = [kind(dense, lr=rate, fused=True)]
        if sparse:
            optimizers.append(kind(sparse, lr=rate))
    set_learning_rate(optimizers, rate)
    return optimizers


@contextmanager
def averaged_weights(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """A context that swaps the parameters with the averages of averaged SGD. It does nothing for
    other optimizers."""

    @torch.no_grad()
    def exchange() -> None:
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if "ax" in state:
                    current = parameter.clone()
                    parameter.copy_(state["ax"])
                    state["ax"].copy_(current)

    optimizers = list(optimizers)
    exchange()
    try:
        yield
    finally:
        exchange()


def non_monotone(losses: Sequence[float], nonmono: int) -> bool:
    """Whether the last validation loss is worse than the best of the earlier ones, the last
    ``nonmono`` of these excepted: when NT-ASGD starts to average (Merity et al., Regularizing and
    Optimizing LSTM Language Models, 2018, algorithm 1) and when fine-tuning ends."""
    reference = losses[: max(len(losses) - 1 - nonmono, 0)]
    return len(reference) > 0 and losses[-1] > min(reference)


def window_lengths(
    total: int, bptt: int, generator: np.random.Generator | None, margin: int | None = None
) -> Iterator[int]:
    """Lengths of consecutive windows that cover ``total`` time steps; the last may extend beyond
    them. Each is ``bptt``; with a generator, ``bptt`` or, with probability 0.05, half of it, plus a
    normal deviate of standard deviation 5, rounded towards zero, at least 5 and at most ``bptt +
    margin``."""
    begin = 0
    while begin < total:
        length = bptt
        if generator is not None:
            mean = bptt if generator.random() < 0.95 else bptt / 2
            length = max(SHORTEST_WINDOW, int(generator.normal(mean, 5)))
            if margin is not None:
                length = min(length, bptt + margin)
        yield length
        begin += length


def set_learning_rate(optimizers: Iterable[Optimizer], learning_rate: float) -> None:
    """Give every parameter group ``learning_rate`` times its ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]


def scheduled_learning_rate(config: TrainConfig, step: float, total: int) -> float:
    """Learning rate of a step, counted from 0, out of ``total``: a linear rise over
    ``config.warmup`` steps, then the schedule, over x from 0 at the end of the warm-up to 1 at the
    last step. Windows of random length count as fractions of a step."""
    warmup = min(config.warmup, total // 2)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate


# Loss on validation and test text.

MOST_STREAMS, SHORTEST_STREAM = 20, 50


def default_streams(n_tokens: int) -> int:
    """Number of streams of a text: at most 20, of at least 50 targets each, or 1."""
    return max(1, min(MOST_STREAMS, (n_tokens - 1) // SHORTEST_STREAM))


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: Any,
    streams: int | None = None,
    *,
    length: int = 128,
    n_targets: int | None = None,
) -> float:
    """Mean negative log-probability, in nats per token, of a text or an evenly spread part of it.
    Every token except the first is a target.

    Args:
        model: language model, temporarily set to evaluation mode.
        tokens: class ids, numpy [n], n >= 2.
        streams: number of parallel streams into which the text is cut. Each begins without context,
            so that a few of them are a little worse than one. Published perplexities are of 10
            streams of validation text and 1 of test text. None: at most 20, of at least 50 targets
            each, as training validates.
        length: number of steps that are computed together; the state is kept between windows.
        n_targets: number of targets to score, rounded up to a multiple of ``streams``: those at the
            beginning of each stream. They have the loss that they have in the whole. None: all.

    Raises:
        ValueError: fewer than 2 tokens, fewer targets than streams, or a length or number of
            targets below 1.

    Example:
        >>> import math, hstree
        >>> from hstree.lm.model import AWDLSTM, LanguageModel
        >>> from hstree.lm.train import evaluate
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> round(math.exp(evaluate(model, range(50), streams=2))) in range(90, 110)
        True
    """
    if streams is None:
        streams = default_streams(len(tokens))
    else:
        streams = check_int("streams", streams, 1, max(len(tokens) - 1, 1))
    text = Streams(tokens, streams, ignore_index=model.head.ignore_index)
    steps = len(text)
    if n_targets is not None:
        steps = min(steps, -(-check_int("n_targets", n_targets) // streams))
    device = model.backbone.embedding.weight.device
    training = model.training
    model.eval()
    total, count = 0.0, 0
    state: State | None = None
    try:
        windows = text.windows(length, steps)
        for window, target in track(windows, "evaluating", -(-steps // length)):
            (log_prob, _), state, _ = model(window.to(device), target.to(device), state)
            total -= float(log_prob.sum(dtype=torch.float64))
            count += int((target != model.head.ignore_index).sum())
    finally:
        model.train(training)
    return total / max(count, 1)


COST_LOGITS = 2**26  # largest number of logits of the flat softmax in the timing of the head


def head_cost(model: LanguageModel, config: TrainConfig, text: Streams) -> HeadCost:
    """Time of a forward and backward pass of the head alone, on the context vectors of the first
    training batch of one process, and of ``F.linear`` + ``F.cross_entropy``. Clears the gradients
    of the head."""
    head = model.head
    streams = min(config.batch_size, max(1, COST_LOGITS // (config.bptt * head.n_classes)))
    device = model.backbone.embedding.weight.device
    tokens, target = (part[:, :streams].to(device) for part in text.window(0, config.bptt))
    with torch.no_grad():
        hidden = model.hidden(tokens)[0].flatten(0, 1)
    target = target.flatten()
    hidden.requires_grad_()
    weight = torch.empty(head.n_classes, hidden.shape[1], device=device).uniform_(-0.1, 0.1)
    bias = torch.zeros(head.n_classes, device=device).requires_grad_()
    weight.requires_grad_()

    def head_step() -> None:
        loss: Tensor = head(hidden, target).loss
        loss.backward()  # type: ignore[no-untyped-call]
        head.zero_grad(set_to_none=True)
        hidden.grad = None

    def flat_step() -> None:
        logits = F.linear(hidden, weight, bias)
        loss = F.cross_entropy(logits, target, ignore_index=head.ignore_index)
        loss.backward()  # type: ignore[no-untyped-call]
        hidden.grad = weight.grad = bias.grad = None

    def seconds(step: Callable[[], None]) -> float:
        from torch.utils.benchmark import Timer  # logs a warning where nvcc has no GPU

        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.1).median

    head.train()
    try:
        return HeadCost(len(hidden), seconds(head_step), seconds(flat_step))
    finally:
        head.eval()


# Several processes that train one model, and what they exchange.

PATIENCE = timedelta(days=1)  # while the first process tokenizes a large text or validates

_Value = TypeVar("_Value")


def is_main_process() -> bool:
    """Whether this process prints and writes: it is the only one, or the first of torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class Processes:
    """The processes of a training run: the number of this one, from 0, how many there are, and the
    device of this one. Every method must be called by all of them."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process validates, prints and writes."""
        return self.rank == 0

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A context that the first process enters and leaves before the others enter it."""
        if self.size > 1 and not self.main:
            dist.barrier()
        yield
        if self.size > 1 and self.main:
            dist.barrier()

    def sum(self, *values: float) -> list[float]:
        """Sums over the processes, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def from_main(self, value: _Value) -> _Value:
        """The value of the first process."""
        return self.gather(value)[0]

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all processes, by rank; tensors must be on the CPU."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def wrap(self, module: nn.Module, *, may_skip_parameters: bool) -> nn.Module:
        """The module in DistributedDataParallel, with the weights of the first process. One
        process: the module itself. ``may_skip_parameters``: whether a step may leave some
        parameters without a gradient. Raises ConfigError if the processes have different trees,
        which torch does not compare."""
        if self.size == 1:
            return module
        tables = [part.get_extra_state() for part in module.modules() if isinstance(part, Tables)]
        every = self.gather(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tables)).digest())
        others = [rank for rank, one in enumerate(every) if one != every[0]]
        if others:
            raise ConfigError(
                f"--head: expected the same trees in all processes, got others in {others} than in "
                "the first"
            )
        return DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=may_skip_parameters,
            gradient_as_bucket_view=True,
        )


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The processes that ``torchrun`` has started, or this one alone. Joins a process group (nccl
    on GPUs, gloo on CPUs) temporarily, unless there is one already.

    ``device`` is a ``--device`` setting; with torchrun the GPU is that of the local rank. Raises
    ConfigError if it does not exist.
    """
    chosen = choose_device(device)
    if not dist.is_available() or (not dist.is_initialized() and "WORLD_SIZE" not in os.environ):
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    joined = not dist.is_initialized()
    if joined:
        if chosen.type == "cuda":
            dist.init_process_group("nccl", device_id=chosen, timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        if joined:
            # A gloo thread that releases a Python tensor waits for the interpreter lock, and
            # destroying the group waits for that thread while it holds the lock. Give the threads
            # time to finish first.
            time.sleep(0.1)
            dist.destroy_process_group()


# Interruption

SECOND_SIGNAL = 2.0  # seconds; after a Ctrl-C, processes of torchrun receive the signal twice


class Interrupted(KeyboardInterrupt):
    """A signal, whose number is None where another process received it, stops training."""

    def __init__(self, signal: int | None) -> None:
        super().__init__()
        self.signal = signal


class Interruption:
    """A context in which SIGINT and SIGTERM are only recorded, to take effect between two steps,
    where the state can be saved. A second signal more than two seconds after the first interrupts
    the program immediately. Signals that were ignored before are still ignored. Outside the main
    thread, which alone receives signals, nothing changes."""

    def __init__(self) -> None:
        self.signal: int | None = None  # number of the received signal
        self._time = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > SECOND_SIGNAL:
            raise Interrupted(self.signal)
