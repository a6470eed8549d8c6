"""Mixtures of experts against a loop over experts made of torch's own layers."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hstree.lab import layers
from hstree.lab.layers import ACTIVATIONS, GATES, MoEConv1d, MoEConv2d, MoEConv3d, MoEDense, mixture

# Layer, arguments, input without the batch dimension; sizes that differ from each other throughout.
CASES: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "dense": (MoEDense, {"in_features": 5, "out_features": 7}, (5,)),
    "conv1d": (MoEConv1d, {"in_channels": 3, "out_channels": 4, "kernel_size": 3}, (3, 9)),
    "conv2d": (
        MoEConv2d,
        {"in_channels": 3, "out_channels": 4, "kernel_size": 3, "stride": 2, "padding": 1},
        (3, 7, 6),
    ),
    "groups": (
        MoEConv2d,
        {
            "in_channels": 4,
            "out_channels": 6,
            "kernel_size": (2, 3),
            "stride": (1, 2),
            "dilation": (2, 1),
            "groups": 2,
        },
        (4, 6, 8),
    ),
    "padding": (
        MoEConv2d,
        {
            "in_channels": 2,
            "out_channels": 3,
            "kernel_size": 3,
            "padding": "same",
            "padding_mode": "circular",
        },
        (2, 5, 4),
    ),
    "conv3d": (
        MoEConv3d,
        {"in_channels": 2, "out_channels": 3, "kernel_size": 2, "padding": 1, "bias": False},
        (2, 3, 4, 5),
    ),
}
TORCH: dict[type[nn.Module], Any] = {
    MoEDense: nn.Linear,
    MoEConv1d: nn.Conv1d,
    MoEConv2d: nn.Conv2d,
    MoEConv3d: nn.Conv3d,
}
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
    kind, arguments, _ = CASES[case]
    return TORCH[kind](**(arguments | {"dtype": torch.float64} | changes))


def by_expert(case: str, layer: Any) -> list[Any]:
    """The experts as torch's own layers."""
    out = layer.experts.weight.shape[0] // layer.n_experts
    groups = CASES[case][1].get("groups", 1)
    experts = []
    for k in range(layer.n_experts):
        rows = [
            group * (out // groups) * layer.n_experts + k * (out // groups) + row
            for group in range(groups)
            for row in range(out // groups)
        ]
        expert = torch_layer(case)
        state = {name: value[rows] for name, value in layer.experts.state_dict().items()}
        expert.load_state_dict(state)
        experts.append(expert)
    return experts


def loop(case: str, layer: Any, x: Tensor) -> Tensor:
    """sum_k g_k(x) f(W_k * x + c_k) for x with a batch dimension, expert by expert."""
    size = {"out_features": K} if case == "dense" else {"out_channels": K, "groups": 1}
    score = None
    if layer.gate is not None:
        gate = torch_layer(case, **size)
        gate.load_state_dict(layer.gate.state_dict())
        score = gate(x)
    total: Any = 0
    for k, expert in enumerate(by_expert(case, layer)):
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
    assert y.is_contiguous()
    torch.testing.assert_close(y, loop(case, layer, x))
    # A change of one expert or gate moves the output: none of them is left out.
    for parameter in layer.parameters():
        for row in range(len(parameter)):
            changed = copy.deepcopy(layer)
            name = next(n for n, p in layer.named_parameters() if p is parameter)
            with torch.no_grad():
                changed.get_parameter(name)[row] += 0.5
            assert not torch.allclose(changed(x), y)


@pytest.mark.parametrize("case", ["dense", "groups"])
def test_gradients_equal_those_of_the_loop(case: str) -> None:
    layer = build(case, activation="tanh")
    x = draw(case, 6).requires_grad_()
    y = layer(x)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, x, upstream)
    wanted = torch.autograd.grad(loop(case, layer, x), x, upstream)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("gate", ["softmax", "constant"])
@pytest.mark.parametrize("case", ["dense", "conv1d"])
def test_gradcheck(case: str, gate: str) -> None:
    layer = build(case, n_experts=2, gate=gate, activation="tanh")
    names, values = zip(*layer.named_parameters(), strict=True)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, state, (x,))

    inputs = (
        draw(case, 2).requires_grad_(),
        *(value.detach().requires_grad_() for value in values),
    )
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("gate", ["none", "constant", "softmax"])
@pytest.mark.parametrize("case", CASES)
def test_one_expert_is_the_layer_and_its_activation(case: str, gate: str) -> None:
    layer = build(case, n_experts=1, gate=gate)
    twin = torch_layer(case)
    twin.load_state_dict(layer.experts.state_dict())
    torch.testing.assert_close(layer(draw(case, 4)), F.relu(twin(draw(case, 4))))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    """By name, as a function or as a module: the same; names as in torch.nn."""
    kinds = {
        "leaky_relu": "LeakyReLU",
        "relu": "ReLU",
        "elu": "ELU",
        "gelu": "GELU",
        "silu": "SiLU",
    }
    module = getattr(nn, kinds.get(name, name.capitalize()))()
    x = draw("dense", 6)
    got = build("dense", activation=name)(x)
    torch.testing.assert_close(got, build("dense", activation=module)(x))
    torch.testing.assert_close(got, build("dense", activation=ACTIVATIONS[name])(x))


