"""Run folders: what writes a folder and reads it back."""

from __future__ import annotations

import dataclasses
import fcntl
import glob
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hstree._files import Content, read_tensors, set_mode, write_atomic, write_synced
from hstree._memory import ran_out
from hstree.heads.registry import head_from_config
from hstree.lm.config import (
    HEAD_SETTINGS,
    NOT_INHERITED,
    UNGROUPED,
    ConfigError,
    TrainConfig,
    read_settings,
    unread,
)
from hstree.lm.data import (
    Corpus,
    HeldOut,
    Tokenizer,
    Vocabulary,
    load_corpus,
    load_held_out,
    tokenizer_from_bytes,
)
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.report import EpochRecord, Summary, fold, read_json

__all__ = [
    "CheckpointError",
    "Run",
    "RunDirectory",
    "RunResults",
    "counterpart",
    "finetuning",
    "load_config",
    "load_model",
    "load_run",
    "load_tokenizer",
    "load_vocabulary",
    "read_epochs",
    "read_run",
    "run_names",
]

#     config.json          settings (TrainConfig)
#     vocabulary.txt       one line word<TAB>frequency for each class
#     tokenizer.json       of Hugging Face tokenizers, or the name of the rule that split the text
#     model.safetensors    weights of the best epoch, and in its metadata the sizes of the backbone
#                          and the head's configuration
#     last.safetensors     the state that --resume loads: last weights, optimizer with its averages,
#                          LSTM states, random states, position, figures of the epochs
#     metrics.jsonl        one JSON object for each epoch (EpochRecord)
#     learning_curve.png   perplexities by epoch
#     comparison.png       perplexity against training time, beside a run with another head
#     summary.json         the final figures, once training has ended (Summary)
#
# The folder appears when training begins. At the end of an epoch last.safetensors is written
# last. If the process is killed before that, the other files may belong to an epoch that
# last.safetensors does not contain; --resume repeats this epoch with the same result.

CONFIG, VOCABULARY, TOKENIZER = "config.json", "vocabulary.txt", "tokenizer.json"
MODEL, STATE = "model.safetensors", "last.safetensors"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
CURVE, COMPARISON = "learning_curve.png", "comparison.png"


class CheckpointError(ValueError):
    """A folder that is not a run folder, or a file of a run that is missing, truncated,
    inconsistent or of another kind."""


# The folder of a run: files that are replaced atomically, by one process at a time.


