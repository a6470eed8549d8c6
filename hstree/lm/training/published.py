"""The values of the presets, each with its source."""

from __future__ import annotations

from typing import Any, NamedTuple

SOURCES = {
    "AWD-LSTM code": "defaults of main.py in https://github.com/salesforce/awd-lstm-lm (Merity, "
    "Keskar and Socher, Regularizing and optimizing LSTM language models, ICLR 2018)",
    "AWD-LSTM README": "commands in the README of https://github.com/salesforce/awd-lstm-lm",
    "MoS code": "defaults of main.py in https://github.com/zihangdai/mos",
    "MoS README": "commands in the README of https://github.com/zihangdai/mos (Yang, Dai, "
    "Salakhutdinov and Cohen, Breaking the softmax bottleneck, ICLR 2018)",
    "DOC code": "defaults of main.py in https://github.com/nttcslab-nlp/doc_lm",
    "DOC README": "commands in the README of https://github.com/nttcslab-nlp/doc_lm (Takase, "
    "Suzuki and Nagata, Direct output connection for a high-rank language model, EMNLP 2018)",
    "study": "Parthiban, Mao and Inkpen, On the softmax bottleneck of recurrent language models, "
    "AAAI 2021, and its code, https://github.com/quettabit/awd-lstm-lmkit",
    "study, Table 6": "Table 6 in the supplement of Parthiban, Mao and Inkpen, On the softmax "
    "bottleneck of recurrent language models, AAAI 2021",
    "assumed": "as for another head; not published for this one",
    "hstree": "not published",
}
"""What a preset's values are taken from, by the short name that each value has."""


class Value(NamedTuple):
    """The value of a setting or of an option of the head, and a key of :data:`SOURCES`."""

    value: Any
    source: str


Values = dict[str, Value]
"""By name of a setting or of an option of the head."""


def _from(source: str, /, **values: Any) -> Values:
    return {name: Value(value, source) for name, value in values.items()}


def _assumed(values: Values) -> Values:
    return {name: Value(value, "assumed") for name, (value, _) in values.items()}


_AWD_LSTM = _from(
    "AWD-LSTM code",
    layers=3,
    dropout=0.4,
    dropout_embedding=0.1,
    weight_dropout=0.5,
    bptt=70,
    variable_bptt=True,
    optimizer="sgd",
    head_learning_rate_factor=1.0,
    weight_decay=1.2e-6,
    clip=0.25,
    schedule="constant",
    warmup=0,
    alpha=2.0,
    beta=1.0,
    averaging="nt",
    nonmono=5,
)
_TIED = _from("AWD-LSTM code", tied=True, bias_start="zero")
_STUDY = _from("study", averaging="et", averaging_epoch=200)

_SIZES = (
    *("embedding_size", "hidden_size", "context_size", "dropout_input", "dropout_hidden"),
    *("learning_rate", "batch_size", "seed"),
)


def _sizes(source: str, /, *values: float) -> Values:
    return _from(source, **dict(zip(_SIZES, values, strict=True)))


_SOFTMAX = {
    "ptb": _AWD_LSTM
    | _STUDY
    | _sizes("study, Table 6", 400, 1150, 400, 0.4, 0.3, 20.0, 20, 141)
    | _from("AWD-LSTM README", epochs=500),
    "wt2": _AWD_LSTM
    | _STUDY
    | _sizes("study, Table 6", 400, 1150, 400, 0.65, 0.2, 30.0, 80, 1881)
    | _from("AWD-LSTM README", epochs=750),
}

# Without the options of the head.
_MOS = {
    "ptb": _AWD_LSTM
    | _TIED
    | _from("MoS code", bptt_margin=40)
    | _sizes("MoS README", 280, 960, 620, 0.4, 0.225, 20.0, 12, 28)
    | _from("MoS README", finetune_learning_rate=25.0, epochs=1000),
    "wt2": _AWD_LSTM
    | _TIED
    | _sizes("MoS README", 300, 1150, 650, 0.55, 0.2, 15.0, 15, 1882)
    | _from("MoS README", finetune_learning_rate=20.0, epochs=1000, bptt_margin=20),
}
_COMPONENTS = _from("MoS README", components=15, latent_dropout=0.29)
_SMALL_BATCHES: dict[str, Values] = {"ptb": {}, "wt2": _from("MoS README", accumulate=3)}
_MIXTURE = {
    corpus: values | _COMPONENTS | _SMALL_BATCHES[corpus] | _STUDY
    for corpus, values in _MOS.items()
}
_MIXTURE["wt2"] |= _from("study, Table 6", seed=1881)

_EXPERTS = _from(
    "DOC README",
    epochs=500,
    nonmono=60,
    experts=[0, 0, 5, 15],
    latent_dropout=0.6,
    prior_penalty=0.001,
)
_DOC = {
    "ptb": _AWD_LSTM
    | _TIED
    | _from("DOC code", bptt_margin=40)
    | _sizes("DOC README", 280, 960, 620, 0.4, 0.225, 20.0, 12, 28)
    | _EXPERTS,
    "wt2": _AWD_LSTM
    | _TIED
    | _sizes("DOC README", 300, 1150, 650, 0.55, 0.2, 15.0, 15, 1882)
    | _from("DOC README", accumulate=3, bptt_margin=20)
    | _EXPERTS,
}

_GSS = {"ptb": _from("study", c=-1.5, k=2.5), "wt2": _from("study", c=-1.5, k=3.0)}
_RANDOM_SLOPES = {"intervals": 100_000, "radius": 20.0, "slope_std": 1.0}
_SLOPES = {**_RANDOM_SLOPES, "slope_learning_rate": 0.02, "slope_decay": 1.2e-6}
_PLIF = _from("study", **_SLOPES)
_PLIF_FROZEN = _from("study", **_RANDOM_SLOPES)
_MOS_PLIF = {
    corpus: _assumed(values) | _from("assumed", function_options=_SLOPES)
    for corpus, values in _MIXTURE.items()
}
_GATES = _from("hstree", gate_features=64)
_MIXTAPE = {"ptb": _MOS["ptb"] | _GATES, "wt2": _assumed(_MOS["wt2"]) | _GATES}
_TREES = _from("hstree", n_trees=4, root=1024, gate="context")


def _heads(corpus: str) -> dict[str, Values]:
    softmax = _SOFTMAX[corpus] | _TIED
    return {
        "softmax": softmax,
        "sigsoftmax": softmax,
        "gss": softmax | _GSS[corpus],
        "plif": softmax | _PLIF,
        "plif-frozen": softmax | _PLIF_FROZEN,
        "mos": _MIXTURE[corpus],
        "moc": _MIXTURE[corpus],
        "mos-plif": _MOS_PLIF[corpus],
        "mixtape": _MIXTAPE[corpus],
        "doc": _DOC[corpus],
        "trees": _SOFTMAX[corpus] | _TREES,
    }


PUBLISHED: dict[str, Values] = {
    f"{corpus}-{head}": values
    for corpus in ("ptb", "wt2")
    for head, values in _heads(corpus).items()
}
"""The values of each preset. A name is a corpus and a head."""
