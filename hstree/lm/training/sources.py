"""Where the value of each setting of a run comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from hstree.lm.runs import TrainConfig, parse_options, read_settings

from .finetune import NOT_INHERITED
from .presets import PRESETS, preset_sources


class SettingSource(NamedTuple):
    """A setting (``head_option NAME`` for an option of the head), its value and where the value
    comes from: ``given``, ``default``, ``preset``, the file of settings, the run to fine-tune, or a
    key of :data:`SOURCES`."""

    name: str
    value: Any
    source: str


def setting_sources(
    config: TrainConfig,
    given: Mapping[str, Any],
    preset: str | None = None,
    file: str | None = None,
) -> list[SettingSource]:
    """All settings of a run with their sources: those that were given, by name, and the others from
    a preset or a file of settings.

    Example:
        >>> from hstree.lm.training import preset, setting_sources
        >>> given = {"batch_size": 6}
        >>> rows = setting_sources(preset("ptb-mos", **given), given, "ptb-mos")
        >>> {row.name: row.source for row in rows if row.name in ("batch_size", "epochs", "clip")}
        {'epochs': 'MoS README', 'batch_size': 'given', 'clip': 'AWD-LSTM code'}
    """
    known = _known(config, preset, file)
    rows = []
    given_options = parse_options(given.get("head_option", ()))
    for field in fields(TrainConfig):
        name, value = field.name, getattr(config, field.name)
        if name == "head_option" and value:
            for option, its_value in parse_options(value).items():
                source = "given" if option in given_options else known.get(option, "default")
                rows.append(SettingSource(f"{name} {option}", its_value, source))
        else:
            source = "given" if name in given else known.get(name, "default")
            rows.append(SettingSource(name, value, source))
    return rows


def _known(config: TrainConfig, preset: str | None, file: str | None) -> dict[str, str]:
    """The sources of settings, and of options of the head, that are neither given nor defaults."""
    options = parse_options(config.head_option)
    known: dict[str, str] = {}
    if config.finetune is not None:
        inherited = [f.name for f in fields(TrainConfig) if f.name not in NOT_INHERITED]
        known = dict.fromkeys((*inherited, *options), f"run {config.finetune}")
        if config.finetune_learning_rate is not None:
            known["learning_rate"] = "finetune_learning_rate"
    settings: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}
    if preset is not None:
        settings, sources = PRESETS[preset], preset_sources(preset) | {"head": "preset"}
    elif file is not None:
        settings = read_settings(file)
        names = (*settings, *parse_options(settings.get("head_option", ())))
        sources = dict.fromkeys(names, f"file {file}")
    return known | {
        name: source
        for name, source in sources.items()
        if name in options or (name in settings and getattr(config, name) == settings[name])
    }
