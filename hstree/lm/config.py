"""Settings of a training run: limits, flags, files, presets."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hstree.heads import head_names
from hstree.lm.report import meant, quoted, shortened
from hstree.trees import recipe_names

__all__ = [
    "PRESETS",
    "RESUMABLE",
    "UNGROUPED",
    "ConfigError",
    "TrainConfig",
    "choose_device",
    "parse_options",
    "preset",
    "read_settings",
    "set_threads",
]

# Settings: fields of a dataclass with a help text, limits, a flag and a check.


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
        >>> from hstree.lm.config import parse_options
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


# Every setting of a training run: one frozen dataclass that defines flags, defaults, limits, help
# texts, and what else is known of each.

SHORTEST_WINDOW = 5
LARGEST_SIZE = 2**20

TREES = ("trees",)
FOREST = ("trees", "forest")

in_data, in_model, in_head, in_optimization, in_run = (
    partial(setting, group) for group in ("data", "model", "head", "optimization", "run")
)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of ``hstree train``.

    Each field is a flag of the same name (``learning_rate`` is ``--learning-rate``); all that is
    said about it is said here, see ``hstree.lm.config.setting``.

    Raises:
        ConfigError: a value out of range; the message names the flag, the expected and the given
            value.
    """

    data: str | None = in_data(
        None,
        "folder with train.txt, valid.txt and test.txt (words separated by spaces); one UTF-8 text "
        "file, or a pipe; a .jsonl, .csv, .parquet or compressed file, or a folder of such files; "
        "hf:NAME[:CONFIG], a dataset of the Hugging Face hub (default: the docstrings and help "
        "topics of this Python installation)",
        metavar="PATH",
        resumable=True,
    )
    column: str | None = in_data(
        None,
        "column of text of a dataset or table (default: text, or the only one)",
        resumable=True,
    )
    min_count: int | None = in_data(
        None,
        "words that occur fewer than N times become <unk> (default: 2 for one text file, else 1)",
        at_least(1),
    )
    max_vocabulary: int | None = in_data(
        None, "largest number of classes, <unk> and <eos> included", at_least(4)
    )
    tokenizer: str | None = in_data(
        None,
        "tokenizer.json of Hugging Face tokenizers, or bpe: byte-pair encoding with "
        "--max-vocabulary classes, learned from the training text (default: words)",
        metavar="FILE",
    )

    embedding_size: int = in_model(
        200, "size of the word embeddings", at_least(1), at_most(LARGEST_SIZE)
    )
    hidden_size: int = in_model(200, "size of the LSTM state", at_least(1), at_most(LARGEST_SIZE))
    layers: int = in_model(1, "number of LSTM layers", at_least(1), at_most(1024))
    context_size: int | None = in_model(
        None,
        "size of the last LSTM layer, the input of the head (default: --hidden-size)",
        at_least(1),
        at_most(LARGEST_SIZE),
    )
    dropout: float = in_model(
        0.5,
        "dropout on the output of the last layer, with one mask for all time steps",
        PROBABILITY,
        noise=True,
    )
    dropout_input: float = in_model(
        0.5,
        "dropout on the word embeddings, with one mask for all time steps",
        PROBABILITY,
        noise=True,
    )
    dropout_hidden: float = in_model(
        0.5,
        "dropout between LSTM layers, with one mask for all time steps",
        PROBABILITY,
        noise=True,
    )
    dropout_embedding: float = in_model(
        0.0, "dropout of whole words (rows of the embedding matrix)", PROBABILITY, noise=True
    )
    weight_dropout: float = in_model(
        0.0, "DropConnect on the hidden-to-hidden weights of every layer", PROBABILITY, noise=True
    )
    embedding_noise: float = in_model(
        0.0,
        "standard deviation of the normal noise that is added to the word embeddings in training, "
        "before --dropout-input",
        at_least(0),
        noise=True,
    )
    sparse_embedding: bool = in_model(
        False, "row-sparse gradients of the word embeddings; only words read are updated"
    )

    head: str = in_head("trees", "output layer, one of {heads}")
    tied: bool = in_head(
        False,
        "tie the output layer to the word embeddings; a softmax then needs --context-size equal "
        "to --embedding-size",
    )
    n_trees: int = in_head(
        4, "trees, forest: number of trees, T", at_least(1), at_most(1024), heads=FOREST
    )
    root: int | None = in_head(
        None,
        "trees: number of children of the root, C (1: a binary root; default: 256, more from "
        "65,537 classes)",
        at_least(1),
        heads=TREES,
    )
    leaf: int | None = in_head(
        None,
        "trees: largest number of classes in a leaf softmax, G; without --levels below binary "
        "nodes (1: binary down to the classes; default: 16 with three levels, or in training "
        "with --sparse from 12,001 classes)",
        at_least(1),
        heads=TREES,
    )
    levels: int | None = in_head(
        None,
        "trees: number of levels; 2: the root, then one softmax over the classes below each of its "
        "children, 3: one more between them, over groups of --leaf classes (default: 2, or "
        "any number of binary nodes with --leaf, or in training with --sparse from 12,001 classes)",
        choices=(2, 3),
        heads=TREES,
    )
    gate: str = in_head(
        "context",
        "trees, forest: mixture weights",
        choices=("uniform", "constant", "context"),
        heads=FOREST,
    )
    recipe: str = in_head(
        "cluster",
        "trees: how trees are built",
        choices=tuple(sorted(recipe_names())),
        heads=TREES,
    )
    subset_size: int | None = in_head(
        None,
        "trees: number of features that each tree reads, S (default: all)",
        at_least(1),
        heads=TREES,
    )
    sparse: bool = in_head(
        False,
        "trees, sampled, forest with negatives: row-sparse gradients; only the visited rows are "
        "updated",
        heads=("trees", "sampled", "forest"),
    )
    all_classes: float = in_head(
        0.0,
        "sampled, forest with negatives: share of the steps, the last ones, that score all classes",
        at_least(0),
        at_most(1),
        metavar="SHARE",
        heads=("sampled", "forest"),
    )
    head_option: tuple[str, ...] = in_head(
        (),
        "any other option of the head, with its value as JSON or plain text; can be repeated",
        metavar="KEY=VALUE",
    )

    epochs: int = in_optimization(8, "passes over the training text", at_least(1), resumable=True)
    batch_size: int = in_optimization(
        20, "number of parallel token streams in each process", at_least(1)
    )
    accumulate: int = in_optimization(
        1,
        "split every batch into this many parts and accumulate their gradients, to save memory; "
        "only rounding and dropout masks differ",
        at_least(1),
    )
    bptt: int = in_optimization(35, "time steps of truncated backpropagation", at_least(1))
    variable_bptt: bool = in_optimization(
        False,
        "draw the length of every window from a normal distribution with standard deviation 5 "
        "and mean --bptt, or half of it with probability 0.05; at least 5. The learning rate is "
        "scaled by the length over --bptt",
    )
    bptt_margin: int | None = in_optimization(
        None,
        "largest number of time steps by which a window of --variable-bptt is longer than --bptt "
        "(default: no limit)",
        at_least(0),
    )
    optimizer: str = in_optimization("adamw", "optimizer", choices=("adamw", "sgd"))
    learning_rate: float = in_optimization(
        6e-3, "learning rate of the backbone", POSITIVE, resumable=True
    )
    head_learning_rate_factor: float = in_optimization(
        8.0, "learning rate of the head divided by that of the backbone", POSITIVE
    )
    weight_decay: float = in_optimization(
        0.03,
        "weight decay: decoupled with adamw, an L2 penalty with sgd; none for sparse parameters",
        at_least(0),
    )
    clip: float = in_optimization(
        1.0, "largest norm of the gradient; 0: no clipping", at_least(0), resumable=True
    )
    schedule: str = in_optimization(
        "cosine", "learning rate schedule", choices=("cosine", "linear", "constant")
    )
    warmup: int = in_optimization(
        50, "steps over which the learning rate rises from 0", at_least(0)
    )
    alpha: float = in_optimization(
        0.0,
        "weight of the activation regularization: mean square of the last layer's output, after "
        "dropout",
        at_least(0),
    )
    beta: float = in_optimization(
        0.0,
        "weight of the temporal activation regularization: mean square of the change of the last "
        "layer's output between time steps",
        at_least(0),
    )
    averaging: str = in_optimization(
        "none",
        "when to switch from SGD to averaged SGD, whose averaged weights are validated and saved: "
        "none (never), nt (when the validation loss is worse than the best of all earlier epochs, "
        "the last --nonmono excepted) or et (after epoch --averaging-epoch)",
        choices=("none", "nt", "et"),
    )
    nonmono: int = in_optimization(
        5, "number of recent epochs that --averaging nt and --finetune ignore", at_least(0)
    )
    averaging_epoch: int = in_optimization(
        200, "et: number of epochs before averaging; 0: average from the start", at_least(0)
    )
    finetune: str | None = in_optimization(
        None,
        "start a new run from the best weights of this run, with averaged SGD, and stop when the "
        "validation loss is worse than the best of all earlier epochs, the last --nonmono "
        "excepted. Other settings are those of that run unless they are given",
        metavar="RUN",
    )
    finetune_learning_rate: float | None = in_optimization(
        None,
        "learning rate of the backbone for --finetune, unless --learning-rate is given (default: "
        "the --learning-rate of the run)",
        POSITIVE,
    )

    run: str | None = in_run(
        None,
        "run folder to create; it must not exist (default: runs/<time>-<head>)",
        metavar="DIR",
        inherited=False,
        grouped=False,
    )
    seed: int = in_run(
        1,
        "seed of trees, initial weights, dropout and window lengths",
        at_least(0),
        at_most(2**62),
        grouped=False,
    )
    device: str = in_run(
        "auto",
        "device; auto: a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
        resumable=True,
        inherited=False,
        grouped=False,
    )
    threads: int | None = in_run(
        None,
        "number of CPU threads (default: chosen by torch)",
        at_least(1),
        at_most(1024),
        resumable=True,
        inherited=False,
        grouped=False,
    )
    validation_tokens: int | None = in_run(
        None,
        "number of validation tokens to score after each epoch, evenly spread over the text: less "
        "exact, and much faster with many classes (default: all)",
        at_least(1),
    )
    precision: str = in_run(
        "float32",
        "precision of the training steps; bfloat16: torch.autocast, with weights and validation in "
        "float32",
        choices=("float32", "bfloat16"),
    )
    compile: bool = in_run(
        False, "use torch.compile for the training step of the head", grouped=False
    )
    save_interval: float = in_run(
        600.0,
        "seconds between saves of the state for --resume within an epoch; 0: after every step",
        at_least(0),
        resumable=True,
        grouped=False,
    )
    tensorboard: bool = in_run(
        False, "write TensorBoard events to the run folder", resumable=True, grouped=False
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = checked(type(self), field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if self.variable_bptt and self.bptt < SHORTEST_WINDOW:
            raise ConfigError(
                f"--variable-bptt: expected a --bptt of at least {SHORTEST_WINDOW}, the shortest "
                f"window, got {self.bptt}"
            )
        for name, averages in (
            ("averaging", self.averaging != "none"),
            ("finetune", self.finetune is not None),
        ):
            if averages and self.optimizer != "sgd":
                raise ConfigError(
                    f"--{name}: averaged SGD needs --optimizer sgd, got {self.optimizer}"
                )
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"--accumulate: expected a divisor of --batch-size {self.batch_size}, "
                f"got {self.accumulate}"
            )
        if self.sparse_embedding and self.tied and not self.sparse:
            raise ConfigError("--sparse-embedding: expected --sparse with --tied, got --tied alone")
        if self.levels == 2 and self.leaf not in (None, 1):
            raise ConfigError(f"--leaf: expected 1 with --levels 2, got {self.leaf}")
        self.head_options()

    def head_options(self) -> dict[str, Any]:
        """Options for :func:`hstree.heads.build_head`: the settings of the group "head" that the
        head reads, and every ``head_option``.

        Raises:
            ConfigError: a ``head_option`` that has a flag of its own, or that would change what a
                perplexity is.
        """
        read = [name for name, heads in READ_BY.items() if self.head in heads]
        options = {name: getattr(self, name) for name in read if name not in READ_BY_TRAINER}
        more = parse_options(self.head_option)
        for name, value in more.items():
            if name in ("tied", *read):
                raise ConfigError(
                    f"--head-option: expected --{flag_name(name)} for {name!r}, got {name}={value}"
                )
            if name in ("ignore_index", "reduction"):
                raise ConfigError(
                    f"--head-option: expected no {name!r}, as a perplexity is over all words of a "
                    f"text, got {name}={value}"
                )
        return options | more

    def with_absolute_paths(self) -> TrainConfig:
        """The settings with absolute paths, as a run folder stores them."""
        return dataclasses.replace(
            self, data=_absolute(self.data), finetune=_absolute(self.finetune)
        )

    def to_json(self) -> str:
        """The settings as a JSON object, one line each."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> TrainConfig:
        """Settings from what :meth:`to_json` wrote; a setting that is missing takes its default.

        Raises:
            ConfigError: not a JSON object, a setting that does not exist, or a value that is not
                valid.
        """
        return cls(**parse_settings(cls, text))


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a file: what ``TrainConfig.to_json`` wrote, or a part of it.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: as ``TrainConfig.from_json``; the message names the file and the setting.
    """
    try:
        return parse_settings(TrainConfig, Path(path).read_bytes(), f"{path}: ")
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a file of settings, got a folder") from None


def _absolute(path: str | None) -> str | None:
    """An absolute path; a dataset of the hub and a pipe keep their names."""
    if path is None or path.startswith("hf:") or Path(path).is_fifo():
        return path
    return os.path.realpath(path)


RESUMABLE = names_where(TrainConfig, resumable=True)
"""The settings that can change when a run is resumed."""

UNGROUPED = names_where(TrainConfig, grouped=False)
"""The settings in which two runs of the same model may differ."""

TRAINING_NOISE = names_where(TrainConfig, noise=True)
"""The settings of the backbone that act in training only."""

NOT_INHERITED = names_where(TrainConfig, inherited=False)
"""Settings of one run, not of the model."""

READ_BY = {
    field.name: field.metadata["heads"]
    for field in dataclasses.fields(TrainConfig)
    if field.metadata["heads"]
}
"""The heads that read a setting of the output layer, where not all heads do."""

READ_BY_TRAINER = frozenset({"all_classes"})
"""Those of them that are no option of the head."""

HEAD_SETTINGS = frozenset(names_where(TrainConfig, group="head")) - {"tied"}
"""The settings in which a model with another head may differ."""


def unread(head: str) -> set[str]:
    return {name for name, heads in READ_BY.items() if head not in heads}


def check_read(config: TrainConfig, names: Iterable[str]) -> None:
    for name in names:
        empty = name in READ_BY_TRAINER and not getattr(config, name)
        if name in unread(config.head) and not empty:
            raise ConfigError(
                f"--{flag_name(name)}: expected the head "
                f"{' or '.join(map(repr, READ_BY[name]))}, which reads it, got --head {config.head}"
            )


# The device and the threads that the settings of a run name.


def choose_device(name: str) -> torch.device:
    """The device of a ``--device`` setting. Raises ConfigError for ``cuda`` where torch finds no
    GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected cpu or auto, since torch finds no GPU, got cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def set_threads(config: TrainConfig) -> None:
    """Set the number of CPU threads of torch, if the configuration has one."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


# Flags from the fields of TrainConfig, and the argument that names a run.


def add_config_arguments(
    parser: argparse.ArgumentParser, *, only: tuple[str, ...] | None = None
) -> None:
    """Add a flag for each field of :class:`TrainConfig`, or for those of ``only``; a flag that is
    not given sets no attribute."""
    groups: dict[str, Any] = {}
    types = field_types(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        if only is not None and field.name not in only:
            continue
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        kind, optional, item = types[field.name]
        help_text = field.metadata["help"].replace("{heads}", ", ".join(head_names()))
        help_text = help_text.replace("%", "%%")
        if not optional and kind is not tuple:
            default = ("yes" if field.default else "no") if kind is bool else field.default
            help_text += f" (default: {default})"
        options: dict[str, Any] = {
            "help": help_text,
            "default": argparse.SUPPRESS,
            "dest": field.name,
        }
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = item or kind
            if field.metadata["choices"]:
                options["choices"] = field.metadata["choices"]
            else:
                options["metavar"] = field.metadata["metavar"] or {int: "N", float: "X"}.get(
                    kind, "NAME"
                )
            if item is str:
                options["action"] = "append"
        groups[name].add_argument(f"--{flag_name(field.name)}", **options)


def config_values(arguments: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(TrainConfig):
        if hasattr(arguments, field.name):
            value = getattr(arguments, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


# Published settings of AWD-LSTM language models on Penn Treebank (ptb) and WikiText-2 (wt2). A name
# is a corpus and a head: ``ptb-softmax``, ``wt2-mos``. Sources of the values, by short names:
#
#   AWD  https://github.com/salesforce/awd-lstm-lm: defaults of main.py, commands of the README
#        (Merity, Keskar and Socher, Regularizing and optimizing LSTM language models, ICLR 2018)
#   MoS  https://github.com/zihangdai/mos, the same (Yang, Dai, Salakhutdinov and Cohen, Breaking
#        the softmax bottleneck, ICLR 2018)
#   P    Parthiban, Mao and Inkpen, On the softmax bottleneck of recurrent language models, AAAI
#        2021, its code, https://github.com/quettabit/awd-lstm-lmkit, and Table 6 of its supplement

_AWD_LSTM: dict[str, Any] = {  # AWD, main.py
    "layers": 3,
    "dropout": 0.4,
    "dropout_embedding": 0.1,
    "weight_dropout": 0.5,
    "bptt": 70,
    "variable_bptt": True,
    "optimizer": "sgd",
    "head_learning_rate_factor": 1.0,
    "weight_decay": 1.2e-6,
    "clip": 0.25,
    "schedule": "constant",
    "warmup": 0,
    "alpha": 2.0,
    "beta": 1.0,
    "averaging": "nt",
    "nonmono": 5,
}
_TIED: dict[str, Any] = {"tied": True, "bias_start": "zero"}  # AWD, main.py
# P compares output layers with averaging after epoch 200; AWD and MoS use averaging "nt".
_COMPARED: dict[str, Any] = {"averaging": "et", "averaging_epoch": 200}

_SIZES = (
    *("embedding_size", "hidden_size", "context_size", "dropout_input", "dropout_hidden"),
    *("learning_rate", "batch_size", "seed"),
)


def _sizes(*values: float, **others: Any) -> dict[str, Any]:
    return dict(zip(_SIZES, values, strict=True)) | others


_SOFTMAX_SIZES = {  # P, Table 6; epochs: AWD, README
    "ptb": _sizes(400, 1150, 400, 0.4, 0.3, 20.0, 20, 141, epochs=500),
    "wt2": _sizes(400, 1150, 400, 0.65, 0.2, 30.0, 80, 1881, epochs=750),
}
_MOS_SIZES = {  # MoS, README; bptt_margin of ptb: main.py
    "ptb": _sizes(280, 960, 620, 0.4, 0.225, 20.0, 12, 28, bptt_margin=40),
    "wt2": _sizes(300, 1150, 650, 0.55, 0.2, 15.0, 15, 1882, bptt_margin=20),
}
_MOS_RULES = {
    "ptb": {"finetune_learning_rate": 25.0, "epochs": 1000},
    "wt2": {"finetune_learning_rate": 20.0, "epochs": 1000},
}
_MIXED: dict[str, dict[str, Any]] = {  # MoS, README; seed of wt2: P, Table 6
    "ptb": {"components": 15, "latent_dropout": 0.29},
    "wt2": {"components": 15, "latent_dropout": 0.29, "accumulate": 3, "seed": 1881},
}
_GSS = {"ptb": {"c": -1.5, "k": 2.5}, "wt2": {"c": -1.5, "k": 3.0}}  # P
_RANDOM_SLOPES = {"intervals": 100_000, "radius": 20.0, "slope_std": 1.0}  # P
_SLOPES = {**_RANDOM_SLOPES, "slope_learning_rate": 0.02, "slope_decay": 1.2e-6}  # P


def _values(corpus: str) -> dict[str, dict[str, Any]]:
    """The settings of each head, and the options of the head among them."""
    untied = _AWD_LSTM | _COMPARED | _SOFTMAX_SIZES[corpus]
    softmax = untied | _TIED
    mixtape = _AWD_LSTM | _TIED | _MOS_SIZES[corpus] | _MOS_RULES[corpus]
    mos = mixtape | _MIXED[corpus] | _COMPARED
    return {
        "softmax": softmax,
        "sigsoftmax": softmax,
        "gss": softmax | _GSS[corpus],
        "plif": softmax | _SLOPES,
        "plif-frozen": softmax | _RANDOM_SLOPES,
        "mos": mos,
        "moc": mos,
        # Assumed: the settings of MoS, and slopes as those of PLIF.
        "mos-plif": mos | {"function_options": _SLOPES},
        # Its paper follows MoS on Penn Treebank; wt2 is assumed. Its code is not public: the sizes
        # of the gates are assumed too, and latent vectors have no dropout.
        "mixtape": mixtape | {"gate_features": 64},
        # Not published. The factor of 8 that suits AdamW makes SGD at 20 diverge.
        "trees": untied | {"n_trees": 4, "root": 1024, "gate": "context"},
    }


_TEXTS = {
    "ptb": "the folder of Penn Treebank",
    "wt2": "the folder of WikiText-2, or hf:Salesforce/wikitext:wikitext-2-v1,",
}
_SETTINGS = frozenset(field.name for field in fields(TrainConfig))


def _preset_settings(head: str, values: Mapping[str, Any]) -> dict[str, Any]:
    options = tuple(
        f"{option}={value if isinstance(value, str) else json.dumps(value)}"
        for option, value in values.items()
        if option not in _SETTINGS
    )
    settings = {setting: value for setting, value in values.items() if setting in _SETTINGS}
    return {"head": head, "head_option": options, **settings}


PRESETS: dict[str, dict[str, Any]] = {
    f"{corpus}-{head}": _preset_settings(head, values)
    for corpus in _TEXTS
    for head, values in _values(corpus).items()
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
        >>> from hstree.lm.config import preset
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


def _known(name: str) -> str:
    if name not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return name
