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

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reconstructions(dtype: torch.dtype) -> None:
    """Pruned every time, the rank stays; pruned once, rounding errors accumulate."""
    ranks, change = reconstructions(120, 10, 12, dtype)
    assert ranks == [10] * 13
    assert 0 < change < 100 * torch.finfo(dtype).eps
    once, _ = reconstructions(60, 5, 60, dtype, prune=False)
    assert once[0] == 5
    assert once[-1] > 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise(dtype: torch.dtype) -> None:
    """Around the c from which the largest singular value of the noise passes the threshold."""
    n = 200
    eps = torch.finfo(dtype).eps
    first = n * (2 * n + 1) * eps**2 / 16
    rows = noise_ranks(n, [0.0, first / 2, 10 * first, 160 * first, 1e5 * first], 10, dtype)
    ranks = [row["press_rank"] for row in rows]
    assert ranks[:2] == [10, 10]
    assert ranks[3] == pytest.approx(0.9 * n, abs=6)
    assert ranks[4] >= n - 2
    assert ranks == pytest.approx([row["expected"] for row in rows], abs=8)
    for row in rows:
        effective = [value for key, value in row.items() if key.startswith("effective")]
        assert effective == [7, 9, 10]
    assert noise_ranks(n, [1.0], 10, dtype)[0]["effective_rank_0.001"] > 100


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
    first, again, other = (reconstructions(40, 3, 2, torch.float64, seed) for seed in (0, 0, 1))
    assert first == again
    assert first[1] != other[1]


# The command


@pytest.mark.usefixtures("elsewhere")
def test_page_figures_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--size 60 --rank 4 --repetitions 2 --seed 3"
    assert main(["experiment", "robustness", *options.split()]) == 0
    assert "matrices of 60 x 60, rank 4, seed 3" in capsys.readouterr().out
    names = {"robustness.md", "robustness.json", "robustness-noise.png"}
    assert {path.name for path in Path("robustness").iterdir()} == names
    data = json.loads(Path("robustness/robustness.json").read_text())
    rows = data["Decomposed and multiplied repeatedly"]
    assert [(r["lowest_press_rank"], r["highest_press_rank"]) for r in rows] == [(4, 4)] * 4
    assert [row["pruned"] for row in rows] == ["every time"] * 2 + ["once"] * 2
    noise = data["With normal noise of variance c / n^2"]
    assert [row["c"] for row in noise] == VARIANCES * 2
    assert [noise[i]["press_rank"] for i in (0, 25, 26, 51)] == [4, 60, 4, 60]
