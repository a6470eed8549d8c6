"""Parts of messages: what was given, and what may have been meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from hstree.__main__ import main
from hstree.lab.study import parse_study
from hstree.lm.config import TrainConfig
from hstree.lm.data import Vocabulary, load_corpus
from hstree.lm.report import meant, quoted, shortened

LONG = "x" * 20_000
FLAGS = (
    "--learning-rate",
    "--layers",
    "--clusters",
    "--head",
    "--weight-decay",
    "--weight-dropout",
)


def test_what_may_be_meant() -> None:
    for given, expected in {
        "--lr": "--learning-rate",
        "--learning_rate": "--learning-rate",
        "--haed": "--head",
        "--wd": "--weight-decay or --weight-dropout",
    }.items():
        assert meant(given, FLAGS) == f"; did you mean {expected}?"
    for given in ("--colour", "-x", "", LONG):
        assert meant(given, FLAGS) == ""


def test_long_values_are_shortened() -> None:
    assert quoted("a'b") == repr("a'b")
    assert quoted(LONG) == f"'{'x' * 80}'... (20,000 characters)"
    assert len(quoted([LONG])) < 120
    assert shortened("abc", 3) == "abc"
    assert shortened("abcd", 3) == "abc... (4 characters)"


def test_no_error_repeats_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(f"{LONG} " * 50)
    for message, call in {
        "only": lambda: load_corpus(tmp_path / "text.txt"),
        "is already": lambda: Vocabulary([LONG, LONG], [1, 1]),
        "expected one of": lambda: TrainConfig(schedule=LONG),  # type: ignore[arg-type]
        "expected KEY=VALUE": lambda: TrainConfig(head_option=(LONG,)),
        "seeds": lambda: parse_study(f'seeds = "{LONG}"\n[[models]]\nhead = "softmax"\n'),
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert len(str(raised.value)) < 2500, message
    for arguments in (["train", "--data", LONG], ["train", f"--{LONG}"], [LONG]):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err) < 2500, arguments[:2]
