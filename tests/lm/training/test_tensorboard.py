"""Events for TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import itertools
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lm.training.toy import small_config, write_corpus

from hstree.lm.report import EpochRecord, Reporter, TensorBoardLog
from hstree.lm.train import TrainingInterrupted, resume, train


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event file is a second younger than the one before: they are named and read in the
    order of seconds, and no run is resumed within the second in which it began."""
    seconds = itertools.count(1_800_000_000)
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer.time",
        SimpleNamespace(time=lambda: next(seconds)),
    )


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def close(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    """Equal steps, and values equal to the float32 that the events hold."""
    steps, values = zip(*found, strict=True)
    wanted_steps, wanted = zip(*expected, strict=True)
    return steps == wanted_steps and values == pytest.approx(wanted, rel=1e-6)


def record(epoch: int, step: int, loss: float) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        step=step,
        learning_rate=0.5 / epoch,
        train_loss=loss + 1.0,
        valid_loss=loss,
        best=True,
        tokens_per_second=1000.0 * epoch,
        seconds=2.0,
    )


def test_curves(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path / "run")
    log.message("nothing is written before training begins")
    assert not (tmp_path / "run").exists()
    log.start(2, 15)
    for step in range(1, 16):
        log.step(1, loss=float(step), tokens=1 if step % 2 else 3)
    log.epoch(record(1, 15, 3.0))
    for _ in range(15):
        log.step(2, loss=2.0, tokens=5)
    log.epoch(record(2, 30, 2.5))
    log.stop()

    found = curves(tmp_path / "run")
    # Steps 1, 3, 5, 7, 9 have one token each, 2, 4, 6, 8, 10 three; 11 and 13 to 15 are as many.
    first = (1 + 3 + 5 + 7 + 9 + 3 * (2 + 4 + 6 + 8 + 10)) / 20
    second = (11 + 13 + 15 + 3 * (12 + 14) + 5 * 5 * 2.0) / (9 + 25)
    losses = [(10, first), (20, second), (30, 2.0)]
    assert close(found["train/loss"], losses)
    assert close(found["train/perplexity"], [(step, math.exp(loss)) for step, loss in losses])
    assert found["valid/loss"] == [(15, 3.0), (30, 2.5)]
    assert close(found["valid/perplexity"], [(15, math.exp(3.0)), (30, math.exp(2.5))])
    assert found["learning_rate"] == [(15, 0.5), (30, 0.25)]
    assert found["tokens_per_second"] == [(15, 1000.0), (30, 2000.0)]
    assert len(found) == 6


def test_steps_before_an_interruption_are_not_lost(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.start(1, 20)
    for step in range(1, 14):
        log.step(1, loss=float(step), tokens=2)
    log.stop()
    log.stop()
    assert curves(tmp_path)["train/loss"] == [(10, 5.5), (13, 12.0)]

    log = TensorBoardLog(tmp_path)
    log.start(1, 20, step=13)
    for step in range(14, 21):
        log.step(1, loss=float(step), tokens=2)
    log.stop()
    assert curves(tmp_path)["train/loss"] == [(10, 5.5), (13, 12.0), (20, 17.0)]


def test_a_run_that_goes_on_from_an_earlier_step(tmp_path: Path) -> None:
    """As after a kill: what was written after the last save is written again."""
    log = TensorBoardLog(tmp_path)
    log.start(3, 20)
    for _ in range(20):
        log.step(1, loss=1.0, tokens=2)
    log.epoch(record(1, 20, 1.0))
    for _ in range(20):
        log.step(2, loss=2.0, tokens=2)
    log.epoch(record(2, 40, 2.0))
    log.stop()

    log = TensorBoardLog(tmp_path)
    log.start(3, 20, step=20)
    for epoch in (2, 3):
        for _ in range(20):
            log.step(epoch, loss=3.0, tokens=2)
        log.epoch(record(epoch, 20 * epoch, 3.0))
    log.stop()
    found = curves(tmp_path)
    assert found["train/loss"] == [(10, 1.0), (20, 1.0), (30, 3.0), (40, 3.0), (50, 3.0), (60, 3.0)]
    assert found["valid/loss"] == [(20, 1.0), (40, 3.0), (60, 3.0)]


def test_events_torn_by_a_kill_do_no_harm(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.start(1, 20)
    for _ in range(20):
        log.step(1, loss=1.0, tokens=2)
    log.stop()
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-7])

    log = TensorBoardLog(tmp_path)
    log.start(1, 20, step=10)
    for _ in range(10):
        log.step(1, loss=2.0, tokens=2)
    log.stop()
    found = curves(tmp_path)
    assert found["train/loss"] == [(10, 1.0), (20, 2.0)]
    assert [step for step, _ in found["train/perplexity"]] == [10, 20]


def test_a_loss_beyond_all_floats(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.start(1, 10)
    for _ in range(10):
        log.step(1, loss=1000.0, tokens=2)
    log.stop()
    assert curves(tmp_path)["train/perplexity"] == [(10, math.inf)]


class Signalled(Reporter):
    """Asks for the end after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves are those of an undisturbed run, but for points before the interruptions."""
    monkeypatch.setattr("hstree.lm.train.learning_curve", lambda *_: b"")
    data = write_corpus(tmp_path / "data", sentences=60)
    train(small_config(data, tmp_path / "undisturbed", epochs=4, tensorboard=True))
    with pytest.raises(TrainingInterrupted):
        train(small_config(data, tmp_path / "run", epochs=4, tensorboard=True), Signalled(3))
    with pytest.raises(TrainingInterrupted):
        resume(tmp_path / "run", Signalled(4))
    resume(tmp_path / "run")
    expected, found = curves(tmp_path / "undisturbed"), curves(tmp_path / "run")
    assert expected.keys() == found.keys()
    for tag in ("valid/loss", "valid/perplexity", "learning_rate"):
        assert len(expected[tag]) == 4
        assert found[tag] == expected[tag]
    expected_steps, steps = ([step for step, _ in c["train/loss"]] for c in (expected, found))
    assert steps == sorted({*expected_steps, 3, 7})
    assert found["train/loss"][-1] == pytest.approx(expected["train/loss"][-1])


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        ValueError,
        match=r"--tensorboard: needs the package .* pip install 'hstree\[tensorboard\]'",
    ):
        TensorBoardLog(tmp_path)
