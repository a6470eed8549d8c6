"""Press rank under rounding and noise: known ranks, the law of the noise's singular values; and the
command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hstree.__main__ import main
from hstree.lab import noise_ranks, reconstructions
from hstree.lab.rank import press_threshold
from hstree.lab.robustness import VARIANCES, expected_press_rank
from lab.commands import refused

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pruned_every_time_the_rank_stays(dtype: torch.dtype) -> None:
    ranks, change = reconstructions(120, 10, 12, dtype)
    assert ranks == [10] * 13
    assert 0 < change < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pruned_once_rounding_errors_accumulate(dtype: torch.dtype) -> None:
    few, _ = reconstructions(120, 10, 2, dtype, prune=False)
    assert few == [10] * 3
    many, _ = reconstructions(60, 5, 60, dtype, prune=False)
    assert many[0] == 5
    assert many[-1] > 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise(dtype: torch.dtype) -> None:
    """Around the c from which the largest singular value of the noise passes the threshold."""
    n = 200
    eps = torch.finfo(dtype).eps
    first = n * (2 * n + 1) * eps**2 / 16
    points = noise_ranks(n, [0.0, first / 2, 10 * first, 160 * first, 1e5 * first], 10, dtype)
    assert [point.press_rank for point in points[:2]] == [10, 10]
    assert points[3].press_rank == pytest.approx(0.9 * n, abs=6)
    assert points[4].press_rank >= n - 2
    for point in points:
        assert point.press_rank == pytest.approx(point.expected, abs=8)
        assert list(point.effective_ranks.values()) == [7, 9, 10]
    assert noise_ranks(n, [1.0], 10, dtype)[0].effective_ranks[1e-3] > 100


def test_expected_press_rank_is_the_quarter_circle_law() -> None:
    """Against the integral of its density, sqrt(4 - x^2) / pi."""
    n, c = 1000, 1e-24
    x = press_threshold((n, n), 1.0, torch.float64) / math.sqrt(c / n)
    steps = torch.linspace(x, 2, 200_001, dtype=torch.float64)
    above = float(torch.trapezoid((4 - steps**2).clamp(min=0).sqrt() / math.pi, steps))
    assert expected_press_rank(n, c, 10, torch.float64) == pytest.approx(n * above, rel=1e-6)
    assert expected_press_rank(n, 0.0, 10, torch.float64) == 10
    assert expected_press_rank(n, 1e-30, 10, torch.float64) == 10
    assert expected_press_rank(n, 1.0, 10, torch.float64) == pytest.approx(n)


def test_seeds() -> None:
    once = noise_ranks(50, [1e-27], 3, torch.float64)
    assert noise_ranks(50, [1e-27], 3, torch.float64) == once
    first, again, other = (reconstructions(40, 3, 2, torch.float64, seed) for seed in (0, 0, 1))
    assert first == again
    assert first[1] != other[1]


# The command


def test_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--size 60 --rank 4 --repetitions 2 --seed 3"
    assert main(["experiment", "robustness", *options.split()]) == 0
    out = capsys.readouterr().out
    assert "matrices of 60 x 60, rank 4, seed 3" in out
    assert {path.name for path in Path("robustness").iterdir()} == {
        "robustness.md",
        "robustness.json",
        "robustness.csv",
        "robustness-noise.png",
    }
    data = json.loads(Path("robustness/robustness.json").read_text())
    rows = data["reconstructions"]
    assert [(r["lowest_press_rank"], r["highest_press_rank"]) for r in rows] == [(4, 4)] * 4
    assert [row["pruned"] for row in rows] == ["every time"] * 2 + ["once"] * 2
    assert [point["c"] for point in data["noise"]] == VARIANCES * 2
    ranks = [point["press_rank"] for point in data["noise"]]
    assert [ranks[i] for i in (0, 25, 26, 51)] == [4, 60, 4, 60]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size 8", "--rank: expected a number below --size, 8, got 10"),
        ("--repetitions 0", "--repetitions: expected at least 1, got 0"),
    ],
)
def test_failures(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "experiment", "robustness", *options.split())
    assert not list(tmp_path.iterdir())
