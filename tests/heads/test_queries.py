"""What every query of a head shares with a call: forward pre-hooks, the meta device, quantized
layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from heads.support import HEADS, SOME, D, V, draw, draw_targets, make
from hstree.heads import Head, Mixtape, Softmax

every_head = pytest.mark.parametrize("kind", HEADS)

USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "log_prob": lambda head, hidden, target: head.log_prob(hidden),
    "entropy": lambda head, hidden, target: head.entropy(hidden),
    "topk": lambda head, hidden, target: head.topk(hidden, 3),
    "predict": lambda head, hidden, target: head.predict(hidden),
    "sample": lambda head, hidden, target: head.sample(
        hidden, 2, generator=torch.Generator().manual_seed(0), return_log_prob=True
    ),
    "candidate_log_prob": lambda head, hidden, target: head.candidate_log_prob(
        hidden, target[:, None]
    ),
    "forward": lambda head, hidden, target: head(hidden, target),
}


def pruned(head: Head) -> Head:
    """With 30% of every weight set to 0 by a forward pre-hook."""
    for module in list(head.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                prune.l1_unstructured(module, name, 0.3)
    return head


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("use", USES)
def test_pruned_and_loaded(kind: str, use: str) -> None:
    """The first use of a head whose weights were loaded, as the head itself after a call."""
    hidden, target = draw(6, D), draw_targets(6).clamp(min=0)
    first, second = pruned(make(kind)).eval(), pruned(HEADS[kind]()).eval()
    second.load_state_dict(first.state_dict())
    first(hidden, target)  # computes the weights
    torch.testing.assert_close(USES[use](second, hidden, target), USES[use](first, hidden, target))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # weight_norm is deprecated
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("use", USES)
def test_normed_and_loaded(norm: Callable[..., Any], use: str) -> None:
    hidden, target = draw(6, D), draw_targets(6).clamp(min=0)
    first, second = (norm(make("softmax"), "weight").eval() for _ in range(2))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(1.5)
    second.load_state_dict(first.state_dict())
    first(hidden, target)
    plain = Softmax(D, V)
    plain.load_state_dict({"weight": first.weight, "bias": first.bias})
    torch.testing.assert_close(USES[use](second, hidden, target), USES[use](plain, hidden, target))


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("use", USES)
def test_hooks_run_once_and_may_change_the_input(kind: str, use: str) -> None:
    head, calls = make(kind).eval(), []
    hidden, target = draw(6, D), draw_targets(6).clamp(min=0)
    expected = USES[use](head, hidden * 4, target)

    def double(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        calls.append("positional")
        assert module is head
        return 2 * inputs[0], *inputs[1:]

    def double_with_keywords(module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> Any:
        calls.append("keywords")
        return (2 * inputs[0], *inputs[1:]), keywords

    handles = [
        head.register_forward_pre_hook(double),
        head.register_forward_pre_hook(double_with_keywords, with_kwargs=True),
        head.register_forward_pre_hook(lambda module, inputs: None),
    ]
    torch.testing.assert_close(USES[use](head, hidden, target), expected)
    assert calls == ["positional", "keywords"]
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(USES[use](head, hidden * 4, target), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_query_between_loss_and_backward(mode: Callable[[], Any]) -> None:
    """The weights that a query without gradients computes may be read by a backward pass that
    computes scores again."""
    hidden, target = draw(6, D), draw_targets(6)
    grads = []
    for query in (False, True):
        head = Mixtape(D, V, label_smoothing=0.1)
        with torch.no_grad():
            for k, parameter in enumerate(head.parameters()):
                parameter.copy_(draw(*parameter.shape, seed=k))
        loss = pruned(head)(hidden, target).loss
        if query:
            with mode():
                head.predict(hidden)
        loss.backward()
        grads.append([parameter.grad for parameter in head.parameters()])
    assert grads[0][0] is not None
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
def test_compiled_query_of_a_pruned_head() -> None:
    torch._dynamo.reset()
    head, hidden = pruned(make("softmax")).eval(), draw(6, D)
    expected = head.log_prob(hidden)
    compiled = torch.compile(head.log_prob, backend="eager")
    torch.testing.assert_close(compiled(hidden), expected)


def described(result: Any) -> Any:
    """Shapes and dtypes."""
    if isinstance(result, Tensor):
        return tuple(result.shape), result.dtype
    return [described(part) for part in result]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in HEADS), *((kind, torch.bfloat16) for kind in SOME)],
)
def test_meta_device(kind: str, dtype: torch.dtype) -> None:
    """Shapes and dtypes as on the CPU, and gradients."""
    head = make(kind)
    hidden, target = draw(6, D), draw_targets(6).clamp(min=0)
    moved = copy.deepcopy(head).to(dtype).to("meta")
    moved.requires_grad_("sparse" not in kind)  # their size depends on values
    for name, use in USES.items():
        x = hidden.to("meta").requires_grad_()
        if name == "sample":
            result = moved.sample(x, 2, return_log_prob=True)
        else:
            result = use(moved, x, target.to("meta"))
        assert described(result) == described(use(head, hidden, target)), name
        parts = [result] if isinstance(result, Tensor) else result
        assert all(part.is_meta for part in parts), name
        if parts[0].requires_grad and "sparse" not in kind:
            parts[0].sum().backward()
            assert x.grad is not None, name
            assert x.grad.is_meta, name


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("option", ["class_weight", "label_smoothing", "z_loss"])
def test_loss_options_on_the_meta_device(kind: str, option: str) -> None:
    options = {option: [1.0] * V if option == "class_weight" else 0.1}
    try:
        head = make(kind, reduction="none", **options).to("meta")
    except ValueError:
        return  # not an option of this head
    output, loss = head(draw(6, D).to("meta"), draw_targets(6).to("meta"))
    assert loss.is_meta
    assert output.shape == loss.shape == (6,)


WITH_LINEAR = [
    kind for kind in HEADS if any(isinstance(part, nn.Linear) for part in make(kind).modules())
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", WITH_LINEAR)
def test_dynamic_quantization(kind: str) -> None:
    """Linear layers inside a head, in int8: their weight is a method."""
    head = make(kind).eval()
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(head), {nn.Linear})
    hidden, target = draw(6, D), draw_targets(6).clamp(min=0)
    for name, use in USES.items():
        expected, result = use(head, hidden, target), use(quantized, hidden, target)
        assert described(result) == described(expected), name
        if name in ("log_prob", "forward"):
            torch.testing.assert_close(result, expected, rtol=0.05, atol=0.3)  # 8 bits
