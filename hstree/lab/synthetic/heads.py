"""The heads of the synthetic bottleneck experiment, in sizes for a hundred outcomes: fast, and with
far fewer parameters than probabilities to fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.heads import Head, build_head, head_class, head_names
from hstree.lm.runs import ConfigError, parse_options

_OPTIONS: dict[str, dict[str, Any]] = {
    "plif": {"intervals": 1000},
    "plif-frozen": {"intervals": 1000},
    "monotonic": {"units": 64, "intervals": 1024},
    "mos": {"components": 4},
    "mos-plif": {"components": 4, "function_options": {"intervals": 1000}},
    "moc": {"components": 4},
    "adaptive": {"div_value": 1},
    "trees": {"n_trees": 4, "recipe": "random", "root": 1, "leaf": 1, "gate": "context"},
}
_SHAPES: dict[str, dict[str, Any]] = {"trees-single": {"n_trees": 1}, "trees-wide": {"root": 10}}
DEFAULT_HEADS = (
    *("softmax", "sigsoftmax", "gss", "gss:k=0.1,c=0", "plif", "monotonic", "mos", "mixtape"),
    *("trees-single", "trees"),
)


@dataclass(frozen=True)
class HeadChoice:
    """A head in this experiment: its name in tables, its name in :mod:`hstree.heads.registry`, and
    its options for :func:`hstree.heads.build_head`."""

    label: str
    name: str
    options: Mapping[str, Any]

    def build(self, dimension: int, targets: npt.NDArray[np.float64], seed: int) -> Head:
        """Build the head for targets [N, M], initialized as for a corpus with their mean as
        frequencies. Parameters are drawn from torch's generator, trees from ``seed``. Raises
        ValueError if the head does not accept these options at this size."""
        frequencies = np.rint(1e6 * targets.sum(0)).astype(np.int64)
        options = {**self.options, "learning_rate_factor": 1.0}
        try:
            return build_head(
                self.name,
                dimension,
                targets.shape[1],
                frequencies=frequencies,
                seed=seed,
                **options,
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"heads: {self.label}, D = {dimension}: {error}") from None


def known_heads() -> list[str]:
    """The names that :func:`choose_head` accepts: all heads that read one vector, and several
    shapes of trees."""
    return sorted({name for name in head_names() if not head_class(name).reads_layers} | {*_SHAPES})


def choose_head(text: str) -> HeadChoice:
    """Parse a head from ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, with values as JSON or plain
    text.

    ``NAME`` is one of :func:`known_heads`. Options are added to its options in this experiment, or
    replace them.

    Raises:
        ValueError: the name is unknown, the head reads several layers, or an option is not
            KEY=VALUE.

    Example:
        >>> from hstree.lab import choose_head
        >>> choose_head("mos:components=15").options
        {'components': 15}
    """
    label, _, rest = text.partition(":")
    if label not in known_heads():
        if label in head_names():
            raise ValueError(
                f"heads: expected heads that read one vector, got {label!r}, which reads several "
                f"layers"
            )
        raise ValueError(f"heads: expected one of {', '.join(known_heads())}, got {label!r}")
    name = "trees" if label in _SHAPES else label
    options = _OPTIONS.get(name, {}) | _SHAPES.get(label, {})
    if rest:
        try:
            options |= parse_options(re.split(r",(?=\w+=)", rest))
        except ConfigError:
            raise ValueError(f"heads: expected NAME:KEY=VALUE,KEY=VALUE, got {text!r}") from None
    return HeadChoice(text, name, options)
