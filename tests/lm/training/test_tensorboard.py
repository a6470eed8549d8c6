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

from hstree.lm.report import Reporter
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


class Stop(Reporter):
    """Asks for the end after some steps; keeps sums of losses and tokens over resumptions."""

    left = 0

    def __init__(self) -> None:
        self.sums: list[tuple[float, int]] = []

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.sums.append((loss * tokens, tokens))
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


def test_curves_of_a_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over ten steps, and fewer before an interruption; no point is written twice."""
    monkeypatch.setattr("hstree.lm.train.learning_curve", lambda *_: b"")
    data = write_corpus(tmp_path / "data", sentences=60)
    run, recorder = tmp_path / "run", Stop()
    recorder.left = 3
    with pytest.raises(TrainingInterrupted):
        train(small_config(data, run, epochs=4, tensorboard=True), recorder)
    state = (run / "last.safetensors").read_bytes()
    recorder.left = 14
    with pytest.raises(TrainingInterrupted):
        resume(run, recorder)
    (run / "last.safetensors").write_bytes(state)  # as if killed, and not saved since
    del recorder.sums[3:]
    records = resume(run, recorder).records
    found = curves(run)
    assert len(found) == 6
    for tag, name in {
        "valid/loss": "valid_loss",
        "valid/perplexity": "valid_perplexity",
        "learning_rate": "learning_rate",
        "tokens_per_second": "tokens_per_second",
    }.items():
        assert [step for step, _ in found[tag]] == [record.step for record in records]
        expected = [getattr(record, name) for record in records]
        assert [value for _, value in found[tag]] == pytest.approx(expected, rel=1e-6)
    steps = [step for step, _ in found["train/loss"]]
    last = records[-1].step
    assert steps == sorted({3, last, *range(10, last, 10)})
    for (step, value), begin in zip(found["train/loss"], [0, *steps], strict=False):
        losses, tokens = zip(*recorder.sums[begin:step], strict=True)
        assert value == pytest.approx(sum(losses) / sum(tokens), rel=1e-6)
    values = [value for _, value in found["train/perplexity"]]
    assert values == pytest.approx([math.exp(loss) for _, loss in found["train/loss"]], rel=1e-5)


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before the work."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = small_config(tmp_path / "no data", tmp_path / "run", tensorboard=True)
    with pytest.raises(
        ValueError,
        match=r"--tensorboard: needs the package .* pip install 'hstree\[tensorboard\]'",
    ):
        train(config)
