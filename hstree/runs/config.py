"""Every setting of a training run: one frozen dataclass, from which flags, defaults, limits and
help texts come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .settings import (
    POSITIVE,
    PROBABILITY,
    ConfigError,
    at_least,
    at_most,
    checked,
    parse_options,
    setting,
)

OPTIMIZERS = ("adamw", "sgd")
AVERAGING = ("none", "nt", "et")
SCHEDULES = ("cosine", "linear", "constant")
DROPOUTS = ("dropout", "dropout_input", "dropout_hidden", "dropout_embedding", "weight_dropout")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "bfloat16")
SHORTEST_WINDOW = 5

RESUMABLE = (
    "data",
    "epochs",
    "learning_rate",
    "clip",
    "device",
    "threads",
    "save_interval",
    "tensorboard",
)
"""The settings that may change when a run goes on."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of ``hstree train``.

    Each field is a flag of the same name (``learning_rate`` is ``--learning-rate``); its metadata
    holds the help text and the group under which ``--help`` lists it; ``{heads}`` in a help text
    stands for the names of the registered heads.

    Raises:
        ConfigError: a value out of range; the message names the flag, what was expected and what
            came.
    """

    # data
    data: str | None = setting(
        None,
        "data",
        "folder with train.txt, valid.txt and test.txt (words separated by spaces), one UTF-8 text "
        "file, or hf:NAME[:CONFIG[:COLUMN]], a dataset of Hugging Face; without it, the docstrings "
        "and help topics of this Python installation",
        metavar="PATH",
    )
    min_count: int | None = setting(
        None,
        "data",
        "words that occur more rarely become <unk> (without it: 2 for a single text file, else 1)",
        at_least(1),
    )
    max_vocabulary: int | None = setting(
        None, "data", "number of classes to keep at most, <unk> and <eos> included", at_least(4)
    )
    tokenizer: str | None = setting(
        None,
        "data",
        "tokenizer.json of Hugging Face tokenizers, or bpe: byte-pair encoding, learnt from the "
        "training text, of --max-vocabulary classes (without it: words)",
        metavar="FILE",
    )

    # model
    embedding_size: int = setting(200, "model", "size of word embeddings", at_least(1))
    hidden_size: int = setting(200, "model", "size of the LSTM's state", at_least(1))
    layers: int = setting(1, "model", "LSTM layers", at_least(1))
    context_size: int | None = setting(
        None,
        "model",
        "size of the last layer, which the head reads (without it: --hidden-size)",
        at_least(1),
    )
    dropout: float = setting(
        0.5,
        "model",
        "locked dropout on the output of the last layer: one mask for all time steps",
        PROBABILITY,
    )
    dropout_input: float = setting(
        0.5, "model", "locked dropout on the word embeddings", PROBABILITY
    )
    dropout_hidden: float = setting(0.5, "model", "locked dropout between LSTM layers", PROBABILITY)
    dropout_embedding: float = setting(
        0.0, "model", "dropout of whole words, rows of the embedding matrix", PROBABILITY
    )
    weight_dropout: float = setting(
        0.0, "model", "DropConnect on the hidden-to-hidden weights of every layer", PROBABILITY
    )

    # head
    head: str = setting("trees", "head", "output layer, one of {heads}")
    tied: bool = setting(
        False,
        "head",
        "tie the output layer to the word embeddings; a softmax then needs a --context-size of "
        "--embedding-size",
    )
    n_trees: int = setting(4, "head", "trees: number of trees T", at_least(1))
    root: int = setting(
        256, "head", "trees: children of the root, C (1: binary down from the root)", at_least(1)
    )
    leaf: int = setting(
        1,
        "head",
        "trees: largest group of leaves under one softmax, G (1: binary to the leaves)",
        at_least(1),
    )
    gate: str = setting(
        "context", "head", "trees: mixture weights", choices=("uniform", "constant", "context")
    )
    recipe: str = setting(
        "cluster", "head", "trees: how trees are built", choices=("cluster", "huffman", "random")
    )
    subset_size: int | None = setting(
        None, "head", "trees: features that each tree reads, S (without it: all)", at_least(1)
    )
    sparse: bool = setting(
        False, "head", "trees: row-sparse gradients; only the visited rows are updated"
    )
    head_option: tuple[str, ...] = setting(
        (),
        "head",
        "any other option of the head, its value as JSON or plain text; may be repeated",
        metavar="KEY=VALUE",
    )

    # optimisation
    epochs: int = setting(8, "optimisation", "passes over the training text", at_least(1))
    batch_size: int = setting(
        20, "optimisation", "streams that run side by side in each process", at_least(1)
    )
    accumulate: int = setting(
        1,
        "optimisation",
        "compute every batch in this many parts, one after the other, to save memory; the same "
        "steps but for rounding and the draws of dropout",
        at_least(1),
    )
    bptt: int = setting(35, "optimisation", "time steps of truncated backpropagation", at_least(1))
    variable_bptt: bool = setting(
        False,
        "optimisation",
        "draw the length of every window: --bptt, or half of it with probability 0.05, plus a "
        "normal deviate of standard deviation 5, at least 5; the learning rate is scaled by the "
        "length over --bptt",
    )
    optimizer: str = setting(
        "adamw", "optimisation", "rule of the weights' updates", choices=OPTIMIZERS
    )
    learning_rate: float = setting(6e-3, "optimisation", "learning rate of the backbone", POSITIVE)
    head_learning_rate_factor: float = setting(
        8.0, "optimisation", "learning rate of the head over that of the backbone", POSITIVE
    )
    weight_decay: float = setting(
        0.01,
        "optimisation",
        "weight decay: decoupled with adamw, an L2 penalty with sgd (sparse parameters have none)",
        at_least(0),
    )
    clip: float = setting(
        1.0, "optimisation", "largest norm of the gradient; 0 for no clipping", at_least(0)
    )
    schedule: str = setting(
        "cosine", "optimisation", "course of the learning rate", choices=SCHEDULES
    )
    warmup: int = setting(
        50, "optimisation", "steps over which the learning rate rises from 0", at_least(0)
    )
    alpha: float = setting(
        0.0,
        "optimisation",
        "penalty on the mean square of the last layer's dropped output",
        at_least(0),
    )
    beta: float = setting(
        0.0,
        "optimisation",
        "penalty on the mean square of the last layer's change from one time step to the next",
        at_least(0),
    )
    averaging: str = setting(
        "none",
        "optimisation",
        "when sgd gives way to averaged SGD, whose averages are validated and kept: never, nt "
        "(the validation loss is worse than the best of all earlier epochs but the last --nonmono) "
        "or et (after epoch --averaging-epoch)",
        choices=AVERAGING,
    )
    nonmono: int = setting(
        5, "optimisation", "epochs that nt, and the end of --finetune, do not look at", at_least(0)
    )
    averaging_epoch: int = setting(
        200, "optimisation", "et: epochs before averaging; 0 averages from the start", at_least(0)
    )
    finetune: str | None = setting(
        None,
        "optimisation",
        "start from the best weights of this run, in averaged SGD, and end when the validation "
        "loss is worse than the best of all earlier epochs but the last --nonmono; the other "
        "settings are that run's unless they are given",
        metavar="RUN",
    )

    # run
    run: str | None = setting(
        None,
        "run",
        "run folder to create; it must not exist yet (without it: runs/<time>-<head>)",
        metavar="DIR",
    )
    seed: int = setting(
        1,
        "run",
        "seed of trees, initial weights, dropout and drawn lengths",
        at_least(0),
        at_most(2**62),
    )
    device: str = setting(
        "auto", "run", "where to train; auto takes a GPU if there is one", choices=DEVICES
    )
    threads: int | None = setting(
        None, "run", "CPU threads (without it: torch's own choice)", at_least(1), at_most(1024)
    )
    precision: str = setting(
        "float32",
        "run",
        "of the training steps: bfloat16 is torch.autocast, with weights and validation in float32",
        choices=PRECISIONS,
    )
    compile: bool = setting(False, "run", "torch.compile for the head's training step")
    save_interval: float = setting(
        600.0,
        "run",
        "seconds after which the state for --resume is saved within an epoch; 0: after every step",
        at_least(0),
    )
    tensorboard: bool = setting(False, "run", "write events for TensorBoard to the run folder")

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
        self.head_options()

    def head_options(self) -> dict[str, Any]:
        """Options for ``Head.from_corpus``: the learning-rate factor, ``tied`` if it is set, the
        tree settings if the head is ``trees``, and every ``head_option``."""
        options: dict[str, Any] = {"learning_rate_factor": self.head_learning_rate_factor}
        if self.tied:
            options["tied"] = True
        if self.head == "trees":
            names = ("n_trees", "root", "leaf", "gate", "recipe", "subset_size", "sparse")
            options |= {name: getattr(self, name) for name in names}
        return options | parse_options(self.head_option)

    def with_absolute_paths(self) -> TrainConfig:
        """The settings as a run keeps them, to be found from anywhere."""
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
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"expected settings as JSON: {error}") from None
        if not isinstance(values, Mapping):
            raise ConfigError(f"expected settings as a JSON object, got {type(values).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown settings: {', '.join(unknown)}")
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**settings)


def _absolute(path: str | None) -> str | None:
    """An absolute path; of a dataset ``hf:NAME...`` only if NAME is a folder."""
    if path is None or not path.startswith("hf:"):
        return None if path is None else str(Path(path).resolve())
    name, colon, rest = path.removeprefix("hf:").partition(":")
    return f"hf:{Path(name).resolve()}{colon}{rest}" if Path(name).is_dir() else path


HEAD_SETTINGS = frozenset(
    field.name for field in dataclasses.fields(TrainConfig) if field.metadata["group"] == "head"
)
"""The settings of the output layer."""
