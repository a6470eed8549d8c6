"""Runs that were saved before are read, evaluated and resumed.

``saved/interrupted`` was stopped in the second of two epochs, ``saved/finished`` has ended; both
learned ``saved/text``. A change of the format that they cannot follow needs a migration.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hstree.lm.config import TrainConfig
from hstree.lm.run import load_config, load_run, load_state, read_run
from hstree.lm.train import evaluate, resume

SAVED = Path(__file__).parent / "saved"
TEXT = str(SAVED / "text")


def test_finished_run_is_read() -> None:
    figures = read_run(SAVED / "finished")
    assert (figures.head, figures.seed, figures.best_epoch) == ("softmax", 7, 2)
    assert [record.averaged for record in figures.epochs] == [False, True]
    assert figures.final is not None
    assert figures.final.test_perplexity == pytest.approx(13.23321620670)
    assert figures.epochs[1].valid_perplexity == figures.final.valid_perplexity
    settings = json.loads((SAVED / "finished" / "config.json").read_text())
    # What it was saved without has its default.
    assert figures.settings == json.loads(TrainConfig().to_json()) | settings


@pytest.mark.parametrize("name", ["finished", "interrupted"])
def test_best_weights_have_the_loss_that_was_written(name: str) -> None:
    run = load_run(SAVED / name)
    corpus = run.corpus(TEXT)
    best = read_run(SAVED / name).best
    assert best is not None
    assert evaluate(run.model, corpus.valid) == pytest.approx(best.valid_loss, rel=1e-5)


def test_interrupted_run_goes_on_to_its_end(tmp_path: Path) -> None:
    """With the losses that the version which saved it went on to."""
    run = tmp_path / "run"
    shutil.copytree(SAVED / "interrupted", run)
    before = read_run(run)
    assert [record.epoch for record in before.epochs] == [1]
    _, _, values = load_state(run / "last.safetensors")
    assert values["trainer"]["position"]["epoch"] == 2
    result = resume(run, data=TEXT)
    assert [record.epoch for record in result.records] == [1, 2]
    assert result.records[0] == before.epochs[0]
    assert result.records[1].step == 2 * result.records[0].step
    after = read_run(run)
    assert after.final == result.summary
    assert result.records[1].train_loss == pytest.approx(2.483270916284, rel=1e-5)
    assert result.summary.test_perplexity == pytest.approx(13.09701723962, rel=1e-5)
    assert load_config(run).epochs == 2
