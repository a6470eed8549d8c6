"""The file of a study: what it says, and what is wrong with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hstree.lab.study import (
    RankSettings,
    StudyError,
    parse_study,
    read_study,
    run_name,
)
from hstree.lm.config import TrainConfig, parse_options, preset

ROOT = Path(__file__).resolve().parents[2]

GRID = """
name = "gss-grid"
seeds = [3, 1]
baseline = "softmax"
rank = { rows = 4000 }

[settings]
data = "ptb"
epochs = 3
dropout = 0.3

[[models]]
head = "softmax"

[[models]]
name = "shape"
head = "gss"
dropout = 0.1
learning_rate = [0.004, 1]

[models.head_options]
c = [-2.0, 0.5]
bias = false
"""


def test_everything_in_a_file() -> None:
    study = parse_study(GRID)
    assert study.name == "gss-grid"
    assert study.seeds == (3, 1)
    assert study.baseline == "softmax"
    assert study.rank == RankSettings(4000, "test")
    assert study.source == GRID
    assert [model.label for model in study.models] == [
        "softmax",
        "shape, learning_rate=0.004, c=-2.0",
        "shape, learning_rate=0.004, c=0.5",
        "shape, learning_rate=1, c=-2.0",
        "shape, learning_rate=1, c=0.5",
    ]
    first, *grid = study.models
    assert first.config == TrainConfig(data="ptb", epochs=3, dropout=0.3, head="softmax")
    assert first.options == {}
    assert grid[1].config == TrainConfig(
        data="ptb",
        epochs=3,
        dropout=0.1,
        head="gss",
        learning_rate=0.004,
        head_option=("c=0.5", "bias=false"),
    )
    assert grid[1].options == {"c": 0.5, "bias": False}
    assert run_name(grid[2], 3) == "shape-learning_rate=1-c=-2.0-seed=3"


def test_what_may_be_left_out() -> None:
    study = parse_study('[[models]]\nhead = "plif"', "mine")
    assert (study.name, study.seeds, study.baseline, study.rank) == ("mine", (1,), None, None)
    assert study.models[0].config == TrainConfig(head="plif")
    assert study.models[0].label == "plif"
    assert parse_study('rank = true\nseeds = 5\n[[models]]\nhead = "plif"').seeds == (5,)
    assert parse_study('rank = true\n[[models]]\nhead = "plif"').rank == RankSettings(None, "test")
    assert parse_study('rank = false\n[[models]]\nhead = "plif"').rank is None


def test_a_list_of_the_common_settings_is_a_grid_of_every_model() -> None:
    text = '[settings]\nlayers = [1, 2]\n[[models]]\nhead = "softmax"\n[[models]]\nhead = "plif"'
    labels = [model.label for model in parse_study(text).models]
    assert labels == ["softmax, layers=1", "softmax, layers=2", "plif, layers=1", "plif, layers=2"]
    one = text + "\nlayers = 3"
    assert [model.config.layers for model in parse_study(one).models] == [1, 2, 3]


def test_options_that_are_lists_or_tables() -> None:
    text = """
[[models]]
head = "adaptive"
head_options = { cutoffs = [[100, 200], [300]] }
[[models]]
head = "mos"
head_options = { function = "plif", function_options = { intervals = 10 } }
"""
    models = parse_study(text).models
    assert [model.options for model in models] == [
        {"cutoffs": [100, 200]},
        {"cutoffs": [300]},
        {"function": "plif", "function_options": {"intervals": 10}},
    ]
    assert run_name(models[0], 1) == "adaptive-cutoffs=-100-200--seed=1"


def test_presets_give_way_to_the_file() -> None:
    text = """
