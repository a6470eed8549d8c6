"""torch's optimisers with row-sparse gradients: the rule at visited rows, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, SparseAdam

from hstree.ops import group_log_prob, path_log_prob
from ops import group_cases
from ops.cases import PATH, Case

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # Adagrad

V, D, T, RATE = 60, 7, 3, 0.1
LogProb = Callable[..., Tensor]


def of_paths() -> tuple[LogProb, tuple[int, ...], tuple[int, ...]]:
    """path_log_prob (input, weight, bias, target, sparse), and the shapes of weight and bias."""
    batch = PATH.batch(Case("paths", trees=T, classes=V, in_features=D))
    rest = batch.path_offset, batch.path, batch.leaf_position

    def log_prob(*given: Tensor, sparse: bool) -> Tensor:
        return path_log_prob(*given, *rest, max_depth=batch.max_depth, sparse=sparse)

    return log_prob, (T, V - 1, D), (T, V - 1)


def of_groups() -> tuple[LogProb, tuple[int, ...], tuple[int, ...]]:
    """The same of group_log_prob."""
    batch = group_cases.draw(group_cases.Case("groups", trees=T, classes=V, clusters=15))
    rest = batch.cluster, batch.order, batch.begin

    def log_prob(*given: Tensor, sparse: bool) -> Tensor:
        return group_log_prob(*given, *rest, max_width=batch.max_width, sparse=sparse)

    return log_prob, (V, D), (T, V)


def sgd(parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return parameter - RATE * grad


def adagrad(parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["sum"] = state.get("sum", 0) + grad**2
    return parameter - RATE * grad / (state["sum"].sqrt() + 1e-10)


def lazy_adam(parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    """Adam whose moments change where there is a gradient alone, with the bias correction of all
    steps."""
    visited = grad != 0
    step = state["step"] = state.get("step", 0) + 1
    zero = torch.zeros_like(grad)
    mean, square = state.get("mean", zero), state.get("square", zero)
    state["mean"] = torch.where(visited, 0.9 * mean + 0.1 * grad, mean)
    state["square"] = torch.where(visited, 0.999 * square + 0.001 * grad**2, square)
    rate = RATE * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    update = rate * state["mean"] / (state["square"].sqrt() + 1e-8)
    return torch.where(visited, parameter - update, parameter)


@pytest.mark.parametrize("op", [of_paths, of_groups])
@pytest.mark.parametrize(
    ("optimizer", "rule"), [(SGD, sgd), (Adagrad, adagrad), (SparseAdam, lazy_adam)]
)
def test_visited_rows_follow_the_rule_and_others_stay(op: Any, optimizer: Any, rule: Any) -> None:
    log_prob, *shapes = op()
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parameters = [draw(*shape).requires_grad_() for shape in shapes]
    stepped = optimizer(parameters, lr=RATE)
    states: list[dict[str, Any]] = [{}, {}]
    for _ in range(4):  # rows that are visited again after steps without them, too
        input, target = draw(5, D), torch.randint(V, (5,), generator=generator)
        before = [parameter.detach().clone() for parameter in parameters]
        dense = [parameter.clone().requires_grad_() for parameter in before]
        log_prob(input, *dense, target, sparse=False).sum().backward()
        stepped.zero_grad()
        log_prob(input, *parameters, target, sparse=True).sum().backward()
        assert all(p.grad is not None and p.grad.is_sparse for p in parameters)
        stepped.step()
        for parameter, old, twin, state in zip(parameters, before, dense, states, strict=True):
            assert twin.grad is not None
            expected = rule(old, twin.grad, state)
            torch.testing.assert_close(parameter.detach(), expected)
            visited = twin.grad != 0
            assert 0 < visited.sum() < visited.numel()
            assert torch.equal(parameter[~visited], old[~visited])
