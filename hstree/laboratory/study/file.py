"""The file of a study: which models, which settings, which seeds."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hstree.heads import head_class
from hstree.runs import ConfigError, TrainConfig, parse_options
from hstree.training import preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    "run": "the folders have the names of the models",
    "seed": "name the seeds under seeds, for all models",
    "finetune": "a study trains its models from the start",
    "head_option": "name the options of a head under its head_options",
}


class StudyError(ValueError):
    """A study's file, or a folder of its runs, that is not usable."""


@dataclass(frozen=True)
class RankSettings:
    """Of which matrix of log-probabilities the ranks are taken: the first ``rows`` contexts (None:
    all) of a part of the text."""

    rows: int | None = None
    split: str = "test"


@dataclass(frozen=True)
class StudyModel:
    """One configuration, trained once with each seed.

    Attributes:
        label: the name of the model in the file, and behind it the values of the grid.
        config: its settings; seed and run folder are not of the study.
    """

    label: str
    config: TrainConfig

    @property
    def options(self) -> dict[str, Any]:
        """The options of its head that are no settings of their own."""
        return parse_options(self.config.head_option)


@dataclass(frozen=True)
class Study:
    """What a file asks for.

    Attributes:
        name: of the study.
        models: every configuration, in the order of the file.
        seeds: with which each is trained.
        baseline: label of the model against which the others are tested, or None.
        rank: of which log-probabilities the ranks are taken; None: no ranks.
        source: the text of the file.
    """

    name: str
    models: tuple[StudyModel, ...]
    seeds: tuple[int, ...]
    baseline: str | None
    rank: RankSettings | None
    source: str


def read_study(path: str | os.PathLike[str]) -> Study:
    """The study of a TOML file as ``EXAMPLE`` shows it.

    Beside the keys there, ``name`` names the study (without it: the file's name). ``seeds`` may be
    one number, and is 1 if it is missing. A model has the name of its head or preset if it has none
    of its own. A list is a grid: one configuration for each element, with several lists for each
    combination.

    Raises:
        StudyError: the file is missing, is not TOML, or a key or value in it is not usable; the
            message names the file, the model and the key.
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
    """The study of a TOML text, called ``name`` if the text does not say; as :func:`read_study`."""
    try:
        values = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"not TOML: {error}") from None
    _only(values, ("name", "seeds", "baseline", "rank", "settings", "models"))
    settings = _table(values, "settings")
    with _within("[settings]"):
        _only_settings(settings)
    tables = values.get("models")
    if not isinstance(tables, list) or not tables:
        raise StudyError(f"models: expected at least one table [[models]], got {tables!r}")
    models: list[StudyModel] = []
    for number, table in enumerate(tables, start=1):
        with _within(f"[[models]] number {number}"):
            model_name = _model_name(table)
        with _within(f"model {model_name!r}"):
            models += _models(model_name, table, settings)
    folders = [run_name(model, 0).casefold() for model in models]
    for model, folder in zip(models, folders, strict=True):
        if folders.count(folder) > 1:
            raise StudyError(f"models: expected a name of its own for each, got {model.label!r}")
    baseline, labels = values.get("baseline"), [model.label for model in models]
    if baseline is not None and baseline not in labels:
        known = ", ".join(map(repr, labels))
        raise StudyError(f"baseline: expected one of the models {known}, got {baseline!r}")
    return Study(
        _name(values, name),
        tuple(models),
        _seeds(values.get("seeds", 1)),
        baseline,
        _rank(values.get("rank", False)),
        source,
    )


def run_name(model: StudyModel, seed: int) -> str:
    """Name of the folder of a run: ``gss-c=-1.5-k=2.5-seed=1``."""
    return re.sub(r"[^\w.=+-]+", "-", f"{model.label}-seed={seed}")


def by_key(error: Exception) -> str:
    """The message of an error with the keys of the file in place of flags."""

    def key(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if name not in (*_SETTINGS, "preset"):
            return match[0]
        return "head_options" if name == "head_option" else name

    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", key, str(error))


# Parts of the file


@contextmanager
def _within(place: object) -> Iterator[None]:
    """Errors begin with the place, and those of settings have keys of the file instead of flags."""
    try:
        yield
    except ValueError as error:
        text = error if isinstance(error, StudyError) else by_key(error)
        raise StudyError(f"{place}: {text}") from None


def _name(values: Mapping[str, Any], default: str) -> str:
    name = values.get("name", default)
    usable = isinstance(name, str) and name.isprintable() and name.strip(" .") != ""
    if not usable or name != Path(name).name:
        raise StudyError(f"name: expected a name that a folder can have, got {name!r}")
    return str(name)


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else [value]
    if not seeds or any(type(seed) is not int for seed in seeds) or len({*seeds}) < len(seeds):
        raise StudyError(f"seeds: expected different whole numbers, got {value!r}")
    try:
        return tuple(TrainConfig(seed=seed).seed for seed in seeds)
    except ConfigError as error:
        raise StudyError(by_key(error).replace("seed:", "seeds:", 1)) from None


def _rank(value: Any) -> RankSettings | None:
    if isinstance(value, bool):
        return RankSettings() if value else None
    if not isinstance(value, dict):
        raise StudyError(f"rank: expected true, false or a table of rows and split, got {value!r}")
    with _within("rank"):
        _only(value, ("rows", "split"))
    rank = RankSettings(**value)
    if rank.rows is not None and (type(rank.rows) is not int or rank.rows < 1):
        raise StudyError(f"rank.rows: expected a number of contexts, got {rank.rows!r}")
    if rank.split not in _SPLITS:
        raise StudyError(f"rank.split: expected one of {', '.join(_SPLITS)}, got {rank.split!r}")
    return rank


def _model_name(values: Any) -> str:
    if not isinstance(values, dict):
        raise StudyError(f"expected a table, got {values!r}")
    kinds = [key for key in ("head", "preset") if key in values]
    if len(kinds) != 1 or not isinstance(values[kinds[0]], str):
        raise StudyError(
            f"expected the name of a head or of a preset, got {', '.join(kinds) or 'neither'}"
        )
    return _name(values, values[kinds[0]])


def _models(
    name: str, values: Mapping[str, Any], common: Mapping[str, Any]
) -> Iterator[StudyModel]:
    """One for each combination of elements of the lists among settings and head options."""
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
    """The values with an element in place of every list, for each combination."""
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
    known = _option_names(config.head)
    for key in options:
        if key not in known:
            raise StudyError(f"head_options: the head {config.head!r} has no option {key}")
    return config


def _option_names(head: str) -> set[str]:
    """Every argument that a head may take by name, those of its base classes included."""
    return {
        parameter.name
        for part in head_class(head).__mro__
        for method in ("__init__", "from_corpus")
        if method in vars(part)
        for parameter in inspect.signature(getattr(part, method)).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }.difference(_SETTINGS)


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise StudyError(f"{key}: expected a table, got {table!r}")
    return table


def _only(values: Iterable[str], known: Iterable[str]) -> None:
    for key in values:
        if key not in known:
            raise StudyError(f"unknown key {key!r}; known are {', '.join(known)}")


def _only_settings(values: Iterable[str]) -> None:
    for key in values:
        if key in _ELSEWHERE:
            raise StudyError(f"{key} is no setting of a study: {_ELSEWHERE[key]}")
    _only(values, _SETTINGS)
