"""Run folders: everything that remains of a training run, written atomically and read back with
clear errors.

    config.json          settings (TrainConfig)
    vocabulary.txt       one line word<TAB>frequency for each class
    model.safetensors    weights of the best epoch, and in its metadata the sizes of the backbone
                         and the head's configuration
    metrics.jsonl        one JSON object for each epoch
    learning_curve.png   perplexities by epoch
    summary.json         the final figures, once training has ended
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hstree.data import Vocabulary
from hstree.heads import head_class
from hstree.models import AWDLSTM, LanguageModel

from .config import ConfigError, TrainConfig

CONFIG, VOCABULARY, MODEL = "config.json", "vocabulary.txt", "model.safetensors"
METRICS, CURVE, SUMMARY = "metrics.jsonl", "learning_curve.png", "summary.json"
METADATA_KEY = "hstree.model"
FORMAT_VERSION = 3  # 1 had all layers in one LSTM module, 2 one dropout

Content: TypeAlias = bytes | Callable[[Path], None]


class CheckpointError(ValueError):
    """A run folder or model file that is missing, foreign, truncated or not consistent."""


def _fill(path: Path, content: Content) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: Content) -> None:
    """Put a file in place in one step: whoever looks sees the old content or the new, and never a
    part of either.

    Args:
        path: the file.
        content: its bytes, or a function that writes them to the path it is given.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        _fill(temporary, content)
        temporary.chmod(0o644)
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunDirectory:
    """The folder of a run, which appears with its first complete content and not before.

    Args:
        path: folder to create; None: ``runs/<default_name>``, with a number behind it if that
            exists.
        default_name: name where ``path`` is None.

    Raises:
        CheckpointError: ``path`` exists, or a folder cannot be created there. Nothing is left
            behind.
    """

    def __init__(self, path: str | os.PathLike[str] | None, default_name: str) -> None:
        self._default = None if path is not None else Path("runs", default_name)
        self.path = Path(path) if path is not None else self._free_name()
        self.published = False
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"{self.path} exists already; a run never overwrites another: name a new folder"
            )
        self._check_writable()

    def _free_name(self) -> Path:
        assert self._default is not None
        path, number = self._default, 1
        while os.path.lexists(path):
            number += 1
            path = self._default.with_name(f"{self._default.name}-{number}")
        return path

    def _check_writable(self) -> None:
        """Create a folder beside the coming one and remove it again, with the parents that were
        missing."""
        parent = self.path.absolute().parent
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        created: list[Path] = []
        try:
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                created.append(folder)
            os.rmdir(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=parent))
        except OSError as error:
            raise CheckpointError(
                f"cannot create the run folder {self.path}: {error.strerror or error}"
            ) from None
        finally:
            for folder in reversed(created):
                folder.rmdir()

    def write(self, files: Mapping[str, Content]) -> None:
        """Write files of the run. The first call creates the folder with all of them; later ones
        replace each atomically, in the order given."""
        if self.published:
            for name, content in files.items():
                write_atomic(self.path / name, content)
            return
        parent = self.path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", suffix=".part", dir=parent))
        try:
            for name, content in files.items():
                _fill(temporary / name, content)
                _sync(temporary / name)
            temporary.chmod(0o755)
            self._publish(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _publish(self, temporary: Path) -> None:
        while True:
            try:
                temporary.rename(self.path)
            except OSError as error:
                if self._default is None or not os.path.lexists(self.path):
                    raise CheckpointError(
                        f"cannot create the run folder {self.path}: {error.strerror}"
                    ) from None
                self.path = self._free_name()
            else:
                self.published = True
                return


def model_writer(model: LanguageModel) -> Callable[[Path], None]:
    """A function that writes the model to the safetensors file it is given."""

    def write(path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        first_name: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            known = first_name.setdefault(id(tensor), name)
            if known == name:
                tensors[name] = tensor.detach().cpu().contiguous()
            else:
                aliases[name] = known
        description = {
            "version": FORMAT_VERSION,
            "backbone": model.backbone.config(),
            "head": {"name": model.head.name, "config": model.head.config()},
            "aliases": aliases,
        }
        save_file(tensors, path, {METADATA_KEY: json.dumps(description)})

    return write


def load_model(path: str | os.PathLike[str]) -> LanguageModel:
    """The model of a file that :func:`model_writer` wrote, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: the file is missing, truncated, or not a model of this library.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            names = list(file.keys())
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file, or a truncated one: {error}"
        ) from None
    if METADATA_KEY not in metadata:
        raise CheckpointError(f"{path}: a safetensors file, but not a model of hstree")
    try:
        description = json.loads(metadata[METADATA_KEY])
        if description["version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: expected format version {FORMAT_VERSION}, got {description['version']}"
            )
        tensors |= {alias: tensors[name] for alias, name in description["aliases"].items()}
        backbone = AWDLSTM.from_config(description["backbone"])
        own = {
            name.removeprefix("head."): tensor
            for name, tensor in tensors.items()
            if name.startswith("head.")
        }
        saved = description["head"]
        head = head_class(saved["name"]).from_config(
            saved["config"], own, embedding=backbone.embedding
        )
        model = LanguageModel(backbone, head)
        model.load_state_dict(tensors)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = str(error).replace("\n", " ")
        raise CheckpointError(f"{path}: not a consistent model file: {reason}") from None
    return model.eval()


@dataclass(frozen=True)
class Run:
    """A run folder in memory.

    Attributes:
        path: the folder.
        config: its settings.
        vocabulary: words and training frequencies.
        model: best weights, in evaluation mode.
    """

    path: Path
    config: TrainConfig
    vocabulary: Vocabulary
    model: LanguageModel


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
    if missing:
        raise CheckpointError(f"{folder}: not a run folder: {', '.join(missing)} missing")
    config = load_config(folder)
    try:
        vocabulary = Vocabulary.load(folder / VOCABULARY)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    model = load_model(folder / MODEL)
    if model.backbone.n_classes != len(vocabulary):
        raise CheckpointError(
            f"{folder}: {MODEL} has {model.backbone.n_classes} classes, "
            f"but {VOCABULARY} {len(vocabulary)} words"
        )
    return Run(folder, config, vocabulary, model.to(device))


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
