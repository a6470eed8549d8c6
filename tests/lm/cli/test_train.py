"""``hstree train``: presets, printed settings, fine-tuning."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lm.training.toy import write_corpus

from hstree.__main__ import main
from hstree.heads import head_names
from hstree.lm.config import PRESETS, TrainConfig, preset
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
    assert main(["train", "--print-config", "json", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert list(Path().iterdir()) == []
    return TrainConfig.from_json(captured.out)


def fails(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_settings_are_printed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == TrainConfig()
    assert printed(capsys, "--epochs", "3", "--tied") == TrainConfig(epochs=3, tied=True)
    for name in PRESETS:
        assert printed(capsys, "--preset", name) == preset(name)


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, list[str]], str]:
    """The rows of the table of settings by their names, and the whole output."""
    assert main(["train", *flags, "--print-config"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [re.split(r"\s{2,}", line.strip()) for line in captured.out.splitlines()]
    table = [line for line in lines if len(line) == 3]
    assert table[0] == ["setting", "value", "source"]
    rows = {name: cells for name, *cells in table[1:]}
    return rows, captured.out


def test_each_printed_setting_has_its_source(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    rows, out = shown(capsys)
    assert list(rows) == names
    assert rows["epochs"] == ["8", "default"]
    assert {source for _, source in rows.values()} == {"default"}
    assert "http" not in out

    flags = ["--preset", "ptb-mos", "--clip", "0.5", "--head-option", "components=5"]
    rows, out = shown(capsys, *flags, "--head-option", "bias=false")
    options = {"bias_start", "latent_dropout", "components", "bias"}
    expected = {*names, *(f"head_option {option}" for option in options)} - {"head_option"}
    assert set(rows) == expected
    assert rows["embedding_size"] == ["280", "MoS README"]
    assert rows["averaging"] == ["et", "study"]
    assert rows["variable_bptt"] == ["yes", "AWD-LSTM code"]
    assert rows["clip"] == ["0.5", "given"]
    assert rows["save_interval"] == ["600", "default"]
    assert rows["head"] == ["mos", "preset"]
    assert rows["head_option components"] == ["5", "given"]
    assert rows["head_option bias"] == ["no", "given"]
    assert rows["head_option latent_dropout"] == ["0.29", "MoS README"]
    assert "\nMoS README: commands in the README of https://github.com/zihangdai/mos" in out
    assert "\nhstree: " not in out

    rows, _ = shown(capsys, "--preset", "ptb-trees", "--head", "softmax")
    assert rows["head"] == ["softmax", "given"]
    assert rows["dropout"] == ["0.4", "AWD-LSTM code"]


def test_printed_settings_of_finetuning(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Path("first").mkdir()
    config = TrainConfig(
        head="mos",
        head_option=("components=3",),
        optimizer="sgd",
        finetune_learning_rate=7.0,
        threads=2,
    )
    Path("first/config.json").write_text(config.to_json())
    rows, _ = shown(capsys, "--finetune", "first", "--epochs", "3")
    assert rows["learning_rate"] == ["7", "finetune_learning_rate"]
    assert rows["finetune"] == ["first", "given"]
    assert rows["epochs"] == ["3", "given"]
    assert rows["optimizer"] == ["sgd", "run first"]
    assert rows["head_option components"] == ["3", "run first"]
    assert rows["threads"] == ["-", "default"]


def test_flags_replace_what_a_preset_says(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "wt2-mos", "--no-tied", "--learning-rate", "1", "--no-variable-bptt"]
    config = printed(capsys, *flags, "--head-option", "components=3", "--data", "x")
    expected = {"tied": False, "learning_rate": 1.0, "variable_bptt": False, "data": "x"}
    assert config == preset("wt2-mos", **expected, head_option=("components=3",))


@pytest.mark.parametrize(
    "flags",
    [
        ["--head", "softmax", "--tied", "--epochs", "3", "--seed", "7"],
        ["--preset", "wt2-mos", "--clip", "0.5", "--threads", "2"],
        ["--preset", "ptb-trees", "--data", "x"],
    ],
    ids=lambda flags: flags[1],
)
def test_printed_settings_are_read_back(
    flags: list[str], tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = printed(capsys, *flags)
    file = tmp_path / "settings.json"
    file.write_text(config.to_json())
    assert printed(capsys, "--config", str(file)) == config
    changed = printed(capsys, "--config", str(file), "--epochs", "11", "--no-tied")
    assert changed == dataclasses.replace(config, epochs=11, tied=False)


def test_a_part_of_the_settings_in_a_file(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of the head are replaced one by one; those of another head are dropped."""
    monkeypatch.setenv("COLUMNS", "120")
    file = Path("..", "settings.json")
    options = ["components=5", "latent_dropout=0.2"]
    file.write_text(json.dumps({"head": "mos", "epochs": 3, "head_option": options}))
    rows, _ = shown(capsys, "--config", str(file), "--head-option", "components=7")
    assert rows["epochs"] == ["3", f"file {file}"]
    assert rows["head_option components"] == ["7", "given"]
    assert rows["head_option latent_dropout"] == ["0.2", f"file {file}"]
    assert rows["clip"] == ["1", "default"]
    config = printed(capsys, "--config", str(file), "--head", "softmax")
    assert config == TrainConfig(head="softmax", epochs=3)


