"""``hstree train``: presets, printed settings, fine-tuning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from lm.cli.support import fails
from lm.training.toy import write_corpus

from hstree.__main__ import main
from hstree.lm.config import PRESETS, TrainConfig, parse_options, preset
from hstree.lm.run import load_run

TINY = [
    *("--embedding-size", "8", "--hidden-size", "8", "--context-size", "8", "--batch-size", "8"),
    *("--bptt", "10", "--learning-rate", "2", "--device", "cpu"),
]


@pytest.fixture
def data(tmp_path: Path, elsewhere: Path) -> Path:
    """A small corpus, not in the working folder."""
    return write_corpus(tmp_path / "data", sentences=100)


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> TrainConfig:
    assert main(["train", "--print-config", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return TrainConfig(**json.loads(captured.out))


def test_settings_are_printed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == TrainConfig()
    assert printed(capsys, "--epochs", "3", "--tied") == TrainConfig(epochs=3, tied=True)
    for name in PRESETS:
        assert printed(capsys, "--preset", name) == preset(name)
    flags = ["--preset", "wt2-mos", "--no-tied", "--learning-rate", "1", "--no-variable-bptt"]
    config = printed(capsys, *flags, "--head-option", "components=3", "--data", "x")
    expected = {"tied": False, "learning_rate": 1.0, "variable_bptt": False, "data": "x"}
    assert config == preset("wt2-mos", **expected, head_option=("components=3",))


def test_settings_in_a_file(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the head are replaced one by one; those of another head are dropped."""
    file = Path("..", "settings.json")
    config = printed(capsys, "--preset", "wt2-mos", "--clip", "0.5", "--threads", "2")
    file.write_text(config.to_json())
    assert printed(capsys, "--config", str(file)) == config
    changed = printed(capsys, "--config", str(file), "--epochs", "11", "--no-tied")
    assert changed == dataclasses.replace(config, epochs=11, tied=False)

    options = ["components=5", "latent_dropout=0.2"]
    file.write_text(json.dumps({"head": "mos", "epochs": 3, "head_option": options}))
    changed = printed(capsys, "--config", str(file), "--head-option", "components=7")
    assert changed.epochs == 3
    assert parse_options(changed.head_option) == {"components": 7, "latent_dropout": 0.2}
    config = printed(capsys, "--config", str(file), "--head", "softmax")
    assert config == TrainConfig(head="softmax", epochs=3)


def test_settings_of_finetuning(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given by a flag or in a file: those of the run, but for what is not inherited."""
    origin = Path("..", "origin")
    origin.mkdir()
    options = {"head": "mos", "head_option": ("components=3",), "optimizer": "sgd"}
    config = TrainConfig(**options, finetune_learning_rate=7.0, threads=2)
    (origin / "config.json").write_text(config.to_json())
    found = printed(capsys, "--finetune", str(origin), "--epochs", "3")
    changes = {"learning_rate": 7.0, "finetune": str(origin), "epochs": 3, "threads": None}
    assert found == dataclasses.replace(config, **changes)
    file = Path("..", "settings.json")
    file.write_text(json.dumps({"finetune": str(origin), "epochs": 3}))
    assert printed(capsys, "--config", str(file)) == found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{file}: no such file"),
        ("{", "{file}: expected settings as JSON: Expecting property name"),
        ("[1]", "{file}: expected settings as a JSON object, got list"),
        ('{"lr": 1}', "{file}: unknown settings: lr; did you mean learning_rate?"),
        ('{"epochs": "3"}', "{file}: epochs: expected int, got '3'"),
    ],
)
def test_files_that_are_no_settings(
    content: str | None, message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path("..", "settings.json")
    if content is not None:
        file.write_text(content)
    error = fails(capsys, "train", "--config", str(file))
    assert error.startswith("hstree: --config: " + message.replace("{file}", str(file)))


@pytest.mark.parametrize("name", ["ptb-mos", "wt2-trees"])
def test_a_small_model_trains_by_a_preset(
    name: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--preset", name, "--data", str(data), "--run", "first", *TINY]
    shape = ["--clusters", "4"] if name == "wt2-trees" else []
    assert main([*command, "--averaging-epoch", "1", "--epochs", "2", *shape]) == 0
    assert "averaging of the weights begins after epoch 1" in capsys.readouterr().out
    records = [json.loads(line) for line in Path("first/metrics.jsonl").read_text().splitlines()]
    assert [record["averaged"] for record in records] == [False, True]

    assert main(["train", "--finetune", "first", "--run", "second", "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert "starting from first, validation perplexity" in out
    assert "averaged" in out
    assert load_run("second").config.finetune == str(Path("first").resolve())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset ptb", "invalid choice: 'ptb'"),
        ("--preset ptb-mos --finetune x", "--preset: expected this or --finetune, got both"),
        ("--preset ptb-mos --config x", "--preset: expected this or --config, got both"),
        ("--resume y --config x", "--config: expected this or --resume, got both"),
        # Its epochs would take weeks on the docstrings of Python.
        ("--preset wt2-mos", "--preset: expected the folder of WikiText-2, or hf:Salesforce/wikit"),
        ("--finetune x", "x: no such run folder"),
        ("--n-trees 2 --head softmax", "--n-trees: expected the head 'trees' or 'forest', which"),
        ("--gate context --preset ptb-mos --data {data}", "--gate: expected the head 'trees' or"),
        (
            "--optimizer sgd --averaging nt --head trees --sparse --n-trees 1 --clusters 4",
            "averaged SGD does not su",
        ),
    ],
)
def test_what_does_not_go_together(
    flags: str, message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ("--preset", "--finetune", "--resume")
    command = (
        [] if flags.startswith(sources) or "--preset" in flags else ["--data", "{data}", *TINY]
    )
    words = [word.replace("{data}", str(data)) for word in [*command, *flags.split()]]
    assert message in fails(capsys, "train", *words)
    assert list(Path().iterdir()) == []


def test_a_model_beyond_memory(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "2", "--hidden-size", "1000000", "--bptt", "999999999"]
    error = fails(capsys, "train", "--data", str(data), *TINY, *flags, status=1)
    assert error.startswith("hstree: memory ran out; a model with smaller --embedding-size, --hidd")
    assert error.endswith("; nothing was written\n")
    assert list(Path().iterdir()) == []
