"""Training steps of the heads, forward and backward with all gradients, against torch's, on one
core.

pytest benchmarks/test_heads.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.baselines import torch_mixture_loss, torch_plif
from benchmarks.contest import TINY, Size, contest
from benchmarks.heads import FORMULAS, MOS_SIZE, SIZE
from benchmarks.memory import measure, peak_extra_bytes
from benchmarks.registry import CONTESTS
from hstree.heads import MixtureOfSoftmaxes
from hstree.ops import plif


@pytest.mark.parametrize(
    ("name", "size", "rounds"),
    [("plif", SIZE, 7), ("heads", SIZE, 9), ("mixtures", SIZE, 3), ("mos", MOS_SIZE, 3)],
    ids=["plif", "heads", "mixtures", "mos"],
)
def test_contest(
    benchmark: Any, short: bool, device: str, name: str, size: Size, rounds: int
) -> None:
    size, rounds = (TINY, 1) if short else (size, rounds)
    benchmark.group = f"{name} ({device})"
    builds = CONTESTS[name]
    torch.manual_seed(0)
    result = contest(benchmark, builds, size, device, rounds)
    if name == "heads" or (name != "plif" and not short):
        for of, peak in measure(name, builds, size, device).items():
            result[of]["peak_bytes"] = peak


def test_every_head_has_a_formula() -> None:
    assert set(FORMULAS) >= {*CONTESTS["heads"], *CONTESTS["mixtures"]}


def test_plif_by_gather_is_the_same_function() -> None:
    input = (4 * torch.randn(7, 50, dtype=torch.float64)).requires_grad_()
    slopes = torch.rand(30, dtype=torch.float64).add_(0.1).requires_grad_()
    grad = torch.randn(7, 50, dtype=torch.float64)
    results = []
    for function in (plif, torch_plif):
        output = function(input, slopes, 5.0)
        results.append((output, *torch.autograd.grad(output, (input, slopes), grad)))
    torch.testing.assert_close(*results)


def test_mixture_of_all_log_probabilities_is_the_same_loss() -> None:
    head = MixtureOfSoftmaxes(12, 40, components=3, latent_features=8).double()
    hidden, target = torch.randn(9, 12, dtype=torch.float64), torch.randint(40, (9,))
    latent, log_prior = head.components(head.encode(hidden))
    assert head.bias is not None
    losses = [
        head(hidden, target).loss,
        torch_mixture_loss(latent, log_prior, head.weight, head.bias, target),
    ]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, list(head.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients)


def test_peak_memory_of_another_process() -> None:
    peak = measure("mos", ["mos"], TINY, "cpu")["mos"]
    assert peak is None or 0 < peak < 2**26


def test_peak_memory_counts_what_a_step_frees_again() -> None:
    peak = peak_extra_bytes(lambda: float(torch.ones(2**25).sum()))
    if peak is None:
        pytest.skip("no /proc/self/clear_refs")
    assert abs(peak - 2**27) < 2**23  # the kernel's memory counts are not exact
