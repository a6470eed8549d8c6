"""The files of a run with tensors: the model and the training state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hstree._files import read_tensors
from hstree._memory import ran_out
from hstree.heads.registry import head_from_config
from hstree.lm.models import AWDLSTM, LanguageModel

from .names import CheckpointError

METADATA_KEY, STATE_KEY = "hstree.model", "hstree.training"
FORMAT_VERSION = 6


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
    try:
        return _loaded(tensors, description)
    except (RuntimeError, MemoryError) as error:
        if ran_out(error):
            with torch.device("meta"):  # an error here: the file is damaged, not memory too small
                _loaded(tensors, description, assign=True)
        raise


def _loaded(
    tensors: dict[str, Tensor], description: dict[str, Any], *, assign: bool = False
) -> LanguageModel:
    backbone = AWDLSTM.from_config(description["backbone"])
    own = {
        name.removeprefix("head."): tensor
        for name, tensor in tensors.items()
        if name.startswith("head.")
    }
    head = head_from_config(description["head"], own, backbone.embedding)
    model = LanguageModel(backbone, head)
    model.load_state_dict(tensors, assign=assign)
    return model


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, path, {key: json.dumps(value) for key, value in metadata.items()})


def model_writer(model: LanguageModel) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        tensors, description = _model_content(model)
        _save(path, tensors, {METADATA_KEY: description})

    return write


def state_writer(
    model: LanguageModel, tensors: dict[str, Tensor], values: dict[str, Any]
) -> Callable[[Path], None]:
    """A function that writes the model and its training state, tensors by name and the rest as JSON
    would, to the safetensors file it is given."""

    def write(path: Path) -> None:
        weights, description = _model_content(model)
        named = {f"model.{name}": tensor for name, tensor in weights.items()}
        named |= {f"training.{name}": tensor for name, tensor in tensors.items()}
        _save(path, named, {METADATA_KEY: description, STATE_KEY: values})

    return write


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
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


_INCONSISTENT = (
    LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, MemoryError
)  # fmt: skip


def load_model(path: str | os.PathLike[str]) -> LanguageModel:
    """The model of a file that ``model_writer`` wrote, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: the file is missing, truncated, or not a model of hstree.
    """
    tensors, metadata = _read(path)
    if STATE_KEY in metadata:
        raise CheckpointError(f"{path}: a training state, not a model")
    try:
        return _build(tensors, json.loads(metadata[METADATA_KEY])).eval()
    except _INCONSISTENT as error:
        if ran_out(error):
            raise
        raise CheckpointError(f"{path}: inconsistent model file: {_line(error)}") from None


def load_state(
    path: str | os.PathLike[str],
) -> tuple[LanguageModel, dict[str, Tensor], dict[str, Any]]:
    """The model, on the CPU, and the state that :func:`state_writer` wrote. Raises CheckpointError
    if the file is missing, truncated, or not a training state."""
    tensors, metadata = _read(path)
    if STATE_KEY not in metadata:
        raise CheckpointError(f"{path}: a model of hstree, but not a training state")
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "training": {}}
    try:
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        model = _build(parts["model"], json.loads(metadata[METADATA_KEY]))
        values = json.loads(metadata[STATE_KEY])
    except _INCONSISTENT as error:
        if ran_out(error):
            raise
        raise CheckpointError(f"{path}: inconsistent training state: {_line(error)}") from None
    return model, parts["training"], values


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def trained_text(path: str | os.PathLike[str]) -> str | None:
    """:meth:`hstree.lm.data.Corpus.fingerprint` of the text of a saved state, None where it is
    unknown."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
        return str(json.loads(metadata[STATE_KEY])["corpus"])
    except (SafetensorError, OSError, *_INCONSISTENT):
        return None
