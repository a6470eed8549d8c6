"""The increasing functions of the logits by themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.support import draw
from hstree.heads.functions import (
    FUNCTIONS,
    GSS,
    PLIF,
    Function,
    MonotonicNetwork,
    Scaled,
    SigSoftmax,
    build_function,
)

every_function = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("sigsoftmax", {}),
        ("gss", {"c": -1.0, "k": 3.0}),
        ("gss", {"c": 2.0, "k": 0.4}),
        ("plif", {}),
        ("plif", {"intervals": 10, "radius": 5.0}),
        ("plif", {"slope_std": 0.3, "slope_learning_rate": 7.0, "slope_decay": 1e-3}),
        ("monotonic", {"units": 50}),
        ("scaled", {"scale": 0.3}),
        ("scaled", {"scale": 0.7, "soft_cap": 40.0}),
    ],
    ids=str,
)


def test_every_function_is_built_by_its_name() -> None:
    assert set(FUNCTIONS) == {"softmax", "sigsoftmax", "gss", "plif", "monotonic", "scaled"}
    for name, kind in FUNCTIONS.items():
        function = build_function(name)
        assert type(function) is kind
        assert function.name == name


@every_function
def test_config_builds_the_same_function(name: str, options: dict[str, Any]) -> None:
    function = build_function(name, options)
    config = function.config()
    assert options.items() <= config.items()
    other = build_function(name, config)
    other.load_state_dict(function.state_dict())
    x = torch.linspace(-30, 30, 101)
    assert torch.equal(function(torch.float32)(x), other(torch.float32)(x))


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_increasing(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """A larger logit is not less probable; the function is smooth enough that none jumps."""
    torch.manual_seed(0)
    function = build_function(name, options)
    x = torch.linspace(-30, 30, 2001, dtype=dtype)
    f = function(dtype)(x)
    assert f.dtype == dtype
    assert (f.diff() > (-4e-6 if dtype == torch.float32 else 0)).all()
    assert f.diff().max() < 0.03 * 8  # no step is steeper than slope 8


@every_function
def test_inverse(name: str, options: dict[str, Any]) -> None:
    """Differences of f are those asked for; the greatest value keeps its place."""
    torch.manual_seed(0)
    function = build_function(name, options).double()
    wanted = torch.tensor([-3.0, -1.5, -1.5, -4.9, -0.7, -2.0], dtype=torch.float64)
    if "radius" in options:
        wanted = wanted.clamp(min=-4)  # f(-5) - f(-0.7) depends on the slopes drawn
    x = function.inverse(wanted)
    assert x.dtype == torch.float64
    assert abs(x.max() - wanted.max()) < 1e-12
    assert x[1] == x[2]
    assert torch.equal(x.argsort(stable=True), wanted.argsort(stable=True))
    f = function(torch.float64)(x)
    torch.testing.assert_close(f - f.max(), wanted - wanted.max(), rtol=0, atol=1e-10)


def test_inverse_beyond_the_range_is_its_end() -> None:
    """f of a network is bounded and PLIF's slopes may be small: the logit stays finite."""
    wanted = torch.tensor([-1.0, -1e6], dtype=torch.float64)
    for function in (PLIF(10, 5.0), MonotonicNetwork(50)):
        x = function.inverse(wanted)
        assert x[1] == -function(torch.float64).radius


@pytest.mark.parametrize("scale", [0.0625, 1.0, 5.0])
@pytest.mark.parametrize("cap", [0.1, 30.0, 1e4])
def test_soft_cap_by_its_definition(scale: float, cap: float) -> None:
    x = torch.linspace(-30 * cap / scale, 30 * cap / scale, 10_001, dtype=torch.float64)
    exact, found = cap * (scale * x / cap).tanh(), Scaled(scale, cap)(torch.float64)(x)
    torch.testing.assert_close(found, exact, rtol=0, atol=3e-12 * cap)


def test_scale_by_its_definition() -> None:
    for dtype, error in ((torch.float32, 2e-7), (torch.float64, 4e-16)):
        x = torch.linspace(-1e4, 1e4, 10_001, dtype=dtype)
        torch.testing.assert_close(Scaled(0.3)(dtype)(x), 0.3 * x, rtol=error, atol=error)


@pytest.mark.parametrize("std", [0.03, 2.0])
def test_plif_begins_with_the_given_deviation(std: float) -> None:
    """Also after a reset."""
    torch.manual_seed(0)
    function = PLIF(slope_std=std)
    first = function.v.detach().clone()
    function.reset()
    assert not torch.equal(function.v, first)
    for v in (first, function.v.detach()):
        assert abs(v.mean() - math.log(math.e - 1)) < 0.01 * std
        assert abs(v.std() / std - 1) < 0.01


def test_plif_without_deviation_begins_as_the_identity() -> None:
    """Up to f(-R) = 0."""
    x = torch.linspace(-25, 25, 101, dtype=torch.float64)
    f = PLIF(slope_std=0).double()(torch.float64)(x)
    torch.testing.assert_close(f, x + 20)


def test_plif_slopes_stay_wide() -> None:
    function = PLIF(5).bfloat16()
    assert function.slopes().dtype == torch.float32
    assert function.double().slopes().dtype == torch.float64


def sigmoids(function: MonotonicNetwork, x: Tensor) -> Tensor:
    """The sum over all units for every x, in float64."""
    u, v, b = (p.double() for p in (function.u, function.v, function.b))
    return (torch.sigmoid(F.softplus(u) * x.double()[:, None] + b) * F.softplus(v)).sum(-1)


