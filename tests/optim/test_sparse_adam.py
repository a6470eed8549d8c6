"""hstree.optim.SparseAdam beside torch.optim.SparseAdam."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hstree.optim
from hstree.heads import TreeEnsemble
from hstree.optim import SparseAdam
from hstree.trees import random_tree

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3},
    {"lr": torch.tensor(0.01), "betas": (0.0, 0.0), "maximize": True},
]


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
        values = torch.randn((visited, *shape[sparse:]), generator=generator, dtype=dtype)
        result.append(torch.sparse_coo_tensor(index, values, shape, check_invariants=False))
    return result


def run(
    kind: Callable[..., torch.optim.Optimizer],
    steps: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    repeat: bool = False,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    own = parameters(dtype)
    groups = [{"params": own[:1]}, {"params": own[1:], "lr": 0.02}]
    optimizer = kind(groups, **options)
    more_steps(own, optimizer, range(steps), dtype, repeat)
    return own, optimizer


def more_steps(
    own: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    seeds: range,
    dtype: torch.dtype,
    repeat: bool = False,
) -> None:
    for seed in seeds:
        for parameter, gradient in zip(own, gradients(seed, dtype, repeat=repeat), strict=True):
            parameter.grad = gradient
        if seed == 2:
            own[1].grad = None
        optimizer.step()


def tensors_of(own: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [optimizer.state[p][name] for p in own for name in ("exp_avg", "exp_avg_sq")]
    return [parameter.detach() for parameter in own] + moments


@pytest.mark.parametrize("repeat", [False, True], ids=["increasing", "repeated"])
@pytest.mark.parametrize("options", OPTIONS, ids=["default", "other", "maximize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_equals_torch(dtype: torch.dtype, options: dict[str, Any], repeat: bool) -> None:
    ours, theirs = (
        run(kind, 5, dtype, options, repeat) for kind in (SparseAdam, torch.optim.SparseAdam)
    )
    rtol, atol = (1e-12, 1e-14) if dtype == torch.float64 else (1e-6, 1e-7)
    for got, expected in zip(tensors_of(*ours), tensors_of(*theirs), strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    steps = [[optimizer.state[p]["step"] for p in own] for own, optimizer in (ours, theirs)]
    assert steps[0] == steps[1] == [5, 4, 5, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_is_the_float32_rule_rounded(dtype: torch.dtype) -> None:
    """Moments keep float32: after one step each weight is the exact one, rounded once."""
    own, optimizer = run(SparseAdam, 1, dtype, OPTIONS[1])
    exact = [nn.Parameter(parameter.detach().float()) for parameter in parameters(dtype)]
    groups = [{"params": exact[:1]}, {"params": exact[1:], "lr": 0.02}]
    theirs = torch.optim.SparseAdam(groups, **OPTIONS[1])
    for parameter, gradient in zip(exact, gradients(0, dtype), strict=True):
        parameter.grad = gradient.float()
    theirs.step()
    unit = torch.finfo(dtype).eps / 2
    for got, expected in zip(own, exact, strict=True):
        torch.testing.assert_close(got.float(), expected, rtol=1.01 * unit, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[got][name]
            assert moment.dtype == torch.float32
            torch.testing.assert_close(moment, theirs.state[expected][name])


def test_rows_that_are_not_visited_keep_every_bit() -> None:
    own, optimizer = run(SparseAdam, 3, torch.float32, {})
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
        SparseAdam(embedding.parameters()).step()
        assert len(calls) == count


def test_empty_gradient_counts_as_a_step() -> None:
    own = nn.Parameter(torch.ones(4, 3))
    optimizers = [kind([own]) for kind in (SparseAdam, torch.optim.SparseAdam)]
    own.grad = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (4, 3), check_invariants=False
    )
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.state[own]["step"] == 1
    assert torch.equal(own, torch.ones(4, 3))


def test_gradients_of_trees_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one backward pass, and of two where torch merges their rows in order, as on the CPU."""
    trees = [random_tree(30, seed=s) for s in (1, 2)]
    head = TreeEnsemble(8, 30, trees, sparse=True)
    own = [p for group in head.parameter_groups() if group.sparse for p in group.params]
    assert len(own) > 1
    optimizers = [
        SparseAdam(own),
        torch.optim.SparseAdam(copied := [copy.deepcopy(p) for p in own]),
    ]
    calls = coalesced(monkeypatch)
    for backward_passes in (1, 2):
        for parameter in own:
            parameter.grad = None
        for _ in range(backward_passes):
            hidden, target = torch.randn(11, 8), torch.randint(30, (11,))
            head(hidden, target).loss.backward()
        for parameter, copied_parameter in zip(own, copied, strict=True):
            copied_parameter.grad = parameter.grad.clone()
        calls.clear()
        optimizers[0].step()
        assert not calls
        optimizers[1].step()
        for parameter, copied_parameter in zip(own, copied, strict=True):
            torch.testing.assert_close(parameter, copied_parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SparseAdam, SparseAdam),
        (SparseAdam, torch.optim.SparseAdam),
        (torch.optim.SparseAdam, SparseAdam),
    ],
    ids=["ours", "ours to torch", "torch to ours"],
)
def test_state_dict_goes_both_ways(first: Any, second: Any, dtype: torch.dtype) -> None:
    own, optimizer = run(first, 3, dtype, OPTIONS[1])
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    loaded = [nn.Parameter(parameter.detach().clone()) for parameter in own]
    other = second([{"params": loaded[:1]}, {"params": loaded[1:]}])
    other.load_state_dict(saved)
    more_steps(own, optimizer, range(3, 5), dtype)
    more_steps(loaded, other, range(3, 5), dtype)
    pairs = zip(tensors_of(own, optimizer), tensors_of(loaded, other), strict=True)
    for expected, got in pairs:
        if first is second:
            assert torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_float32_moments_survive_state_dict() -> None:
    own, optimizer = run(SparseAdam, 3, torch.bfloat16, {})
    saved = copy.deepcopy(optimizer.state_dict())
    other = SparseAdam([{"params": own[:1]}, {"params": own[1:]}])
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


def test_closure() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = SparseAdam(embedding.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = embedding(torch.tensor([3, 1, 3])).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_dense_gradient() -> None:
    own = parameters(torch.float32)
    optimizer = SparseAdam([{"params": own[:1]}, {"params": own[1:]}])
    own[2].grad = torch.ones(2, 9)
    match = r"parameter 1 of group 1, shape \[2, 9\]: expected a sparse gradient, got a dense one"
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()


def test_three_sparse_dimensions() -> None:
    own = nn.Parameter(torch.ones(2, 3, 4))
    own.grad = torch.ones(2, 3, 4).to_sparse()
    with pytest.raises(RuntimeError, match=r"index: expected shape \[1, nnz\] or \[2, nnz\]"):
        SparseAdam([own]).step()


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"eps": 0.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}], ids=str
)
def test_bad_option(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        SparseAdam([nn.Parameter(torch.ones(2))], **options)


def test_example() -> None:
    names = {"torch": torch, "SparseAdam": SparseAdam}
    (example,) = doctest.DocTestFinder(recurse=False).find(SparseAdam, "SparseAdam", globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
    assert hstree.optim.__all__ == ["SparseAdam"]