[settings]
data = "ptb"
epochs = 5
[[models]]
preset = "ptb-mos"
learning_rate = 15
head_options = { components = [5, 10] }
"""
    model = parse_study(text).models[1]
    assert model.label == "ptb-mos, components=10"
    changes = {"data": "ptb", "epochs": 5, "learning_rate": 15.0}
    assert model.config == preset("ptb-mos", **changes, head_option=("components=10",))
    assert model.options == {"bias_start": "zero", "latent_dropout": 0.29, "components": 10}


MODEL = '[[models]]\nhead = "gss"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [1", "not TOML: "),
        ("", r"models: expected at least one table \[\[models\]\]"),
        ("models = 3", r"models: expected at least one table \[\[models\]\], got 3"),
        ("models = [3]", r"\[\[models\]\] number 1: expected a table, got 3"),
        (f"seed = 1\n{MODEL}", "unknown key 'seed', expected one of name, seeds"),
        (f"name = '../x'\n{MODEL}", "name: expected a valid name for a folder, got '../x'"),
        (f"name = '..'\n{MODEL}", "name: expected a valid name for a folder"),
        (f"seeds = []\n{MODEL}", r"seeds: expected different whole numbers, got \[\]"),
        (f"seeds = [1, 1]\n{MODEL}", "seeds: expected different whole numbers"),
        (f"seeds = [true]\n{MODEL}", "seeds: expected different whole numbers"),
        (f"seeds = [-1]\n{MODEL}", "seeds: expected at least 0, got -1"),
        (f"baseline = 'mos'\n{MODEL}", "baseline: expected one of the models 'gss', got 'mos'"),
        (f"rank = 3\n{MODEL}", "rank: expected true, false or a table of rows and split, got 3"),
        (f"rank = {{ row = 3 }}\n{MODEL}", "rank: unknown key 'row', expected one of rows, split"),
        (f"rank = {{ rows = 0 }}\n{MODEL}", "rank.rows: expected a number of contexts, got 0"),
        (f"rank = {{ split = 'x' }}\n{MODEL}", "rank.split: expected one of train, valid, test"),
        (f"settings = 3\n{MODEL}", "settings: expected a table, got 3"),
        (
            f"[settings]\nepoch = 3\n{MODEL}",
            r"\[settings\]: unknown key 'epoch', expected one of data",
        ),
        (f"[settings]\nseed = 3\n{MODEL}", r"\[settings\]: seed: cannot be set in a study: set"),
        (f"[settings]\nepochs = 0\n{MODEL}", "model 'gss': epochs: expected at least 1, got 0"),
        ("[[models]]\nname = 'a'", "number 1: expected the name of a head or of a preset"),
        (f"{MODEL}preset = 'ptb-gss'", "number 1: .* got head, preset"),
        ("[[models]]\nhead = ['gss']", "number 1: expected the name of a head"),
        ("[[models]]\nhead = 'gsss'", "model 'gsss': head: expected one of adaptive, doc"),
        ("[[models]]\npreset = 'ptb-gss'", "model 'ptb-gss': preset: expected the folder of Penn"),
        ("[[models]]\npreset = 'gss'", "model 'gss': preset: expected one of ptb-softmax"),
        (f"{MODEL}name = 'a/b'", "number 1: name: expected a valid name for a folder"),
        (f"{MODEL}run = 'x'", "model 'gss': run: cannot be set in a study"),
        (
            f"{MODEL}head_option = 'k=1'",
            "head_option: cannot be set in a study: .* in head_options",
        ),
        (f"{MODEL}n_tree = 3", "model 'gss': unknown key 'n_tree'"),
        (f"{MODEL}layers = []", r"model 'gss': layers: expected at least one value, got \[\]"),
        (f"{MODEL}layers = 'two'", "model 'gss': layers: expected int, got 'two'"),
        (f"{MODEL}learning_rate = -1", "model 'gss': learning_rate: expected a positive number"),
        (f"{MODEL}averaging = 'nt'", "model 'gss': averaging: averaged SGD needs optimizer sgd"),
        (f"{MODEL}head_options = 3", "model 'gss': head_options: expected a table, got 3"),
        (
            f"{MODEL}head_options = {{ components = 3 }}",
            "model 'gss': head_options: the head 'gss' has no option components",
        ),
        (f"{MODEL}head_options = {{ tied = true }}", "head_options: expected tied for 'tied', got"),
        (f"{MODEL}head_options = {{ k = 1979-05-27 }}", "head_options: k: expected"),
        (MODEL + MODEL, "models: expected different names, got 'gss'"),
        (f"{MODEL}layers = [1, 1]", "different names, got 'gss, layers=1'"),
    ],
)
def test_unusable_files(text: str, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        parse_study(text)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(StudyError, match=r"mine\.toml: No such file"):
        read_study(file)
    file.write_bytes(b"\xff")
    with pytest.raises(StudyError, match=r"mine\.toml: expected UTF-8 text"):
        read_study(file)
    file.write_text("seeds = 1")
    with pytest.raises(StudyError, match=r"mine\.toml: models: expected"):
        read_study(file)
    file.write_text(MODEL)
    assert read_study(file).name == "mine"


LABORATORY = ROOT / "benchmarks" / "laboratory"
MODELS = {
    "ptb": 8,
    "bias-start": 8,
    "components": 6,
    "gss-grid": 72,
    "gss-rates": 20,
    "heads": 7,
    "latent-dropout": 3,
    "plif-rank": 16,
    "plif-start": 6,
    "rates": 27,
    "seeds": 3,
    "seeds-tuned": 3,
}


def test_the_studies_of_the_laboratory() -> None:
    studies = {file.stem: read_study(file) for file in LABORATORY.glob("*.toml")}
    assert {name: len(study.models) for name, study in studies.items()} == MODELS


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("components", "components", [1, 3, 5, 10, 15, 20]),
        ("latent-dropout", "latent_dropout", [0.29, 0.145, 0.0]),
    ],
)
def test_studies_of_mos_and_their_published_size(name: str, key: str, values: list[float]) -> None:
    """The file in the comment has the same grid, with the settings of the preset."""
    small = read_study(LABORATORY / f"{name}.toml")
    assert [model.options[key] for model in small.models] == values
    comment = small.source.partition("the whole file is:\n")[2].partition("# Published:")[0]
    study = parse_study("\n".join(line.removeprefix("#   ") for line in comment.splitlines()))
    assert study.rank == RankSettings()
    published = preset("ptb-mos", data="PTB", averaging="nt")
    assert [model.options[key] for model in study.models] == values
    for model in study.models:
        own = dataclasses.replace(model.config, head_option=published.head_option)
        assert own == published
        kept = {k: v for k, v in parse_options(published.head_option).items() if k != key}
        assert kept.items() <= model.options.items()
