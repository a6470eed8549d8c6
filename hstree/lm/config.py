"""Settings of a training run: one dataclass, its flags, its files, and presets."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch

from hstree.lm.report import meant, quoted, shortened

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


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range."""


# Types of settings, with their limits.


@dataclass(frozen=True)
class Limit:
    text: str
    holds: Callable[[Any], bool]


def at_least(minimum: int) -> Limit:
    return Limit(f"at least {minimum}", lambda value: value >= minimum)


def at_most(maximum: int) -> Limit:
    return Limit(f"at most {maximum}", lambda value: value <= maximum)


Count = Annotated[int, at_least(1)]
Size = Annotated[int, at_least(1), at_most(2**20)]
Few = Annotated[int, at_least(1), at_most(1024)]
Natural = Annotated[int, at_least(0)]
Seed = Annotated[int, at_least(0), at_most(2**62)]
Classes = Annotated[int, at_least(4)]  # two words, <unk> and <eos>
Weight = Annotated[float, at_least(0)]
Share = Annotated[float, at_least(0), at_most(1)]
Positive = Annotated[float, Limit("a positive number", lambda value: value > 0)]
Probability = Annotated[float, Limit("a probability in [0, 1)", lambda value: 0 <= value < 1)]

SHORTEST_WINDOW = 5


