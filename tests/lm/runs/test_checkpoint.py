"""Reading run folders: what was written, and errors for what is missing, foreign or damaged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hstree.heads import Softmax
from hstree.lm.config import TrainConfig
from hstree.lm.data import Vocabulary, WhiteSpace, tokenizer_to_bytes
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.run import CheckpointError, RunDirectory, load_model, load_run, model_writer

VOCABULARY = Vocabulary(["<eos>", "a", "b", "<unk>"], [4, 3, 2, 0])


def make_model(n_classes: int = 4) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(AWDLSTM(n_classes, 3, 5), Softmax(5, n_classes))


def write_run(path: Path, model: LanguageModel | None = None) -> Path:
    directory = RunDirectory(path, "unused")
    directory.write(
        {
            "config.json": TrainConfig().to_json().encode(),
            "vocabulary.txt": VOCABULARY.to_bytes(),
            "tokenizer.json": tokenizer_to_bytes(WhiteSpace()),
            "model.safetensors": model_writer(model or make_model()),
        }
    )
    return path


def test_round_trip(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(CheckpointError, match=r"has 6 classes, but vocabulary.txt 4 words"):
        load_run(write_run(tmp_path / "other", make_model(6)))
    run = load_run(write_run(tmp_path / "run", model))
    assert run.config == TrainConfig()
    assert run.vocabulary == VOCABULARY
    for (name, mine), (other_name, other) in zip(
        model.state_dict().items(), run.model.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(mine, other)
        assert other.data_ptr() % 64 == 0


def test_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run folder"):
        load_run(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"not a run folder: config.json, vocab.* missing"):
        load_run(tmp_path)
    run = write_run(tmp_path / "run")
    for name in ("tokenizer.json", "model.safetensors"):
        content = (run / name).read_bytes()
        (run / name).unlink()
        with pytest.raises(CheckpointError, match=f"not a run folder: {name} missing"):
            load_run(run)
        (run / name).write_bytes(content)


def test_foreign_models(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="no such file"):
        load_model(path)
    model_writer(make_model())(path)
    content = path.read_bytes()
    for length in (0, 8, 100, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="not a safetensors file, or a truncated one"):
            load_model(path)
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="a safetensors file, but not a model of hstree"):
        load_model(path)
    Softmax(3, 4).save(path)
    with pytest.raises(CheckpointError, match="not a model of hstree"):
        load_model(path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("{}", "inconsistent model file: 'version'"),
        ("no json", "inconsistent model file"),
        ('{"version": 99}', "expected format version 7, got 99"),
        (
            '{"version": 7, "aliases": {}, "backbone": {"kind": "gru"}}',
            "expected the kind 'awd-lstm'",
        ),
        (
            '{"version": 7, "aliases": {"head.weight": "absent"}}',
            "inconsistent model file: 'absent'",
        ),
    ],
)
def test_inconsistent_models(tmp_path: Path, description: str, message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2)}, path, {"hstree.model": description})
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors import safe_open

    run = write_run(tmp_path / "run")
    path = run / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    del tensors["backbone.lstms.0.bias_ih_l0"]
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=r"backbone\.lstms\.0\.bias_ih_l0"):
        load_run(run)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"config\.json: expected settings as JSON"),
        ("config.json", b"\xff", r"config\.json: "),
        ("config.json", b'{"speed": 1}', r"config\.json: unknown settings: speed"),
        ("vocabulary.txt", b"a\t1", r"vocabulary\.txt: not a vocabulary file"),
        ("tokenizer.json", b"{}", r"tokenizer\.json: not a tokenizer"),
    ],
)
def test_damaged_text_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_run(run)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(value: float, tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.head.bias[2] = value
    run = write_run(tmp_path / "run", model)
    file = str(run / "model.safetensors")
    expected = f"^{re.escape(file)}: .* expected finite weights, got NaN or infinity in head.bias"
    for call in (lambda: load_run(run), lambda: load_model(file)):
        with pytest.raises(CheckpointError, match=expected):
            call()