def lock_folder(folder: Path) -> int | None:
    """A file descriptor that holds the lock of a folder, even if the folder is renamed; None where
    locks are not available. Raises BlockingIOError if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


class RunDirectory:
    """The folder of a run, new or to be resumed (:meth:`RunDirectory.open`). A new one appears,
    complete, with its first content. While it is open, no other process can open it.

    Args:
        path: folder to create; None: ``runs/<default_name>``, with a number appended if that
            exists.
        default_name: name where ``path`` is None.

    Attributes:
        published: whether the folder is there.
        best: record of the epoch whose weights it holds, as far as its writer has noted it.

    Raises:
        CheckpointError: ``path`` exists, or a folder cannot be created there. Nothing is left
            behind.
    """

    published = False
    best: EpochRecord | None = None
    _lock: int | None = None

    def __init__(self, path: str | os.PathLike[str] | None, default_name: str) -> None:
        self._default = None if path is not None else Path("runs", default_name)
        self.path = Path(path) if path is not None else self._free_name()
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"{self.path} already exists, and a run never overwrites another: "
                f"name a new folder, or resume with --resume {self.path}"
            )
        there = next(folder for folder in self.path.absolute().parents if os.path.lexists(folder))
        try:  # before the work that the run takes
            os.rmdir(self._part(there))
        except OSError as error:
            raise self._cannot_create(error) from None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The folder of a run to resume. Files that a killed process left incomplete are removed.
        Raises CheckpointError if it does not exist, or another process writes to it."""
        directory = cls.__new__(cls)
        directory.path, directory.published = Path(path), True
        if not directory.path.is_dir():
            raise CheckpointError(f"{path}: no such run folder")
        try:
            directory._lock = lock_folder(directory.path)
        except BlockingIOError:
            raise CheckpointError(f"{path}: another process trains in this folder") from None
        for leftover in directory.path.glob(".*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
        return directory

    def close(self) -> None:
        """Release the lock, so that other processes can open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, files: Mapping[str, Content]) -> None:
        """Write files of the run. The first call creates the folder with all of them; later ones
        replace each atomically, in the order given. Raises OSError if one cannot be written."""
        if self.published:
            for name, content in files.items():
                write_atomic(self.path / name, content)
            return
        part = None
        try:
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            part = self._part(self.path.absolute().parent)
            self._lock = lock_folder(part)
            for name, content in files.items():
                write_synced(part / name, content)
            set_mode(part, 0o777)
            self._publish(part)
        except OSError as error:
            raise OSError(str(self._cannot_create(error))) from error
        finally:
            if part is not None:
                shutil.rmtree(part, ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a file of the run, if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def _part(self, folder: Path) -> Path:
        return Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", suffix=".part", dir=folder))

    def _cannot_create(self, error: OSError) -> CheckpointError:
        reason = error.strerror or error
        return CheckpointError(f"cannot create the run folder {self.path}: {reason}")

    def _free_name(self) -> Path:
        assert self._default is not None
        path, number = self._default, 1
        while os.path.lexists(path):
            number += 1
            path = self._default.with_name(f"{self._default.name}-{number}")
        return path

    def _publish(self, part: Path) -> None:
        while not self.published:
            try:
                part.rename(self.path)
                self.published = True
            except OSError as error:
                if self._default is None or not os.path.lexists(self.path):
                    raise self._cannot_create(error) from None
                self.path = self._free_name()
        # What processes that were killed before this folder appeared have left next to it.
        pattern = f".{glob.escape(self.path.name)}-????????.part"
        for leftover in self.path.absolute().parent.glob(pattern):
            with suppress(OSError):  # locked: a process that is still writing
                lock = lock_folder(leftover)
                shutil.rmtree(leftover)
                if lock is not None:
                    os.close(lock)


# The files of a run with tensors: the model and the training state.

METADATA_KEY, STATE_KEY = "hstree.model", "hstree.training"
FORMAT_VERSION = 7


def _model_content(model: LanguageModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Distinct tensors of a model, and the description from which :func:`_build` rebuilds it."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first_name.setdefault(id(tensor), name)
        if known == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = known
    return tensors, {
        "version": FORMAT_VERSION,
        "backbone": model.backbone.config(),
        "head": {"name": model.head.name, "config": model.head.config()},
        "aliases": aliases,
    }


def _build(tensors: dict[str, Tensor], description: dict[str, Any]) -> LanguageModel:
    if description["version"] != FORMAT_VERSION:
        raise ValueError(f"expected format version {FORMAT_VERSION}, got {description['version']}")
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"expected finite weights, got NaN or infinity in {name}")
    tensors = tensors | {alias: tensors[name] for alias, name in description["aliases"].items()}
    backbone = AWDLSTM.from_config(description["backbone"])
    own = {
        name.removeprefix("head."): tensor
        for name, tensor in tensors.items()
        if name.startswith("head.")
    }
    head = head_from_config(description["head"], own, backbone.embedding)
    model = LanguageModel(backbone, head)
    model.load_state_dict(tensors)
    return model


def _save(tensors: dict[str, Tensor], metadata: dict[str, Any], path: Path) -> None:
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, path, {key: json.dumps(value) for key, value in metadata.items()})


def model_writer(model: LanguageModel) -> Callable[[Path], None]:
    """A function that writes the model to the safetensors file it is given."""
    tensors, description = _model_content(model)
    return partial(_save, tensors, {METADATA_KEY: description})


def state_writer(
    model: LanguageModel, tensors: dict[str, Tensor], values: dict[str, Any]
) -> Callable[[Path], None]:
    """A function that writes the model and its training state, tensors by name and the rest as JSON
    would, to the safetensors file it is given."""
    weights, description = _model_content(model)
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    named |= {f"training.{name}": tensor for name, tensor in tensors.items()}
    return partial(_save, named, {METADATA_KEY: description, STATE_KEY: values})


_INCONSISTENT = (
    LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, MemoryError
)  # fmt: skip


def _read(
    path: str | os.PathLike[str], *, state: bool
) -> tuple[LanguageModel, dict[str, Tensor], Any]:
    """The model of a file, the other tensors of a training state and its values. Raises
    CheckpointError if the file is missing, truncated, or not of this kind."""
    try:
        tensors, metadata = read_tensors(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file, or a truncated one: {error}"
        ) from None
    if METADATA_KEY not in metadata:
        raise CheckpointError(f"{path}: a safetensors file, but not a model of hstree")
    if state != (STATE_KEY in metadata):
        kinds = "a model of hstree", "a training state"
        raise CheckpointError(f"{path}: expected {kinds[state]}, got {kinds[not state]}")
    try:
        values = json.loads(metadata[STATE_KEY]) if state else None
        parts = {"training": {}, "model": {}} if state else {"training": {}, "model": tensors}
        for name, tensor in tensors.items() if state else ():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        model = _build(parts["model"], json.loads(metadata[METADATA_KEY]))
    except _INCONSISTENT as error:
        if ran_out(error):
            raise
        reason = " ".join(str(error).split())
        kind = "training state" if state else "model file"
        raise CheckpointError(f"{path}: inconsistent {kind}: {reason}") from None
    return model, parts["training"], values


def load_model(path: str | os.PathLike[str]) -> LanguageModel:
    """The model of a file that ``model_writer`` wrote, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: the file is missing, truncated, or not a model of hstree.
    """
    return _read(path, state=False)[0].eval()


def load_state(
    path: str | os.PathLike[str],
) -> tuple[LanguageModel, dict[str, Tensor], dict[str, Any]]:
    """The model, on the CPU, and the state that :func:`state_writer` wrote. Raises CheckpointError
    if the file is missing, truncated, or not a training state."""
    return _read(path, state=True)


def trained_text(path: str | os.PathLike[str]) -> str | None:
    """:meth:`hstree.lm.data.Corpus.fingerprint` of the text of a saved state, None where it is
    unknown."""
    try:
        with safe_open(path, framework="pt") as file:
            return str(json.loads(file.metadata()[STATE_KEY])["corpus"])
    except (SafetensorError, OSError, *_INCONSISTENT):
        return None


# A run folder in memory: settings, vocabulary, tokenizer, best weights.


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
    return _part_of(folder, VOCABULARY, Vocabulary.load)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run folder. Raises CheckpointError if it cannot be read."""
    return _part_of(folder, TOKENIZER, lambda path: tokenizer_from_bytes(path.read_bytes()))


_Part = TypeVar("_Part")


def _part_of(folder: Path, name: str, read: Callable[[Path], _Part]) -> _Part:
    try:
        return read(folder / name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a run folder: {name} missing") from None
    except ValueError as error:
        where = "" if str(folder / name) in str(error) else f"{folder / name}: "
        raise CheckpointError(f"{where}{error}") from None


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


# Fine-tuning


def finetuning(origin: str | os.PathLike[str], /, **changes: Any) -> TrainConfig:
    """Settings that fine-tune a run: its own settings, with ``finetune`` and the given changes.
    The learning rate is ``finetune_learning_rate``, if it is set and no ``learning_rate`` is given.

    Args:
        origin: folder of the run.
        **changes: fields of :class:`hstree.lm.config.TrainConfig` that replace those of the run.

    Raises:
        CheckpointError: the settings of the folder cannot be read.
        ConfigError: a value that is not valid, or a run that was not trained with SGD.
    """
    settings = dataclasses.asdict(load_config(origin))
    for name in NOT_INHERITED:
        del settings[name]
    settings |= {"finetune": os.fspath(origin)} | changes
    if "learning_rate" not in changes and settings["finetune_learning_rate"] is not None:
        settings["learning_rate"] = settings["finetune_learning_rate"]
    return TrainConfig(**settings)


# The figures of a run. One that has not finished has no summary.json; its figures are those of
# the finished epochs.


@dataclass(frozen=True)
class RunResults:
    """A run: its folder, as it was given, its settings, the finished epochs, in order, and the
    final figures, None if it has not finished."""

    path: Path
    config: TrainConfig
    epochs: tuple[EpochRecord, ...]
    final: Summary | None

    @property
    def head(self) -> str:
        """Registered name of the output layer."""
        return self.config.head

    @property
    def seed(self) -> int:
        """Seed of the trees, the initial weights and dropout."""
        return self.config.seed

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings as in config.json."""
        return all_settings(self.config)

    @property
    def best(self) -> EpochRecord | None:
        """The epoch with the lowest validation perplexity; None if no epoch has finished."""
        return min(self.epochs, key=lambda epoch: epoch.valid_loss, default=None)

    @property
    def best_epoch(self) -> int | None:
        """Number of the best epoch."""
        if self.final is not None:
            return self.final.best_epoch
        return None if self.best is None else self.best.epoch

    @property
    def valid_perplexity(self) -> float | None:
        """Validation perplexity per token after the best epoch."""
        kept = self.final or self.best
        return None if kept is None else kept.valid_perplexity

    @property
    def test_perplexity(self) -> float | None:
        """Test perplexity per token of the best epoch's weights; None if the run has not
        finished."""
        return None if self.final is None else self.final.test_perplexity

    @property
    def seconds_per_epoch(self) -> float | None:
        """Median over the epochs, training and validation."""
        return statistics.median(e.seconds for e in self.epochs) if self.epochs else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the epochs, training only."""
        return statistics.median(e.tokens_per_second for e in self.epochs) if self.epochs else None

    def compared_settings(self) -> dict[str, Any]:
        """The settings that two runs of a group must share: ``model_settings``. Instead of the run
        from which this one was fine-tuned, those of that run, and of the runs before it, without
        their folders and seeds; the name of its folder if it no longer exists."""
        chain: list[Any] = []
        seen: set[str] = set()
        name = self.config.finetune
        while name is not None and name not in seen:
            seen.add(name)
            try:
                config = load_config(name)
            except CheckpointError:
                chain.append(name)
                break
            chain.append(model_settings(config) | {"finetune": None})
            name = config.finetune
        return model_settings(self.config) | {"finetune": chain or None}


def read_run(path: str | os.PathLike[str]) -> RunResults:
    """Read the figures of a run folder.

    Raises:
        CheckpointError: the folder or its config.json does not exist, or one of the files was not
            written by ``hstree train``.
    """
    folder = Path(path)
    config, file = load_config(folder), folder / SUMMARY
    final = _parsed(Summary, _text(file), str(file)) if file.is_file() else None
    return RunResults(folder, config, read_epochs(folder), final)


def counterpart(run: RunResults, head: str) -> RunResults | None:
    """The newest finished run next to ``run``, in the same folder, that has another head and
    otherwise the same settings (those of the head and :data:`~hstree.lm.config.UNGROUPED` ones but
    the seed aside) on the same text. None if there is no such run."""
    found: list[tuple[float, RunResults]] = []
    for file in run.path.absolute().parent.glob(f"*/{SUMMARY}"):
        with suppress(CheckpointError, OSError):
            other = read_run(run.path.parent / file.parent.name)
            fits = other.head == head and _comparable(other) == _comparable(run)
            if fits and run.final and other.final and other.final.text == run.final.text:
                found.append((file.stat().st_mtime, other))
    return max(found, key=itemgetter(0))[1] if found else None


def _comparable(run: RunResults) -> dict[str, Any]:
    settings = {k: v for k, v in run.compared_settings().items() if k not in HEAD_SETTINGS}
    return settings | {"seed": run.seed}


def model_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that make a model, as in config.json: all but
    :data:`~hstree.lm.config.UNGROUPED` and those that its head does not read."""
    left_out = {*UNGROUPED, *unread(config.head)}
    return {name: value for name, value in all_settings(config).items() if name not in left_out}


def read_epochs(folder: Path) -> tuple[EpochRecord, ...]:
    """The finished epochs of a run folder. Raises CheckpointError, which names the line, for a line
    that is not the record of an epoch."""
    path = folder / METRICS
    if not path.is_file():
        return ()
    return tuple(
        _parsed(EpochRecord, line, f"{path}, line {number}")
        for number, line in enumerate(_text(path).splitlines(), start=1)
    )


def all_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings as in config.json."""
    settings: dict[str, Any] = json.loads(config.to_json())
    return settings


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: expected UTF-8 text") from None


def _parsed(kind: type[_Part], text: str, where: str) -> _Part:
    try:
        return read_json(kind, text)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