@dataclass(frozen=True)
class TrainConfig:
    """Settings of ``hstree train``.

    Each field is a flag of the same name (``learning_rate`` is ``--learning-rate``), whose help is
    the text below the field.

    Raises:
        ConfigError: a value out of range; the message names the flag, the expected and the given
            value.
    """

    data: str | None = None
    """folder with train.txt, valid.txt and test.txt (words separated by spaces); one UTF-8 text
    file; a .jsonl, .csv, .parquet or compressed file, or a folder of such files;
    hf:NAME[:CONFIG], a dataset of the Hugging Face hub (default: the docstrings and help topics of
    this Python installation)"""
    column: str | None = None
    """column of text of a dataset or table (default: text, or the only one)"""
    min_count: Count | None = None
    """words that occur fewer than N times become <unk> (default: 2 for one text file, else 1)"""
    max_vocabulary: Classes | None = None
    """largest number of classes, <unk> and <eos> included"""
    tokenizer: str | None = None
    """tokenizer.json of Hugging Face tokenizers, or bpe: byte-pair encoding with --max-vocabulary
    classes, learned from the training text (default: words)"""

    embedding_size: Size = 200
    """size of the word embeddings"""
    hidden_size: Size = 200
    """size of the LSTM state"""
    layers: Few = 1
    """number of LSTM layers"""
    context_size: Size | None = None
    """size of the last LSTM layer, the input of the head (default: --hidden-size)"""
    dropout: Probability = 0.5
    """dropout on the output of the last layer, with one mask for all time steps"""
    dropout_input: Probability = 0.5
    """dropout on the word embeddings, with one mask for all time steps"""
    dropout_hidden: Probability = 0.5
    """dropout between LSTM layers, with one mask for all time steps"""
    dropout_embedding: Probability = 0.0
    """dropout of whole words (rows of the embedding matrix)"""
    weight_dropout: Probability = 0.0
    """DropConnect on the hidden-to-hidden weights of every layer"""
    embedding_noise: Weight = 0.0
    """standard deviation of the normal noise that is added to the word embeddings in training,
    before --dropout-input"""
    sparse_embedding: bool = False
    """row-sparse gradients of the word embeddings; only words read are updated"""

    head: str = "sampled"
    """output layer"""
    tied: bool = False
    """tie the output layer to the word embeddings; a softmax then needs --context-size equal to
    --embedding-size"""
    n_trees: Few = 4
    """trees, forest: number of trees, T"""
    clusters: Count | None = None
    """trees, forest: number of clusters of a tree, C (default: 256, with trees more from 65,537
    classes)"""
    binary: bool = False
    """trees: binary nodes below the clusters, not one softmax over the classes of each (default
    with --sparse from 12,001 classes)"""
    gate: Literal["uniform", "constant", "context"] = "context"
    """trees, forest: mixture weights"""
    recipe: Literal["cluster", "huffman", "random"] = "cluster"
    """trees: how trees are built"""
    subset_size: Count | None = None
    """trees: number of features that each tree reads, S (default: all)"""
    sparse: bool = False
    """trees, sampled, forest with negatives: row-sparse gradients; only the visited rows are
    updated"""
    all_classes: Share = 0.0
    """sampled, forest with negatives: share of the steps, the last ones, that score all classes"""
    head_option: tuple[str, ...] = ()
    """any other option of the head, with its value as JSON or plain text; can be repeated"""

    epochs: Count = 10
    """passes over the training text"""
    batch_size: Count = 20
    """number of parallel token streams in each process"""
    accumulate: Count = 1
    """split every batch into this many parts and accumulate their gradients, to save memory; only
    rounding and dropout masks differ"""
    bptt: Count = 35
    """time steps of truncated backpropagation"""
    variable_bptt: bool = False
    """draw the length of every window from a normal distribution with standard deviation 5 and mean
    --bptt, or half of it with probability 0.05; at least 5. The learning rate is scaled by the
    length over --bptt"""
    bptt_margin: Natural | None = None
    """largest number of time steps by which a window of --variable-bptt is longer than --bptt
    (default: no limit)"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """optimizer"""
    learning_rate: Positive = 6e-3
    """learning rate of the backbone"""
    head_learning_rate_factor: Positive = 8.0
    """learning rate of the head divided by that of the backbone"""
    weight_decay: Weight = 0.03
    """weight decay: decoupled with adamw, an L2 penalty with sgd; none for sparse parameters"""
    clip: Weight = 1.0
    """largest norm of the gradient; 0: no clipping"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """learning rate schedule"""
    warmup: Natural = 50
    """steps over which the learning rate rises from 0"""
    alpha: Weight = 0.0
    """weight of the activation regularization: mean square of the last layer's output, after
    dropout"""
    beta: Weight = 0.0
    """weight of the temporal activation regularization: mean square of the change of the last
    layer's output between time steps"""
    averaging: Literal["none", "nt", "et"] = "none"
    """when to switch from SGD to averaged SGD, whose averaged weights are validated and saved: none
    (never), nt (when the validation loss is worse than the best of all earlier epochs, the last
    --nonmono excepted) or et (after epoch --averaging-epoch)"""
    nonmono: Natural = 5
    """number of recent epochs that --averaging nt and --finetune ignore"""
    averaging_epoch: Natural = 200
    """et: number of epochs before averaging; 0: average from the start"""
    finetune: str | None = None
    """start a new run from the best weights of this run, with averaged SGD, and stop when the
    validation loss is worse than the best of all earlier epochs, the last --nonmono excepted. Other
    settings are those of that run unless they are given"""
    finetune_learning_rate: Positive | None = None
    """learning rate of the backbone for --finetune, unless --learning-rate is given (default: the
    --learning-rate of the run)"""

    run: str | None = None
    """run folder to create; it must not exist (default: runs/<time>-<head>)"""
    seed: Seed = 1
    """seed of trees, initial weights, dropout and window lengths"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device; auto: a GPU if there is one"""
    threads: Few | None = None
    """number of CPU threads (default: chosen by torch)"""
    validation_tokens: Count | None = None
    """number of validation tokens to score after each epoch, evenly spread over the text: less
    exact, and much faster with many classes (default: all)"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """precision of the training steps; bfloat16: torch.autocast, with weights and validation in
    float32"""
    compile: bool = False
    """use torch.compile for the training step of the head"""
    save_interval: Weight = 600.0
    """seconds between saves of the state for --resume within an epoch; 0: after every step"""
    tensorboard: bool = False
    """write TensorBoard events to the run folder"""

    def __post_init__(self) -> None:
        for name in KINDS:
            object.__setattr__(
                self, name, _checked(name, getattr(self, name), f"--{flag_name(name)}")
            )
        if self.variable_bptt and self.bptt < SHORTEST_WINDOW:
            raise ConfigError(
                f"--variable-bptt: expected a --bptt of at least {SHORTEST_WINDOW}, the shortest "
                f"window, got {self.bptt}"
            )
        averaged = {"averaging": self.averaging != "none", "finetune": self.finetune is not None}
        for name, averages in averaged.items():
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
        self.head_options()

    def head_options(self) -> dict[str, Any]:
        """Options for :func:`hstree.heads.build_head`: the settings of the output layer that the
        head reads, and every ``head_option``.

        Raises:
            ConfigError: a ``head_option`` that has a flag of its own, or that would change what a
                perplexity is.
        """
        read = [name for name, heads in READ_BY.items() if self.head in heads]
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
        options = {name: getattr(self, name) for name in read if name != "all_classes"}
        chosen = [name for name in ("clusters", "binary") if not options.get(name)]
        for name in chosen:
            options.pop(name, None)  # the head chooses
        return options | more

    def with_absolute_paths(self) -> TrainConfig:
        """The settings with absolute paths, as a run folder stores them."""
        return dataclasses.replace(
            self, data=_absolute(self.data), finetune=_absolute(self.finetune)
        )

    def to_json(self) -> str:
        """The settings as a JSON object, one line each."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


# What else is known of settings, by name.


class Kind(NamedTuple):
    """The type of a setting, and its values."""

    type: type  # int, float, str, bool or tuple, which is one of str
    optional: bool  # whether None is allowed
    choices: tuple[Any, ...]
    limits: tuple[Limit, ...]


