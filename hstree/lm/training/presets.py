"""Published settings of AWD-LSTM language models on Penn Treebank and WikiText-2, by name.

A name is a corpus and a head: ``ptb-softmax``, ``wt2-mos``. Every value has a source; see
:func:`preset_sources`.

- Softmax, SigSoftmax, GSS and PLIF have the backbone and the rules of training of Merity et al.,
  Regularizing and optimizing LSTM language models (2018); MoS and MoC those of Yang et al.,
  Breaking the softmax bottleneck (2018). Averaging begins after epoch 200, as in the comparison of
  output layers that these presets reproduce; the two papers use ``averaging="nt"``.
- MoS with PLIF has the settings of MoS, and slopes as those of PLIF.
- Mixtape has the settings of MoS, which its paper follows on Penn Treebank; it has no WikiText-2.
  Its code is not public: the number of classes with gates of their own and the size of the gates
  are the defaults of :class:`hstree.Mixtape`, and latent vectors have no dropout.
- DOC has the settings of Takase et al., Direct output connection (2018), and of its code.
- The presets of the head ``trees`` are not published. They use the backbone and the learning rate
  of the softmax: the factor of 8 that suits AdamW makes SGD at 20 diverge. The four trees share
  their output embedding at the leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hstree.lm.runs import ConfigError, TrainConfig, parse_options

from .published import PUBLISHED, SOURCES, Values

__all__ = ["PRESETS", "SOURCES", "preset", "preset_sources"]

_TEXTS = {
    "ptb": "the folder of Penn Treebank",
    "wt2": "the folder of WikiText-2, or hf:Salesforce/wikitext:wikitext-2-v1,",
}
_SETTINGS = frozenset(field.name for field in fields(TrainConfig))


def _settings(name: str, values: Values) -> dict[str, Any]:
    options = tuple(
        f"{option}={value if isinstance(value, str) else json.dumps(value)}"
        for option, (value, _) in values.items()
        if option not in _SETTINGS
    )
    settings = {setting: value for setting, (value, _) in values.items() if setting in _SETTINGS}
    return {"head": name.partition("-")[2], "head_option": options, **settings}


PRESETS: dict[str, dict[str, Any]] = {
    name: _settings(name, values) for name, values in PUBLISHED.items()
}
"""The settings of each preset that can differ from the defaults."""


def preset(name: str, **changes: Any) -> TrainConfig:
    """The settings of a preset, with changes.

    Args:
        name: a key of :data:`PRESETS`.
        **changes: fields of :class:`TrainConfig` that replace those of the preset. A
            ``head_option`` replaces only the option of the same name; with another ``head`` the
            options of the preset are dropped.

    Raises:
        ConfigError: an unknown name, or a value that is not valid.

    Example:
        >>> from hstree.lm.training.presets import preset
        >>> preset("ptb-mos", data="ptb/", head_option=("components=5",)).learning_rate
        20.0
    """
    return TrainConfig(**merged(PRESETS[_known(name)], changes))


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes, as those of :func:`preset`."""
    head = settings.get("head", TrainConfig.head)
    if changes.get("head", head) != head:
        return {k: v for k, v in settings.items() if k != "head_option"} | dict(changes)
    given = tuple(changes.get("head_option", ()))
    replaced = parse_options(given).keys()
    kept = [
        option
        for option in settings.get("head_option", ())
        if not parse_options([option]).keys() & replaced
    ]
    options = {"head_option": (*kept, *given)} if kept else {}
    return {**settings, **changes, **options}


def check_text(name: str | None, config: TrainConfig) -> None:
    """Raises ConfigError for the settings of a preset without a text: on the docstrings of Python
    they would train for weeks. None: no preset."""
    if name is not None and config.data is None:
        text = _TEXTS[name.partition("-")[0]]
        raise ConfigError(f"--preset: expected {text} as --data for {name}, got no --data")


def preset_sources(name: str) -> dict[str, str]:
    """Where the values of a preset are from.

    Args:
        name: a key of :data:`PRESETS`.

    Returns:
        For each setting, and each option of the head by its own name, a key of :data:`SOURCES`.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> from hstree.lm.training import SOURCES, preset_sources
        >>> preset_sources("ptb-mos")["components"]
        'MoS README'
        >>> SOURCES["hstree"]
        'not published'
    """
    return {setting: source for setting, (_, source) in PUBLISHED[_known(name)].items()}


def _known(name: str) -> str:
    if name not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return name
