"""Every setting of a training run: one frozen dataclass that defines flags, defaults, limits, help
texts, and what else is known of each."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hstree.trees import recipe_names

from .settings import (
    POSITIVE,
    PROBABILITY,
    ConfigError,
    at_least,
    at_most,
    checked,
    flag_name,
    names_where,
    parse_options,
    parse_settings,
    setting,
)

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
    said about it is said here, see ``hstree.lm.runs.settings.setting``.

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
