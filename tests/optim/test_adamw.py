"""hstree.optim.AdamW beside torch.optim.AdamW, and its lazy rule beside plain PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from hstree.heads import TreeEnsemble
from hstree.optim import AdamW, clip_grad_norm_
from hstree.trees import random_tree

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.5},
    {"lr": torch.tensor(0.01), "betas": (0.0, 0.0), "maximize": True, "weight_decay": 0.0},
]
OPTION_NAMES = ["default", "other", "maximize"]
ALL = 10**9


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """As a head of trees has them, as an embedding has them, and a bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, 5), (20, 7), (2, 9), (13,)]
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


def gradients(
    seed: int, dtype: torch.dtype, visited: int = 12, repeat: bool = False
) -> list[Tensor]:
    """Sparse gradients of the parameters, not marked as coalesced; unordered if they repeat."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for parameter, sparse in zip(parameters(dtype), (2, 1, 2, 1), strict=True):
        shape = parameter.shape
        rows = shape[:sparse].numel()
        if repeat:
            place = torch.randint(rows, (visited,), generator=generator)
        else:
            place = torch.randperm(rows, generator=generator)[:visited].sort().values
        index = torch.stack(torch.unravel_index(place, shape[:sparse]))
        values = torch.randn((len(place), *shape[sparse:]), generator=generator, dtype=dtype)
        result.append(torch.sparse_coo_tensor(index, values, shape, check_invariants=False))
    return result


def run(
    kind: Callable[..., torch.optim.Optimizer],
    steps: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    **more: Any,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    own = parameters(dtype)
    optimizer = kind([{"params": own[:1]}, {"params": own[1:], "lr": 0.02}], **options)
    more_steps(own, optimizer, range(steps), dtype, **more)
    return own, optimizer


def more_steps(
    own: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    seeds: range,
    dtype: torch.dtype,
    *,
    dense: bool = False,
    **more: Any,
) -> None:
    for seed in seeds:
        for parameter, gradient in zip(own, gradients(seed, dtype, **more), strict=True):
            parameter.grad = gradient.to_dense() if dense else gradient
        if seed == 2:
            own[1].grad = None
        optimizer.step()


def tensors_of(own: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [optimizer.state[p][name] for p in own for name in ("exp_avg", "exp_avg_sq")]
    return [parameter.detach() for parameter in own] + moments


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_NAMES)
@pytest.mark.parametrize("code", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_dense_gradients_are_stepped_by_torch(
    code: dict[str, bool], options: dict[str, Any]
) -> None:
    if "foreach" in code and "lr" in options:
        options = options | {"lr": float(options["lr"])}  # torch's foreach takes no tensor
    ours = run(AdamW, 4, torch.float32, options | code, dense=True)
    of_torch = code or {"fused": True}
    theirs = run(torch.optim.AdamW, 4, torch.float32, options | of_torch, dense=True)
    for got, expected in zip(tensors_of(*ours), tensors_of(*theirs), strict=True):
        assert torch.equal(got, expected)


def test_fused_by_default() -> None:
    """Torch's own default is a loop over operators on a CPU; what is asked for stays."""
    own = nn.Parameter(torch.zeros(3))
    groups = [{"params": [own]}, {"params": [nn.Parameter(torch.zeros(2))], "fused": False}]
    optimizer = AdamW(groups)
    assert [group["fused"] for group in optimizer.param_groups] == [True, False]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert optimizer.param_groups[2]["fused"]
    for options in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        assert not AdamW([own], **options).param_groups[0]["fused"]
    assert not AdamW([own, nn.Parameter(torch.zeros(3, device="meta"))]).param_groups[0]["fused"]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_gradients_of_every_row_give_the_step_of_torch(
    dtype: torch.dtype, options: dict[str, Any], fused: bool | None
) -> None:
    ours = run(AdamW, 5, dtype, options | {"fused": fused}, visited=ALL)
    theirs = run(torch.optim.AdamW, 5, dtype, options, visited=ALL, dense=True)
    rtol, atol = (1e-12, 1e-14) if dtype == torch.float64 else (2e-6, 2e-7)
    for got, expected in zip(tensors_of(*ours), tensors_of(*theirs), strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    steps = [[int(optimizer.state[p]["step"]) for p in own] for own, optimizer in (ours, theirs)]
    assert steps[0] == steps[1] == [5, 4, 5, 5]


@pytest.mark.parametrize("repeat", [False, True], ids=["increasing", "repeated"])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_NAMES)
def test_lazy_rule(options: dict[str, Any], repeat: bool) -> None:
    """In float64, of every visited row; k counts the steps of the whole parameter."""
    own, optimizer = run(AdamW, 5, torch.float64, options, repeat=repeat)
    rule = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01} | options
    beta1, beta2 = rule["betas"]
    sign = -1 if rule.get("maximize") else 1
    for i, (w, got) in enumerate(zip(parameters(torch.float64), own, strict=True)):
        w = w.detach()
        m, v, k = torch.zeros_like(w), torch.zeros_like(w), 0
        lr = float(rule["lr"]) if i == 0 else 0.02
        for seed in range(5):
            if seed == 2 and i == 1:
                continue
            gradient = gradients(seed, torch.float64, repeat=repeat)[i]
            k += 1
            g = sign * gradient.to_dense()
            ones = torch.ones(gradient._nnz(), *[1] * gradient.dense_dim())
            shape = (*w.shape[: gradient.sparse_dim()], *[1] * gradient.dense_dim())
            places = torch.sparse_coo_tensor(
                gradient._indices(), ones, shape, check_invariants=False
            )
            visited = places.to_dense() > 0
            m = torch.where(visited, beta1 * m + (1 - beta1) * g, m)
            v = torch.where(visited, beta2 * v + (1 - beta2) * g * g, v)
            change = m / (1 - beta1**k) / ((v / (1 - beta2**k)).sqrt() + rule["eps"])
            stepped = w - lr * rule["weight_decay"] * w - lr * change
            w = torch.where(visited, stepped, w)
        torch.testing.assert_close(got.detach(), w, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(optimizer.state[got]["exp_avg"], m, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(optimizer.state[got]["exp_avg_sq"], v, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_is_the_float32_rule_rounded(dtype: torch.dtype) -> None:
    """Moments keep float32: after one step each weight is the exact one, rounded once."""
    own, optimizer = run(AdamW, 1, dtype, OPTIONS[1], visited=ALL)
    exact = [nn.Parameter(parameter.detach().float()) for parameter in parameters(dtype)]
    groups = [{"params": exact[:1]}, {"params": exact[1:], "lr": 0.02}]
    theirs = torch.optim.AdamW(groups, **OPTIONS[1])
    for parameter, gradient in zip(exact, gradients(0, dtype, visited=ALL), strict=True):
        parameter.grad = gradient.to_dense().float()
    theirs.step()
    unit = torch.finfo(dtype).eps / 2
    for got, expected in zip(own, exact, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=1.01 * unit, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[got][name]
            assert moment.dtype == torch.float32
            torch.testing.assert_close(moment, theirs.state[expected][name])


def test_rows_that_are_not_visited_keep_every_bit() -> None:
    own, optimizer = run(AdamW, 3, torch.float32, {"weight_decay": 0.5})
    before = [tensor.clone() for tensor in tensors_of(own, optimizer)]
    index = torch.tensor([[0, 1], [3, 8]])
    own[0].grad = torch.sparse_coo_tensor(
        index, torch.ones(2, 5), (2, 9, 5), check_invariants=False
    )
    for parameter in own[1:]:
        parameter.grad = None
    optimizer.step()
    visited = torch.zeros(2, 9, dtype=torch.bool)
    visited[0, 3] = visited[1, 8] = True
    for number, (now, old) in enumerate(zip(tensors_of(own, optimizer), before, strict=True)):
        if number in (0, 4, 5):  # of the first parameter
            assert torch.equal((now != old).any(-1), visited)
        else:
            assert torch.equal(now, old)


def coalesced(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The gradients that are coalesced from now on."""
    calls: list[Tensor] = []
    original = Tensor.coalesce

    def coalesce(self: Tensor) -> Tensor:
        calls.append(self)
        return original(self)

    monkeypatch.setattr(Tensor, "coalesce", coalesce)
    return calls


def test_unordered_gradients_are_coalesced(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    calls = coalesced(monkeypatch)
    for tokens, count in (([1, 3], 0), ([3, 1], 1), ([1, 1], 1)):
        calls.clear()
        embedding.zero_grad()
        embedding(torch.tensor(tokens)).sum().backward()
        AdamW(embedding.parameters()).step()
        assert len(calls) == count


def test_empty_gradient_counts_as_a_step() -> None:
    own = nn.Parameter(torch.ones(4, 3))
    own.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (4, 3), check_invariants=False
    )
    optimizer = AdamW([own])
    optimizer.step()
    assert optimizer.state[own]["step"] == 1
    assert torch.equal(own, torch.ones(4, 3))


def test_gradients_of_trees_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one backward pass, and of two where torch merges their rows in order, as on the CPU."""
    trees = [random_tree(30, seed=s) for s in (1, 2)]
    head = TreeEnsemble(8, 30, trees, sparse=True)
    own = head.sparse_parameters()
    assert len(own) > 1
    calls = coalesced(monkeypatch)
    optimizer = AdamW(own)
    for backward_passes in (1, 2):
        head.zero_grad()
        for _ in range(backward_passes):
            hidden, target = torch.randn(11, 8), torch.randint(30, (11,))
            head(hidden, target).loss.backward()
        before = [parameter.detach().clone() for parameter in own]
        optimizer.step()
        assert not calls
        assert all(not torch.equal(*pair) for pair in zip(own, before, strict=True))


class Model(nn.Module):
    """A dense layer below a head of trees, small enough for a batch to visit every node."""

    def __init__(self, sparse: bool, classes: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        trees = [random_tree(classes, seed=seed) for seed in (1, 2)]
        self.head = TreeEnsemble(8, classes, trees, gate="context", sparse=sparse)
        self.classes = classes

    def loss(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        target = torch.arange(48) % self.classes  # each, so that every node has a gradient
        means = torch.randn(self.classes, 6, generator=torch.Generator().manual_seed(9))
        x = means[target] + torch.randn(48, 6, generator=generator)
        return self.head(torch.tanh(self.body(x)), target).loss

    def groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": self.body.parameters()}, *self.head.parameter_groups(lr)]


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    seeds: range,
    scheduler: LRScheduler | None = None,
    max_norm: float = 0.0,
) -> list[float]:
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = model.loss(seed)
        loss.backward()
        if max_norm:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def assert_same_weights(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for got, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, expected, **tolerance)


def test_one_optimizer_trains_dense_and_sparse_parameters() -> None:
    """As torch does with dense gradients, clipped ones too."""
    sparse, dense = Model(True), Model(False)
    ours = AdamW(sparse.groups(0.01), lr=0.01)
    theirs = torch.optim.AdamW(dense.groups(0.01), lr=0.01)
    losses = train(sparse, ours, range(8), max_norm=0.1)
    assert losses == pytest.approx(train(dense, theirs, range(8), max_norm=0.1), rel=1e-5)
    assert losses[-1] < losses[0]
    assert sparse.head.below.weight.grad.is_sparse
    assert not sparse.body.weight.grad.is_sparse
    assert_same_weights(sparse, dense)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.8**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 8),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, [0.01, 0.02, 0.02], total_steps=8),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    """OneCycleLR changes the betas too."""
    rates, models = [], []
    for kind, sparse in ((AdamW, True), (torch.optim.AdamW, False)):
        model = Model(sparse)
        optimizer = kind(model.groups(0.01), lr=0.01)
        scheduler = SCHEDULERS[name](optimizer)
        train(model, optimizer, range(6), scheduler)
        rates.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        models.append(model)
    assert rates[0] == rates[1]
    assert_same_weights(*models)


@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler_gives_the_steps_without_it(fused: bool | None) -> None:
    scaled, plain = Model(True), Model(True)
    optimizers = [AdamW(model.groups(0.01), lr=0.01, fused=fused) for model in (scaled, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for seed in range(6):
        optimizers[0].zero_grad()
        scaler.scale(scaled.loss(seed)).backward()
        if seed % 2:
            scaler.unscale_(optimizers[0])
            clip_grad_norm_(scaled.parameters(), 0.1)
        scaler.step(optimizers[0])
        scaler.update()
        train(plain, optimizers[1], range(seed, seed + 1), max_norm=0.1 * (seed % 2))
    assert scaler.get_scale() == 8 * 1024
    assert_same_weights(scaled, plain)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("where", ["head.below.weight", "body.bias"])
def test_grad_scaler_skips_a_step_with_infinities(where: str, fused: bool | None) -> None:
    model = Model(True)
    optimizer = AdamW(model.groups(0.01), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copy.deepcopy(model)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(model.loss(0)).backward()
        gradient = model.get_parameter(where).grad
        assert gradient is not None
        if bad:
            (gradient._values() if gradient.is_sparse else gradient).flatten()[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512
        same = [
            torch.equal(*pair) for pair in zip(before.parameters(), model.parameters(), strict=True)
        ]
        assert all(same) == bad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(AdamW, AdamW), (AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)],
    ids=["ours", "ours to torch", "torch to ours"],
)
def test_state_dict_goes_both_ways(first: Any, second: Any, dtype: torch.dtype) -> None:
    """Gradients of every row, dense for torch: the run goes on as if nothing had changed."""
    dense = [kind is torch.optim.AdamW for kind in (first, second)]
    own, optimizer = run(first, 3, dtype, OPTIONS[1], visited=ALL, dense=dense[0])
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    loaded = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    other = second([{"params": loaded[:1]}, {"params": loaded[1:]}])
    other.load_state_dict(saved)
    more_steps(own, optimizer, range(3, 5), dtype, visited=ALL, dense=dense[0])
    more_steps(loaded, other, range(3, 5), dtype, visited=ALL, dense=dense[1])
    pairs = zip(tensors_of(own, optimizer), tensors_of(loaded, other), strict=True)
    for expected, got in pairs:
        if first is second:
            assert torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-7)


def test_state_of_sparse_adam_loads() -> None:
    """It goes on without weight decay, but for the place of eps."""
    options = {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-12}
    own, theirs = run(torch.optim.SparseAdam, 3, torch.float64, options)
    loaded = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    ours = AdamW([{"params": loaded[:1]}, {"params": loaded[1:]}])
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert [group["weight_decay"] for group in ours.param_groups] == [0.0, 0.0]
    more_steps(own, theirs, range(3, 5), torch.float64)
    more_steps(loaded, ours, range(3, 5), torch.float64)
    pairs = zip(tensors_of(own, theirs), tensors_of(loaded, ours), strict=True)
    for expected, got in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)
    more_steps(loaded, ours, range(5, 6), torch.float64, dense=True)


def test_float32_moments_survive_state_dict() -> None:
    own, optimizer = run(AdamW, 3, torch.bfloat16, {})
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW([{"params": own[:1]}, {"params": own[1:]}])
    other.load_state_dict(saved)
    for parameter in own:
        for name in ("exp_avg", "exp_avg_sq"):
            moment = other.state[parameter][name]
            assert moment.dtype == torch.float32
            assert torch.equal(moment, optimizer.state[parameter][name])
    _, theirs = run(torch.optim.SparseAdam, 3, torch.bfloat16, {})
    other.load_state_dict(theirs.state_dict())
    more_steps(own, other, range(3, 4), torch.bfloat16)
    assert other.state[own[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fused", [None, True])
def test_a_parameter_may_change_between_dense_and_sparse(
    fused: bool | None, dtype: torch.dtype
) -> None:
    own, optimizer = run(AdamW, 2, dtype, {"fused": fused}, visited=ALL)
    more_steps(own, optimizer, range(2, 4), dtype, visited=ALL, dense=True)
    more_steps(own, optimizer, range(4, 6), dtype, visited=ALL)
    expected, theirs = run(torch.optim.AdamW, 6, dtype, {}, visited=ALL, dense=True)
    assert int(optimizer.state[own[0]]["step"]) == int(theirs.state[expected[0]]["step"]) == 6
    unit = torch.finfo(dtype).eps
    for got, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=4 * unit, atol=4 * unit)


def test_pickle_and_deepcopy() -> None:
    model = Model(True)
    optimizer = AdamW(model.groups(0.01), lr=0.01, fused=True)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    pickle.dump((model, optimizer), file)
    file.seek(0)
    for other, same in (pickle.load(file), copy.deepcopy((model, optimizer))):
        expected = copy.deepcopy((model, optimizer))
        assert isinstance(same, AdamW)
        assert same.param_groups[0]["params"][0] is other.body.weight
        train(other, same, range(2, 4))
        train(*expected, range(2, 4))
        assert_same_weights(other, expected[0], rtol=0, atol=0)


def test_add_param_group() -> None:
    model, expected = Model(True), Model(False)
    optimizer = AdamW(model.body.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(expected.body.parameters(), lr=0.01)
    for one, its_model in ((optimizer, model), (theirs, expected)):
        for group in its_model.head.parameter_groups(0.01):
            one.add_param_group(group)
        train(its_model, one, range(3))
    assert_same_weights(model, expected)


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "differentiable"])
def test_what_the_sparse_step_lacks_is_refused(name: str) -> None:
    own = nn.Parameter(torch.ones(2))
    match = f"{name}: expected False, which the sparse step needs, got True"
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        AdamW([own], **{name: True})
    with pytest.raises(ValueError, match=match):
        AdamW([{"params": [own], name: True}])
    if name != "differentiable":
        state = torch.optim.AdamW([own], **{name: True}).state_dict()
        with pytest.raises(ValueError, match=match):
            AdamW([own]).load_state_dict(state)


def test_hooks_run_once() -> None:
    """Also after torch has wrapped the step of its own AdamW."""
    own = nn.Parameter(torch.ones(3))
    torch.optim.AdamW([own]).step()
    optimizer = AdamW([own])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    own.grad = torch.ones(3)
    optimizer.step()
    assert calls == ["before", "after"]
    assert optimizer.state[own]["step"] == 1


def test_closure() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = AdamW(embedding.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = embedding(torch.tensor([3, 1, 3])).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_gradients_stay_where_the_step_fails() -> None:
    own = nn.Parameter(torch.ones(2, 3, 4))
    dense = nn.Parameter(torch.ones(2))
    own.grad, dense.grad = torch.ones(2, 3, 4).to_sparse(), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"index: expected shape \[1, nnz\] or \[2, nnz\]"):
        AdamW([own, dense]).step()
    assert own.grad.is_sparse
    assert torch.equal(dense.grad, torch.ones(2))


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}],
    ids=str,
)
def test_bad_option(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        AdamW([nn.Parameter(torch.ones(2))], **options)
