"""The same steps in parts, in bfloat16 and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.runs import Recorder, metrics, tensors
from lm.training.toy import SGD, small_config, write_corpus

from hstree.lm.data import load_corpus
from hstree.lm.model import cpu_has_lstm
from hstree.lm.run import load_run
from hstree.lm.train import evaluate, resume, train

EXACT = {"dropout": 0.0, "dropout_input": 0.0, "dropout_hidden": 0.0, "epochs": 1}
HEADS: dict[str, dict[str, Any]] = {
    "softmax": {"alpha": 1.0, "beta": 1.0},
    "trees": {"head": "trees"},
    "sparse-trees": {"head": "trees", "sparse": True},
    "mos": {"head": "mos", "head_option": ("components=3",)},
    "adaptive": {"head": "adaptive", "head_option": ("cutoffs=[4,8]",)},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data", sentences=100)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures, which take longer than these trainings."""
    monkeypatch.setattr("hstree.lm.train.learning_curve", lambda *_: b"")


def losses(data: Path, run: Path, **changes: Any) -> list[float]:
    recorder = Recorder()
    train(small_config(data, run, **changes), recorder)
    return recorder.losses


@pytest.mark.parametrize("name", HEADS)
def test_accumulated_steps_are_the_same(name: str, data: Path, tmp_path: Path) -> None:
    """In parts of some streams and of one, of which the last has no target in the last window."""
    changes = SGD | EXACT | HEADS[name] | {"bptt": 7}
    whole = losses(data, tmp_path / "1", **changes)
    assert len(whole) > 10
    for parts in (2, 8):
        run = tmp_path / str(parts)
        assert losses(data, run, **changes, accumulate=parts) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16_learns(name: str, data: Path, tmp_path: Path) -> None:
    changes = HEADS[name] | {"epochs": 6}
    exact = losses(data, tmp_path / "float32", **changes)
    rounded = losses(data, tmp_path / "bfloat16", **changes, precision="bfloat16")
    # The adaptive head computes in float32 in any case.
    assert (rounded == exact) == (name == "adaptive" and not cpu_has_lstm(torch.bfloat16))
    assert rounded[:5] == pytest.approx(exact[:5], rel=0.02)
    run = load_run(tmp_path / "bfloat16")
    for file in ("model.safetensors", "last.safetensors"):
        for key, tensor in tensors(run.path / file).items():
            assert tensor.dtype != torch.bfloat16 or key.startswith("training.lstm.")
    corpus = load_corpus(data)
    valid = evaluate(run.model, corpus.valid)
    assert valid == min(record["valid_loss"] for record in metrics(run.path))
    assert valid < corpus.statistics().unigram_loss(corpus.valid[1:]) - 0.7  # half the perplexity


def test_an_lstm_in_float32_is_said_at_the_start_and_on_resumption(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without a bfloat16 LSTM, and not on one that has it."""
    said = "the LSTM layers run in float32"
    run = tmp_path / "run"
    for epochs, has_lstm in enumerate((True, False, True, False), start=1):
        for module in ("model", "train"):
            monkeypatch.setattr(f"hstree.lm.{module}.cpu_has_lstm", lambda _, has=has_lstm: has)
        if has_lstm and not cpu_has_lstm(torch.bfloat16):
            continue
        recorder = Recorder()
        if not run.exists():
            train(small_config(data, run, epochs=epochs, precision="bfloat16"), recorder)
        else:
            resume(run, recorder, epochs=epochs)
        assert sum(said in text for text in recorder.messages) == (not has_lstm)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_steps_are_the_same(data: Path, tmp_path: Path) -> None:
    changes = SGD | EXACT | {"bptt": 7}
    whole = losses(data, tmp_path / "eager", **changes)
    compiled = losses(data, tmp_path / "compiled", **changes, compile=True)
    assert compiled == pytest.approx(whole, rel=1e-5)
    eager, run = (load_run(tmp_path / name) for name in ("eager", "compiled"))
    assert run.model.state_dict().keys() == eager.model.state_dict().keys()
