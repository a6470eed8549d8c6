"""Mixtures of experts against a loop over experts made of torch's own layers; the non-local block
against its formula, position by position, and against attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.lab.layers import GATES, MoEConv2d, MoEDense, NonLocalBlock, mixture

# Layer, arguments, input without the batch dimension; sizes that differ from each other throughout.
CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "dense": (MoEDense, {"in_features": 5, "out_features": 7}, (5,)),
    "conv2d": (
        MoEConv2d,
        {
            "in_channels": 3,
            "out_channels": 4,
            "kernel_size": (2, 3),
            "stride": (2, 1),
            "padding": 1,
        },
        (3, 7, 6),
    ),
}
TORCH: dict[str, Any] = {"dense": nn.Linear, "conv2d": nn.Conv2d}
K = 3


def build(case: str, n_experts: int = K, **options: Any) -> Any:
    """The layer in float64, with biases that are not 0."""
    kind, arguments, _ = CASES[case]
    torch.manual_seed(1)
    layer = kind(n_experts=n_experts, **({"dtype": torch.float64} | arguments | options))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return layer


def draw(case: str, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*batch, *CASES[case][2], dtype=dtype)


def torch_layer(case: str, **changes: Any) -> Any:
    return TORCH[case](**(CASES[case][1] | {"dtype": torch.float64} | changes))


def loop(case: str, layer: Any, x: Tensor) -> Tensor:
    """sum_k g_k(x) f(W_k * x + c_k) for x with a batch dimension, expert by expert."""
    score = None
    if layer.gate is not None:
        gate = torch_layer(case, **{"out_features" if case == "dense" else "out_channels": K})
        gate.load_state_dict(layer.gate.state_dict())
        score = gate(x)
    total: Any = 0
    for k in range(K):
        expert = torch_layer(case)
        rows = slice(k * layer.out, (k + 1) * layer.out)
        expert.load_state_dict({n: v[rows] for n, v in layer.experts.state_dict().items()})
        y = layer.activation(expert(x))
        if layer.gate_function == "softmax":
            y = y * (score.select(1, k).exp() / score.exp().sum(1)).unsqueeze(1)
        elif layer.gate_function == "sigmoid":
            y = y / (1 + (-score.select(1, k)).exp()).unsqueeze(1)
        elif layer.gate_function == "constant":
            y = y / K
        total = total + y
    return total


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_experts(case: str, gate: str) -> None:
    layer = build(case, gate=gate, activation="softplus")
    x = draw(case, 6)
    y = layer(x)
    torch.testing.assert_close(y, loop(case, layer, x))
    # A change of one expert or gate moves the output: none of them is left out.
    for name, parameter in layer.named_parameters():
        for row in range(len(parameter)):
            changed = copy.deepcopy(layer)
            with torch.no_grad():
                changed.get_parameter(name)[row] += 0.5
            assert not torch.allclose(changed(x), y)


def test_shapes() -> None:
    """Leading dimensions of a dense layer; no rows; not contiguous; channels last."""
    layer, x = build("dense"), draw("dense", 2, 3, 4)
    assert layer(x).shape == (2, 3, 4, 7)
    torch.testing.assert_close(layer(x.transpose(0, 2)), layer(x).transpose(0, 2))
    torch.testing.assert_close(layer(x[0, 0, 0]), layer(x)[0, 0, 0])
    layer, x = build("conv2d"), draw("conv2d", 4)
    assert layer(x[:0]).shape == torch_layer("conv2d")(x[:0]).shape
    torch.testing.assert_close(layer(x[::2]), layer(x)[::2])
    torch.testing.assert_close(layer(x.contiguous(memory_format=torch.channels_last)), layer(x))


@pytest.mark.parametrize("case", CASES)
def test_autocast(case: str) -> None:
    """The dtype of torch's own layer, also where autocast widens an activation, as CUDA's does."""
    layer = build(case, activation=lambda x: F.softplus(x.float()), dtype=torch.float32)
    x = draw(case, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch_layer(case, dtype=torch.float32)(x).dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.03, atol=0.03)


def test_activations_by_name_and_as_a_module() -> None:
    x = draw("dense", 6)
    for name, module in (("relu", nn.ReLU()), ("tanh", nn.Tanh()), ("identity", nn.Identity())):
        got = build("dense", activation=name)(x)
        assert torch.equal(got, build("dense", activation=module)(x))


def test_compiles_without_a_break() -> None:
    layer = build("conv2d")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(draw("conv2d", 4)), layer(draw("conv2d", 4)))


@pytest.mark.parametrize(
    ("layer", "fans", "gate_fans"),
    [
        (MoEDense(100, 200, 8), 300, 108),
        (MoEConv2d(40, 60, (3, 5), 8), (40 + 60) * 15, (40 + 8) * 15),
    ],
    ids=["dense", "conv2d"],
)
def test_initial_values_are_glorot_uniform(layer: Any, fans: int, gate_fans: int) -> None:
    """As nn.init.xavier_uniform_ draws the weight of one expert, whatever their number."""
    for weight, total in ((layer.experts.weight, fans), (layer.gate.weight, gate_fans)):
        bound = (6 / total) ** 0.5
        assert 0.98 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not layer.experts.bias.any()
    assert not layer.gate.bias.any()


def test_parameters() -> None:
    """Their number and names, on which saved files depend."""
    assert sum(p.numel() for p in MoEDense(20, 30, 4).parameters()) == 4 * (20 + 1) * (30 + 1)
    assert sum(p.numel() for p in MoEDense(20, 30, 4, gate="none").parameters()) == 4 * 21 * 30
    layer = MoEConv2d(6, 9, (3, 5), 4, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in layer.parameters()) == 4 * (6 * 15 + 1) * (9 + 1)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    names = ["experts.weight", "experts.bias", "gate.weight", "gate.bias"]
    assert list(layer.state_dict()) == names


def test_mixture_of_shared_experts_is_that_of_experts_at_every_position() -> None:
    torch.manual_seed(0)
    gate, experts = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7)
    everywhere = experts[..., None, None].expand(2, 3, 7, 5, 4)
    wanted = torch.stack([(gate[:, :, None] * everywhere)[:, k] for k in range(3)]).sum(0)
    torch.testing.assert_close(mixture(gate, experts), wanted)
    torch.testing.assert_close(mixture(gate, everywhere), wanted)


def test_bad_arguments_and_inputs() -> None:
    for options, match in (
        ({"n_experts": 0}, "n_experts: expected a whole number of at least 1, got 0"),
        ({"gate": "relu"}, "gate: expected one of softmax, sigmoid, .*, got 'relu'"),
        ({"activation": "Relu"}, "activation: expected one of .*'Relu'"),
    ):
        with pytest.raises(ValueError, match=match):
            build("dense", **options)
    for layer in (build("conv2d"), NonLocalBlock(3)):
        with pytest.raises(ValueError, match=r"expected shape \[N, C, H, W\], got \(3, 9\)"):
            layer(torch.zeros(3, 9, dtype=torch.float64))


# The non-local block

C, E = 6, 4


def block_and_input(**options: Any) -> tuple[NonLocalBlock, Tensor]:
    """A block in float64 whose output is not 0."""
    torch.manual_seed(1)
    block = NonLocalBlock(C, E, **({"dtype": torch.float64} | options))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.5)
    return block, torch.randn(3, C, 3, 4, dtype=torch.float64)


def at(layer: Any, x: Tensor) -> Tensor:
    """The linear map of one position."""
    return layer.weight.flatten(1) @ x + layer.bias


def test_formula() -> None:
    block, x = block_and_input()
    z = block(x).flatten(2)
    assert block(x).shape == x.shape
    for n, rows in enumerate(x.flatten(2)):
        positions = rows.unbind(1)
        for i, x_i in enumerate(positions):
            weight = [torch.exp(at(block.theta, x_i) @ at(block.phi, x_k)) for x_k in positions]
            terms = [w * at(block.g, x_k) for w, x_k in zip(weight, positions, strict=True)]
            y_i = torch.stack(terms).sum(0) / torch.stack(weight).sum()
            torch.testing.assert_close(z[n, :, i], x_i + at(block.output, y_i))


def test_starts_as_the_identity() -> None:
    _, x = block_and_input()
    block = NonLocalBlock(C, dtype=torch.float64)
    assert torch.equal(block(x), x)
    assert block.theta.out_channels == 3
    sizes = sum(parameter.numel() for parameter in NonLocalBlock(C, E).parameters())
    assert sizes == 4 * C * E + 3 * E + C
