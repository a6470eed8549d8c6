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
import subprocess
import sys
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
from lm.training.toy import small_config, write_corpus
from safetensors.torch import save_file

from hstree.__main__ import main
from hstree.heads import Softmax, registry
from hstree.heads.base import HeadOutput
from hstree.lm import train as train_module
from hstree.lm.config import ConfigError, TrainConfig
from hstree.lm.run import CheckpointError, load_config, load_run
from hstree.lm.train import TrainingError, TrainingInterrupted, resume, train

SGD = {
    "optimizer": "sgd",
    "learning_rate": 10.0,
    "head_learning_rate_factor": 1.0,
    "clip": 0.25,
    "schedule": "constant",
    "warmup": 0,
}
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
    "nt": {**SGD, "averaging": "nt", "nonmono": 0, "variable_bptt": True, "epochs": 4},
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
        self.reports = self.stopped = 0

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

    def stop(self) -> None:
        self.stopped += 1


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
    # No step was made twice, and none was left out.
    assert len(losses) == total


def test_averaging_begins_amid_the_runs_above(undisturbed: Callable[[str], TrainConfig]) -> None:
    for name in ("nt", "et"):
        averaged = [record["averaged"] for record in metrics(Path(str(undisturbed(name).run)))]
        assert averaged == sorted(averaged)
        assert set(averaged) == {False, True}


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


def test_interrupted_after_the_last_epoch(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the final figures are missing."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    expected = undisturbed("adamw")
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "measure_head_cost", interrupt)
        assert go_on(replace(expected, run=str(tmp_path / "run"))) is not None
    assert not (tmp_path / "run" / "summary.json").exists()
    recorder = Recorder()
    resume(tmp_path / "run", recorder)
    assert recorder.losses == []
    assert_same_run(tmp_path / "run", Path(str(expected.run)))