def _kind(hint: Any) -> Kind:
    optional = NoneType in get_args(hint)
    if optional:
        hint = next(part for part in get_args(hint) if part is not NoneType)
    limits = getattr(hint, "__metadata__", ())
    hint = get_args(hint)[0] if limits else hint
    if get_origin(hint) is Literal:
        return Kind(type(get_args(hint)[0]), optional, get_args(hint), limits)
    return Kind(get_origin(hint) or hint, optional, (), limits)


KINDS: dict[str, Kind] = {
    name: _kind(hint) for name, hint in get_type_hints(TrainConfig, include_extras=True).items()
}
_NAMES = [*KINDS]
_STARTS = [_NAMES.index(name) for name in ("data", "embedding_size", "head", "epochs", "run")]
GROUPS: dict[str, list[str]] = {
    heading: _NAMES[start:end]
    for heading, (start, end) in zip(
        ("data", "model", "head", "optimization", "run"),
        pairwise([*_STARTS, len(_NAMES)]),
        strict=True,
    )
}
"""The settings under each heading of the help."""


@cache
def help_texts() -> dict[str, str]:
    """The text below each field of :class:`TrainConfig`."""
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in pairwise(classes["TrainConfig"].body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


RESUMABLE = (
    *("data", "column", "epochs", "learning_rate", "clip", "device", "threads", "save_interval"),
    "tensorboard",
)
"""The settings that can change when a run is resumed."""

UNGROUPED = ("run", "seed", "device", "threads", "compile", "save_interval", "tensorboard")
"""The settings in which two runs of the same model may differ."""

NOT_INHERITED = ("run", "device", "threads")
"""Settings of one run, not of the model."""

TRAINING_NOISE = (
    *("dropout", "dropout_input", "dropout_hidden", "dropout_embedding", "weight_dropout"),
    "embedding_noise",
)
"""The settings of the backbone that act in training only."""

HEAD_SETTINGS = frozenset(GROUPS["head"]) - {"tied"}
"""The settings in which a model with another head may differ."""

MODEL_SETTINGS = tuple(
    name
    for name in (*GROUPS["data"], *GROUPS["model"], *GROUPS["head"])
    if name not in ("data", "column", *TRAINING_NOISE)
)
"""The settings that fine-tuning cannot change."""

READ_BY: dict[str, tuple[str, ...]] = {
    "n_trees": ("trees", "forest"),
    "clusters": ("trees", "forest"),
    "binary": ("trees",),
    "gate": ("trees", "forest"),
    "recipe": ("trees",),
    "subset_size": ("trees",),
    "sparse": ("trees", "sampled", "forest"),
    "all_classes": ("sampled", "forest"),
}
"""The heads that read a setting of the output layer, where not all heads do."""


def unread(head: str) -> set[str]:
    return {name for name, heads in READ_BY.items() if head not in heads}


# Values


def flag_name(name: str) -> str:
    """``learning_rate`` as on the command line: ``learning-rate``."""
    return name.replace("_", "-")


def _checked(name: str, value: Any, where: str) -> Any:
    """The value of a setting, a whole number as a float where the setting is one, a list as a
    tuple. Raises ConfigError, whose message begins with ``where``, for a value of another type, not
    finite, or outside the choices or limits."""
    kind = KINDS[name]
    if value is None and kind.optional:
        return None
    if kind.type is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 1000 else math.inf
    if kind.type is tuple and isinstance(value, list):
        value = tuple(value)
    parts: tuple[Any, ...] = value if kind.type is tuple else (value,)
    if type(value) is not kind.type:
        expected = kind.type.__name__
    elif kind.type is tuple and any(type(part) is not str for part in parts):
        expected = "a tuple of str"
    elif isinstance(value, float) and not math.isfinite(value):
        expected = "a finite number"
    elif kind.choices and value not in kind.choices:
        expected = f"one of {', '.join(map(str, kind.choices))}"
    elif any(isinstance(part, str) and not _names_a_file(part) for part in parts):
        expected = "text without NUL, in UTF-8"
    elif broken := [limit.text for limit in kind.limits if not limit.holds(value)]:
        expected = broken[0]
    else:
        return value
    raise ConfigError(f"{where}: expected {expected}, got {quoted(value)}")


def _names_a_file(text: str) -> bool:
    """Also a name that the command line gives in another encoding."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


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


def check_read(config: TrainConfig, names: Iterable[str]) -> None:
    """Raises ConfigError for one of these settings that the head does not read."""
    for name in names:
        if name in unread(config.head) and (name != "all_classes" or config.all_classes):
            heads = " or ".join(map(repr, READ_BY[name]))
            raise ConfigError(
                f"--{flag_name(name)}: expected the head {heads}, which reads it, got "
                f"--head {config.head}"
            )


# Files


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a file: what ``TrainConfig.to_json`` wrote, or a part of it.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: not a JSON object, a setting that does not exist, or a value that is not
            valid; the message names the file and the setting.
    """
    try:
        values = json.loads(Path(path).read_bytes())
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a file of settings, got a folder") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected settings as JSON: {error}") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(f"{path}: expected settings as a JSON object, got {kind}")
    unknown = sorted(values.keys() - KINDS)
    if unknown:
        listed = shortened(", ".join(unknown))
        raise ConfigError(f"{path}: unknown settings: {listed}{meant(unknown[0], KINDS)}")
    return {name: _checked(name, value, f"{path}: {name}") for name, value in values.items()}


