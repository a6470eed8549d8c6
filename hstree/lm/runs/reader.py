"""A run folder in memory: settings, vocabulary, tokenizer, best weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hstree.lm._terminal import fold
from hstree.lm.data import Corpus, HeldOut, Tokenizer, Vocabulary, load_corpus, load_held_out
from hstree.lm.data.tokenizer import tokenizer_from_bytes
from hstree.lm.models import LanguageModel

from .checkpoint import load_model, trained_text
from .config import TrainConfig, read_settings
from .names import CONFIG, MODEL, STATE, TOKENIZER, VOCABULARY, CheckpointError
from .settings import ConfigError


@dataclass(frozen=True)
class Run:
    """A run folder in memory: its settings, its words with their training frequencies, the best
    weights, in evaluation mode, and the tokenizer, which splits text as that of the run was
    split."""

    path: Path
    config: TrainConfig
    vocabulary: Vocabulary
    model: LanguageModel
    tokenizer: Tokenizer

    def corpus(self, data: str | None = None, column: str | None = None) -> Corpus:
        """A text in the words of the run: ``data`` and ``column`` as for ``hstree train``; None:
        the text that the run was trained on, with a warning on standard error if it has changed
        since. Raises ValueError if it does not exist."""
        if data is None and column is None:
            return self._own_corpus
        return load_corpus(
            data, column=column, vocabulary=self.vocabulary, tokenizer=self.tokenizer
        )

    def held_out(self, data: str | None = None, column: str | None = None) -> HeldOut:
        """A text to score in the words of the run: the held-out parts of a folder or dataset, or
        the whole of a single text; None: those of :meth:`corpus`. Raises ValueError if it does not
        exist, or has no held-out part."""
        if data is None:
            return self.corpus(data, column).held_out()
        return load_held_out(
            data, column=column, vocabulary=self.vocabulary, tokenizer=self.tokenizer
        )

    @cached_property
    def _own_corpus(self) -> Corpus:
        data, column = self.config.data, self.config.column
        corpus = load_corpus(
            data, column=column, vocabulary=self.vocabulary, tokenizer=self.tokenizer
        )
        if trained_text(self.path / STATE) not in (None, corpus.fingerprint()):
            line = f"hstree: {corpus.name} has changed since this run was trained on it"
            print(fold(line, sys.stderr), file=sys.stderr)
        return corpus


def load_config(path: str | os.PathLike[str]) -> TrainConfig:
    """The settings of a run folder.

    Raises:
        CheckpointError: the folder does not exist, or its settings are missing or not valid.
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # whatever the name
        raise CheckpointError(f"{folder}: no such run folder")
    file = folder / CONFIG
    try:
        settings = read_settings(file)
    except FileNotFoundError:
        inside = any(folder.glob(f"*/{CONFIG}"))
        hint = "; its subfolders are runs: name one of them" if inside else ""
        raise CheckpointError(f"{folder}: not a run folder: {CONFIG} missing{hint}") from None
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    try:
        return TrainConfig(**settings)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None


def load_run(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Run:
    """Read a run folder.

    Raises:
        CheckpointError: the folder or one of its files is missing, truncated, of another kind, or
            inconsistent with the others.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such run folder")
    missing = [
        name for name in (CONFIG, VOCABULARY, TOKENIZER, MODEL) if not (folder / name).is_file()
    ]
    if missing == [MODEL] and (folder / STATE).is_file():
        raise CheckpointError(
            f"{folder}: no epoch has finished, so there is no {MODEL}; "
            f"resume with hstree train --resume {folder}"
        )
    if missing:
        raise CheckpointError(f"{folder}: not a run folder: {', '.join(missing)} missing")
    config = load_config(folder)
    vocabulary = load_vocabulary(folder)
    model = load_model(folder / MODEL)
    if model.backbone.n_classes != len(vocabulary):
        raise CheckpointError(
            f"{folder}: {MODEL} has {model.backbone.n_classes} classes, "
            f"but {VOCABULARY} {len(vocabulary)} words"
        )
    return Run(folder, config, vocabulary, model.to(device), load_tokenizer(folder))


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a run folder. Raises CheckpointError if it cannot be read."""
    try:
        return Vocabulary.load(folder / VOCABULARY)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a run folder: {VOCABULARY} missing") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run folder. Raises CheckpointError if it cannot be read."""
    try:
        return tokenizer_from_bytes((folder / TOKENIZER).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a run folder: {TOKENIZER} missing") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / TOKENIZER}: {error}") from None


def run_names(places: Sequence[str]) -> list[str]:
    """Names of runs, and of other files, in tables and pictures: their last path components, or the
    paths as they were given if two of these are equal.

    Raises:
        ValueError: a place is given twice.
    """
    resolved = [Path(place).resolve() for place in places]
    for place, path in zip(places, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"{place}: expected every run and file once, got this one twice")
    names = [path.name for path in resolved]
    return names if len(set(names)) == len(names) else list(places)
