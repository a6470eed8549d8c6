"""Settings: fields of a dataclass with a help text, limits, a flag and a check."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from hstree.lm._messages import meant, quoted, shortened


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range."""


@dataclass(frozen=True)
class Limit:
    text: str
    holds: Callable[[float], bool]


def at_least(minimum: int) -> Limit:
    return Limit(f"at least {minimum}", lambda value: value >= minimum)


def at_most(maximum: int) -> Limit:
    return Limit(f"at most {maximum}", lambda value: value <= maximum)


POSITIVE = Limit("a positive number", lambda value: value > 0)
PROBABILITY = Limit("a probability in [0, 1)", lambda value: 0.0 <= value < 1.0)


def setting(
    group: str,
    default: Any,
    help: str,
    *limits: Limit,
    choices: tuple[Any, ...] = (),
    metavar: str = "",
    heads: tuple[str, ...] = (),
    noise: bool = False,
    resumable: bool = False,
    inherited: bool = True,
    grouped: bool = True,
) -> Any:
    """A dataclass field whose metadata holds the other arguments.

    Args:
        group: heading under which ``--help`` lists it.
        default: value of the setting.
        help: help text; ``{heads}`` stands for the names of the registered heads.
        *limits: conditions on its value, or on each of its values.
        choices: the values that are allowed.
        metavar: its value in help texts.
        heads: the heads that read it, where not all do.
        noise: whether it acts on the backbone in training only.
        resumable: whether it can change when a run is resumed.
        inherited: whether fine-tuning takes it from the run it starts from.
        grouped: whether runs of the same model agree in it.
    """
    metadata = {key: value for key, value in locals().items() if key != "default"}
    return dataclasses.field(default=default, metadata=metadata)


def names_where(config: type, **wanted: Any) -> tuple[str, ...]:
    return tuple(
        field.name
        for field in dataclasses.fields(config)
        if wanted.items() <= {name: field.metadata[name] for name in wanted}.items()
    )


def flag_name(name: str) -> str:
    """``learning_rate`` as on the command line: ``learning-rate``."""
    return name.replace("_", "-")


class FieldType(NamedTuple):
    """Type of a field: int, float, str, bool or tuple; for a tuple also the type of its items.
    ``optional``: whether None is allowed."""

    kind: type
    optional: bool
    item: type | None


@cache
def field_types(config: type) -> dict[str, FieldType]:
    result = {}
    for name, hint in typing.get_type_hints(config).items():
        optional = isinstance(hint, types.UnionType)
        kinds = typing.get_args(hint) if optional else (hint,)
        kind = next(part for part in kinds if part is not type(None))
        outer = typing.get_origin(kind) or kind
        item = typing.get_args(kind)[0] if outer is tuple else None
        result[name] = FieldType(outer, optional, item)
    return result


def checked(config: type, field: dataclasses.Field[Any], value: Any, name: str = "") -> Any:
    """The value of a field, a whole number as a float where the field is one, a list as a tuple.
    Raises ConfigError, whose message begins with ``name``, by default the flag, for a value of
    another type, not finite, or outside the choices or limits."""
    kind, optional, item = field_types(config)[field.name]
    if value is None and optional:
        return None
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    flag = name or f"--{flag_name(field.name)}"
    if type(value) is not kind:
        raise ConfigError(f"{flag}: expected {kind.__name__}, got {quoted(value)}")
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    if item is not None and any(type(part) is not item for part in parts):
        raise ConfigError(f"{flag}: expected a tuple of {item.__name__}, got {quoted(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{flag}: expected a finite number, got {value}")
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(
            f"{flag}: expected one of {', '.join(map(str, choices))}, got {quoted(value)}"
        )
    for part in parts:
        if isinstance(part, str):
            _check_text(part, flag)
        for limit in field.metadata["limits"]:
            if not limit.holds(part):
                raise ConfigError(f"{flag}: expected {limit.text}, got {part}")
    return value


def _check_text(text: str, flag: str) -> None:
    """Raises ConfigError for a text that cannot be the name of a file. One that the command line
    gives in another encoding can."""
    if "\0" in text:
        raise ConfigError(f"{flag}: expected text without NUL, got {quoted(text)}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ConfigError(f"{flag}: expected text in UTF-8, got {quoted(text)}") from None


def parse_settings(config: type, text: str | bytes, where: str = "") -> dict[str, Any]:
    """The settings of a JSON object by name. Raises ConfigError, whose message begins with
    ``where``, if it is none, or has a setting that ``config`` does not have or does not allow."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}expected settings as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}expected settings as a JSON object, got {type(values).__name__}")
    known = {field.name: field for field in dataclasses.fields(config)}
    unknown = sorted(values.keys() - known)
    if unknown:
        listed = shortened(", ".join(unknown))
        raise ConfigError(f"{where}unknown settings: {listed}{meant(unknown[0], known)}")
    return {
        name: checked(config, known[name], value, f"{where}{name}" if where else "")
        for name, value in values.items()
    }


def parse_options(texts: Iterable[str], name: str = "--head-option") -> dict[str, Any]:
    """Options from ``KEY=VALUE`` texts, each value read as JSON or, if that fails, as plain
    text. The last of several equal keys counts.

    Raises:
        ConfigError: not ``KEY=VALUE``; the message begins with ``name``.

    Example:
        >>> from hstree.lm.runs.settings import parse_options
        >>> parse_options(["components=15", "activation=relu"])
        {'components': 15, 'activation': 'relu'}
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{name}: expected KEY=VALUE, got {quoted(text)}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
