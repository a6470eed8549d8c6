"""TrainConfig: one source of settings."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hstree.lm.config import ConfigError, TrainConfig, field_types, parse_options


def test_round_trip() -> None:
    config = TrainConfig(
        data="x", layers=2, dropout=0.25, sparse=True, head_option=("a=1", "b=text"), threads=2
    )
    assert TrainConfig.from_json(config.to_json()) == config
    assert TrainConfig.from_json(TrainConfig().to_json()) == TrainConfig()
    assert TrainConfig.from_json('{"epochs": 3}') == TrainConfig(epochs=3)


def test_every_setting_is_described() -> None:
    for field in dataclasses.fields(TrainConfig):
        assert field.metadata["help"], field.name
        assert field.metadata["group"], field.name
        assert field_types(TrainConfig)[field.name][0] in (int, float, str, bool, tuple)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().epochs = 3  # type: ignore[misc]


def test_whole_numbers_serve_as_floats() -> None:
    config = TrainConfig(learning_rate=1)
    assert type(config.learning_rate) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs: expected at least 1, got 0"),
        ({"context_size": 0}, "--context-size: expected at least 1, got 0"),
        ({"tied": None}, "--tied: expected bool, got None"),
        ({"batch_size": -1}, "--batch-size: expected at least 1, got -1"),
        ({"dropout": -0.1}, r"--dropout: expected a probability in \[0, 1\), got -0.1"),
        ({"dropout": 1.0}, "--dropout"),
        ({"dropout_input": 1.0}, "--dropout-input: expected a probability"),
        ({"dropout_hidden": -1.0}, "--dropout-hidden: expected a probability"),
        ({"dropout_embedding": 1.5}, "--dropout-embedding: expected a probability"),
        ({"weight_dropout": 1.0}, "--weight-dropout: expected a probability"),
        ({"bptt_margin": -1}, "--bptt-margin: expected at least 0, got -1"),
        ({"finetune_learning_rate": 0.0}, "--finetune-learning-rate: expected a positive number"),
        ({"embedding_noise": -0.1}, "--embedding-noise: expected at least 0, got -0.1"),
        ({"alpha": -1.0}, "--alpha: expected at least 0"),
        ({"beta": -1.0}, "--beta: expected at least 0"),
        ({"nonmono": -1}, "--nonmono: expected at least 0"),
        ({"averaging_epoch": -1}, "--averaging-epoch: expected at least 0"),
        ({"optimizer": "adam"}, "--optimizer: expected one of adamw, sgd, got 'adam'"),
        ({"averaging": "asgd"}, "--averaging: expected one of none, nt, et, got 'asgd'"),
        ({"averaging": "nt"}, "--averaging: averaged SGD needs --optimizer sgd, got adamw"),
        ({"finetune": "x"}, "--finetune: averaged SGD needs --optimizer sgd, got adamw"),
        ({"learning_rate": 0.0}, "--learning-rate: expected a positive number"),
        ({"learning_rate": float("nan")}, "--learning-rate: expected a finite number"),
        ({"clip": -1.0}, "--clip: expected at least 0"),
        ({"threads": 1025}, "--threads: expected at most 1024, got 1025"),
        ({"hidden_size": 10**30}, "--hidden-size: expected at most 1048576, got 1000"),
        ({"context_size": 2**20 + 1}, "--context-size: expected at most 1048576, got 1048577"),
        ({"embedding_size": 2**63}, "--embedding-size: expected at most 1048576, got 9223"),
        ({"layers": 1025}, "--layers: expected at most 1024, got 1025"),
        ({"seed": 2**62 + 1}, "--seed: expected at most"),
        ({"accumulate": 3}, "--accumulate: expected a divisor of --batch-size 20, got 3"),
        ({"variable_bptt": True, "bptt": 4}, "--variable-bptt: expected a --bptt of at least 5"),
        ({"max_vocabulary": 3}, "--max-vocabulary: expected at least 4"),
        ({"schedule": "step"}, "--schedule: expected one of cosine, linear, constant, got 'step'"),
        ({"gate": "and"}, "--gate: expected one of uniform, constant, context"),
        ({"levels": 4}, "--levels: expected one of 2, 3, got 4"),
        ({"levels": 2, "leaf": 8}, "--leaf: expected 1 with --levels 2, got 8"),
        ({"head_option": ("novalue",)}, "--head-option: expected KEY=VALUE, got 'novalue'"),
        ({"head_option": (1,)}, r"--head-option: expected a tuple of str, got \(1,\)"),
        ({"epochs": "3"}, "--epochs: expected int, got '3'"),
        ({"sparse": 1}, "--sparse: expected bool, got 1"),
        (
            {"sparse_embedding": True, "tied": True},
            "--sparse-embedding: expected --sparse with --tied, got --tied alone",
        ),
        ({"epochs": True}, "--epochs: expected int, got True"),
        ({"seed": -1}, "--seed: expected at least 0"),
    ],
)
def test_bad_values_name_the_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected settings as JSON"),
        ('{"epochs": 3', "expected settings as JSON"),
        ("[1]", "expected settings as a JSON object, got list"),
        ('{"epoch": 3, "sede": 1}', "unknown settings: epoch, sede"),
        ('{"epochs": null}', "--epochs: expected int, got None"),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_json(text)


def test_head_options() -> None:
    softmax = TrainConfig(head="softmax", head_option=("note=a=b", "cutoffs=[2, 5]"))
    assert softmax.head_options() == {"note": "a=b", "cutoffs": [2, 5]}
    assert TrainConfig(head="softmax", tied=True).head_options() == {}
    assert TrainConfig(head="sampled", sparse=True).head_options() == {"sparse": True}
    trees = TrainConfig(n_trees=3, root=7, sparse=True).head_options()
    assert trees["n_trees"] == 3
    assert trees["root"] == 7
    assert trees["levels"] is None
    assert TrainConfig(levels=3, leaf=8).head_options()["levels"] == 3
    assert trees["sparse"] is True
    assert {"leaf", "gate", "recipe", "subset_size"} <= set(trees)


def test_options_are_json_or_text() -> None:
    texts = ["a=1", "b=[1, 2.5]", "c=context", "d=", "e=x=y", 'f="1"', "a=null"]
    assert parse_options(texts) == {
        "a": None,
        "b": [1, 2.5],
        "c": "context",
        "d": "",
        "e": "x=y",
        "f": "1",
    }
    assert parse_options([]) == {}
    for text in ("", "a", "=1", "a b=1", "1a=1"):
        with pytest.raises(ConfigError, match=f"^heads: expected KEY=VALUE, got '{text}'$"):
            parse_options([text], "heads")


def test_json_holds_every_setting() -> None:
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(json.loads(TrainConfig().to_json())) == names
