"""A training whose memory does not suffice, or runs out at a step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.runs import assert_same_run
from lm.training.toy import QUICK, small_config, write_corpus
from safetensors import safe_open
from safetensors.torch import save_file

from hstree.__main__ import main
from hstree._memory import ran_out
from hstree.heads import Softmax, head_names, load_head
from hstree.lm.data import CorpusStatistics
from hstree.lm.runs import (
    CheckpointError,
    ConfigError,
    TrainConfig,
    checkpoint,
    load_model,
    load_run,
)
from hstree.lm.runs.checkpoint import load_state
from hstree.lm.runs.names import STATE
from hstree.lm.training import build_model, memory, resume, train
from hstree.lm.training.build import own_parameter_count

TESTS = Path(__file__).resolve().parents[2]
# Steps that allocate megabytes.
SIZES = {"hidden_size": 256, "batch_size": 16, "bptt": 30, "save_interval": 0.0, "epochs": 3}
STOP = """
import resource, sys
from pathlib import Path
import torch
from hstree.lm.training import Silent, TrainingMemoryError, train
from ops.limited import limit
from lm.training.toy import small_config

class Starve(Silent):
    steps = 0
    def step(self, epoch, loss, tokens):
        self.steps += 1
        if self.steps == 3:
            limit(1 << 20)

torch.set_num_threads(1)
data, run = map(Path, sys.argv[1:])
try:
    train(small_config(data, run, **{sizes}), Starve())
except TrainingMemoryError as error:
    limit(None)
    print(error)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data", sentences=200)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_runs_out_keeps_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real limit in a process of its own; where there is memory again, the run goes on."""
    run = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, "-c", STOP.replace("{sizes}", repr(SIZES)), str(data), str(run)],
        capture_output=True, text=True, check=False, cwd=TESTS,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("memory ran out; a run with a smaller --batch-size")
    assert f"resume with hstree train --resume {run}" in result.stdout
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    resume(run)
    load_run(run)
    train(small_config(data, tmp_path / "expected", **SIZES))
    torch.set_num_threads(threads)
    assert_same_run(run, tmp_path / "expected")


def test_a_command_says_that_memory_ran_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_config(data, tmp_path / "run", epochs=1))

    def exhaust(*_: object, **__: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr("hstree.lm.training.evaluate", exhaust)
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert re.match(r"hstree: memory ran out: .*allocat", capsys.readouterr().err)


def test_models_beyond_memory_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, two moments of AdamW, and what a step keeps."""
    monkeypatch.setattr(memory, "available_memory", lambda _: 10_000_000)
    train(small_config(data, tmp_path / "small", epochs=1))
    config = small_config(data, tmp_path / "large", hidden_size=1000)
    with pytest.raises(ConfigError, match=r"one of at least 6\d\.\d MiB, where 9\.5 MiB are"):
        train(config)
    assert not (tmp_path / "large").exists()


def test_row_sparse_embeddings_have_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 embeddings of 240 numbers have 38.4 MB with gradients and moments, else 28.8 MB."""
    monkeypatch.setattr(memory, "available_memory", lambda _: 34_000_000)
    sizes = {"embedding_size": 240, "hidden_size": 8, "layers": 1, "batch_size": 1, "bptt": 5}
    config = TrainConfig(head="softmax", **sizes)
    with pytest.raises(ConfigError, match="fit into memory"):
        memory.check_memory(config, 10_000, 100, torch.device("cpu"))
    config = replace(config, sparse_embedding=True)
    memory.check_memory(config, 10_000, 100, torch.device("cpu"))


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        ("adaptive", {"head_option": ("cutoffs=[10]",)}),
        ("trees", {"subset_size": 4, "n_trees": 1}),
        ("sampled", {"sparse": True}),
        ("mos", {"head_option": ("latent_features=4",)}),
    ],
)
def test_heads_of_fewer_numbers_are_not_refused(
    monkeypatch: pytest.MonkeyPatch, head: str, settings: dict[str, Any]
) -> None:
    """A softmax of 10,000 classes by 256 has 41 MB of weights, gradients and moments."""
    monkeypatch.setattr(memory, "available_memory", lambda _: 38_000_000)
    sizes = {"embedding_size": 8, "hidden_size": 256, "layers": 1, "batch_size": 1, "bptt": 5}
    with pytest.raises(ConfigError, match="fit into memory"):
        memory.check_memory(TrainConfig(head="softmax", **sizes), 10_000, 100, torch.device("cpu"))
    config = TrainConfig(head=head, **(sizes | settings))
    memory.check_memory(config, 10_000, 100, torch.device("cpu"))


