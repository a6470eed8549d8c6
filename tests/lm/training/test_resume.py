"""A run that was interrupted, or whose saving failed, and was resumed is the undisturbed run, bit
for bit."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from lm.training.runs import Recorder, assert_same_run, metrics, tensors
from lm.training.toy import SGD, small_config, write_corpus

from hstree.heads import Softmax, registry
from hstree.heads.base import HeadOutput
from hstree.lm import train as train_module
from hstree.lm.config import ConfigError, TrainConfig
from hstree.lm.run import CheckpointError, load_config, load_run
from hstree.lm.train import TrainingError, TrainingInterrupted, resume, train

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "adamw": {
        "layers": 2,
        "dropout_embedding": 0.1,
        "weight_dropout": 0.2,
        "embedding_noise": 0.1,
        "alpha": 1.0,
        "beta": 1.0,
    },
    "windows": {"variable_bptt": True, "bptt_margin": 2},
    "sgd": {**SGD, "variable_bptt": True, "weight_dropout": 0.2},
    "nt": {**SGD, "learning_rate": 10.0, "averaging": "nt", "nonmono": 0, "epochs": 4},
    "et": {**SGD, "averaging": "et", "averaging_epoch": 1, "layers": 2},
    "et-at-once": {**SGD, "averaging": "et", "averaging_epoch": 0},
    "trees": {"head": "trees", "subset_size": 8},
    "sparse-trees": {"head": "trees", "sparse": True},
    "sparse-trees-sgd": {**SGD, "head": "trees", "sparse": True, "variable_bptt": True},
    "sampled": {
        "head": "sampled",
        "sparse": True,
        "head_option": ("negatives=8",),
        "all_classes": 0.4,
    },
    "sparse-embedding": {"sparse_embedding": True},
    "mos": {"head": "mos", "head_option": ("components=3", "latent_dropout=0.3")},
    "plif": {"head": "plif", "head_option": ("intervals=1000",)},
    "tied": {"tied": True, "context_size": 12},
    "accumulate": {"accumulate": 2},
    "bfloat16": {"precision": "bfloat16"},
    "finetune": {**SGD, "learning_rate": 1.0, "nonmono": 5, "epochs": 3},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pictures, which take longer than these trainings; one thread, as the processes have that
    are started here."""
    monkeypatch.setattr(train_module, "learning_curve", lambda *_: b"")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data", sentences=40)


