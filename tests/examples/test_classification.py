"""The example of classification, at a small size."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "classification.py"
HEADS = [
    "linear",
    "adaptive",
    "trees",
    "clustered-tree",
    "clustered-trees",
    "sampled-512",
    "sampled-2048",
]
SMALL: dict[str, Any] = {
    "classes": 1500,
    "batch_size": 64,
    "lr": 0.004,
    "seconds": 60.0,
    "steps": 60,
    "threads": 1,
}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("classification", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TRAIN_ROWS, module.TEST_ROWS = 10_000, 500
    yield module
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "labels"), [*((name, 1) for name in HEADS), ("linear", 5), ("clustered-tree", 5)]
)
def test_head_learns(name: str, labels: int, example: ModuleType) -> None:
    """Better than the most frequent labels, whatever the features."""
    assert list(example.HEADS) == HEADS
    result = example.measure(name, labels=labels, **SMALL)
    _, (_, target) = example.make_data(SMALL["classes"], labels, (10_000, 500))
    guess = torch.bincount(target.flatten(), minlength=SMALL["classes"]).topk(5).indices
    right = (guess[:, None] == target[:, None, :]).any(2).float()
    for n, found in zip((1, 5), result.precision, strict=True):
        assert 2 * right[:, :n].sum(1).mean() / min(n, labels) < found <= 1
    assert result.steps == SMALL["steps"]
    assert 0 < result.milliseconds < 1000
    assert 0 < result.before_mib <= result.peak_mib < 5000
    assert result.parameters > 0


def test_data_are_what_they_are_said_to_be(example: ModuleType) -> None:
    ((features, target),) = example.make_data(1000, 5, (20_000,))
    assert features.shape == (20_000, example.FEATURES)
    assert target.shape == (20_000, 5)
    assert (target.sort(1).values.diff(dim=1) > 0).all()  # five that differ
    assert (target % 10 == target[:, :1] % 10).all()  # of one of ten clusters
    assert torch.equal(example.make_data(1000, 5, (20_000,))[0][1], target)
    ((_, single),) = example.make_data(1000, 1, (100_000,))
    share = torch.bincount(single.flatten(), minlength=1000) / 100_000
    expected = 1 / (torch.arange(1000) + 10.0)
    torch.testing.assert_close(share[:20], (expected / expected.sum())[:20], rtol=0.2, atol=0)
    assert 0.4 < share[:100].sum() / (expected / expected.sum())[:100].sum() < 1.1


def test_loss_of_several_labels(example: ModuleType) -> None:
    """Repeated rows and one row of logits give the same mean."""
    hidden, target = torch.randn(6, 128), torch.randint(50, (6, 3))
    linear = torch.nn.Linear(128, 50)
    softmax = example.hstree.heads.Softmax(128, 50)
    softmax.load_state_dict(linear.state_dict())
    expected = torch.stack([F.cross_entropy(linear(hidden), column) for column in target.t()])
    for head in (linear, softmax):
        torch.testing.assert_close(example.loss(head, hidden, target), expected.mean())


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--classes", "150"], "--classes: expected a multiple of 100, got 150"),
        (["--labels", "101"], "--labels: expected 1 to 100, got 101"),
    ],
)
def test_bad_flags(
    flags: list[str], match: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(flags)
    assert match in capsys.readouterr().err


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--classes", "1000", "--steps", "5", "--heads", "trees"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| trees |")
    assert lines[2].count("|") == lines[0].count("|") == 8
    assert "torch and the data take" in lines[-1]
