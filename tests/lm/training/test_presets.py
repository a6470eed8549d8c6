"""Presets hold the published settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hstree.lm.config import (
    PRESETS,
    SOURCES,
    ConfigError,
    TrainConfig,
    parse_options,
    preset,
    preset_sources,
    setting_sources,
)
from hstree.lm.data import CorpusStatistics
from hstree.lm.train import build_model

# Penn Treebank, WikiText-2. Softmax: the table of the study; mixtures: README of MoS.
SOFTMAX: dict[str, tuple[float | None, float | None]] = {
    "dropout_input": (0.4, 0.65),
    "dropout_hidden": (0.3, 0.2),
    "learning_rate": (20, 30),
    "batch_size": (20, 80),
    "seed": (141, 1881),
    "embedding_size": (400, 400),
    "hidden_size": (1150, 1150),
    "context_size": (400, 400),
    "epochs": (500, 750),
    "bptt_margin": (None, None),
    "finetune_learning_rate": (None, None),
}
MIXTURE: dict[str, tuple[float | None, float | None]] = {
    "dropout_input": (0.4, 0.55),
    "dropout_hidden": (0.225, 0.2),
    "learning_rate": (20, 15),
    "finetune_learning_rate": (25, 20),
    "batch_size": (12, 15),
    "accumulate": (1, 3),
    "bptt_margin": (40, 20),
    "seed": (28, 1881),
    "embedding_size": (280, 300),
    "hidden_size": (960, 1150),
    "context_size": (620, 650),
    "epochs": (1000, 1000),
}
DOC = MIXTURE | {"seed": (28, 1882), "epochs": (500, 500), "finetune_learning_rate": (None, None)}
MIXTAPE = MIXTURE | {"seed": (28, 1882), "accumulate": (1, 1)}
TABLES = {"mos": MIXTURE, "moc": MIXTURE, "mos-plif": MIXTURE, "doc": DOC, "mixtape": MIXTAPE}
EVERYWHERE: dict[str, Any] = {
    "layers": 3,
    "dropout": 0.4,
    "dropout_embedding": 0.1,
    "weight_dropout": 0.5,
    "embedding_noise": 0.0,
    "bptt": 70,
    "variable_bptt": True,
    "clip": 0.25,
    "weight_decay": 1.2e-6,
    "optimizer": "sgd",
    "averaging": "et",
    "averaging_epoch": 200,
    "nonmono": 5,
    "head_learning_rate_factor": 1.0,
    "schedule": "constant",
    "warmup": 0,
    "alpha": 2.0,
    "beta": 1.0,
}
RULES: dict[str, dict[str, Any]] = {
    "doc": {"averaging": "nt", "nonmono": 60},
    "mixtape": {"averaging": "nt"},
}
SLOPES = {
    "intervals": 100_000,
    "radius": 20.0,
    "slope_std": 1.0,
    "slope_learning_rate": 0.02,
    "slope_decay": 1.2e-6,
}
MIXED = {"components": 15, "latent_dropout": 0.29}


@pytest.mark.parametrize("name", PRESETS)
def test_published_settings(name: str) -> None:
    corpus, head = name.split("-", 1)
    config = preset(name)
    assert config.head == head
    assert config.tied == (head != "trees")
    table = TABLES.get(head, SOFTMAX)
    expected = {key: row[corpus == "wt2"] for key, row in table.items()}
    expected |= EVERYWHERE | RULES.get(head, {})
    assert {key: getattr(config, key) for key in expected} == expected
    options: dict[str, dict[str, Any]] = {
        "mos": MIXED,
        "moc": MIXED,
        "mos-plif": MIXED | {"function_options": SLOPES},
        "mixtape": {"gate_features": 64},
        "doc": {"experts": [0, 0, 5, 15], "latent_dropout": 0.6, "prior_penalty": 0.001},
        "gss": {"c": -1.5, "k": 3.0 if corpus == "wt2" else 2.5},
        "plif": SLOPES,
        "plif-frozen": {name: SLOPES[name] for name in ("intervals", "radius", "slope_std")},
    }
    bias = {} if head == "trees" else {"bias_start": "zero"}
    assert parse_options(config.head_option) == options.get(head, {}) | bias
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_has_a_source(name: str) -> None:
    config, sources = preset(name), preset_sources(name)
    assert set(sources.values()) <= SOURCES.keys()
    differing = {
        field.name
        for field in dataclasses.fields(TrainConfig)
        if getattr(config, field.name) != field.default
    }
    options = parse_options(config.head_option)
    assert differing - {"head", "head_option"} | options.keys() <= sources.keys()
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    assert sources.keys() - settings == options.keys()
    rows = setting_sources(config, {}, name)
    assert {row.source for row in rows} <= {"preset", "default", *sources.values()}
    for row in rows:
        option = row.name.removeprefix("head_option ")
        value = options[option] if option in options else getattr(config, row.name)
        assert row.value == value
        assert row.source == {"head": "preset", **sources}.get(option, "default")


def test_source_of_an_option_that_was_not_given() -> None:
    """As in a configuration that was read from a file."""
    rows = setting_sources(TrainConfig(head="gss", head_option=("c=1",)), {})
    assert [(row.value, row.source) for row in rows if row.name == "head_option c"] == [
        (1, "default")
    ]


def test_sources_are_all_used() -> None:
    used = {source for name in PRESETS for source in preset_sources(name).values()}
    assert used == SOURCES.keys()
    with pytest.raises(ConfigError, match=r"--preset: expected one of ptb-softmax, .*, got 'x'"):
        preset_sources("x")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("ptb-softmax", 24_221_600),
        ("wt2-gss", 33_556_078),
        ("ptb-plif", 24_321_600),
        ("ptb-mos", 21_500_620),
        ("wt2-mos", 34_909_528),
        ("wt2-moc", 34_909_528),
        ("ptb-mos-plif", 21_600_620),
        ("ptb-doc", 22_849_120),  # published: 23M
        ("wt2-doc", 36_639_278),  # published: 37M
    ],
)
def test_published_parameter_counts(name: str, count: int) -> None:
    n_classes = 33_278 if name.startswith("wt2") else 10_000
    statistics = CorpusStatistics(np.ones(n_classes, np.int64), np.zeros(0, np.int32))
    with torch.device("meta"):
        model = build_model(preset(name), n_classes, statistics)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.backbone.weight_dropout == 0.5
    assert model.backbone.dropout_embedding == 0.1


def test_every_value_gives_way_to_a_change() -> None:
    config = preset("ptb-mos", learning_rate=1.0, averaging="nt", data="here", epochs=3)
    assert (config.learning_rate, config.averaging, config.data) == (1.0, "nt", "here")
    assert (config.epochs, config.batch_size) == (3, 12)


def test_head_options_are_replaced_one_by_one() -> None:
    config = preset("ptb-mos", head_option=("components=5", "bias=false"))
    assert parse_options(config.head_option) == {
        "latent_dropout": 0.29,
        "bias_start": "zero",
        "components": 5,
        "bias": False,
    }
    assert preset("ptb-mos", head="mos").head_option == preset("ptb-mos").head_option
    other = preset("ptb-mos", head="softmax")
    assert other.head_option == ()
    assert other.batch_size == 12
    assert preset("ptb-mos", head="gss", head_option=("k=2",)).head_option == ("k=2",)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"--preset: expected one of ptb-softmax, .*, got 'ptb'"):
        preset("ptb")
    with pytest.raises(ConfigError, match="--dropout: expected a probability"):
        preset("ptb-softmax", dropout=2.0)
