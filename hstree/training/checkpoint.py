"""Run folders: everything that remains of a training run, written atomically and read back with
clear errors.

    config.json          settings (TrainConfig)
    vocabulary.txt       one line word<TAB>frequency for each class
    tokenizer.json       of Hugging Face tokenizers, where a text was cut by one
    model.safetensors    weights of the best epoch, and in its metadata the sizes of the backbone
                         and the head's configuration
    last.safetensors     the state from which --resume goes on: last weights, optimiser with its
                         averages, LSTM states, random states, position, figures of the epochs
    metrics.jsonl        one JSON object for each epoch
    learning_curve.png   perplexities by epoch
    summary.json         the final figures, once training has ended

The folder appears when training begins. At the end of an epoch last.safetensors is written last: if
the process is killed before, the other files may be of an epoch that it does not know yet, and
which --resume makes again, the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hstree._files import read_tensors
from hstree.data import Corpus, Subwords, Tokenizer, Vocabulary, load_corpus
from hstree.heads import head_class
from hstree.models import AWDLSTM, LanguageModel

from .config import ConfigError, TrainConfig
from .run_directory import CONFIG, MODEL, STATE, TOKENIZER, VOCABULARY, CheckpointError

METADATA_KEY, STATE_KEY = "hstree.model", "hstree.training"
FORMAT_VERSION = 3  # 1 had all layers in one LSTM module, 2 one dropout


def _model_content(model: LanguageModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Distinct tensors of a model, and the description from which :func:`_build` makes it."""
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
    """The model of a :func:`_model_content`."""
    if description["version"] != FORMAT_VERSION:
        raise ValueError(f"expected format version {FORMAT_VERSION}, got {description['version']}")
    tensors = tensors | {alias: tensors[name] for alias, name in description["aliases"].items()}
    backbone = AWDLSTM.from_config(description["backbone"])
    own = {
        name.removeprefix("head."): tensor
        for name, tensor in tensors.items()
        if name.startswith("head.")
    }
    saved = description["head"]
    head = head_class(saved["name"]).from_config(saved["config"], own, embedding=backbone.embedding)
    model = LanguageModel(backbone, head)
    model.load_state_dict(tensors)
    return model


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_cpu, path, {key: json.dumps(value) for key, value in metadata.items()})
    except SafetensorError as error:  # a full disk
        raise OSError(f"{path}: {error}") from None


def model_writer(model: LanguageModel) -> Callable[[Path], None]:
    """A function that writes the model to the safetensors file it is given."""

    def write(path: Path) -> None:
        tensors, description = _model_content(model)
        _save(path, tensors, {METADATA_KEY: description})

    return write


def state_writer(
    model: LanguageModel, tensors: dict[str, Tensor], values: dict[str, Any]
) -> Callable[[Path], None]:
    """A function that writes the model and the state of its training to the safetensors file it is
    given.

    Args:
        model: the last weights.
        tensors: of the training's state, by name.
        values: the rest of it; JSON-able.
    """

    def write(path: Path) -> None:
        weights, description = _model_content(model)
        named = {f"model.{name}": tensor for name, tensor in weights.items()}
        named |= {f"training.{name}": tensor for name, tensor in tensors.items()}
        _save(path, named, {METADATA_KEY: description, STATE_KEY: values})

    return write


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file that this module wrote."""
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
    return tensors, metadata


_INCONSISTENT = (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError)


def load_model(path: str | os.PathLike[str]) -> LanguageModel:
    """The model of a file that :func:`model_writer` wrote, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: the file is missing, truncated, or not a model of this library.
    """
    tensors, metadata = _read(path)
    if STATE_KEY in metadata:
        raise CheckpointError(f"{path}: the state of a training, not a model")
    try:
        return _build(tensors, json.loads(metadata[METADATA_KEY])).eval()
    except _INCONSISTENT as error:
        raise CheckpointError(f"{path}: not a consistent model file: {_line(error)}") from None


def load_state(
    path: str | os.PathLike[str],
) -> tuple[LanguageModel, dict[str, Tensor], dict[str, Any]]:
    """The model, on the CPU, and the state that :func:`state_writer` wrote.

    Raises:
        CheckpointError: the file is missing, truncated, or not the state of a training.
    """
    tensors, metadata = _read(path)
    if STATE_KEY not in metadata:
        raise CheckpointError(f"{path}: a model of hstree, but not the state of its training")
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "training": {}}
    try:
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        model = _build(parts["model"], json.loads(metadata[METADATA_KEY]))
        values = json.loads(metadata[STATE_KEY])
    except _INCONSISTENT as error:
        raise CheckpointError(f"{path}: not a consistent state: {_line(error)}") from None
    return model, parts["training"], values


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True)
class Run:
    """A run folder in memory.

    Attributes:
        path: the folder.
        config: its settings.
        vocabulary: words and training frequencies.
        model: best weights, in evaluation mode.
        tokenizer: cuts text into words; None: what the kind of text at hand asks for.
    """

    path: Path
    config: TrainConfig
    vocabulary: Vocabulary
    model: LanguageModel
    tokenizer: Tokenizer | None = None

    def corpus(self, data: str | None = None) -> Corpus:
        """A text in the words of the run.

        Args:
            data: what ``hstree train --data`` takes; None: the text that the run was trained on.

        Raises:
            ValueError: there is no such text.
        """
        return load_corpus(
            data or self.config.data, vocabulary=self.vocabulary, tokenizer=self.tokenizer
        )


def load_config(path: str | os.PathLike[str]) -> TrainConfig:
    """The settings of a run folder.

    Raises:
        CheckpointError: there is no such folder, or its settings are missing or not valid.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such run folder")
    try:
        return TrainConfig.from_json((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a run folder: {CONFIG} missing") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None


def load_run(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Run:
    """Read a run folder.

    Raises:
        CheckpointError: the folder or one of its files is missing, foreign, truncated, or does not
            fit the others.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such run folder")
    missing = [name for name in (CONFIG, VOCABULARY, MODEL) if not (folder / name).is_file()]
    if missing == [MODEL] and (folder / STATE).is_file():
        raise CheckpointError(
            f"{folder}: no epoch has ended yet, so there is no {MODEL}; "
            f"go on with hstree train --resume {folder}"
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


def trained_text(folder: Path) -> str | None:
    """:meth:`hstree.data.Corpus.fingerprint` of the text that a run was trained on, None where that
    is not known."""
    try:
        with safe_open(folder / STATE, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
        return str(json.loads(metadata[STATE_KEY])["corpus"])
    except (SafetensorError, OSError, *_INCONSISTENT):
        return None


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a run folder. Raises CheckpointError if it cannot be read."""
    try:
        return Vocabulary.load(folder / VOCABULARY)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a run folder: {VOCABULARY} missing") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a run folder, None if it has none of its own. Raises CheckpointError if it
    cannot be read."""
    if not (folder / TOKENIZER).is_file():
        return None
    try:
        return Subwords.from_bytes((folder / TOKENIZER).read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{folder / TOKENIZER}: {error}") from None


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl, one for each epoch. Raises CheckpointError that names a line
    which is not JSON."""
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise CheckpointError(
                f"{path}, line {number}: expected a JSON object, got {line[:60]!r}"
            ) from None
    return records