def test_activation_with_parameters_is_part_of_the_layer() -> None:
    layer = build("dense", activation=nn.PReLU(dtype=torch.float64))
    layer(draw("dense", 6)).sum().backward()
    assert layer.state_dict()["activation.weight"].item() == 0.25
    assert layer.activation.weight.grad.abs() > 0


@pytest.mark.parametrize("gate", ["softmax", "none"])
@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_torch(case: str, gate: str) -> None:
    """Unbatched, without rows, not contiguous."""
    layer, twin = build(case, gate=gate), torch_layer(case)
    x = draw(case, 4)
    assert layer(x).shape == twin(x).shape
    torch.testing.assert_close(layer(x[1]), layer(x)[1])
    assert layer(x[:0]).shape == twin(x[:0]).shape
    torch.testing.assert_close(layer(x.mT.contiguous().mT if x.dim() > 2 else x), layer(x))
    torch.testing.assert_close(layer(x[::2]), layer(x)[::2])


def test_leading_dimensions_of_a_dense_layer() -> None:
    layer, x = build("dense"), draw("dense", 2, 3, 4)
    assert layer(x).shape == (2, 3, 4, 7)
    torch.testing.assert_close(layer(x).flatten(0, 2), layer(x.flatten(0, 2)))
    torch.testing.assert_close(layer(x.transpose(0, 2)), layer(x).transpose(0, 2))


def test_channels_last() -> None:
    layer, x = build("conv2d"), draw("conv2d", 4)
    torch.testing.assert_close(layer(x.contiguous(memory_format=torch.channels_last)), layer(x))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("case", ["dense", "conv2d"])
def test_autocast(case: str, gate: str) -> None:
    """The dtype of torch's own layer, also where autocast widens an activation, as CUDA's does."""
    layer = build(case, gate=gate, activation=lambda x: F.softplus(x.float()), dtype=torch.float32)
    x = draw(case, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch_layer(case, dtype=torch.float32)(x).dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.03, atol=0.03)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("case", CASES)
def test_function_transforms(case: str) -> None:
    """vmap over single inputs, and batched Jacobians, equal those of autograd."""
    layer, x = build(case, activation="tanh"), draw(case, 3)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
        jacobian = torch.func.vmap(torch.func.jacrev(layer))(x)
    for got, one in zip(jacobian, x, strict=True):
        torch.testing.assert_close(got, torch.autograd.functional.jacobian(layer, one))


def test_compiles_without_a_break() -> None:
    layer = build("conv2d")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(draw("conv2d", 4)), layer(draw("conv2d", 4)))


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["dense", "groups"])
def test_number_of_operations_does_not_depend_on_the_number_of_experts(case: str) -> None:
    calls = []
    for n_experts in (2, 16):
        layer, x = build(case, n_experts), draw(case, 4)
        with _Count() as count, torch.no_grad():
            layer(x)
        calls.append(count.calls)
    assert calls[0] == calls[1] > 0


def parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def test_parameter_counts() -> None:
    assert parameters(MoEDense(20, 30, 4)) == 4 * (20 + 1) * (30 + 1)
    assert parameters(MoEDense(20, 30, 4, gate="none")) == 4 * (20 + 1) * 30
    assert parameters(MoEDense(20, 30, 4, bias=False)) == 4 * 20 * (30 + 1)
    layer: nn.Module = MoEConv2d(6, 9, (3, 5), 4, groups=3)
    assert parameters(layer) == 4 * (6 * 15 // 3 + 1) * 9 + 4 * (6 * 15 + 1)
    layer = MoEConv1d(6, 9, 5, 4, gate="sigmoid", bias=False)
    assert parameters(layer) == 4 * 6 * 5 * 9 + 4 * 6 * 5
    assert parameters(MoEConv3d(2, 3, 2, 5, gate="constant")) == 5 * (2 * 8 + 1) * 3


@pytest.mark.parametrize(
    ("layer", "fans", "gate_fans"),
    [
        (MoEDense(100, 200, 8), 300, 108),
        (MoEConv2d(40, 60, (3, 5), 8, groups=2), (20 + 60) * 15, (40 + 8) * 15),
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
    before = layer.experts.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.experts.weight)


@pytest.mark.parametrize("case", CASES)
def test_state_dict(case: str) -> None:
    """Saved files depend on the names."""
    layer, other = build(case), build(case)
    names = ["experts.weight", "experts.bias", "gate.weight", "gate.bias"]
    if not CASES[case][1].get("bias", True):
        names = [name for name in names if name.endswith("weight")]
    assert list(layer.state_dict()) == names
    other.reset_parameters()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(draw(case, 4)), layer(draw(case, 4)))
    assert list(build(case, gate="none").state_dict()) == [n for n in names if "gate" not in n]


def test_factory_arguments() -> None:
    layer = MoEConv1d(2, 3, 3, 4, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer(torch.empty(5, 2, 8, device="meta", dtype=torch.bfloat16)).shape == (5, 3, 6)


def test_repr() -> None:
    text = "in_features=5, out_features=7, n_experts=3, gate='softmax', activation=relu"
    assert text in repr(build("dense"))
    text = "in_channels=3, out_channels=4, n_experts=3, gate='none', activation=identity"
    assert text in repr(build("conv1d", gate="none", activation="identity"))
    assert "activation=PReLU" in repr(build("dense", activation=nn.PReLU()))


def test_mixture_of_shared_experts_is_that_of_experts_at_every_position() -> None:
    torch.manual_seed(0)
    gate, experts = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7)
    everywhere = experts[..., None, None].expand(2, 3, 7, 5, 4)
    wanted = torch.stack([(gate[:, :, None] * everywhere)[:, k] for k in range(3)]).sum(0)
    torch.testing.assert_close(mixture(gate, experts), wanted)
    torch.testing.assert_close(mixture(gate, everywhere), wanted)


@pytest.mark.parametrize("name", ["MoEDense", "NonLocalBlock"])
def test_example(name: str) -> None:
    names = {"torch": torch, name: getattr(layers, name)}
    (example,) = doctest.DocTestFinder(recurse=False).find(names[name], name, globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize(
    ("case", "options", "match"),
    [
        ("dense", {"n_experts": 0}, "n_experts: expected a whole number of at least 1, got 0"),
        ("conv1d", {"n_experts": 2.0}, "n_experts: expected a whole number .*, got 2.0"),
        ("dense", {"in_features": True}, "in_features: expected a whole number .*, got True"),
        ("conv2d", {"out_channels": -1}, "out_channels: expected a whole number .*, got -1"),
        ("conv2d", {"groups": 0}, "groups: expected a whole number of at least 1, got 0"),
        (
            "groups",
            {"out_channels": 3},
            "groups: expected a divisor of in_channels and out_channels, 4 and 3, got 2",
        ),
        ("dense", {"gate": "relu"}, "gate: expected one of softmax, sigmoid, .*, got 'relu'"),
        ("dense", {"activation": "Relu"}, "activation: expected a function or one of .*'Relu'"),
        ("dense", {"activation": 3}, "activation: expected a function or its name, got int"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_arguments(case: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(case, **options)


@pytest.mark.parametrize(
    ("case", "shape", "match"),
    [
        ("dense", (4, 6), r"input: expected shape \[..., 5\], got \(4, 6\)"),
        ("dense", (), r"input: expected shape \[..., 5\], got \(\)"),
        ("conv1d", (4, 4, 9), r"input: expected shape \[N, 3, W\] or \[3, W\], got \(4, 4, 9\)"),
        ("conv2d", (3, 9), r"expected shape \[N, 3, H, W\] or \[3, H, W\], got \(3, 9\)"),
        ("conv3d", (1, 1, 2, 3, 4, 5), r"\[N, 2, D, H, W\] or .*, got \(1, 1, 2, 3, 4, 5\)"),
    ],
    ids=str,
)
def test_bad_inputs(case: str, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(case)(torch.zeros(shape, dtype=torch.float64))
