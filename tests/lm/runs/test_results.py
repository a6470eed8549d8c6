"""The figures of run folders."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from hstree.lm.config import UNGROUPED, TrainConfig
from hstree.lm.report import EpochRecord, HeadCost, Summary, perplexity, read_json
from hstree.lm.run import CheckpointError, counterpart, read_run

from .made_up import SUMMARY, write_run


def test_finished_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", head="gss", seed=7))
    assert (run.head, run.seed, run.best_epoch) == ("gss", 7, 2)
    assert (run.valid_perplexity, run.test_perplexity) == (120.5, 118.25)
    assert run.final is not None
    assert (run.final.backbone_parameters, run.final.head_parameters) == (24_221_600, 10_000)
    assert (run.seconds_per_epoch, run.tokens_per_second) == (12.0, 2000.0)
    assert [epoch.epoch for epoch in run.epochs] == [1, 2, 3]
    # A default stands in for a setting that config.json lacks, and for no other.
    assert (run.settings["clip"], run.settings["dropout"]) == (TrainConfig().clip, 0.4)
    assert run.settings["head_option"] == []
    assert run.final.text == (10_000, 929_589, "639.3")
    assert run.final.valid_share == 1.0  # of a summary that was written without it


def test_unfinished_run_has_what_is_there(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", valid=(300.0, 250.0), test=None))
    assert (run.best_epoch, run.valid_perplexity) == (2, pytest.approx(250.0))
    assert run.test_perplexity is None
    assert run.final is None
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run = read_run(tmp_path / "run")
    assert run.epochs == ()
    assert run.best_epoch is run.valid_perplexity is run.seconds_per_epoch is None
    assert run.tokens_per_second is None


def test_infinite_perplexity_and_whole_numbers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", valid=(float("inf"), 90), test=89))
    assert [epoch.valid_perplexity for epoch in run.epochs] == [math.inf, pytest.approx(90.0)]
    assert run.test_perplexity == 89.0


def test_settings_that_make_the_model(tmp_path: Path) -> None:
    """All but those of the machine, and of other heads."""
    run = read_run(write_run(tmp_path / "trees", head="trees"))
    assert set(run.settings) - set(run.compared_settings()) == {*UNGROUPED, "all_classes"}
    shape = {"n_trees", "clusters", "binary"}
    of_trees = shape | {"gate", "recipe", "subset_size"}
    for head, more in (("sampled", set()), ("softmax", {"sparse", "all_classes"})):
        other = read_run(write_run(tmp_path / head, head=head))
        left_out = set(other.settings) - set(other.compared_settings())
        assert left_out == {*UNGROUPED, *of_trees, *more}


def test_fine_tuned_runs_are_known_by_the_settings_of_their_origin(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"first-{seed}", seed=seed)
        write_run(tmp_path / f"second-{seed}", seed=seed, finetune=str(tmp_path / f"first-{seed}"))
        write_run(tmp_path / f"third-{seed}", seed=seed, finetune=str(tmp_path / f"second-{seed}"))
    write_run(tmp_path / "other", dropout=0.1)
    write_run(tmp_path / "tuned-other", finetune=str(tmp_path / "other"))
    tuned = {
        name: read_run(tmp_path / name).compared_settings()
        for name in ("first-1", "second-1", "second-2", "third-1", "third-2", "tuned-other")
    }
    assert tuned["second-1"] == tuned["second-2"]
    assert tuned["third-1"] == tuned["third-2"]
    distinct = [tuned[name] for name in ("first-1", "second-1", "third-1", "tuned-other")]
    assert all(a != b for i, a in enumerate(distinct) for b in distinct[:i])
    gone = write_run(tmp_path / "orphan", finetune=str(tmp_path / "gone"))
    assert "gone" in str(read_run(gone).compared_settings()["finetune"])
    gone = write_run(tmp_path / "damaged", finetune="x" * 300)
    assert "xxx" in str(read_run(gone).compared_settings()["finetune"])
    itself = write_run(tmp_path / "itself", finetune=str(tmp_path / "itself"))
    assert read_run(itself).compared_settings()["finetune"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", r"config\.json: expected settings as JSON: "),
        ("config.json", "[]", "expected settings as a JSON object, got list"),
        ("config.json", '{"head": "gss", "seed": "x"}', "config.json: seed: expected int, got 'x'"),
        ("config.json", '{"head_option": ["x"]}', "config.json: --head-option: expected KEY=VALUE"),
        ("config.json", r'{"finetune": "\u0000"}', r"config\.json: finetune: expected text witho"),
        ("config.json", '{"finetune": "a"}', r"config\.json: --finetune: averaged SGD needs"),
        ("metrics.jsonl", "oops", r"metrics\.jsonl, line 1: expected a JSON object, got 'oops'"),
        ("metrics.jsonl", '{"epoch": 1}', "line 1: expected 'step' to be int, got None"),
        ("metrics.jsonl", '{"epoch": true}', "expected 'epoch' to be int, got True"),
        ("metrics.jsonl", '{"epoch": 1.0}', "expected 'epoch' to be int, got 1.0"),
        ("summary.json", "", r"summary\.json: expected a JSON object, got ''"),
        ("summary.json", "{}", r"summary\.json: expected 'corpus' to be str, got None"),
        ("summary.json", json.dumps(SUMMARY | {"classes": 1.5}), "'classes' to be int, got 1.5"),
    ],
)
def test_broken_files(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_run(folder)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"summary\.json: expected UTF-8 text"):
        read_run(folder)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: no such run folder"):
        read_run(tmp_path / "missing")
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"file: no such run folder"):
        read_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: not a run folder: config\.json missing$"):
        read_run(tmp_path / "empty")
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b")
    with pytest.raises(CheckpointError, match="its subfolders are runs: name one of them"):
        read_run(tmp_path / "runs")


def test_counterpart_has_another_head_and_the_same_settings(tmp_path: Path) -> None:
    trees = read_run(write_run(tmp_path / "trees", head="trees", n_trees=8, clusters=64))
    assert counterpart(trees, "softmax") is None
    write_run(tmp_path / "other-setting", dropout=0.3)
    write_run(tmp_path / "other-seed", seed=2)
    write_run(tmp_path / "tied", tied=True)
    write_run(tmp_path / "unfinished", test=None)
    write_run(tmp_path / "other-text", summary={"unigram_test_perplexity": 600.0})
    write_run(tmp_path / "other-head", head="gss")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "summary.json").write_text("{}")
    assert counterpart(trees, "softmax") is None
    for age, name in ((50, "older"), (10, "newer")):  # other machines are no other settings
        folder = write_run(tmp_path / name, head_option=["a=1"], threads=age)
        os.utime(folder / "summary.json", (time.time() - age,) * 2)
    found = counterpart(trees, "softmax")
    assert found is not None
    assert found.path == tmp_path / "newer"
    found = counterpart(found, "trees")
    assert found is not None
    assert found.path == trees.path


RECORD = EpochRecord(3, 120, 0.25, 5.5, 5.25, True, 1e4, 12.5, averaged=True)
FINAL = Summary(
    *("text", "trees", 9, 80, 3, 2),
    *(12.5, 13.5, 20.0, 21.0),
    *(400, 90, HeadCost(70, 0.002, 0.003), 60.5),
)


def test_records_round_trip() -> None:
    line = RECORD.to_json()
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert json.loads(line)["valid_perplexity"] == RECORD.valid_perplexity == math.exp(5.25)
    assert json.loads(line)["train_perplexity"] == RECORD.train_perplexity == math.exp(5.5)
    assert read_json(EpochRecord, line) == RECORD
    assert json.loads(FINAL.to_json())["cost"]["ratio"] == FINAL.cost.ratio == 1.5
    assert read_json(Summary, FINAL.to_json()) == FINAL


def test_perplexity_beyond_a_float() -> None:
    assert perplexity(700.0) == perplexity(math.inf) == math.inf
    record = EpochRecord(1, 1, 0.1, 1e6, math.inf, True, 1.0, 1.0)
    assert read_json(EpochRecord, record.to_json()) == record
    assert record.train_perplexity == record.valid_perplexity == math.inf
    values = json.loads(FINAL.to_json())
    for cost, message in ((1.5, "'cost' to be HeadCost, got 1.5"), ({}, "'rows' to be int")):
        with pytest.raises(ValueError, match=message):
            read_json(Summary, json.dumps(values | {"cost": cost}))
