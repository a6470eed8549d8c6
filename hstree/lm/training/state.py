"""The state of a training: begun from settings, saved to and loaded from a run folder."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from hstree._files import Content
from hstree.lm.data import Corpus, CorpusStatistics, load_corpus
from hstree.lm.data.tokenizer import tokenizer_to_bytes
from hstree.lm.models import LanguageModel
from hstree.lm.runs import (
    RESUMABLE,
    CheckpointError,
    ConfigError,
    EpochRecord,
    TrainConfig,
    load_run,
    load_tokenizer,
    load_vocabulary,
    perplexity,
)
from hstree.lm.runs.checkpoint import load_state, state_writer
from hstree.lm.runs.names import CONFIG, MODEL, STATE, TOKENIZER, VOCABULARY
from hstree.lm.runs.records import read_record

from .build import build_model, check_size, own_parameter_count
from .distributed import Processes
from .finetune import starting_model
from .memory import check_memory
from .progress import Reporter
from .trainer import Trainer, process_seed
from .validation import evaluate


@dataclass
class Training:
    """The parts of a run and its progress.

    Attributes:
        config: its settings.
        corpus: its text.
        fingerprint: of the text.
        statistics: of the text.
        trainer: the loop, which holds the model.
        records: one for each finished epoch.
        best: record of the epoch whose weights are kept, None if no epoch has finished; epoch 0 is
            the start of fine-tuning.
        ended: whether fine-tuning has stopped improving.
        seconds: time spent before the state was loaded.
    """

    config: TrainConfig
    corpus: Corpus
    fingerprint: str
    statistics: CorpusStatistics
    trainer: Trainer
    records: list[EpochRecord] = field(default_factory=list)
    best: EpochRecord | None = None
    ended: bool = False
    seconds: float = 0.0

    @property
    def model(self) -> LanguageModel:
        """The model as it is now."""
        return self.trainer.model

    @cached_property
    def unigram_loss(self) -> float:
        """Loss of the unigram model on the validation text, in nats per token."""
        return self.statistics.unigram_loss(self.corpus.valid[1:])

    @property
    def done(self) -> bool:
        """Whether no epoch remains."""
        return self.ended or len(self.records) >= self.config.epochs

    def state(self, seconds: float) -> Callable[[Path], None]:
        """A function that writes everything, and the seconds spent so far, to a file for
        :func:`load`.

        Raises:
            TrainingError: weights are not finite.
        """
        self.trainer.check_weights()
        tensors, values = self.trainer.state()
        return state_writer(
            self.model,
            tensors,
            {
                "settings": _fixed_settings(self.config),
                "corpus": self.fingerprint,
                "records": [dataclasses.asdict(record) for record in self.records],
                "best": None if self.best is None else dataclasses.asdict(self.best),
                "ended": self.ended,
                "seconds": seconds,
                "trainer": values,
            },
        )


def begin(
    config: TrainConfig, processes: Processes, reporter: Reporter
) -> tuple[Training, dict[str, Content]]:
    """A new training, and the first files of its folder: vocabulary, tokenizer, and the weights
    from which fine-tuning starts.

    Raises:
        ValueError: a setting, the text or the run to fine-tune is not valid.
    """
    origin = None if config.finetune is None else load_run(config.finetune)
    with processes.main_first():  # the others find the tokenized text in the cache
        corpus = load_corpus(
            config.data,
            min_count=config.min_count,
            max_vocabulary=config.max_vocabulary,
            vocabulary=None if origin is None else origin.vocabulary,
            tokenizer=config.tokenizer if origin is None else origin.tokenizer,
        )
    reporter.message(
        f"corpus: {corpus.name}\n        {len(corpus.train):,} training, {len(corpus.valid):,} "
        f"validation, {len(corpus.test):,} test tokens; {len(corpus.vocabulary):,} classes"
    )
    check_size(corpus, config, processes.size)
    check_memory(config, len(corpus.vocabulary), len(corpus.train), processes.device)
    statistics = corpus.statistics()
    if config.averaging == "et" and config.averaging_epoch >= config.epochs:
        reporter.message(
            f"weights will not be averaged: --averaging-epoch is {config.averaging_epoch}, "
            f"--epochs is {config.epochs}"
        )
    late = [epoch for epoch in config.relearn_trees if epoch > config.epochs]
    if late:
        reporter.message(
            f"trees will not be re-learned before epoch {', '.join(map(str, late))}: --epochs is "
            f"{config.epochs}"
        )
    if origin is None:
        started = time.perf_counter()
        model = build_model(config, len(corpus.vocabulary), statistics).to(processes.device)
        reporter.message(_describe(model, time.perf_counter() - started))
    else:
        torch.manual_seed(config.seed)
        model = starting_model(config, origin).to(processes.device)
    if processes.rank > 0:
        torch.manual_seed(process_seed(config.seed, processes.rank))
    trainer = Trainer(model, corpus, config, processes)
    training = Training(config, corpus, corpus.fingerprint(), statistics, trainer)
    files: dict[str, Content] = {
        VOCABULARY: corpus.vocabulary.to_bytes(),
        TOKENIZER: tokenizer_to_bytes(corpus.tokenizer),
    }
    if origin is not None:
        valid_loss = evaluate(model, corpus.valid)
        training.best = EpochRecord(0, 0, 0.0, math.nan, valid_loss, True, 0.0, 0.0)
        files[MODEL] = partial(shutil.copyfile, origin.path / MODEL)
        reporter.message(
            f"starting from {origin.path}, validation perplexity {perplexity(valid_loss):.1f}"
        )
    return training, files


def load(folder: Path, config: TrainConfig, processes: Processes) -> Training:
    """The training whose state was saved in a run folder.

    Args:
        folder: of the run.
        config: its settings; those of :data:`~hstree.lm.runs.RESUMABLE` may have changed.
        processes: as many as before.

    Raises:
        CheckpointError: there is no state, or it is inconsistent with the other files or the text.
        ConfigError: fewer epochs than have finished.
        ValueError: the text does not exist.
    """
    model, tensors, values = load_state(folder / STATE)
    try:
        records = [read_record(EpochRecord, record) for record in values["records"]]
        best = values["best"]
        best = None if best is None else read_record(EpochRecord, best)
        ended, seconds = values["ended"], values["seconds"]
    except (KeyError, TypeError, ValueError) as error:
        raise _inconsistent(folder, error) from None
    vocabulary, tokenizer = load_vocabulary(folder), load_tokenizer(folder)
    with processes.main_first():
        corpus = load_corpus(config.data, vocabulary=vocabulary, tokenizer=tokenizer)
    fingerprint = corpus.fingerprint()
    try:
        settings = _fixed_settings(config)
        saved = _fixed_settings(TrainConfig()) | values["settings"]  # a new setting: its default
        other = [name for name in settings if saved[name] != settings[name]]
        if other:
            raise ValueError(f"the state of a run whose {', '.join(other)} differs from {CONFIG}")
        if values["corpus"] != fingerprint:
            raise ValueError(
                f"--resume: the text {corpus.name} is not the text of this run: it has changed, or "
                f"--data names another one"
            )
        if config.epochs < len(records):
            raise ConfigError(
                f"--epochs: expected at least {len(records)}, the number of finished epochs, "
                f"got {config.epochs}"
            )
        trainer = Trainer(model.to(processes.device), corpus, config, processes)
        trainer.restore(tensors, values["trainer"])
    except ConfigError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder / STATE}: {error}") from None
    except (KeyError, IndexError, TypeError, RuntimeError) as error:
        raise _inconsistent(folder, error) from None
    return Training(
        config, corpus, fingerprint, corpus.statistics(), trainer, records, best, ended, seconds
    )


def _inconsistent(folder: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(f"{folder / STATE}: inconsistent training state: {reason}")


def _fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that cannot change when a run is resumed; JSON-able."""
    changing = (*RESUMABLE, "run", "finetune")
    settings: dict[str, Any] = json.loads(config.to_json())
    return {name: value for name, value in settings.items() if name not in changing}


def _describe(model: LanguageModel, seconds: float) -> str:
    backbone = sum(parameter.numel() for parameter in model.backbone.parameters())
    head = own_parameter_count(model.head, model.backbone)
    return (
        f"model:  LSTM with {backbone:,} parameters\n"
        f"        head {model.head.name!r} with {head:,} parameters, built in {seconds:.1f} s"
    )