def test_interrupted_while_the_state_is_loaded(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    expected = undisturbed("adamw")
    steps = metrics(Path(str(expected.run)))[0]["step"]
    config = replace(expected, run=str(tmp_path / "run"))
    assert go_on(config, Stop(step=steps + 1)) is not None
    with monkeypatch.context() as patch:
        patch.setattr("hstree.lm.train.load_corpus", interrupt)
        interrupted = go_on(config)
    assert interrupted is not None
    assert interrupted.run == tmp_path / "run"
    assert interrupted.best is not None
    assert interrupted.best.epoch == 1
    assert go_on(config) is None
    assert_same_run(tmp_path / "run", Path(str(expected.run)))


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


def test_saves_that_fail_one_after_the_other(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed("sparse-trees")
    config = replace(expected, run=str(tmp_path / "run"), save_interval=0.0)
    for at in itertools.count(1):
        faults = Faults(at, KeyboardInterrupt(), after=at % 2 == 0)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            faults.patch(patch)
            go_on(config)
        if faults.count < at or (tmp_path / "run" / "summary.json").exists():
            break
    assert at > 8
    assert_same_run(tmp_path / "run", Path(str(expected.run)))


def test_what_a_killed_start_has_left_is_removed(data: Path, tmp_path: Path) -> None:
    """But not what another process, whose run has a longer name, is writing at this moment."""
    own, other = tmp_path / ".run-abcd1234.part", tmp_path / ".run-2-abcd1234.part"
    for folder in (own, other):
        folder.mkdir()
        (folder / "config.json").write_text("half of")
    train(small_config(data, tmp_path / "run", epochs=1))
    assert {path.name for path in tmp_path.iterdir()} == {"run", other.name}
    assert (other / "config.json").exists()


def test_leftovers_of_a_killed_save_are_removed(
    undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    expected = undisturbed("adamw")
    config = replace(expected, run=str(tmp_path / "run"))
    assert go_on(config, Stop(step=2)) is not None
    for name in (".last.safetensors-abc.part", ".model.safetensors-xyz.part"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "last.safetensors").write_bytes(b"half of")
        (tmp_path / "run" / name / ".tmpXYZ").write_bytes(b"")
    go_on(config)
    assert_same_run(tmp_path / "run", Path(str(expected.run)))


# Changed settings


def test_more_epochs(data: Path, tmp_path: Path) -> None:
    settings = {"schedule": "constant", "warmup": 0, "weight_dropout": 0.1}
    train(small_config(data, tmp_path / "four", epochs=4, **settings))
    train(small_config(data, tmp_path / "two", epochs=2, **settings))
    with pytest.raises((ConfigError, CheckpointError), match=r"--epochs"):
        resume(tmp_path / "two")
    with pytest.raises((ConfigError, CheckpointError), match=r"--epochs"):
        resume(tmp_path / "two", epochs=1)
    forget()
    result = resume(tmp_path / "two", epochs=4)
    assert [record.epoch for record in result.records] == [1, 2, 3, 4]
    assert_same_run(tmp_path / "two", tmp_path / "four")
    assert load_config(tmp_path / "two").epochs == 4


def test_more_epochs_interrupted_before_the_final_figures(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final figures of the first epochs are not those of all."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    train(small_config(data, tmp_path / "run", epochs=1))
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "measure_head_cost", interrupt)
        with pytest.raises(TrainingInterrupted):
            resume(tmp_path / "run", epochs=2)
    assert resume(tmp_path / "run").summary.epochs == 2


def test_a_text_that_has_moved(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "here")
    train(small_config(data, tmp_path / "expected"))
    with pytest.raises(TrainingInterrupted):
        train(small_config(tmp_path / "here", tmp_path / "run"), Stop(step=2))
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(ValueError, match="here"):
        resume(tmp_path / "run")
    resume(tmp_path / "run", data=str(tmp_path / "there"))
    assert load_config(tmp_path / "run").data == str(tmp_path / "there")
    assert_same_run(tmp_path / "run", tmp_path / "expected")


def test_other_learning_rate(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", schedule="constant", warmup=0, epochs=4)
    with pytest.raises(TrainingInterrupted):
        train(config, Stop(step=5))
    with pytest.raises(TrainingInterrupted):
        resume(tmp_path / "run", Stop(step=5), learning_rate=0.001, clip=0.5)
    saved = load_config(tmp_path / "run")
    assert (saved.learning_rate, saved.clip) == (0.001, 0.5)
    result = resume(tmp_path / "run")
    rates = [record.learning_rate for record in result.records]
    assert rates == pytest.approx([0.01, 0.001, 0.001, 0.001])


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 3}, {"seed": 2}, {"head": "trees"}, {"batch_size": 4}],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_must_stay(
    changes: dict[str, Any], undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    shutil.copytree(Path(str(undisturbed("adamw").run)), tmp_path / "run")
    flag = "--" + next(iter(changes)).replace("_", "-")
    with pytest.raises(ConfigError, match=flag):
        resume(tmp_path / "run", epochs=5, **changes)
    assert load_config(tmp_path / "run").epochs == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--hidden-size", "3"],
        ["--run", "other"],
        ["--preset", "ptb-softmax"],
        ["--finetune", "other"],
        ["--optimizer", "sgd"],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_that_do_not_go_with_resume(
    flags: list[str],
    undisturbed: Callable[[str], TrainConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(undisturbed("adamw").run)
    assert main(["train", "--resume", run, "--epochs", "3", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--resume" in error
    assert flags[0] in error


# What cannot be resumed


@pytest.fixture
def stopped(undisturbed: Callable[[str], TrainConfig], tmp_path: Path) -> Path:
    """A run that was interrupted in its second epoch."""
    with pytest.raises(TrainingInterrupted):
        train(replace(undisturbed("adamw"), run=str(tmp_path / "run")), Stop(step=6))
    return tmp_path / "run"


def test_missing_parts(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such run folder"):
        resume(tmp_path / "absent")
    for name in ("last.safetensors", "config.json", "vocabulary.txt"):
        broken = tmp_path / "broken"
        shutil.copytree(stopped, broken)
        (broken / name).unlink()
        with pytest.raises(CheckpointError, match=re.escape(name)):
            resume(broken)
        shutil.rmtree(broken)


def test_every_truncation_is_noticed(stopped: Path) -> None:
    path = stopped / "last.safetensors"
    content = path.read_bytes()
    for length in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"last\.safetensors: .*truncated"):
            resume(stopped)
    path.write_bytes(content)
    resume(stopped)


def test_foreign_states(
    stopped: Path, undisturbed: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    path = stopped / "last.safetensors"
    content = path.read_bytes()
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"last\.safetensors"):
        resume(stopped)
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(CheckpointError, match=r"last\.safetensors"):
        resume(stopped)
    shutil.copyfile(stopped / "model.safetensors", path)
    with pytest.raises(CheckpointError, match=r"last\.safetensors"):
        resume(stopped)
    for other in ("sgd", "trees", "mos", "tied"):
        shutil.copyfile(Path(str(undisturbed(other).run)) / "last.safetensors", path)
        with pytest.raises(CheckpointError):
            resume(stopped)
    path.write_bytes(content)
    resume(stopped)


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 20), ("batch_size", 4), ("seed", 5), ("optimizer", "sgd")]
)
def test_settings_of_another_run(name: str, value: object, stopped: Path) -> None:
    """config.json was edited, or comes from elsewhere."""
    path = stopped / "config.json"
    content = path.read_text()
    path.write_text(json.dumps(json.loads(content) | {name: value}))
    with pytest.raises((CheckpointError, ConfigError), match=name.replace("_", "[-_]")):
        resume(stopped)
    path.write_text(content)
    resume(stopped)


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
    assert re.search(rf"the loss became nan in epoch \d, step {step}\b", message)
    assert "--learning-rate" in message
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_a_process(
    number: signal.Signals, status: int, data: Path, tmp_path: Path
) -> None:
    config = small_config(
        data, tmp_path / "expected", epochs=300, schedule="constant", threads=1, layers=2
    )
    flags = ["--embedding-size", "12", "--hidden-size", "16", "--layers", "2", "--dropout", "0.1"]
    flags += ["--dropout-input", "0.1", "--dropout-hidden", "0.1", "--batch-size", "8"]
    flags += ["--bptt", "10", "--learning-rate", "0.01", "--warmup", "5", "--head", "softmax"]
    flags += ["--schedule", "constant", "--device", "cpu", "--threads", "1", "--epochs", "300"]
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-m", "hstree", "train", "--data", str(data), "--run", "run", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch   2/300"):
                break
        with pytest.raises(CheckpointError, match="another process"):
            resume(run)
        process.send_signal(number)
        _, error = process.communicate()
    assert process.returncode == status, error
    *progress, last = error.splitlines()
    assert all(re.search(r"  \d+%  ", line) for line in progress), error  # of slow work
    assert "hstree train --resume run" in last
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    done = len(metrics(run))
    assert 2 <= done < 300
    forget()
    resume(run, epochs=done + 2)
    train(replace(config, epochs=done + 2))
    assert_same_run(run, tmp_path / "expected")
