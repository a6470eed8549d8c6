"""``hstree train``: presets, printed settings, fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training.toy import write_corpus

from hstree.cli import main
from hstree.runs import TrainConfig, load_run
from hstree.training import PRESETS, preset

TINY = [
    *("--embedding-size", "8", "--hidden-size", "8", "--context-size", "8", "--batch-size", "8"),
    *("--bptt", "10", "--learning-rate", "2", "--device", "cpu"),
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small corpus; the working folder is an empty one."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return write_corpus(tmp_path / "data", sentences=100)


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> TrainConfig:
    assert main(["train", "--print-config", *flags]) == 0
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


def test_flags_replace_what_a_preset_says(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "wt2-mos", "--no-tied", "--learning-rate", "1", "--no-variable-bptt"]
    config = printed(capsys, *flags, "--head-option", "components=3", "--data", "x")
    expected = {"tied": False, "learning_rate": 1.0, "variable_bptt": False, "data": "x"}
    assert config == preset("wt2-mos", **expected, head_option=("components=3",))


@pytest.mark.parametrize("name", ["ptb-softmax", "ptb-mos", "wt2-trees"])
def test_a_small_model_trains_by_a_preset(
    name: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--preset", name, "--data", str(data), "--run", "first", *TINY]
    assert main([*command, "--averaging-epoch", "1", "--epochs", "2", "--root", "4"]) == 0
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
    error = fails(capsys, "--averaging", "nt")
    assert error == "hstree: --averaging: averaged SGD needs --optimizer sgd, got adamw\n"
    command = ["--data", str(data), *TINY, "--optimizer", "sgd", "--averaging", "nt", "--sparse"]
    error = fails(capsys, *command, "--n-trees", "1", "--root", "4")
    assert "averaged SGD does not support the row-sparse gradients of the head 'trees'" in error
    assert "without --sparse" in error
    assert list(Path().iterdir()) == []