@pytest.fixture(scope="module")
def origin(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to be fine-tuned."""
    run = tmp_path_factory.mktemp("origin") / "run"
    train(small_config(data, run, **SGD, epochs=1))
    return run


@pytest.fixture(scope="module")
def undisturbed(
    data: Path, origin: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], TrainConfig]:
    """Settings of a configuration; the run folder that they name holds the undisturbed run."""
    done: dict[str, TrainConfig] = {}

    def run(name: str) -> TrainConfig:
        if name not in done:
            settings = dict(CONFIGURATIONS[name])
            if name == "finetune":
                settings["finetune"] = str(origin)
            folder = tmp_path_factory.mktemp(name) / "run"
            config = done[name] = small_config(data, folder, **settings)
            train(config)
        return done[name]

    return run


class Stop(Recorder):
    """Interrupts at a report: the n-th of all, or the n-th of a step."""

    def __init__(self, *, report: int | None = None, step: int | None = None) -> None:
        super().__init__()
        self.report, self.at_step = report, step
        self.reports = 0

    def _count(self) -> None:
        self.reports += 1
        if self.reports == self.report:
            raise KeyboardInterrupt

    def message(self, text: str) -> None:
        self._count()

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        self._count()

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        super().step(epoch, loss, tokens)
        if len(self.losses) == self.at_step:
            raise KeyboardInterrupt
        self._count()

    def epoch(self, record: Any) -> None:
        super().epoch(record)
        self._count()


def forget() -> None:
    """What a new process does not know: the states of all random generators."""
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def go_on(config: TrainConfig, reporter: Recorder | None = None) -> TrainingInterrupted | None:
    """Begin, or resume if the run folder is there. Returns the interruption if there is one."""
    forget()
    assert config.run is not None
    try:
        if Path(config.run).exists():
            resume(config.run, reporter)
        else:
            train(config, reporter)
    except TrainingInterrupted as interrupt:
        return interrupt
    return None


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_interrupted_after_every_few_steps(
    name: str, steps: int, undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    expected = undisturbed(name)
    config = replace(expected, run=str(tmp_path / "run"))
    losses: list[float] = []
    interruptions = 0
    while True:
        recorder = Stop(step=steps)
        interrupt = go_on(config, recorder)
        losses += recorder.losses
        assert recorder.stopped == 1
        if interrupt is None:
            break
        assert interrupt.run == tmp_path / "run"
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        interruptions += 1
    assert_same_run(tmp_path / "run", Path(str(expected.run)))
    total = metrics(tmp_path / "run")[-1]["step"]
    assert interruptions == total // steps
    if name in ("nt", "et"):  # averaging begins amid the run
        averaged = [record["averaged"] for record in metrics(tmp_path / "run")]
        assert set(averaged) == {False, True}
    # No step was made twice, and none was left out.
    assert len(losses) == total


def test_interrupted_at_every_report(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    """Also while the text is read and the model is built, when there is nothing to keep yet."""
    expected = undisturbed("mos")
    found = set()
    for report in itertools.count(1):
        run = tmp_path / str(report)
        config = replace(expected, run=str(run))
        interrupt = go_on(config, Stop(report=report))
        if interrupt is not None:
            found.add(interrupt.run is not None)
            assert (interrupt.run is not None) == run.exists()
            assert go_on(config) is None
        assert_same_run(run, Path(str(expected.run)))
        assert [path.name for path in tmp_path.iterdir()] == [run.name]
        shutil.rmtree(run)
        if interrupt is None:
            break
    assert found == {False, True}
    assert report > metrics(Path(str(expected.run)))[-1]["step"]


# Saves that fail


class Faults:
    """Makes the n-th file operation fail, before or after it has taken effect."""

    OPERATIONS = (
        (tempfile, "mkstemp"),
        (tempfile, "mkdtemp"),
        (safetensors.torch, "serialize_file"),
        (os, "chmod"),
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
    )

    def __init__(self, at: int, error: BaseException, *, after: bool) -> None:
        self.at, self.error, self.after = at, error, after
        self.count = 0

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, name in self.OPERATIONS:
            monkeypatch.setattr(module, name, self._failing(getattr(module, name)))

    def _failing(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            here = self.count == self.at
            if here and not self.after:
                raise self.error
            result = operation(*arguments, **keywords)
            if here:
                raise self.error
            return result

        return failing


@pytest.mark.slow
def test_any_file_operation_may_fail(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk before it takes effect, or an interruption after it has."""
    settings = {**CONFIGURATIONS["et"], "bptt": 40, "save_interval": 0.0}
    expected = tmp_path / "expected"
    train(small_config(data, expected, **settings))
    assert metrics(expected)[-1]["step"] == 2
    run = tmp_path / "run"
    for at in itertools.count(1):
        error = KeyboardInterrupt() if at % 2 else OSError(errno.ENOSPC, "No space left on device")
        faults = Faults(at, error, after=at % 2 == 1)
        with monkeypatch.context() as patch, suppress(type(error), CheckpointError):
            faults.patch(patch)
            go_on(small_config(data, run, **settings))
        if not (run / "summary.json").exists():
            assert faults.count >= at
            go_on(small_config(data, run, **settings))
        assert_same_run(run, expected)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "run"]
        shutil.rmtree(run)
        if faults.count < at:
            break
    # The state is saved five times; a save makes a file, fills, syncs and renames it.
    assert at > 5 * 4


def test_interrupted_after_the_last_epoch(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the final figures are missing: those of fewer epochs are gone."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    expected = undisturbed("adamw")
    run = tmp_path / "run"
    train(replace(expected, run=str(run), epochs=1, schedule="constant"))
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "head_cost", interrupt)
        with pytest.raises(TrainingInterrupted):
            resume(run, epochs=2)
    assert not (run / "summary.json").exists()
    recorder = Recorder()
    assert resume(run, recorder).summary.epochs == 2
    assert recorder.losses == []


# Changed settings, and what cannot be resumed


def test_more_epochs(data: Path, tmp_path: Path) -> None:
    settings = {"schedule": "constant", "warmup": 0, "weight_dropout": 0.1}
    train(small_config(data, tmp_path / "four", epochs=4, **settings))
    train(small_config(data, tmp_path / "two", epochs=2, **settings))
    for changes in ({}, {"epochs": 1}):
        with pytest.raises(ConfigError, match=r"--epochs"):
            resume(tmp_path / "two", **changes)
    forget()
    result = resume(tmp_path / "two", epochs=4)
    assert [record.epoch for record in result.records] == [1, 2, 3, 4]
    assert_same_run(tmp_path / "two", tmp_path / "four")


def test_other_settings_and_a_text_that_has_moved(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "here")
    run, config = tmp_path / "run", {"schedule": "constant", "warmup": 0, "epochs": 4}
    with pytest.raises(TrainingInterrupted):
        train(small_config(tmp_path / "here", run, **config), Stop(step=5))
    with pytest.raises(ConfigError, match="--seed: expected a setting that can change"):
        resume(run, seed=2)
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(ValueError, match="here"):
        resume(run)
    there = str(tmp_path / "there")
    with pytest.raises(TrainingInterrupted):
        resume(run, Stop(step=5), learning_rate=0.001, clip=0.5, data=there)
    saved = load_config(run)
    assert (saved.learning_rate, saved.clip, saved.data) == (0.001, 0.5, there)
    rates = [record.learning_rate for record in resume(run).records]
    assert rates == pytest.approx([0.01, 0.001, 0.001, 0.001])


