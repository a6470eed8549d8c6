"""Singular values of Jacobians: cases with a known answer, and random matrix theory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from heads.support import allocations
from torch import Tensor, nn

from hstree.__main__ import main
from hstree.lab import jacobian_experiment, jacobian_singular_values
from hstree.lab.jacobian import LayerSpectrum, summarize_singular_values
from hstree.lab.layers import MoEDense

N = 128


def draw(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def mixture(features: int, n_experts: int, **options: Any) -> MoEDense:
    torch.manual_seed(1)
    return MoEDense(features, features, n_experts, dtype=torch.float64, **options)


# Singular values


@pytest.mark.parametrize("size", [(6, 4), (4, 6), (5, 5)], ids=str)
def test_linear_layer_has_those_of_its_weight(size: tuple[int, int]) -> None:
    layer = nn.Linear(*size, dtype=torch.float64)
    got = jacobian_singular_values(layer, draw(9, size[0]))
    wanted = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(got, wanted.expand(9, -1))
    assert not got.requires_grad


def test_convolution_and_normalisation() -> None:
    """A layer of several dimensions whose outputs depend on many inputs, against autograd, input by
    input."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(), nn.LayerNorm(27))
    layer = nn.Sequential(*layers).double().eval()
    x = draw(4, 2, 4, 4)
    got = jacobian_singular_values(layer, x)
    assert got.shape == (4, 27)
    for one, values in zip(x, got, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: layer(x[None])[0], one)
        torch.testing.assert_close(values, torch.linalg.svdvals(jacobian.reshape(27, 32)))


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunks_change_nothing(chunk_size: int) -> None:
    layer, x = mixture(6, 4), draw(9, 6)
    calls = []

    def watched(x: Tensor) -> Tensor:
        calls.append(x)
        return layer(x)

    got = jacobian_singular_values(watched, x, chunk_size=chunk_size)
    torch.testing.assert_close(got, jacobian_singular_values(layer, x))
    assert len(calls) == math.ceil(9 / chunk_size)


def test_memory_is_that_of_a_chunk() -> None:
    n, k = 32, 4
    layer, x = mixture(n, k), draw(40, n)
    jacobian_singular_values(layer, x[:1])
    largest, most = allocations(lambda: jacobian_singular_values(layer, x, chunk_size=2))
    assert largest <= 2 * n * k * n * 8
    assert most <= 5 * 2 * n * k * n * 8


def test_softmax_gates_against_the_derivative_by_hand() -> None:
    """dy/dx = sum_k g_k f'_k W_k + sum_k g_k f_k (v_k - sum_j g_j v_j)^T."""
    layer, x = mixture(6, 3, activation="tanh"), draw(6)
    weight = layer.experts.weight.detach().view(3, 6, 6)
    assert layer.gate is not None
    v = layer.gate.weight.detach()
    g = (v @ x).softmax(0)
    jacobian = torch.zeros(6, 6, dtype=torch.float64)
    for k in range(3):
        y = (weight[k] @ x).tanh()
        jacobian += g[k] * (1 - y**2)[:, None] * weight[k]
        jacobian += g[k] * y[:, None] * (v[k] - g @ v)
    got = jacobian_singular_values(layer, x[None])
    torch.testing.assert_close(got[0], torch.linalg.svdvals(jacobian))


def test_rank_is_the_number_of_outputs_with_an_active_expert() -> None:
    layer, x = mixture(16, 2, gate="constant"), draw(20, 16)
    active = (layer.experts(x) > 0).view(20, 2, 16).any(1).sum(1)
    values = jacobian_singular_values(layer, x)
    assert torch.equal((values > 1e-12).sum(1), active)
    record, *_ = summarize_singular_values(values)
    assert record["zero"] == pytest.approx(1 - active.double().mean().item() / 16)


def test_bad_inputs() -> None:
    for shape in ((3,), (0, 4)):
        with pytest.raises(ValueError, match=r"inputs: expected shape \[N, ...\] without a 0"):
            jacobian_singular_values(nn.Identity(), torch.zeros(shape))


# Summaries


def test_summary_of_known_values() -> None:
    values = torch.tensor(
        [[2.0, 1.0, 0.5], [4.0, 0.3, 0.02], [8.0, 0.004, 0.0], [2.0, 2.0, 0.2]], dtype=torch.float64
    )
    record, mean, normalised = summarize_singular_values(values)
    assert mean == pytest.approx((4.0, 0.826, 0.18))
    assert normalised == pytest.approx((1, 1.5755 / 4, (0.25 + 0.005 + 0 + 0.1) / 4))
    assert (record["largest"], record["smallest"]) == pytest.approx((4.0, 0.18))
    # Above 0.1: 3, 1, 1, 2 (0.2 / 2 is not above); above 0.01: 3, 2, 1, 3; above 0.001: 3, 3, 1, 3.
    above = [record[f"above {share} of largest"] for share in (0.1, 0.01, 0.001)]
    assert above == pytest.approx((7 / 12, 9 / 12, 10 / 12))
    assert record["zero"] == pytest.approx(1 - 11 / 12)
    assert record["median condition number"] == 10.0
    assert record["quartiles"] == (4.0, 200.0)
    record, *_ = summarize_singular_values(values[1:3])
    assert (record["median condition number"], record["quartiles"][1]) == (200.0, math.inf)
    record, _, normalised = summarize_singular_values(torch.zeros(2, 3, dtype=torch.float64))
    assert not normalised.any()
    assert (record["zero"], record["quartiles"]) == (1, (math.inf, math.inf))