def test_settings_of_finetuning_in_a_file(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    config = TrainConfig(head="softmax", optimizer="sgd", finetune_learning_rate=7.0, layers=2)
    (origin / "config.json").write_text(config.to_json())
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"finetune": str(origin), "epochs": 3}))
    config = printed(capsys, "--config", str(file))
    assert (config.layers, config.epochs, config.learning_rate) == (2, 3, 7.0)
    file.write_text(config.to_json())
    assert printed(capsys, "--config", str(file)) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{file}: no such file"),
        ("{", "{file}: expected settings as JSON: Expecting property name"),
        ("[1]", "{file}: expected settings as a JSON object, got list"),
        ('{"learning": 1}', "{file}: unknown settings: learning"),
        ('{"lr": 1}', "{file}: unknown settings: lr; did you mean learning_rate?"),
        ('{"epochs": "3"}', "{file}: epochs: expected int, got '3'"),
        ('{"dropout": 1.5}', "{file}: dropout: expected a probability in [0, 1), got 1.5"),
        ('{"schedule": "step"}', "{file}: schedule: expected one of cosine, linear, constant"),
        ('{"head_option": [1]}', "{file}: head_option: expected a tuple of str, got (1,)"),
        (r'{"finetune": "a\u0000"}', "{file}: finetune: expected text without NUL, got 'a\\x00'"),
        (r'{"run": "\ud800"}', "{file}: run: expected text in UTF-8, got '\\ud800'"),
    ],
)
def test_files_that_are_no_settings(
    content: str | None,
    message: str,
    tmp_path: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "settings.json"
    if content is not None:
        file.write_text(content)
    error = fails(capsys, "--config", str(file))
    assert error.startswith("hstree: --config: " + message.replace("{file}", str(file)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"finetune": "absent"}, "absent: no such run folder"),
        ({"finetune": "x" * 300}, f"{'x' * 300}: no such run folder"),
        ({"head_option": ["red"]}, "--head-option: expected KEY=VALUE, got 'red'"),
        ({"accumulate": 3}, "--accumulate: expected a divisor of --batch-size 20, got 3"),
        ({"averaging": "nt"}, "--averaging: averaged SGD needs --optimizer sgd, got adamw"),
        ({"head": "tree"}, f"head: expected one of {', '.join(head_names())}, got 'tree'"),
        ({"data": "absent"}, "absent: no such file or folder"),
        ({"data": "x" * 300}, f"{'x' * 300}: no such file or folder"),
        ({"tokenizer": "x" * 300}, f"--tokenizer: {'x' * 300}: no such file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_settings_of_a_file_that_do_not_work(
    settings: dict[str, Any], message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the file, a flag or both are the cause, the file is named."""
    file = Path("..", "settings.json")
    file.write_text(json.dumps({"data": str(data)} | settings))
    error = fails(capsys, "--config", str(file), "--seed", "2")
    assert error == f"hstree: {message} (with --config {file})\n"


@pytest.mark.parametrize("name", ["ptb-softmax", "ptb-mos", "wt2-trees"])
def test_a_small_model_trains_by_a_preset(
    name: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--preset", name, "--data", str(data), "--run", "first", *TINY]
    shape = ["--root", "4"] if name == "wt2-trees" else []
    assert main([*command, "--averaging-epoch", "1", "--epochs", "2", *shape]) == 0
    assert "averaging of the weights begins after epoch 1" in capsys.readouterr().out
    records = [json.loads(line) for line in Path("first/metrics.jsonl").read_text().splitlines()]
    assert [record["averaged"] for record in records] == [False, True]

    assert main(["train", "--finetune", "first", "--run", "second", "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert "starting from first, validation perplexity" in out
    assert "averaged" in out
    assert load_run("second").config.finetune == str(Path("first").resolve())


def test_what_does_not_go_together(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'ptb'" in fails(capsys, "--preset", "ptb")
    error = fails(capsys, "--preset", "ptb-mos", "--finetune", "x")
    assert error == "hstree: --preset: expected this or --finetune, got both\n"
    assert "x: no such run folder" in fails(capsys, "--finetune", "x")
    error = fails(capsys, "--preset", "ptb-mos", "--config", "x")
    assert error == "hstree: --preset: expected this or --config, got both\n"
    error = fails(capsys, "--resume", "y", "--config", "x")
    assert error == "hstree: --config: expected this or --resume, got both\n"
    error = fails(capsys, "--averaging", "nt")
    assert error == "hstree: --averaging: averaged SGD needs --optimizer sgd, got adamw\n"
    command = ["--data", str(data), *TINY, "--optimizer", "sgd", "--averaging", "nt", "--sparse"]
    error = fails(capsys, *command, "--n-trees", "1", "--root", "4")
    assert "--averaging, --finetune: averaged SGD does not support row-sparse gradients" in error
    assert "without --sparse" in error
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--n-trees 2 --head softmax", "--n-trees: expected the head 'trees' or 'forest', which"),
        ("--sparse --head mos", "--sparse: expected the head 'trees' or 'sampled' or 'forest'"),
        ("--gate context --preset ptb-mos", "--gate: expected the head 'trees' or 'forest',"),
        ("--head-option n_trees=3", "--head-option: expected --n-trees for 'n_trees', got n_tr"),
        ("--head mos --head-option tied=true", "--head-option: expected --tied for 'tied', got"),
        ("--head-option ignore_index=0", "--head-option: expected no 'ignore_index', as a perpl"),
        ("--head-option reduction=sum", "--head-option: expected no 'reduction', as a perplexity"),
        ("--head plif --head-option intervals=100000000", "intervals: expected a whole number fro"),
        ("--n-trees 1000000", "--n-trees: expected at most 1024, got 1000000"),
        ("--hidden-size 1000000000000", "--hidden-size: expected at most 1048576, got 10000000"),
        ("--layers 100000000", "--layers: expected at most 1024, got 100000000"),
        ("--context-size 100000000", "--context-size: expected at most 1048576, got 100000000"),
        (
            "--batch-size 999999999",
            "--batch-size: expected at least 1000000000 tokens in the train",
        ),
    ],
)
def test_what_would_be_ignored_or_does_not_fit(
    flags: str, message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [] if "--preset" in flags else TINY
    assert message in fails(capsys, "--data", str(data), *command, *flags.split())
    assert list(Path().iterdir()) == []


def test_a_model_beyond_memory(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "2", "--hidden-size", "1000000", "--bptt", "999999999"]
    assert main(["train", "--data", str(data), *TINY, *flags]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("hstree: memory ran out; a model with smaller --embedding-size, --hidd")
    assert error.endswith("; nothing was written\n")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ptb-softmax", "Penn Treebank"),
        ("ptb-trees", "Penn Treebank"),
        ("wt2-mos", "WikiText-2, or hf:Salesforce/wikitext:wikitext-2-v1,"),
    ],
)
def test_a_preset_needs_its_text(
    name: str, text: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its epochs would take weeks on the docstrings of Python."""
    assert fails(capsys, "--preset", name, "--epochs", "1") == (
        f"hstree: --preset: expected the folder of {text} as --data for {name}, got no --data\n"
    )
    assert list(Path().iterdir()) == []
