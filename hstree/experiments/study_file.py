"""The TOML file of a study: which models, which settings, which seeds.

    name = "gss"                      # without it: the name of the file
    seeds = [1, 2, 3]                 # or one number; without it: 1
    baseline = "softmax"              # the model against which the others are tested
    rank = true                       # or {rows = 4000, split = "test"}

    [settings]                        # of hstree train, for all models
    data = "ptb"
    epochs = 3

    [[models]]
    head = "softmax"                  # or preset = "ptb-softmax"

    [[models]]
    name = "shape"                    # without it: the head or the preset
    head = "gss"
    learning_rate = 0.004             # any setting, in place of the one above
    head_options = { c = [-1.5, 0.0], k = [1.5, 2.0, 2.5] }

A list is a grid: one configuration for each element, and with several lists for each combination.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hstree.heads import head_class
from hstree.training import ConfigError, TrainConfig, preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SETTINGS = tuple(field.name for field in dataclasses.fields(TrainConfig))
SPLITS = ("train", "valid", "test")
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
        name: of the model in the file.
        label: the name, and behind it the values of the grid.
        config: its settings; seed and run folder are not of the study.
    """

    name: str
    label: str
    config: TrainConfig

    def options(self) -> dict[str, Any]:
        """The options of its head that are no settings of their own."""
        options = self.config.head_options()
        names = (text.partition("=")[0] for text in self.config.head_option)
        return {name: options[name] for name in names}


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
    """The study of a TOML file; see this module's text.

    Raises:
        StudyError: the file is missing, is not TOML, or a key or value in it is not usable; the
            message names the file, the model and the key.
    """
    file = Path(path)
    try:
        source = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise StudyError(f"{file}: expected UTF-8 text") from None
    except OSError as error:
        raise StudyError(f"{file}: {error.strerror}") from None
    try:
        return parse_study(source, file.stem)
    except StudyError as error:
        raise StudyError(f"{file}: {error}") from None


def parse_study(source: str, name: str = "study") -> Study:
    """The study of a TOML text.

    Args:
        source: the text.
        name: of the study, if the text holds none.

    Raises:
        StudyError: as :func:`read_study`.
    """
    try:
        values = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"not TOML: {error}") from None
    _only(values, ("name", "seeds", "baseline", "rank", "settings", "models"), "")
    name = _name(values.get("name", name), "name")
    seeds = _seeds(values.get("seeds", [1]))
    settings = _table(values.get("settings", {}), "settings")
    _check_settings(settings, "[settings]")
    models = tuple(_models(values.get("models", []), settings))
    folders = [run_name(model, 0).casefold() for model in models]
    for model, folder in zip(models, folders, strict=True):
        if folders.count(folder) > 1:
            raise StudyError(f"models: expected a name of its own for each, got {model.label!r}")
    baseline = values.get("baseline")
    labels = [model.label for model in models]
    if baseline is not None and baseline not in labels:
        raise StudyError(
            f"baseline: expected one of the models {', '.join(map(repr, labels))}, got {baseline!r}"
        )
    return Study(name, models, seeds, baseline, _rank(values.get("rank", False)), source)


def run_name(model: StudyModel, seed: int) -> str:
    """Name of the folder of a run: ``gss-c=-1.5-k=2.5-seed=1``."""
    return re.sub(r"[^\w.=+-]+", "-", f"{model.label}-seed={seed}")


# Parts of the file


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str) or value != Path(value).name or not _usable(value):
        raise StudyError(f"{key}: expected a name that a folder can have, got {value!r}")
    return value


def _usable(name: str) -> bool:
    return name.isprintable() and name.strip(" .") != ""


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else [value]
    if not seeds or any(type(seed) is not int for seed in seeds) or len({*seeds}) < len(seeds):
        raise StudyError(f"seeds: expected different whole numbers, got {value!r}")
    for seed in seeds:
        try:
            TrainConfig(seed=seed)
        except ConfigError as error:
            raise StudyError(by_key(error).replace("seed:", "seeds:", 1)) from None
    return tuple(seeds)