# The experiment


@pytest.fixture(scope="module")
def layers() -> list[LayerSpectrum]:
    return jacobian_experiment(N, inputs=20, experts=(4, 2, 8, 16), seeds=2)


def of_gate(layers: list[LayerSpectrum], gate: str) -> list[LayerSpectrum]:
    return [layer for layer in layers if layer.gate == gate]


def test_layers(layers: list[LayerSpectrum]) -> None:
    records = [layer.record for layer in layers]
    gates = [f"mixture, {gate} gates" for gate in ("softmax", "constant")]
    assert [(of["layer"], of["experts"]) for of in records] == [
        *(("linear", None), ("dense", None)),
        *((gate, k) for gate in gates for k in (2, 4, 8, 16)),
    ]
    assert [of["parameters"] for of in records] == [
        *[N * (N + 1)] * 2,
        *(k * (N + 1) ** 2 for k in (2, 4, 8, 16)),
        *(k * (N + 1) * N for k in (2, 4, 8, 16)),
    ]


def test_dense_layer_is_half_a_random_matrix(layers: list[LayerSpectrum]) -> None:
    """The active half of the rows of W, with variance 1/n: by Marchenko and Pastur the singular
    values fill [1 - sqrt(1/2), 1 + sqrt(1/2)]; the other half is 0."""
    linear, dense = layers[:2]
    for key in ("zero", *(f"above {share} of largest" for share in (0.1, 0.01, 0.001))):
        assert dense.record[key] == pytest.approx(0.5, abs=0.02)
    assert dense.mean[0] == pytest.approx(1 + 0.5**0.5, rel=0.05)
    assert dense.mean[48] > 1 - 0.5**0.5
    assert max(dense.mean[85:]) < 1e-12
    assert dense.record["quartiles"] == (math.inf, math.inf)
    # Linear down to the middle: straight lines differ from it by little.
    line = [dense.mean[0] + (dense.mean[48] - dense.mean[0]) * i / 48 for i in range(49)]
    assert max(abs(x - y) for x, y in zip(line, dense.mean, strict=False)) < 0.1 * dense.mean[0]
    assert linear.mean[0] == pytest.approx(2, rel=0.06)
    assert linear.record["zero"] == 0


def test_constant_gates_against_theory(layers: list[LayerSpectrum]) -> None:
    """A row is dead where all its experts are: a share of 2^-K. The others are random with
    variance 1 / (2 K n), bar the mean of the active W_k, which points along x:
    dy/dx = t u x^T / |x| + noise, t = 1 / sqrt(2 pi), whose largest singular value is
    t + 1 / (2 K t) where t is above the noise, K > pi."""
    t = 1 / math.sqrt(2 * math.pi)
    for layer in of_gate(layers, "constant"):
        k = layer.record["experts"]
        assert layer.record["zero"] == pytest.approx(2.0**-k, abs=0.02)
        if k >= 8:
            assert layer.mean[0] == pytest.approx(t + 1 / (2 * k * t), rel=0.03)
            assert layer.mean[1] == pytest.approx(2 / math.sqrt(2 * k), rel=0.05)


def test_draws_depend_on_the_seed_alone(layers: list[LayerSpectrum]) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    other = jacobian_experiment(N, inputs=20, experts=(8,), gates=("constant",), seeds=2)
    assert torch.equal(torch.get_rng_state(), state)
    same = [*layers[:2], of_gate(layers, "constant")[2]]
    assert [layer.record for layer in other] == [layer.record for layer in same]


def test_every_gate_and_one_feature() -> None:
    gates = ("softmax", "sigmoid", "constant", "none")
    found = jacobian_experiment(1, 3, (1, 2), "tanh", gates, seeds=1)
    assert len(found) == 2 + 4 * 2
    assert all(layer.record["quartiles"] == (1, 1) for layer in found)
    constant, none = ([x.mean[0] for x in of_gate(found, gate)] for gate in gates[2:])
    assert none == pytest.approx([constant[0], 2 * constant[1]])


# The command

SMALL = ("--features", "6", "--inputs", "4", "--experts", "3", "2", "--seeds", "2")


@pytest.mark.usefixtures("elsewhere")
def test_page_figures_and_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--gates", "none", "--activation", "tanh", "--output", "new/results"]
    assert main(["experiment", "jacobian", *arguments]) == 0
    out, folder = capsys.readouterr().out, Path("new/results")
    assert "note: Draws of inputs and weights: 2; standard normal inputs of each: 4" in out
    pictures = ["jacobian-normalised-singular-values.png", "jacobian-singular-values.png"]
    names = [*pictures, "jacobian.json", "jacobian.md"]
    assert sorted(file.name for file in folder.iterdir()) == names
    data = json.loads((folder / "jacobian.json").read_text())
    assert (data["features"], data["inputs"], data["seeds"]) == (6, 4, 2)
    assert (data["experts"], data["gates"], data["activation"]) == ([2, 3], ["none"], "tanh")
    records = data["Singular values of dy/dx, n = 6, activation tanh"]
    kinds = [(of["layer"], of["experts"]) for of in records]
    mixture = "mixture, none gates"
    assert kinds == [("linear", None), ("dense", None), (mixture, 2), (mixture, 3)]
    page = (folder / "jacobian.md").read_text()
    assert page.startswith("# Jacobians of mixtures of experts\n")
    assert all(f"]({name})" in page for name in pictures)
