"""The file of a study: its models, settings and seeds."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hstree.heads import head_options
from hstree.lm._messages import meant, quoted, shortened
from hstree.lm._packages import optional_package
from hstree.lm.runs import ConfigError, TrainConfig, parse_options
from hstree.lm.training import preset
from hstree.lm.training.presets import check_text

EXAMPLE = """\
    seeds = [1, 2, 3]
    baseline = "softmax"          # t-tests against this model
    rank = true                   # or {rows = 4000, split = "test"}

    [settings]                    # any setting of hstree train, for all models
    data = "ptb"
    epochs = 3

    [[models]]
    head = "softmax"              # or a preset: preset = "ptb-softmax"

    [[models]]
    name = "shape"
    head = "gss"
    learning_rate = 0.004         # any setting, in place of the one for all
    head_options = { c = [-1.5, 0.0], k = [1.5, 2.5] }

A list is a grid: this study has softmax and four models of gss, each with three
seeds.
"""
_SETTINGS = tuple(field.name for field in dataclasses.fields(TrainConfig))
_SPLITS = ("train", "valid", "test")
_ELSEWHERE = {
    "run": "folders are named after the models",
    "seed": "set seeds, which apply to all models",
    "finetune": "a study trains its models from scratch",
    "head_option": "set the options of a head in head_options",
}


class StudyError(ValueError):
    """A study's file, or the folder of one of its runs, is invalid."""


@dataclass(frozen=True)
class RankSettings:
    """The matrix of log-probabilities for the ranks: the first ``rows`` contexts (None: all) of one
    split of the text."""

    rows: int | None = None
    split: str = "test"


@dataclass(frozen=True)
class StudyModel:
    """One configuration, trained once with each seed: the name of the model in the file, followed
    by the values of the grid, and its settings, whose seed and run folder are placeholders."""

    label: str
    config: TrainConfig

    @property
    def options(self) -> dict[str, Any]:
        return parse_options(self.config.head_option)


@dataclass(frozen=True)
class Study:
    name: str
    models: tuple[StudyModel, ...]  # in the order of the file
    seeds: tuple[int, ...]
    baseline: str | None  # label of the model that the others are tested against
    rank: RankSettings | None  # None: no ranks
    source: str  # text of the file


def read_study(path: str | os.PathLike[str]) -> Study:
    """Read the study of a TOML file such as ``EXAMPLE``.

    In addition to the keys there, ``name`` names the study (default: the file's name). ``seeds``
    may be a single number (default: 1). The name of a model defaults to that of its head or preset.
    A list is a grid: one configuration for each element, and with several lists for each
    combination. A setting with several values, such as ``relearn_trees``, is a list in a list.

    Raises:
        StudyError: the file is missing, is not TOML, or has an invalid key or value; the message
            names the file, the model and the key.
    """
    file = Path(path)
    with _within(file):
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise StudyError("expected UTF-8 text") from None
        except OSError as error:
            raise StudyError(error.strerror) from None
        return parse_study(source, file.stem)


def parse_study(source: str, name: str = "study") -> Study:
    """Parse a study like :func:`read_study`, from a TOML text; ``name``: the default name."""
    module = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    toml = optional_package(module, "hstree study", "lm")
    try:
        values = toml.loads(source)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError, or a number of many digits
        raise StudyError(f"not TOML: {error}") from None
    _only(values, ("name", "seeds", "baseline", "rank", "settings", "models"))
    settings = _table(values, "settings")
    with _within("[settings]"):
        _only_settings(settings)
    tables = values.get("models")
    if not isinstance(tables, list) or not tables:
        raise StudyError(f"models: expected at least one table [[models]], got {quoted(tables)}")
    models: list[StudyModel] = []
    for number, table in enumerate(tables, start=1):
        with _within(f"[[models]] number {number}"):
            model_name = _model_name(table)
        with _within(f"model {model_name!r}"):
            models += _models(model_name, table, settings)
    folders = [run_name(model, 0).casefold() for model in models]
    number_of = Counter(folders)
    for model, folder in zip(models, folders, strict=True):
        if number_of[folder] > 1:
            raise StudyError(f"models: expected different names, got {quoted(model.label)}")
    baseline, labels = values.get("baseline"), [model.label for model in models]
    if baseline is not None and baseline not in labels:
        known = shortened(", ".join(map(repr, labels)), 1000)
        raise StudyError(f"baseline: expected one of the models {known}, got {quoted(baseline)}")
    return Study(
        _name(values, name),
        tuple(models),
        _seeds(values.get("seeds", 1)),
        baseline,
        _rank(values.get("rank", False)),
        source,
    )


def run_name(model: StudyModel, seed: int) -> str:
    """The name of the folder of a run, such as ``gss-c=-1.5-k=2.5-seed=1``."""
    return re.sub(r"[^\w.=+-]+", "-", f"{model.label}-seed={seed}")