@pytest.mark.parametrize(
    ("head", "option"),
    [
        ("mos", "components=99999999"),
        ("mos", f"components={10**15}"),  # more numbers than 64 bits can count
        ("mos", f"components={10**18}"),
        ("moc", "components=99999999"),
        ("doc", "experts=[0,99999999]"),
        ("mixtape", "gate_features=99999999"),
        ("mos-plif", "latent_features=99999999"),
        ("plif", "intervals=9999999"),
    ],
)
def test_options_of_heads_beyond_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, head: str, option: str
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda _: 100_000_000)
    sizes = {"embedding_size": 8, "hidden_size": 8, "layers": 1, "batch_size": 1, "bptt": 5}
    config = TrainConfig(head=head, **sizes)
    memory.check_memory(config, 1_000, 100, torch.device("cpu"))
    config = TrainConfig(head=head, head_option=(option,), **sizes)
    with pytest.raises(ConfigError, match=r"fit into memory.* sizes in --head-option, smaller"):
        memory.check_memory(config, 1_000, 100, torch.device("cpu"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", sorted(set(head_names()) - {"trees"}))
def test_weights_of_heads_are_counted(head: str, tied: bool) -> None:
    """Without building them."""
    sizes = {"embedding_size": 8, "hidden_size": 12, "context_size": 8, "layers": 2}
    config = TrainConfig(head=head, tied=tied, **sizes, head_option=QUICK.get(head, ()))
    statistics = CorpusStatistics.from_tokens([0, 1, 2, 3] * 10, 30)
    try:
        model = build_model(config, 30, statistics)
    except ConfigError:
        return  # cannot be tied
    own = own_parameter_count(model.head, model.backbone)
    assert memory._head_weights(config, 30, 8) == own


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("hstree: not enough memory for an operator"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("the loss became nan"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_errors_of_memory(error: BaseException, expected: bool) -> None:
    assert ran_out(error) == expected


def test_error_of_torch() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out(caught.value)


def test_files_without_the_memory_for_them_are_not_called_damaged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Softmax(4, 9).save(tmp_path / "head")
    run = train(small_config(data, tmp_path / "run", epochs=1)).run

    def exhaust(*_: object, **__: object) -> None:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")

    with monkeypatch.context() as patched:
        patched.setattr(Softmax, "from_config", exhaust)
        with pytest.raises(RuntimeError, match="allocat"):
            load_head(tmp_path / "head")
    with monkeypatch.context() as patched:
        loaded = checkpoint._loaded

        def exhaust_but_meta(*args: Any, assign: bool = False) -> Any:
            return loaded(*args, assign=True) if assign else exhaust()

        patched.setattr(checkpoint, "_loaded", exhaust_but_meta)
        with pytest.raises(RuntimeError, match="allocat"):
            load_model(run / "model.safetensors")
        with pytest.raises(RuntimeError, match="allocat"):
            load_state(run / STATE)


def test_a_damaged_file_that_asks_for_memory_is_damaged(data: Path, tmp_path: Path) -> None:
    file = train(small_config(data, tmp_path / "run", epochs=1)).run / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        description = json.loads(opened.metadata()["hstree.model"])
    description["backbone"]["embedding_size"] = 10**11
    save_file(tensors, file, {"hstree.model": json.dumps(description)})
    with pytest.raises(CheckpointError, match="inconsistent model file"):
        load_model(file)
