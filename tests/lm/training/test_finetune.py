"""Settings of fine-tuning, and what does not fit the run it starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.toy import SGD, small_config, write_corpus

from hstree.lm.config import ConfigError
from hstree.lm.data import load_corpus
from hstree.lm.run import finetuning, load_config, load_run
from hstree.lm.train import build_optimizers, evaluate, starting_model, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data", sentences=100)
    train(small_config(data, folder / "run", **SGD, epochs=1, threads=1))
    return folder / "run"


def test_settings_are_those_of_the_run(run: Path) -> None:
    config = finetuning(run, learning_rate=5.0)
    theirs = load_config(run)
    assert config == replace(
        theirs, run=None, threads=None, device="auto", finetune=str(run), learning_rate=5.0
    )
    assert finetuning(run, run="there").run == "there"


def test_learning_rate_of_finetuning(run: Path, tmp_path: Path) -> None:
    """That of the run's settings, unless a learning rate is given."""
    own = load_config(run).learning_rate
    assert finetuning(run).learning_rate == own
    config = finetuning(run, finetune_learning_rate=25.0)
    assert (config.learning_rate, config.finetune_learning_rate) == (25.0, 25.0)
    settings = replace(load_config(run), finetune_learning_rate=20.0)
    (tmp_path / "config.json").write_text(settings.to_json())
    assert finetuning(tmp_path).learning_rate == 20.0
    assert finetuning(tmp_path, learning_rate=1.0).learning_rate == 1.0
    assert finetuning(tmp_path, finetune_learning_rate=None).learning_rate == own


def test_dropouts_and_learning_rates_may_differ(run: Path) -> None:
    changes = {
        "dropout": 0.0,
        "weight_dropout": 0.3,
        "embedding_noise": 0.1,
        "head_learning_rate_factor": 2.0,
    }
    config = finetuning(run, **changes)
    model = starting_model(config, load_run(run))
    assert model.backbone.dropout == 0.0
    assert model.backbone.dropout_input == 0.1
    assert model.backbone.weight_dropout == 0.3
    assert model.backbone.embedding_noise == 0.1
    (optimizer,) = build_optimizers(model, config)
    of_body, of_head = optimizer.param_groups
    assert of_head["factor"] == 2.0 * of_body["factor"]


def test_it_starts_from_the_best_weights_in_averaged_sgd(run: Path, tmp_path: Path) -> None:
    """A text is read with the vocabulary of the run."""
    other = write_corpus(tmp_path / "other", sentences=60, seed=3)
    (other / "train.txt").write_text((other / "train.txt").read_text() + "the zebra sleeps .\n")
    config = finetuning(run, run=str(tmp_path / "new"), data=str(other), dropout=0.1, epochs=2)
    result = train(config)
    first, second = load_run(run), load_run(tmp_path / "new")
    assert second.vocabulary == first.vocabulary
    assert second.config.dropout == second.model.backbone.dropout == 0.1
    assert all(record.averaged for record in result.records)
    valid = load_corpus(other, vocabulary=first.vocabulary).valid
    start, best = evaluate(first.model, valid), min(r.valid_loss for r in result.records)
    assert best < start
    assert evaluate(second.model, valid) == best


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([3.0, 2.0, 2.5, 2.5, 2.5, 1.0], [2.0, 2.5, 2.5, 2.5]), ([1.0, 2.0, 3.0], [2.0, 3.0])],
    ids=["non-monotone", "no better than the start"],
)
def test_when_it_ends(
    losses: list[float],
    expected: list[float],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = iter(losses)  # the first is that of the run
    monkeypatch.setattr("hstree.lm.train.evaluate", lambda *_, **__: next(rest, 1.0))
    epochs = 9 if len(losses) > 3 else 2
    result = train(finetuning(run, run=str(tmp_path / "new"), epochs=epochs, nonmono=2))
    assert [record.valid_loss for record in result.records] == expected
    assert result.summary.best_epoch == (1 if epochs == 9 else 0)
    if epochs == 2:
        theirs = load_run(run).model.state_dict()
        mine = load_run(tmp_path / "new").model.state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 20}, "--hidden-size: expected 16 as in .*run, .* got 20"),
        ({"head": "gss"}, "--head: expected 'softmax' as in"),
        ({"head_option": ("bias=false",)}, r"--head-option: expected \(\) as in"),
        ({"tied": True}, "--tied: expected False as in"),
        ({"max_vocabulary": 5}, "--max-vocabulary: expected None as in"),
        ({"tokenizer": "bpe"}, "--tokenizer: expected None as in"),
    ],
)
def test_another_model_is_refused(
    changes: dict[str, Any], message: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(finetuning(run, run=str(tmp_path / "new"), **changes))
    assert list(tmp_path.iterdir()) == []