@pytest.mark.parametrize("part", ["train", "valid"])
def test_a_changed_text_is_noticed(part: str, data: Path, tmp_path: Path) -> None:
    own = tmp_path / "data"
    shutil.copytree(data, own)
    with pytest.raises(TrainingInterrupted):
        train(small_config(own, tmp_path / "run"), Stop(step=2))
    path = own / f"{part}.txt"
    text = path.read_text()
    # As long as before, with the same words, each as often.
    lines = text.splitlines()
    path.write_text("\n".join(lines[1:] + lines[:1]) + "\n")
    with pytest.raises(CheckpointError, match="has changed"):
        resume(tmp_path / "run")
    path.write_text(text)
    resume(tmp_path / "run")


def test_damaged_and_foreign_files(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    """Each is named, nothing is written, and with the right files the run goes on."""
    with pytest.raises(CheckpointError, match="no such run folder"):
        resume(tmp_path / "absent")
    run = tmp_path / "run"
    with pytest.raises(TrainingInterrupted):
        train(replace(undisturbed("adamw"), run=str(run)), Stop(step=6))
    state, config = run / "last.safetensors", run / "config.json"
    content, settings = state.read_bytes(), config.read_text()
    for name in ("last.safetensors", "config.json", "vocabulary.txt", "tokenizer.json"):
        kept = (run / name).read_bytes()
        (run / name).unlink()
        with pytest.raises(CheckpointError, match=re.escape(name)):
            resume(run)
        (run / name).write_bytes(kept)
    for length in (0, 8, 100, len(content) // 2, len(content) - 1):
        state.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"last\.safetensors: .*truncated"):
            resume(run)
    shutil.copyfile(run / "model.safetensors", state)
    with pytest.raises(CheckpointError, match="expected a training state, got a model"):
        resume(run)
    for other in ("sgd", "trees", "mos", "tied"):
        shutil.copyfile(Path(str(undisturbed(other).run)) / "last.safetensors", state)
        with pytest.raises(CheckpointError, match=r"differs from config\.json"):
            resume(run)
    state.write_bytes(content.replace(b'\\"version\\": 7', b'\\"version\\": 6'))
    with pytest.raises(CheckpointError, match="expected format version 7, got 6"):
        resume(run)
    state.write_bytes(content)
    for name, value in {"hidden_size": 20, "seed": 5, "optimizer": "sgd"}.items():
        config.write_text(json.dumps(json.loads(settings) | {name: value}))
        with pytest.raises(CheckpointError, match=f"whose {name} differs"):
            resume(run)
    config.write_text(settings)
    resume(run)
    assert_same_run(run, Path(str(undisturbed("adamw").run)))


# Divergence


class Fragile(Softmax):
    """A softmax whose loss is not a number at one training step of the process."""

    name = "fragile"
    fails_at: int | None = None
    calls = 0

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> HeadOutput:
        output = super().forward(hidden, target)
        if self.training:
            type(self).calls += 1
            if self.calls == self.fails_at:
                return output._replace(loss=output.loss * math.nan)
        return output


@pytest.mark.parametrize("step", [1, 2, 6])
def test_divergence_keeps_the_last_good_state(
    step: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_HEADS", dict(registry._HEADS))
    registry.register_head(Fragile)
    expected = small_config(data, tmp_path / "expected", head="fragile", save_interval=0.0)
    train(expected)
    monkeypatch.setattr(Fragile, "calls", 0)
    monkeypatch.setattr(Fragile, "fails_at", step)
    run = tmp_path / "run"
    with pytest.raises(TrainingError) as caught:
        train(replace(expected, run=str(run)))
    message = str(caught.value)
    assert re.search(rf"the loss became nan in epoch \d, step {step}; try a lower --lea", message)
    kept = "no epoch had finished; the" if step < 6 else "the weights of epoch 1 and the"
    assert f"{kept} last good state" in message
    assert str(run) in message
    assert all(
        bool(tensor.isfinite().all()) for tensor in tensors(run / "last.safetensors").values()
    )
    if (run / "model.safetensors").exists():
        load_run(run)
    resume(run)
    assert_same_run(run, tmp_path / "expected")


# Signals


def test_a_signal_takes_effect_after_the_step(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    class Signalled(Recorder):
        def step(self, epoch: int, loss: float, tokens: int) -> None:
            super().step(epoch, loss, tokens)
            if len(self.losses) == 3:
                signal.raise_signal(number)

    expected = undisturbed("et")
    config = replace(expected, run=str(tmp_path / "run"))
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        recorder = Signalled()
        interrupt = go_on(config, recorder)
        assert interrupt is not None
        assert (interrupt.run, interrupt.signal) == (tmp_path / "run", number)
        assert len(recorder.losses) == 3
        assert signal.getsignal(number) is before
    go_on(config)
    assert_same_run(tmp_path / "run", Path(str(expected.run)))
