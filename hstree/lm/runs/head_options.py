"""The settings of a run that its head reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .settings import ConfigError, flag_name, parse_options

if TYPE_CHECKING:
    from .config import TrainConfig

TREES = ("trees",)
READ_BY = {
    **dict.fromkeys(("n_trees", "root", "leaf", "levels", "gate", "recipe", "subset_size"), TREES),
    "sparse": ("trees", "sampled"),
    "relearn_trees": TREES,
}
"""The heads that read a setting of the output layer, where not all heads do."""
_NO_OPTION = ("relearn_trees",)
"""Those that change the head during training, and are no arguments of it."""
MEASURE = ("ignore_index", "reduction")
"""Options of a head that would change what a perplexity is."""


def head_options(config: TrainConfig) -> dict[str, Any]:
    """See :meth:`TrainConfig.head_options`."""
    options: dict[str, Any] = {"learning_rate_factor": config.head_learning_rate_factor}
    read = [name for name, heads in READ_BY.items() if config.head in heads]
    read = [name for name in read if name not in _NO_OPTION]
    options |= {name: getattr(config, name) for name in read}
    more = parse_options(config.head_option)
    for name in MEASURE:
        if name in more:
            raise ConfigError(
                f"--head-option: expected no {name!r}, as a perplexity is over all words of a "
                f"text, got {name}={more[name]}"
            )
    return options | more


def unread(head: str) -> set[str]:
    """The settings that have no effect on a head."""
    return {name for name, heads in READ_BY.items() if head not in heads}


def check_read(config: TrainConfig, names: Iterable[str]) -> None:
    """Raises ConfigError if one of these settings has no effect on the head."""
    for name in names:
        empty = name == "relearn_trees" and not config.relearn_trees
        if name in unread(config.head) and not empty:
            raise ConfigError(
                f"--{flag_name(name)}: expected the head "
                f"{' or '.join(map(repr, READ_BY[name]))}, which reads it, got --head {config.head}"
            )
