"""TrainConfig: one source of settings, their files, and what is known of them by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hstree.heads import SampledSoftmax, head_class, head_names, head_options
from hstree.lm import config as module
from hstree.lm.config import ConfigError, TrainConfig, parse_options, read_settings
from hstree.trees import recipe_names


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    options = {"data": "x", "dropout": 0.25, "sparse": True, "head_option": ("a=1", "b=text")}
    for config in (TrainConfig(**options), TrainConfig()):
        file.write_text(config.to_json())
        assert TrainConfig(**read_settings(file)) == config
    file.write_text('{"epochs": 3, "learning_rate": 1}')
    assert read_settings(file) == {"epochs": 3, "learning_rate": 1.0}
    assert type(TrainConfig(**read_settings(file)).learning_rate) is float


def test_every_setting_is_described() -> None:
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    grouped = [name for group in module.GROUPS.values() for name in group]
    assert [*module.help_texts()] == [*module.KINDS] == grouped == names
    assert [*module.GROUPS] == ["data", "model", "head", "optimization", "run"]
    for kind in module.KINDS.values():
        assert kind.type in (int, float, str, bool, tuple)
    for known in ("RESUMABLE", "UNGROUPED", "NOT_INHERITED", "TRAINING_NOISE", "READ_BY"):
        assert set(getattr(module, known)) <= set(names), known


def test_settings_fit_the_heads() -> None:
    """The heads that read a setting take it as an option."""
    assert set(module.KINDS["recipe"].choices) == set(recipe_names())
    samplers = {head for head in head_names() if issubclass(head_class(head), SampledSoftmax)}
    for name, heads in module.READ_BY.items():
        takes = {head for head in head_names() if name in head_options(head)}
        known = {"all_classes": samplers, "recipe": takes - {"forest"}}  # which has others
        assert set(heads) == known.get(name, takes), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "--epochs: expected at least 1, got 0"),
        ({"layers": 1025}, "--layers: expected at most 1024, got 1025"),
        ({"hidden_size": 10**30}, "--hidden-size: expected at most 1048576, got 1000"),
        ({"max_vocabulary": 3}, "--max-vocabulary: expected at least 4"),
        ({"seed": 2**62 + 1}, "--seed: expected at most"),
        ({"clip": -1.0}, "--clip: expected at least 0"),
        ({"all_classes": 1.5}, "--all-classes: expected at most 1, got 1.5"),
        ({"dropout": 1.0}, r"--dropout: expected a probability in \[0, 1\), got 1.0"),
        ({"finetune_learning_rate": 0.0}, "--finetune-learning-rate: expected a positive number"),
        ({"learning_rate": float("nan")}, "--learning-rate: expected a finite number"),
        ({"learning_rate": 10**400}, "--learning-rate: expected a finite number"),
        ({"schedule": "step"}, "--schedule: expected one of cosine, linear, constant, got 'step'"),
        ({"tied": None}, "--tied: expected bool, got None"),
        ({"epochs": True}, "--epochs: expected int, got True"),
        ({"head_option": (1,)}, r"--head-option: expected a tuple of str, got \(1,\)"),
        ({"head_option": ("novalue",)}, "--head-option: expected KEY=VALUE, got 'novalue'"),
        ({"head_option": ("sparse=true",)}, "--head-option: expected --sparse for 'sparse', got"),
        ({"head_option": ("tied=true",)}, "--head-option: expected --tied for 'tied', got tied=T"),
        ({"head_option": ("reduction=sum",)}, "--head-option: expected no 'reduction', as a perpl"),
        ({"finetune": "a\0"}, r"--finetune: expected text without NUL, in UTF-8, got 'a\\x00'"),
        ({"run": "\ud800"}, r"--run: expected text without NUL, in UTF-8, got '\\ud800'"),
        ({"averaging": "nt"}, "--averaging: averaged SGD needs --optimizer sgd, got adamw"),
        ({"finetune": "x"}, "--finetune: averaged SGD needs --optimizer sgd, got adamw"),
        ({"accumulate": 3}, "--accumulate: expected a divisor of --batch-size 20, got 3"),
        ({"variable_bptt": True, "bptt": 4}, "--variable-bptt: expected a --bptt of at least 5"),
        ({"sparse_embedding": True, "tied": True}, "--sparse-embedding: expected --sparse with"),
    ],
)
def test_bad_values_name_the_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


def test_head_options() -> None:
    softmax = TrainConfig(head="softmax", tied=True, head_option=("note=a=b", "cutoffs=[2, 5]"))
    assert softmax.head_options() == {"note": "a=b", "cutoffs": [2, 5]}
    sampled = TrainConfig(head="sampled", sparse=True, all_classes=0.5)
    assert sampled.head_options() == {"sparse": True}
    trees = TrainConfig(head="trees", n_trees=3, clusters=8, sparse=True).head_options()
    expected = {"n_trees": 3, "clusters": 8, "subset_size": None}
    assert trees == expected | {"gate": "context", "recipe": "cluster", "sparse": True}


def test_options_are_json_or_text() -> None:
    texts = ["a=1", "b=[1, 2.5]", "c=context", "d=", "e=x=y", 'f="1"', "a=null"]
    expected = {"a": None, "b": [1, 2.5], "c": "context", "d": "", "e": "x=y", "f": "1"}
    assert parse_options(texts) == expected
    for text in ("", "a", "=1", "a b=1", "1a=1"):
        with pytest.raises(ConfigError, match=f"^heads: expected KEY=VALUE, got '{text}'$"):
            parse_options([text], "heads")