def _absolute(path: str | None) -> str | None:
    """An absolute path; that of a dataset of the hub stays as it is."""
    if path is None or path.startswith("hf:"):
        return path
    return os.path.realpath(path)


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
_TIED = {"tied": True, "bias_start": "zero"}  # AWD, main.py
# P compares output layers with averaging after epoch 200; AWD and MoS use averaging "nt".
_COMPARED = {"averaging": "et", "averaging_epoch": 200}


def _sizes(*values: float, **others: Any) -> dict[str, Any]:
    names = ("embedding_size", "hidden_size", "context_size", "dropout_input", "dropout_hidden")
    return dict(zip((*names, "learning_rate", "batch_size", "seed"), values, strict=True)) | others


_SOFTMAX_SIZES = {  # P, Table 6; epochs: AWD, README
    "ptb": _sizes(400, 1150, 400, 0.4, 0.3, 20.0, 20, 141, epochs=500),
    "wt2": _sizes(400, 1150, 400, 0.65, 0.2, 30.0, 80, 1881, epochs=750),
}
_MOS_SIZES = {  # MoS, README; bptt_margin of ptb: main.py
    "ptb": _sizes(280, 960, 620, 0.4, 0.225, 20.0, 12, 28, bptt_margin=40)
    | {"finetune_learning_rate": 25.0, "epochs": 1000},
    "wt2": _sizes(300, 1150, 650, 0.55, 0.2, 15.0, 15, 1882, bptt_margin=20)
    | {"finetune_learning_rate": 20.0, "epochs": 1000},
}
_MIXED: dict[str, dict[str, Any]] = {  # MoS, README; seed of wt2: P, Table 6
    "ptb": {"components": 15, "latent_dropout": 0.29},
    "wt2": {"components": 15, "latent_dropout": 0.29, "accumulate": 3, "seed": 1881},
}
_GSS = {"ptb": {"c": -1.5, "k": 2.5}, "wt2": {"c": -1.5, "k": 3.0}}  # P
_RANDOM_SLOPES = {"intervals": 100_000, "radius": 20.0, "slope_std": 1.0}  # P
_SLOPES = {**_RANDOM_SLOPES, "slope_learning_rate": 0.02, "slope_decay": 1.2e-6}  # P


def _published(corpus: str) -> dict[str, dict[str, Any]]:
    """The settings of each head, and the options of the head among them."""
    untied = _AWD_LSTM | _COMPARED | _SOFTMAX_SIZES[corpus]
    softmax = untied | _TIED
    mixtape = _AWD_LSTM | _TIED | _MOS_SIZES[corpus]
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
        "trees": untied | {"n_trees": 4, "clusters": 1024, "gate": "context"},
    }


def _as_settings(head: str, values: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in values.items() if name not in KINDS}
    texts = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())
    settings = {name: value for name, value in values.items() if name in KINDS}
    return {"head": head, "head_option": tuple(texts), **settings}


_TEXTS = {
    "ptb": "the folder of Penn Treebank",
    "wt2": "the folder of WikiText-2, or hf:Salesforce/wikitext:wikitext-2-v1,",
}
PRESETS: dict[str, dict[str, Any]] = {
    f"{corpus}-{head}": _as_settings(head, values)
    for corpus in _TEXTS
    for head, values in _published(corpus).items()
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
    if name not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return TrainConfig(**merged(PRESETS[name], changes))


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes, as those of :func:`preset`."""
    head = settings.get("head", TrainConfig.head)
    replaced = parse_options(changes.get("head_option", ()))
    kept = [
        option
        for option in settings.get("head_option", ())
        if changes.get("head", head) == head and not parse_options([option]).keys() & replaced
    ]
    options = (*kept, *changes.get("head_option", ()))
    result = {**settings, **changes, "head_option": options}
    return result if options else {k: v for k, v in result.items() if k != "head_option"}


def check_text(name: str | None, config: TrainConfig) -> None:
    """Raises ConfigError for the settings of a preset without a text: on the docstrings of Python
    they would train for weeks. None: no preset."""
    if name is not None and config.data is None:
        text = _TEXTS[name.partition("-")[0]]
        raise ConfigError(f"--preset: expected {text} as --data for {name}, got no --data")