def _rank(value: Any) -> RankSettings | None:
    if isinstance(value, bool):
        return RankSettings() if value else None
    if not isinstance(value, dict):
        raise StudyError(f"rank: expected true, false or a table of rows and split, got {value!r}")
    _only(value, ("rows", "split"), "rank: ")
    rank = RankSettings(**value)
    if rank.rows is not None and (type(rank.rows) is not int or rank.rows < 1):
        raise StudyError(f"rank.rows: expected a number of contexts, got {rank.rows!r}")
    if rank.split not in SPLITS:
        raise StudyError(f"rank.split: expected one of {', '.join(SPLITS)}, got {rank.split!r}")
    return rank


def _models(value: Any, settings: Mapping[str, Any]) -> Iterator[StudyModel]:
    if not isinstance(value, list) or not value:
        raise StudyError(f"models: expected at least one table [[models]], got {value!r}")
    for number, item in enumerate(value, start=1):
        values = _table(item, f"[[models]] number {number}")
        kind = [key for key in ("head", "preset") if key in values]
        if len(kind) != 1 or not isinstance(values[kind[0]], str):
            raise StudyError(
                f"[[models]] number {number}: expected the name of a head or of a preset, "
                f"got {', '.join(kind) or 'neither'}"
            )
        name = _name(values.get("name", values[kind[0]]), f"[[models]] number {number}: name")
        where = f"model {name!r}"
        options = _table(values.get("head_options", {}), f"{where}: head_options")
        own = {k: v for k, v in values.items() if k not in ("name", "preset", "head_options")}
        _check_settings(own, where)
        for chosen in _grid({**settings, **own}, options, where):
            yield _model(name, values.get("preset"), *chosen, where)


def _model(
    name: str,
    preset_name: str | None,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    grid: Mapping[str, Any],
    where: str,
) -> StudyModel:
    given = tuple(
        f"{key}={_json(value, f'{where}: head_options: {key}')}" for key, value in options.items()
    )
    try:
        if preset_name is None:
            config = TrainConfig(**settings, head_option=given)
        else:
            config = preset(preset_name, **settings, head_option=given)
        known = _option_names(config.head)
    except ValueError as error:
        raise StudyError(f"{where}: {by_key(error)}") from None
    for key in options:
        if key not in known:
            raise StudyError(f"{where}: head_options: the head {config.head!r} has no option {key}")
    label = ", ".join([name, *(f"{key}={_short(value)}" for key, value in grid.items())])
    return StudyModel(name, label, config)


def _grid(
    settings: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Settings and options without lists, and what was chosen from lists, for each combination."""
    lists = [
        (target, key, value)
        for target, values in enumerate((settings, options))
        for key, value in values.items()
        if isinstance(value, list)
    ]
    for _, key, value in lists:
        if not value:
            raise StudyError(f"{where}: {key}: expected at least one value, got []")
    for chosen in itertools.product(*(value for _, _, value in lists)):
        parts = (dict(settings), dict(options))
        for (target, key, _), value in zip(lists, chosen, strict=True):
            parts[target][key] = value
        names = [key for _, key, _ in lists]
        yield *parts, dict(zip(names, chosen, strict=True))


def _check_settings(values: Mapping[str, Any], where: str) -> None:
    for key in values:
        if key in _ELSEWHERE:
            raise StudyError(f"{where}: {key} is no setting of a study: {_ELSEWHERE[key]}")
    _only(values, _SETTINGS, f"{where}: ")


def _option_names(head: str) -> set[str]:
    """Every argument that a head may take by name, those of its base classes included."""
    functions = [
        vars(part)[name]
        for part in head_class(head).__mro__
        for name in ("__init__", "from_corpus")
        if name in vars(part)
    ]
    parameters = [
        inspect.signature(getattr(function, "__func__", function)).parameters.values()
        for function in functions
    ]
    names = {p.name for part in parameters for p in part if p.kind is p.KEYWORD_ONLY}
    return names.difference(_SETTINGS)


def by_key(error: Exception) -> str:
    """The message of an error with the keys of the file in place of flags."""

    def key(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if name not in (*_SETTINGS, "preset"):
            return match[0]
        return "head_options" if name == "head_option" else name

    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", key, str(error))


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # dates and times
        raise StudyError(f"{where}: expected a number, text, table or list, got {value}") from None


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StudyError(f"{where}: expected a table, got {value!r}")
    return value


def _only(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise StudyError(f"{where}unknown key {key!r}; known are {', '.join(known)}")
