"""mixture_log_prob in chunks against the whole matrix of logits in torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference.mixture_log_prob import mixture_log_prob_reference
from torch import Tensor

from hstree._numerics import is_low
from hstree.ops import (
    LogitFunction,
    _chunked_loss,
    _mixture_chunks,
    default_chunk_rows,
    mixture_log_prob,
)
from hstree.ops.mixture_log_prob import CHUNK_BYTES

N, K, D, V = 23, 3, 7, 41


def draw(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(size, generator=random, dtype=torch.float64)


def cubic_table() -> Tensor:
    """Increasing: the cubics of x + tanh(x) over 10 intervals of [-4, 4]."""
    x = torch.linspace(-4, 4, 11, dtype=torch.float64)
    function = LogitFunction.cubic(x + torch.tanh(x), 2 - torch.tanh(x) ** 2, 4.0)
    assert function.table is not None
    return function.table


def functions() -> dict[str, dict[str, Any]]:
    slopes = draw(9, seed=5).exp()
    table = LogitFunction.plif(slopes, 3.0).table
    return {
        "softmax": {},
        "sigsoftmax": {"c": 0.0, "k": 2.0},
        "gss": {"c": -1.5, "k": 2.5},
        "plif": {"table": table, "radius": 3.0},
        "cubic": {"table": cubic_table(), "radius": 4.0},
    }


every_function = pytest.mark.parametrize("name", functions())


def arguments(components: int, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Of order one, on the device, all leaves that want gradients."""
    log_prior = draw(N, components, seed=seed + 1).log_softmax(1) if components > 1 else None
    made = {
        "latent": draw(N, components, D, seed=seed + 2),
        "log_prior": log_prior,
        "weight": draw(V, D, seed=seed + 3),
        "bias": draw(V, seed=seed + 4),
    }
    return {name: None if t is None else t.to(device).requires_grad_() for name, t in made.items()}


def targets(device: torch.device, ignored: int = -1) -> Tensor:
    target = torch.randint(V, (N,), generator=torch.Generator().manual_seed(9))
    target[::5] = ignored
    return target.to(device)


def on(device: torch.device, name: str) -> dict[str, Any]:
    function = functions()[name]
    if "table" in function:
        function["table"] = function["table"].to(device).requires_grad_()
    return function


def gradients(value: Tensor, inputs: list[Tensor | None]) -> list[Tensor]:
    leaves = [t for t in inputs if t is not None]
    return list(torch.autograd.grad(value, leaves, retain_graph=True))