def by_key(error: Exception) -> str:
    """The message of an error, with keys of the file in place of flags."""

    def key(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if name not in (*_SETTINGS, "preset"):
            return match[0]
        return "head_options" if name == "head_option" else name

    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", key, str(error))


# Parts of the file


@contextmanager
def _within(place: object) -> Iterator[None]:
    """Prefix errors with the place, and replace flags in them by keys of the file."""
    try:
        yield
    except ValueError as error:
        text = error if isinstance(error, StudyError) else by_key(error)
        raise StudyError(f"{place}: {text}") from None


def _name(values: Mapping[str, Any], default: str) -> str:
    name = values.get("name", default)
    usable = isinstance(name, str) and name.isprintable() and name.strip(" .") != ""
    if not usable or name != Path(name).name:
        raise StudyError(f"name: expected a valid name for a folder, got {quoted(name)}")
    return str(name)


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else [value]
    if not seeds or any(type(seed) is not int for seed in seeds) or len({*seeds}) < len(seeds):
        raise StudyError(f"seeds: expected different whole numbers, got {quoted(value)}")
    try:
        for seed in (min(seeds), max(seeds)):  # the limits are those of a range
            TrainConfig(seed=seed)
        return tuple(seeds)
    except ConfigError as error:
        raise StudyError(by_key(error).replace("seed:", "seeds:", 1)) from None


def _rank(value: Any) -> RankSettings | None:
    if isinstance(value, bool):
        return RankSettings() if value else None
    if not isinstance(value, dict):
        expected = "true, false or a table of rows and split"
        raise StudyError(f"rank: expected {expected}, got {quoted(value)}")
    with _within("rank"):
        _only(value, ("rows", "split"))
    rank = RankSettings(**value)
    if rank.rows is not None and (type(rank.rows) is not int or rank.rows < 1):
        raise StudyError(f"rank.rows: expected a number of contexts, got {quoted(rank.rows)}")
    if rank.split not in _SPLITS:
        raise StudyError(
            f"rank.split: expected one of {', '.join(_SPLITS)}, got {quoted(rank.split)}"
        )
    return rank


def _model_name(values: Any) -> str:
    if not isinstance(values, dict):
        raise StudyError(f"expected a table, got {quoted(values)}")
    kinds = [key for key in ("head", "preset") if key in values]
    if len(kinds) != 1 or not isinstance(values[kinds[0]], str):
        raise StudyError(
            f"expected the name of a head or of a preset, got {', '.join(kinds) or 'neither'}"
        )
    return _name(values, values[kinds[0]])


def _models(
    name: str, values: Mapping[str, Any], common: Mapping[str, Any]
) -> Iterator[StudyModel]:
    """One model for each combination of elements of the lists in settings and head options."""
    own = {key: v for key, v in values.items() if key not in ("name", "preset", "head_options")}
    _only_settings(own)
    given = {**common, **own}
    options = _table(values, "head_options")
    for chosen, chosen_options in itertools.product(_grid(given), _grid(options)):
        config = _config(values.get("preset"), chosen, chosen_options)
        label = [name]
        for listed, part in ((given, chosen), (options, chosen_options)):
            for key, value in part.items():
                if isinstance(listed[key], list):
                    text = value if isinstance(value, str) else json.dumps(value)
                    label.append(f"{key}={text}")
        yield StudyModel(", ".join(label), config)


def _grid(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values with every list replaced by one of its elements, for each combination."""
    for key, value in values.items():
        if value == []:
            raise StudyError(f"{key}: expected at least one value, got []")
    lists = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


def _config(
    preset_name: str | None, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> TrainConfig:
    texts = []
    for key, value in options.items():
        try:
            texts.append(f"{key}={json.dumps(value)}")
        except TypeError:  # dates and times
            raise StudyError(
                f"head_options: {key}: expected a number, text, table or list, got {value}"
            ) from None
    make = TrainConfig if preset_name is None else partial(preset, preset_name)
    config = make(**settings, head_option=tuple(texts))
    check_text(preset_name, config)
    known = head_options(config.head).difference(_SETTINGS)
    for key in options:
        if key not in known:
            raise StudyError(f"head_options: the head {config.head!r} has no option {key}")
    return config


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise StudyError(f"{key}: expected a table, got {quoted(table)}")
    return table


def _only(values: Iterable[str], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            listed = f"{', '.join(known)}{meant(key, known)}"
            raise StudyError(f"unknown key {quoted(key)}, expected one of {listed}")


def _only_settings(values: Iterable[str]) -> None:
    for key in values:
        if key in _ELSEWHERE:
            raise StudyError(f"{key}: cannot be set in a study: {_ELSEWHERE[key]}")
    _only(values, _SETTINGS)
