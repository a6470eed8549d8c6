"""Published settings of AWD-LSTM language models on Penn Treebank and WikiText-2, by name.

A name is a corpus and a head: ``ptb-softmax``, ``wt2-mos``. The backbone and the training settings
are those of Merity et al., Regularizing and Optimizing LSTM Language Models (2018); the mixtures
are those of Yang et al., Breaking the Softmax Bottleneck (2018). Averaging begins after epoch 200,
as in the comparison of output layers that these settings reproduce; the two papers use
``averaging="nt"``. The number of epochs is that of the papers.

The presets of the head ``trees`` are not published. They use the backbone and the learning rate of
the softmax: the factor of 8 that suits AdamW makes SGD at 20 diverge. The four trees share their
output embedding at the leaves, and are re-learned after the first epoch.
"""

from __future__ import annotations

from typing import Any

from hstree.runs import ConfigError, TrainConfig, parse_options

_COMMON: dict[str, Any] = {
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
    "averaging": "et",
    "averaging_epoch": 200,
    "nonmono": 5,
}

# Columns: Penn Treebank, WikiText-2.
_CORPORA = ("ptb", "wt2")
_SOFTMAX: dict[str, tuple[Any, Any]] = {
    "embedding_size": (400, 400),
    "hidden_size": (1150, 1150),
    "context_size": (400, 400),
    "dropout_input": (0.4, 0.65),
    "dropout_hidden": (0.3, 0.2),
    "learning_rate": (20.0, 30.0),
    "batch_size": (20, 80),
    "epochs": (500, 750),
    "seed": (141, 1881),
}
_MIXTURE: dict[str, tuple[Any, Any]] = {
    "embedding_size": (280, 300),
    "hidden_size": (960, 1150),
    "context_size": (620, 650),
    "dropout_input": (0.4, 0.55),
    "dropout_hidden": (0.225, 0.2),
    "learning_rate": (20.0, 15.0),
    "batch_size": (12, 15),
    "epochs": (1000, 1000),
    "seed": (28, 1881),
}

_TREES: dict[str, tuple[Any, Any]] = _SOFTMAX | {
    "n_trees": (4, 4),
    "root": (1024, 1024),
    "gate": ("context", "context"),
    "relearn_trees": ((2,), (2,)),
}

_MIXTURE_OPTIONS = ("components=15", "latent_dropout=0.29")

# For each head its columns, whether it is tied to the word embeddings, and its options.
_HEADS: dict[str, tuple[dict[str, tuple[Any, Any]], bool, tuple[tuple[str, ...], ...]]] = {
    "softmax": (_SOFTMAX, True, ((), ())),
    "sigsoftmax": (_SOFTMAX, True, ((), ())),
    "gss": (_SOFTMAX, True, (("c=-1.5", "k=2.5"), ("c=-1.5", "k=3.0"))),
    "plif": (_SOFTMAX, True, ((), ())),
    "plif-frozen": (_SOFTMAX, True, ((), ())),
    "mos": (_MIXTURE, True, (_MIXTURE_OPTIONS, _MIXTURE_OPTIONS)),
    "moc": (_MIXTURE, True, (_MIXTURE_OPTIONS, _MIXTURE_OPTIONS)),
    "trees": (_TREES, False, ((), ())),
}

PRESETS: dict[str, dict[str, Any]] = {
    f"{corpus}-{head}": {
        "head": head,
        "tied": tied,
        "head_option": options[column],
        **_COMMON,
        **{name: values[column] for name, values in columns.items()},
    }
    for column, corpus in enumerate(_CORPORA)
    for head, (columns, tied, options) in _HEADS.items()
}
"""The settings of each preset that can differ from the defaults."""


def preset(name: str, **changes: Any) -> TrainConfig:
    """The settings of a preset, with changes.

    Args:
        name: a key of :data:`PRESETS`.
        **changes: fields of :class:`TrainConfig` that replace those of the preset. A
            ``head_option`` replaces only the option of the same name; with another ``head`` the
            options of the preset are dropped, and so is ``relearn_trees``.

    Raises:
        ConfigError: an unknown name, or a value that is not valid.

    Example:
        >>> from hstree.training.presets import preset
        >>> preset("ptb-mos", data="ptb/", head_option=("components=5",)).learning_rate
        20.0
    """
    if name not in PRESETS:
        raise ConfigError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    settings = PRESETS[name]
    if changes.get("head", settings["head"]) == settings["head"]:
        given = tuple(changes.get("head_option", ()))
        replaced = parse_options(given).keys()
        kept = [o for o in settings["head_option"] if not parse_options([o]).keys() & replaced]
        changes = changes | {"head_option": (*kept, *given)}
    else:
        settings = settings | {"head_option": (), "relearn_trees": ()}
    return TrainConfig(**(settings | changes))