@pytest.mark.parametrize(
    ("name", "components", "reduction", "chunk_rows"),
    [  # the size of the chunks in turn
        (*case, (1, 4, N, 1000)[i % 4])
        for i, case in enumerate(product(functions(), [1, K], ["none", "sum", "mean"]))
    ],
)
def test_equals_the_reference(
    name: str, components: int, reduction: str, chunk_rows: int, device: torch.device
) -> None:
    """Loss, log-probabilities and gradients: of the loss alone, and of a sum over rows that weighs
    them differently plus the loss."""
    given, function = arguments(components, device), on(device, name)
    target = targets(device)
    inputs = [*given.values(), function.get("table")]
    log_prob, loss = mixture_log_prob(
        *given.values(),
        target,
        LogitFunction(**function),
        reduction=reduction,
        chunk_rows=chunk_rows,
    )
    expected = mixture_log_prob_reference(*given.values(), target, **function)
    wanted = {
        "none": -expected,
        "sum": -expected.sum(),
        "mean": -expected.sum() / (target >= 0).sum(),
    }
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(loss, wanted[reduction])
    upstream = draw(N, seed=7).to(device)
    weigh = upstream if reduction == "none" else torch.tensor(0.7, device=device)
    for value, reference in (
        ((weigh * loss).sum(), (weigh * wanted[reduction]).sum()),
        (
            (upstream * log_prob).sum() + 2 * loss.sum(),
            (upstream * expected).sum() + 2 * wanted[reduction].sum(),
        ),
    ):
        got, right = gradients(value, inputs), gradients(reference, inputs)
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("components", [1, K])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_row_weight(
    reduction: str, components: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Weights, one of them 0, of which those of ignored rows do not count."""
    given, target = arguments(components, device), targets(device)
    for name in ("latent", "weight"):
        given[name] = given[name].detach().to(dtype).requires_grad_()
    weight = torch.linspace(0, 2, N, dtype=torch.float64, device=device)
    weight[5] = torch.nan  # an ignored row
    inputs = list(given.values())
    log_prob, loss = mixture_log_prob(
        *inputs, target, row_weight=weight, reduction=reduction, chunk_rows=4
    )
    exact = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    expected = mixture_log_prob_reference(*exact, target)
    close = {} if dtype == torch.float64 else {"rtol": 0.03, "atol": 0.03, "check_dtype": False}
    torch.testing.assert_close(log_prob, expected, **close)
    kept = weight.masked_fill(target == -1, 0)
    wanted = -kept * expected
    if reduction != "none":
        wanted = wanted.sum() / (kept.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(loss, wanted, **close)
    loss, wanted = loss.sum(), wanted.sum()
    for upstream in (1.0, 0.7):  # ready with the loss, and scaled
        got, right = gradients(upstream * loss, inputs), gradients(upstream * wanted, exact)
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, **close)
    both = gradients(loss + log_prob.sum(), inputs)
    for a, b in zip(both, gradients(wanted + expected.sum(), exact), strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("components", [1, K])
def test_offset(components: int, device: torch.device) -> None:
    """A bias of all classes but the target of each row; a class at -inf is left out, but is not
    where it is the target."""
    given, target = arguments(components, device), targets(device)
    offset = torch.linspace(-3, 3, V, dtype=torch.float64, device=device)
    offset[[2, 4]] = -torch.inf
    target[:4] = torch.tensor([2, 3, -1, 4])
    log_prob, loss = mixture_log_prob(*given.values(), target, offset=offset, chunk_rows=4)
    latent, prior, weight, bias = given.values()
    rows = []
    for n, y in enumerate(target):
        added = offset.masked_fill(torch.arange(V, device=device) == y, 0)
        of_row = None if prior is None else prior[[n]]
        rows.append(
            mixture_log_prob_reference(latent[[n]], of_row, weight, bias + added, target[[n]])
        )
    expected = torch.cat(rows)
    torch.testing.assert_close(log_prob, expected)
    wanted = -expected.sum() / (target >= 0).sum()
    got, right = gradients(loss, [*given.values()]), gradients(wanted, [*given.values()])
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)


def test_ignored_rows_may_hold_infinities(device: torch.device) -> None:
    given, target = arguments(K, device), targets(device)
    expected = gradients(mixture_log_prob(*given.values(), target)[1], [*given.values()])
    with torch.no_grad():
        given["latent"][target == -1] = torch.inf
    found = gradients(mixture_log_prob(*given.values(), target)[1], [*given.values()])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("group", [1, 2, N])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("components", [1, K])
def test_gradients_in_16_bits_of_several_chunks(
    components: int,
    dtype: torch.dtype,
    group: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The products of a GPU, here also on the CPU."""
    for module in (_chunked_loss, _mixture_chunks):
        monkeypatch.setattr(module, "keeps_low", is_low)
    monkeypatch.setattr(_mixture_chunks, "group_chunks", lambda *_: group)
    low = {
        name: None if t is None else t.detach().to(dtype).requires_grad_()
        for name, t in arguments(components, device).items()
    }
    exact = {
        name: None if t is None else t.detach().double().requires_grad_() for name, t in low.items()
    }
    target = targets(device)
    loss = mixture_log_prob(*low.values(), target, chunk_rows=2)[1]
    truth = -mixture_log_prob_reference(*exact.values(), target)[target != -1].mean()
    assert abs(loss - truth) <= 1e-3 * truth
    got, true = (gradients(x, list(of.values())) for x, of in ((loss, low), (truth, exact)))
    for a, b in zip(got, true, strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= 2 * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("components", [1, K])
def test_low_precision(dtype: torch.dtype, components: int, device: torch.device) -> None:
    """Errors against float64 on the rounded inputs: at most those of torch's own operators in that
    precision and a small margin."""
    given = {
        name: None if t is None else t.detach() for name, t in arguments(components, device).items()
    }
    low = {
        name: None if t is None else t.to(dtype if name != "log_prior" else torch.float32)
        for name, t in given.items()
    }
    low["bias"] = low["bias"].float()
    target, upstream = targets(device), draw(N, seed=3).to(device)

    def run(cast: Any, function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = {
            name: None if t is None else t.to(cast or t.dtype).clone().requires_grad_()
            for name, t in low.items()
        }
        value = function(**leaves)
        return [value, *gradients((value * upstream).sum(), list(leaves.values()))]

    def eager(latent: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(latent, weight, bias.to(weight.dtype)).float()
        prior = 0.0 if log_prior is None else log_prior[:, :, None]
        log_prob = (prior + logits.log_softmax(-1)).logsumexp(1)
        return -F.nll_loss(log_prob, target, ignore_index=-1, reduction="none")

    def ours(latent: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        return mixture_log_prob(latent, log_prior, weight, bias, target, reduction="none")[0]

    def exact(latent: Tensor, log_prior: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        return mixture_log_prob_reference(latent, log_prior, weight, bias, target)

    truth, got, plain = run(torch.float64, exact), run(None, ours), run(None, eager)
    assert got[0].dtype == torch.float32
    for a, b, t in zip(got, plain, truth, strict=True):
        scale = t.abs().max()
        error, allowed = (a - t).abs().max() / scale, (b - t).abs().max() / scale
        assert error <= 1.05 * allowed + 2 * torch.finfo(dtype).eps


@every_function
def test_large_logits(name: str, device: torch.device) -> None:
    """Logits of 1e4 in float32 against float64."""
    given, function = arguments(K, device), on(device, name)
    target = targets(device)
    big = {n: None if t is None else t.detach().float() for n, t in given.items()}
    big["weight"] = (big["weight"] * 1e4).requires_grad_()
    big["latent"].requires_grad_()
    truth = {n: t.detach().double().requires_grad_() for n, t in big.items() if t is not None}
    low = {k: t.detach().float() if k == "table" else t for k, t in function.items()}
    double = {k: t.detach().float().double() if k == "table" else t for k, t in function.items()}
    got = mixture_log_prob(*big.values(), target, LogitFunction(**low), reduction="sum")
    expected = mixture_log_prob_reference(*truth.values(), target, **double)
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-5, atol=0.05)
    a = gradients(got[1], [big["latent"]])[0].double()
    b = gradients(-expected.sum(), [truth["latent"]])[0]
    torch.testing.assert_close(a, b, rtol=1e-3, atol=float(1e-3 * b.abs().max()))


def test_backward_twice(device: torch.device) -> None:
    """The gradients of the forward pass are given away once; then they are computed again."""
    given = arguments(K, device)
    inputs = list(given.values())
    _, loss = mixture_log_prob(*inputs, targets(device))
    first, second = gradients(loss, inputs), gradients(loss, inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients(3 * loss, inputs), first, strict=True):
        torch.testing.assert_close(a, 3 * b)


@pytest.mark.parametrize("components", [1, K])
def test_no_rows_and_ignored_rows(components: int, device: torch.device) -> None:
    given = arguments(components, device)
    inputs = list(given.values())
    nothing = torch.full((N,), -1, device=device)
    log_prob, loss = mixture_log_prob(*inputs, nothing, reduction="sum")
    assert not log_prob.any()
    assert loss == 0
    assert not any(g.any() for g in gradients(loss, inputs))
    log_prob, loss = mixture_log_prob(*inputs, nothing, reduction="mean")
    assert loss.isnan()  # as F.cross_entropy
    assert not any(g.any() for g in gradients(log_prob.sum(), inputs))
    zero = torch.zeros(N, dtype=torch.float64, device=device)
    _, loss = mixture_log_prob(*inputs, targets(device), row_weight=zero, reduction="mean")
    assert loss.isnan()
    assert not any(g.any() for g in gradients(loss, inputs))
    empty = [None if t is None else t[:0] if len(t) == N else t for t in inputs]
    log_prob, loss = mixture_log_prob(*empty, nothing[:0], reduction="sum")
    assert log_prob.shape == (0,)
    assert loss == 0


def test_float32_is_deterministic_and_close_to_float64(device: torch.device) -> None:
    given = {n: t.detach() for n, t in arguments(K, device).items()}
    single = [t.float().requires_grad_() for t in given.values()]
    double = [t.float().double().requires_grad_() for t in given.values()]
    target = targets(device)
    runs = [gradients(mixture_log_prob(*single, target)[1], single) for _ in range(2)]
    truth = gradients(mixture_log_prob(*double, target)[1], double)
    for a, b, t in zip(*runs, truth, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=1e-6)


def test_not_contiguous(device: torch.device) -> None:
    given = arguments(K, device)
    inputs = list(given.values())
    strided = [t.detach().repeat_interleave(2, dim=-1)[..., ::2].requires_grad_() for t in inputs]
    assert not any(t.is_contiguous() for t in strided)
    _, loss = mixture_log_prob(*strided, targets(device).repeat_interleave(2)[::2])
    _, expected = mixture_log_prob(*inputs, targets(device))
    torch.testing.assert_close(loss, expected)
    for a, b in zip(gradients(loss, strided), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_memory_is_that_of_a_chunk(device: torch.device) -> None:
    """No allocation of the order of all logits: the largest is the weight's gradient or a chunk."""
    rows, classes, features = 512, 3000, 8
    h, w = (draw(n, features).float().to(device).requires_grad_() for n in (rows, classes))
    y = torch.zeros(rows, dtype=torch.int64, device=device)
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        mixture_log_prob(h[:, None], None, w, None, y, chunk_rows=16)[1].backward()
    largest = max(
        max(e.self_cpu_memory_usage, e.self_device_memory_usage) for e in profile.events()
    )
    assert 16 * classes * 4 <= largest <= 2 * 16 * classes * 4 < rows * classes * 4 / 10


def test_default_chunk_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 5 * V * 4)
    rows = torch.empty(N, D)
    assert default_chunk_rows(rows, V) == 5
    assert default_chunk_rows(rows.double(), V) == 2
    assert default_chunk_rows(rows, 100 * V) == 1


def test_autocast(device: torch.device) -> None:
    given = arguments(1, device)
    h, w, b = (given[n].detach().float().requires_grad_() for n in ("latent", "weight", "bias"))
    expected = mixture_log_prob(h, None, w, b, targets(device))[1]
    with torch.autocast(device.type, torch.bfloat16):
        loss = mixture_log_prob(h, None, w, b, targets(device))[1]
    assert loss.dtype == torch.float32
    assert 0 < (loss - expected).abs() < 0.05
    loss.backward()
    assert {t.grad.dtype for t in (h, w, b)} == {torch.float32}


@pytest.mark.parametrize("rounds", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_in_float32_beside_16_bits(
    dtype: torch.dtype, rounds: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rounded for the products, and its gradient is not."""
    if rounds:
        for module in (_chunked_loss, _mixture_chunks):
            monkeypatch.setattr(module, "keeps_low", is_low)
    given = arguments(1, device)
    latent = given["latent"].detach().to(dtype).requires_grad_()
    weight, target = given["weight"].detach().float().requires_grad_(), targets(device)
    loss = mixture_log_prob(latent, None, weight, None, target, chunk_rows=4)[1]
    low = weight.detach().to(dtype).requires_grad_()
    assert torch.equal(loss, mixture_log_prob(latent, None, low, None, target, chunk_rows=4)[1])
    exact = [t.detach().double().requires_grad_() for t in (latent, low)]
    true = mixture_log_prob_reference(exact[0], None, exact[1], None, target)
    right = gradients(-true.sum() / (target >= 0).sum(), exact)
    for a, b in zip(gradients(loss, [latent, weight]), right, strict=True):
        assert (a - b).abs().max() <= 2 * torch.finfo(dtype).eps * b.abs().max()
    (of_weight,) = gradients(loss, [weight])
    assert of_weight.dtype == torch.float32
    assert not torch.equal(of_weight, of_weight.to(dtype).float())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"latent": (N, D)}, ValueError, r"latent: expected shape \[N, K, D\], got \(23, 7\)"),
        ({"weight": (V, D + 1)}, ValueError, r"weight: expected shape \[V, 7\].*got \(41, 8\)"),
        ({"weight": (0, D)}, ValueError, r"weight: expected shape \[V, 7\].*got \(0, 7\)"),
        ({"bias": (V + 1,)}, ValueError, r"bias: expected shape \[41\], got \(42,\)"),
        ({"log_prior": (N, 2)}, ValueError, r"log_prior: expected shape \[23, 3\], got \(23, 2\)"),
        ({"log_prior": None}, ValueError, r"log_prior: expected shape \[23, 3\], got None"),
        ({"target": (N - 1,)}, ValueError, r"target: expected shape \[23\].*got \(22,\)"),
        (
            {"row_weight": torch.ones(N - 1)},
            ValueError,
            r"row_weight: expected shape \[23\], got \(22,\)",
        ),
        ({"reduction": "avg"}, ValueError, "reduction: expected one of none, sum, mean, got 'avg'"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows: expected at least 1, got 0"),
        ({"function": {"k": 0.0}}, ValueError, "k: expected a finite positive number, got 0.0"),
        ({"function": {"c": float("nan")}}, ValueError, "c: expected a finite number, got nan"),
        ({"function": {"radius": -1.0}}, ValueError, "radius: .* positive number, got -1.0"),
    ],
    ids=str,
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], match: str) -> None:
    cpu = torch.device("cpu")
    given: dict[str, Any] = {n: t.detach() for n, t in arguments(K, cpu).items()}
    given |= {"target": targets(cpu)}
    options: dict[str, Any] = {}
    function: dict[str, Any] = {}
    for name, value in change.items():
        if name == "function":
            function = value
        elif name in given:
            dtype = torch.int64 if name == "target" else torch.float64
            given[name] = None if value is None else torch.zeros(value, dtype=dtype)
        else:
            options[name] = value
    with pytest.raises(error, match=match):
        mixture_log_prob(**given, function=LogitFunction(**function), **options)


def test_bad_dtypes_and_targets() -> None:
    z, w = torch.randn(4, 1, D), torch.randn(V, D)
    y = torch.tensor([0, 1, V, 2])
    with pytest.raises(RuntimeError, match=r"target\[2\]: expected .* \[0, 41\), got 41"):
        mixture_log_prob(z, None, w, None, y)
    y = y.clamp(max=V - 1)
    with pytest.raises(
        ValueError, match=r"weight: expected dtype torch.float32, got torch.float64"
    ):
        mixture_log_prob(z, None, w.double(), None, y)
    with pytest.raises(ValueError, match=r"latent: expected a floating-point dtype"):
        mixture_log_prob(z.long(), None, w, None, y)
