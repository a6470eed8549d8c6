"""What a line of metrics.jsonl and summary.json hold."""

from __future__ import annotations

import json
import math

import pytest

from hstree.lm.report import EpochRecord, HeadCost, Summary, perplexity

RECORD = EpochRecord(3, 120, 0.25, 5.5, 5.25, True, 1e4, 12.5, averaged=True)
SUMMARY = Summary(
    *("text", "trees", 9, 80, 3, 2),
    *(12.5, 13.5, 20.0, 21.0),
    *(400, 90, HeadCost(70, 0.002, 0.003), 60.5),
)


def test_round_trip() -> None:
    line = RECORD.to_json()
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert json.loads(line)["valid_perplexity"] == RECORD.valid_perplexity == math.exp(5.25)
    assert json.loads(line)["train_perplexity"] == RECORD.train_perplexity == math.exp(5.5)
    assert EpochRecord.from_json(line) == RECORD
    assert json.loads(SUMMARY.to_json())["cost"]["ratio"] == SUMMARY.cost.ratio == 1.5
    assert Summary.from_json(SUMMARY.to_json()) == SUMMARY


def test_perplexity_beyond_a_float() -> None:
    assert perplexity(700.0) == perplexity(math.inf) == math.inf
    record = EpochRecord(1, 1, 0.1, 1e6, math.inf, True, 1.0, 1.0)
    assert EpochRecord.from_json(record.to_json()) == record
    assert record.train_perplexity == record.valid_perplexity == math.inf


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epoch", 1.0, "expected 'epoch' to be int, got 1.0"),
        ("epoch", True, "expected 'epoch' to be int, got True"),
        ("best", 1, "expected 'best' to be bool, got 1"),
        ("seconds", "1", "expected 'seconds' to be float, got '1'"),
        ("averaged", None, "expected 'averaged' to be bool, got None"),
    ],
)
def test_other_types(name: str, value: object, message: str) -> None:
    values = json.loads(RECORD.to_json()) | {name: value}
    with pytest.raises(ValueError, match=message):
        EpochRecord.from_json(json.dumps(values))


def test_cost_of_another_kind() -> None:
    values = json.loads(SUMMARY.to_json())
    for cost, message in ((1.5, "'cost' to be HeadCost, got 1.5"), ({}, "'rows' to be int")):
        with pytest.raises(ValueError, match=message):
            Summary.from_json(json.dumps(values | {"cost": cost}))