def network(kind: str) -> MonotonicNetwork:
    function = MonotonicNetwork(200)
    if kind == "steps":  # u up to 5: steps far apart
        random = torch.Generator().manual_seed(3)
        with torch.no_grad():
            u = 0.2 + 4.8 * torch.rand(200, generator=random)
            function.u.copy_(u.expm1().log())
            function.v.copy_(draw(200, seed=4))
            function.b.copy_(-u * (40 * torch.rand(200, generator=random) - 20))
    return function


@pytest.mark.parametrize("kind", ["initial", "steps"])
def test_network_is_interpolated_within_the_bound(kind: str) -> None:
    """Value, derivative, and the gradient of the parameters, against the sum of all sigmoids."""
    function = network(kind)
    with torch.no_grad():
        curvature = (F.softplus(function.v) * F.softplus(function.u) ** 4).sum().double().item()
    h = 128 / 4096
    bound = h**4 / 384 * curvature / 8 + 1e-12  # |sigmoid''''| <= 1/8
    if kind == "initial":
        assert bound < 1.3e-8
    x = (18 * draw(3000, seed=5).double()).requires_grad_()
    assert x.abs().max() < 64
    f, expected = function(torch.float64)(x), sigmoids(function, x)
    assert (f - expected).abs().max() <= bound
    upstream = draw(3000, seed=6).double()
    leaves = (x, function.u, function.v, function.b)
    grads = torch.autograd.grad((f * upstream).sum(), leaves)
    right = torch.autograd.grad((expected * upstream).sum(), leaves)
    # Hermite interpolation: |error of f'| <= sqrt(3) / 216 h^3 max |f''''|.
    slack = math.sqrt(3) / 216 * h**3 * curvature / 8 * upstream.abs() + 1e-12
    assert ((grads[0] - right[0]).abs() <= slack).all()
    for name, got, wanted in zip("uvb", grads[1:], right[1:], strict=True):
        error = (got - wanted).norm() / wanted.norm()
        # The parameters are float32, and so are their gradients.
        assert error < (1e-7 if kind == "initial" else 2e-6), f"{name}: {error:.1e}"


def test_network_begins_near_the_identity() -> None:
    """Up to the constant 20, which cancels."""
    x = torch.linspace(-14, 14, 57, dtype=torch.float64)
    f = MonotonicNetwork()(torch.float64)(x)
    assert (f - 20 - x).abs().max() < 0.003
    slope = f.diff() / 0.5
    assert (slope - 1).abs().max() < 0.003


def test_network_beyond_the_knots_goes_on_straight() -> None:
    function = MonotonicNetwork(4)
    with torch.no_grad():
        function.u.fill_(math.log(math.expm1(0.05)))  # slopes that have not died out at 64
        function.v.fill_(3.0)
    for end in (-64.0, 64.0):
        x = torch.tensor([end], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(sigmoids(function, x).sum(), x)
        far = torch.tensor([end, 1e3 * end], dtype=torch.float64)
        f = function(torch.float64)(far)
        torch.testing.assert_close(f[0], sigmoids(function, x)[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(f[1] - f[0], slope[0] * 999 * end, rtol=1e-6, atol=0)


def test_network_units_and_intervals() -> None:
    """One unit is one sigmoid; a coarse interpolation is still near."""
    function = MonotonicNetwork(1, intervals=256)
    with torch.no_grad():
        function.v.fill_(math.log(math.expm1(2.0)))
    x = torch.linspace(-10, 10, 201, dtype=torch.float64)
    f = function(torch.float64)(x)
    torch.testing.assert_close(f, 2 * torch.sigmoid(x), rtol=0, atol=0.5**4 / 384 * 2 / 8)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        (
            "relu",
            {},
            r"function: expected one of softmax, .*, monotonic, scaled, got 'relu'",
        ),
        (["plif"], {}, r"function: expected one of softmax, .*, got \['plif'\]"),
        ("plif", {"frozen": "no"}, "frozen: expected True or False, got 'no'"),
        ("softmax", {"k": 2.0}, "function_options: .*unexpected keyword argument 'k'|takes no"),
        ("plif", {"slopes": 3}, "function_options: .*unexpected keyword argument 'slopes'"),
        ("plif", {"slope_std": -0.1}, "slope_std: expected a number of at least 0, got -0.1"),
        (
            "plif",
            {"slope_learning_rate": 0},
            "slope_learning_rate: expected a finite positive number, got 0",
        ),
        ("plif", {"slope_decay": -1.0}, "slope_decay: expected a number of at least 0, got -1.0"),
        ("plif", {"slope_decay": math.nan}, "slope_decay: expected a finite number, got nan"),
        ("scaled", {"soft_cap": 0}, "soft_cap: expected a finite positive number, got 0"),
        ("scaled", {"scale": -1}, "scale: expected a finite positive number, got -1"),
    ],
    ids=str,
)
def test_bad_options(name: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build_function(name, options)


def test_parameter_groups() -> None:
    """Only learned slopes have a rate of their own."""

    def rates(function: Function) -> list[tuple[float, float, int]]:
        groups = function.parameter_groups(4.0)
        return [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups]

    assert rates(PLIF(5)) == [(0.02, 0.0, 1)]
    assert rates(PLIF(5, slope_learning_rate=30, slope_decay=1.2e-6)) == [(30.0, 1.2e-6, 1)]
    assert rates(PLIF(5, frozen=True, slope_decay=0.1)) == []
    assert rates(MonotonicNetwork(5)) == [(4.0, 0.0, 3)]
    assert rates(GSS()) == rates(SigSoftmax()) == []
