"""Presets hold the published settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hstree.lm.config import PRESETS, ConfigError, parse_options, preset
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
MIXTAPE = MIXTURE | {"seed": (28, 1882), "accumulate": (1, 1)}
TABLES = {"mos": MIXTURE, "moc": MIXTURE, "mos-plif": MIXTURE, "mixtape": MIXTAPE}
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
        "gss": {"c": -1.5, "k": 3.0 if corpus == "wt2" else 2.5},
        "plif": SLOPES,
        "plif-frozen": {name: SLOPES[name] for name in ("intervals", "radius", "slope_std")},
    }
    bias = {} if head == "trees" else {"bias_start": "zero"}
    assert parse_options(config.head_option) == options.get(head, {}) | bias


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
