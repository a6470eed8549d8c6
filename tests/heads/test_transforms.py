"""Every head under torch.func and in forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

from heads.support import HEADS, draw, draw_targets, make
from hstree.heads import Head

# In torch's own code, the first time that forward mode is at work.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ROWS = 4
every_head = pytest.mark.parametrize("kind", HEADS)
close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}

Outputs = Callable[[Head, Tensor, Tensor], Tensor]
OUTPUTS: dict[str, Outputs] = {
    "loss": lambda head, hidden, target: head(hidden, target).loss,
    "output": lambda head, hidden, target: head(hidden, target).output,
    "log_prob": lambda head, hidden, target: head.log_prob(hidden),
    "topk": lambda head, hidden, target: head.topk(hidden, 3)[0],
}


def problem(kind: str, **options: Any) -> tuple[Head, Tensor, Tensor]:
    head = make(kind, reduction="sum", **options).double().eval()
    target = draw_targets(ROWS)
    target[1] = -100
    return head, draw(ROWS, head.in_features, dtype=torch.float64), target


def parameters(head: Head) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in head.named_parameters()}


def check_per_sample_gradients(head: Head, hidden: Tensor, target: Tensor) -> None:
    """Equal to those of a plain loop over the rows."""

    def loss(state: dict[str, Tensor], hidden: Tensor, target: Tensor) -> Tensor:
        return functional_call(head, state, (hidden[None], target[None])).loss

    of_batch = vmap(grad(loss, (0, 1)), in_dims=(None, 0, 0))
    of_parameters, of_hidden = of_batch(parameters(head), hidden, target)
    learned = dict(head.named_parameters())
    for parameter in learned.values():
        parameter.requires_grad_()
    for i in range(len(hidden)):
        row = hidden[i : i + 1].clone().requires_grad_()
        plain = torch.autograd.grad(
            head(row, target[i : i + 1]).loss,
            [row, *learned.values()],
            allow_unused=True,
            materialize_grads=True,
        )
        assert_close(of_hidden[i], plain[0][0], **close)
        for name, expected in zip(learned, plain[1:], strict=True):
            assert_close(of_parameters[name][i], expected.to_dense(), **close)
    assert of_hidden[0].any()
    assert not of_hidden[1].any()  # ignored


@every_head
def test_per_sample_gradients(kind: str) -> None:
    check_per_sample_gradients(*problem(kind))


@pytest.mark.parametrize("kind", ["softmax", "mos", "mixtape", "trees, wide, subset, context"])
def test_per_sample_gradients_of_other_losses(kind: str) -> None:
    head, hidden, target = problem(kind, label_smoothing=0.1, class_weight=torch.rand(37) + 0.5)
    check_per_sample_gradients(head, hidden, target)


@every_head
@pytest.mark.parametrize("output", OUTPUTS)
def test_forward_mode(kind: str, output: str) -> None:
    """The finite difference, along hidden and all parameters; by torch.func and dual numbers."""
    head, hidden, target = problem(kind)
    state = parameters(head)
    along = {name: draw(*x.shape, seed=7, dtype=x.dtype) for name, x in state.items()}
    toward, step = draw(*hidden.shape, seed=8, dtype=hidden.dtype), 1e-6

    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: Tensor) -> Tensor:
            return OUTPUTS[output](self.head, hidden, target)

    def value(hidden: Tensor, state: dict[str, Tensor]) -> Tensor:
        named = {f"head.{name}": x for name, x in state.items()}
        result: Tensor = functional_call(Call(), named, (hidden,))
        return result

    def moved(by: float) -> Tensor:
        there = {name: x + by * along[name] for name, x in state.items()}
        return value(hidden + by * toward, there)

    expected = (moved(step) - moved(-step)) / (2 * step)
    primal, tangent = jvp(value, (hidden, state), (toward, along))
    assert_close(primal, moved(0), **close)
    assert_close(tangent, expected, rtol=1e-6, atol=2e-7)
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x, along[name]) for name, x in state.items()}
        dual = forward_ad.unpack_dual(value(forward_ad.make_dual(hidden, toward), duals))
        assert_close(dual.tangent, tangent, **close)


@every_head
def test_jacobian_of_log_prob(kind: str) -> None:
    head, hidden, _ = problem(kind)
    got = jacrev(head.log_prob)(hidden)
    plain = torch.autograd.functional.jacobian(head.log_prob, hidden)
    assert_close(got, plain, **close)
    assert_close(jacfwd(head.log_prob)(hidden), plain, **close)
    by_row = vmap(jacrev(lambda row: head.log_prob(row)))(hidden)
    assert_close(by_row, torch.stack([plain[i, :, i] for i in range(ROWS)]), **close)


@pytest.mark.parametrize("kind", ["softmax", "plif, tied", "mixtape", "trees, leaves"])
def test_hessian(kind: str) -> None:
    """A column against the finite difference of the gradient."""
    head, hidden, target = problem(kind)

    def loss(hidden: Tensor) -> Tensor:
        return head(hidden, target).loss

    toward, step = draw(*hidden.shape, seed=8, dtype=hidden.dtype), 1e-5
    product = (hessian(loss)(hidden) * toward).sum((2, 3))
    after, before = (grad(loss)(hidden + sign * step * toward) for sign in (1, -1))
    assert_close(product, (after - before) / (2 * step), rtol=1e-5, atol=1e-7)


@every_head
def test_batches_of_contexts(kind: str) -> None:
    head, hidden, target = problem(kind)
    head.requires_grad_(False)
    assert_close(vmap(head.log_prob)(hidden), head.log_prob(hidden), **close)
    assert torch.equal(vmap(head.predict)(hidden), head.predict(hidden))
    assert_close(vmap(lambda x: head.topk(x, 3))(hidden), head.topk(hidden, 3), **close)
    output = vmap(lambda x, y: head(x, y).output)(hidden, target)
    assert_close(output, head(hidden, target).output, **close)


@every_head
def test_a_bad_target(kind: str) -> None:
    """An error from the kernel; NaN from the one head that has none."""
    head, hidden, target = problem(kind)
    target[2] = head.n_classes + 3
    of_batch = vmap(lambda x, y: head(x, y).output)
    if kind != "adaptive":
        with pytest.raises(RuntimeError, match="target"):
            of_batch(hidden, target)
        return
    output = of_batch(hidden, target)
    assert output[2].isnan()
    assert output[[0, 1, 3]].isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize(
    "kind", ["softmax", "plif, tied", "monotonic", "mixtape", "trees, wide, subset, context"]
)
def test_compile(kind: str) -> None:
    """Per-sample gradients and a derivative in forward mode, each in one graph."""
    torch._dynamo.reset()
    head, hidden, target = problem(kind)
    state = parameters(head)

    def loss(state: dict[str, Tensor], hidden: Tensor, target: Tensor) -> Tensor:
        return functional_call(head, state, (hidden[None], target[None])).loss

    def forward_mode(hidden: Tensor) -> Tensor:
        tangent: Tensor = jvp(lambda x: head(x, target).loss, (hidden,), (hidden,))[1]
        return tangent

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    for function, given in ((per_sample, (state, hidden, target)), (forward_mode, (hidden,))):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_close(compiled(*given), function(*given), **close)
