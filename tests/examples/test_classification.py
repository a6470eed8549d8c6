"""The example of classification, at a small size."""

from __future__ import annotations

import importlib.util
import itertools
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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
    found = dict(zip(example.SCORES, result.scores, strict=True))
    for n in (1, 5):
        assert 2 * right[:, :n].sum(1).mean() / n < found[f"precision@{n}"] <= min(n, labels) / n
    assert found["recall@5"] == pytest.approx(found["precision@5"] * 5 / labels)
    assert 0 < found["nDCG@5"] <= 1
    assert 0 < found["PSP@5"] <= 1
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


def test_loss_skips_the_padding(example: ModuleType) -> None:
    hidden, target = torch.randn(3, 128), torch.tensor([[4, 7], [2, -1], [-1, -1]])
    linear = torch.nn.Linear(128, 50)
    softmax = example.hstree.heads.Softmax(128, 50)
    softmax.load_state_dict(linear.state_dict())
    log_prob = linear(hidden).log_softmax(1)
    expected = -(log_prob[0, 4] + log_prob[0, 7] + log_prob[1, 2]) / 3
    for head in (linear, softmax):
        torch.testing.assert_close(example.loss(head, hidden, target), expected)


def scores_of_a_row(first: list[int], labels: set[int], weight: list[float]) -> list[float]:
    """By their definitions; the best weights by trying all sets of labels."""

    def gain(order: Iterable[int]) -> float:
        return sum(1 / math.log2(i + 2) for i, c in enumerate(order) if c in labels)

    def worth(order: Iterable[int]) -> float:
        return sum(weight[c] for c in order if c in labels)

    if not labels:
        return [0.0] * 5
    n, hits = len(first), len(labels & {*first})
    sets = itertools.combinations(labels, min(n, len(labels)))
    best = max(worth(some) for some in sets)
    ideal = gain([*labels][:n])
    return [hits / n, hits / len(labels), gain(first) / ideal, worth(first), best]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_scores_are_those_of_a_loop(n: int, example: ModuleType) -> None:
    random = torch.Generator().manual_seed(n)
    n_rows, n_labels = 40, 12
    found = torch.rand(n_rows, n_labels, generator=random).argsort(1)[:, :5]
    target = torch.rand(n_rows, n_labels, generator=random).argsort(1)[:, :7]
    target[torch.rand(n_rows, 7, generator=random) < 0.6] = -1
    target[3] = -1
    counts = torch.randint(30, (n_labels,), generator=random)
    weight = example.inverse_propensity(counts, 500, 0.6, 2.6)
    for v in range(n_labels):
        exponent = -0.6 * math.log(int(counts[v]) + 2.6)
        share = 1 / (1 + (math.log(500) - 1) * 3.6**0.6 * math.exp(exponent))
        assert weight[v] == pytest.approx(1 / share)
    expected = [
        scores_of_a_row(row[:n], {c for c in labels if c >= 0}, weight.tolist())
        for row, labels in zip(found.tolist(), target.tolist(), strict=True)
    ]
    np.testing.assert_allclose(example.scores(found, target, weight, n), expected, rtol=1e-12)


ROWS = """3 4 6
5,2 0:3.0 3:4.0
 1:2.5
0 2:-1
"""


def test_read_data(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(ROWS)
    features, labels = example.read_data(str(path))
    assert features.toarray().tolist() == [
        pytest.approx([0.6, 0, 0, 0.8]),
        [0, 1, 0, 0],
        [0, 0, -1, 0],
    ]
    assert labels.toarray().tolist() == [[0, 0, 1, 0, 0, 1], [0] * 6, [1, 0, 0, 0, 0, 0]]
    assert example.batch((features, labels), np.array([0, 1]))[1].tolist() == [[2, 5], [-1, -1]]
    assert example.count_labels(labels, 6).tolist() == [1, 0, 1, 0, 0, 1]
    path.write_text(ROWS.replace(" 1:2.5", "1:2.5"))  # the same row
    assert (example.read_data(str(path))[0] != features).nnz == 0
    for text, match in [
        (ROWS.partition("\n")[2], r'train.txt: expected "N F V" in the first line, got \'5,2 0:3'),
        (ROWS + "1 0:1\n", "train.txt: expected 3 rows, as the first line says, got 4"),
    ]:
        path.write_text(text)
        with pytest.raises(SystemExit, match=match):
            example.read_data(str(path))


@pytest.mark.parametrize("name", HEADS)
def test_head_learns_from_a_file(name: str, example: ModuleType, tmp_path: Path) -> None:
    """Labels that one feature decides are found."""
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        lines = ["600 40 80"]
        for label in random.integers(40, size=600):
            other = int(random.integers(40))
            lines.append(f"{label},{label + 40} {label}:2 {other}:0.5")
        (tmp_path / part).write_text("\n".join(lines) + "\n")
    data = [str(tmp_path / part) for part in ("train", "test")]
    result = example.measure(name, labels=1, data=data, **SMALL | {"lr": 0.02})
    found = dict(zip(example.SCORES, result.scores, strict=True))
    assert found["precision@1"] > 0.8
    assert found["recall@5"] > 0.8
    assert found["precision@5"] == pytest.approx(found["recall@5"] * 2 / 5)


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
    assert lines[2].count("|") == lines[1].count("|") == lines[0].count("|") == 11
    assert "torch and the data take" in lines[-1]
