"""What else meets a deferred layer: compilers, transforms, hooks, checkpoints, files, threads."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hstree
from hstree import deferred
from hstree.deferred import DeferredLogits, defer_logits, undefer

V, D = 50, 8
TOKENS = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.lm_head = nn.Linear(D, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embedding(tokens))


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), TARGET.view(-1))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "LEAST", 0)


@pytest.fixture
def plain() -> Model:
    return Model()


@pytest.fixture
def model(plain: Model) -> Model:
    made = copy.deepcopy(plain)
    defer_logits(made.lm_head)
    return made


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's, in forward mode
def test_torch_func(plain: Model, model: Model) -> None:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], tokens: Tensor, target: Tensor, of: Model) -> Tensor:
        logits = torch.func.functional_call(of, parameters, (tokens,))
        return F.cross_entropy(logits.reshape(-1, V), target.reshape(-1))

    for work in (
        lambda of: torch.func.grad(lambda p: loss(p, TOKENS, TARGET, of))(parameters),
        lambda of: torch.vmap(torch.func.grad(lambda p, a, b: loss(p, a, b, of)), (None, 0, 0))(
            parameters, TOKENS, TARGET
        ),
        lambda of: {
            "tangent": torch.func.jvp(
                lambda p: loss(p, TOKENS, TARGET, of),
                (parameters,),
                ({name: torch.ones_like(p) for name, p in parameters.items()},),
            )[1]
        },
    ):
        expected, found = work(plain), work(model)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_functional_call_keeps_the_parameters_of_the_call(plain: Model, model: Model) -> None:
    others = {name: 2 * p.detach() for name, p in plain.named_parameters()}
    expected = torch.func.functional_call(plain, others, (TOKENS,))
    logits = torch.func.functional_call(model, others, (TOKENS,))
    assert isinstance(logits, DeferredLogits)
    torch.testing.assert_close(loss_of(logits), loss_of(expected))
    assert torch.equal(logits + 0, expected)


@pytest.mark.parametrize(
    "trace",
    [
        lambda model: torch.export.export(model, (TOKENS,)).module(),
        lambda model: torch.jit.trace(model, TOKENS),
        torch.fx.symbolic_trace,
        lambda model: torch.fx.experimental.proxy_tensor.make_fx(model)(TOKENS),
    ],
    ids=["export", "jit", "fx", "make_fx"],
)
@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated
def test_tracing(trace: Callable[[nn.Module], Any], plain: Model, model: Model) -> None:
    found = trace(model)(TOKENS)
    assert type(found) is Tensor
    torch.testing.assert_close(found, plain(TOKENS))


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("what", ["model", "step", "loss"])
def test_compile(what: str, backend: str, plain: Model, model: Model) -> None:
    torch._dynamo.reset()
    if what == "model":
        compiled = torch.compile(model, backend=backend)
        loss = loss_of(compiled(TOKENS))
    elif what == "step":
        loss = torch.compile(lambda tokens: loss_of(model(tokens)), backend=backend)(TOKENS)
    else:
        loss = torch.compile(loss_of, backend=backend)(model(TOKENS))
    expected = loss_of(plain(TOKENS))
    torch.testing.assert_close(loss, expected)
    for own, other in zip(gradients(model, loss), gradients(plain, expected), strict=True):
        torch.testing.assert_close(own, other)


def test_flops_are_counted_of_plain_products(plain: Model, model: Model) -> None:
    counts = []
    for each in (plain, model):
        with FlopCounterMode(display=False) as counter:
            loss_of(each(TOKENS)).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_forward_hooks_see_and_change_the_logits(plain: Model, model: Model) -> None:
    seen = []
    for each in (plain, model):
        each.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
        each.lm_head.register_forward_hook(lambda *call: seen.append(call[2].shape))
        each.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    expected, loss = loss_of(plain(TOKENS)), loss_of(model(TOKENS))
    torch.testing.assert_close(loss, expected)
    assert seen == [(3, 5, V), (3, 5, V)]
    for own, other in zip(gradients(model, loss), gradients(plain, expected), strict=True):
        torch.testing.assert_close(own, other)


def test_backward_hooks_get_the_gradient_of_the_logits(plain: Model, model: Model) -> None:
    seen: list[Tensor] = []
    for each in (plain, model):
        each.lm_head.register_full_backward_hook(lambda m, a, out: seen.append(out[0] + 0))
        loss_of(each(TOKENS)).backward()
    torch.testing.assert_close(seen[1], seen[0])


def test_hooks_and_gradients_of_logits(plain: Model, model: Model) -> None:
    found: list[list[Tensor]] = []
    for each in (plain, model):
        logits = each(TOKENS)
        logits.retain_grad()
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        loss = loss_of(logits)
        (by_grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        loss.backward()
        assert logits.grad is not None
        found.append([by_grad, seen[-1], logits.grad])
    torch.testing.assert_close(found[1], found[0])


def test_a_gradient_of_logits_that_nobody_has_read_is_refused(model: Model) -> None:
    logits = model(TOKENS)
    loss = loss_of(logits)
    with pytest.raises(RuntimeError, match="inputs: expected logits that were read before"):
        torch.autograd.grad(loss, logits)
    logits.compute()
    (found,) = torch.autograd.grad(loss_of(logits), logits)
    assert found.shape == logits.shape


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("of", ["layer", "loss"])
def test_checkpoints(of: str, reentrant: bool, plain: Model, model: Model) -> None:
    found = []
    for each in (plain, model):
        hidden = each.embedding(TOKENS)
        if of == "layer":
            loss = loss_of(checkpoint(each.lm_head, hidden, use_reentrant=reentrant))
        else:
            loss = checkpoint(
                lambda h, each=each: loss_of(each.lm_head(h)), hidden, use_reentrant=reentrant
            )
        found.append((loss, gradients(each, loss)))
    torch.testing.assert_close(found[1], found[0])


def test_parametrized_weights(plain: Model, model: Model) -> None:
    """Before and after the layer is deferred."""
    late = copy.deepcopy(plain)
    for each in (plain, model, late):
        weight_norm(each.lm_head)
    defer_logits(late.lm_head)
    expected = loss_of(plain(TOKENS))
    wanted = gradients(plain, expected)
    for each in (model, late):
        logits = each(TOKENS)
        assert isinstance(logits, DeferredLogits)
        loss = loss_of(logits)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(each, loss), wanted)
        assert torch.equal(logits + 0, plain(TOKENS))
    parametrize.remove_parametrizations(model.lm_head, "weight")
    torch.testing.assert_close(loss_of(model(TOKENS)), expected)


class Scaled(nn.Linear):
    """Inherits the forward method of Linear, as layers of models do that only mark themselves."""


class Factor(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


@pytest.mark.parametrize("kind", [nn.Linear, Scaled])
def test_copies_and_files(kind: type[nn.Linear]) -> None:
    layer = kind(D, V)
    before = {name: p.clone() for name, p in layer.state_dict().items()}
    assert defer_logits(layer) is layer
    assert isinstance(layer, kind)
    assert list(layer.state_dict()) == ["weight", "bias"]
    hidden = torch.randn(4, D)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is type(layer)
        assert isinstance(other(hidden), DeferredLogits)
        assert torch.equal(other(hidden) + 0, F.linear(hidden, before["weight"], before["bias"]))
    assert undefer(layer) is layer
    assert type(layer) is kind
    assert type(layer(hidden)) is Tensor
    assert vars(layer).keys() == vars(kind(D, V)).keys()
    for name, p in layer.state_dict().items():
        assert torch.equal(p, before[name])


def test_logits_are_pickled_and_copied_as_numbers(model: Model) -> None:
    logits = model(TOKENS).detach()
    for other in (pickle.loads(pickle.dumps(logits)), copy.deepcopy(logits)):
        assert type(other) is Tensor
        assert torch.equal(other, logits)
    assert repr(model(TOKENS)).startswith("tensor(")
    assert model(TOKENS).detach().numpy().shape == (3, 5, V)
    assert len(list(model(TOKENS))) == 3


def test_threads_share_a_layer(plain: Model, model: Model) -> None:
    batches = [torch.randint(V, (3, 5)) for _ in range(32)]

    def work(tokens: Tensor) -> Tensor:
        logits = model(tokens)
        return torch.stack([loss_of(logits), logits.logsumexp(-1).mean(), logits.max()]).detach()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, batches))
    for tokens, values in zip(batches, found, strict=True):
        z = plain(tokens)
        expected = torch.stack([loss_of(z), z.logsumexp(-1).mean(), z.max()])
        torch.testing.assert_close(values, expected)


def test_small_calls_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layer = defer_logits(nn.Linear(4, 1024))
    assert type(layer(torch.zeros(1023, 4))) is Tensor
    assert isinstance(layer(torch.zeros(1024, 4)), DeferredLogits)


def test_frozen_layers(plain: Model, model: Model) -> None:
    for each in (plain, model):
        each.lm_head.requires_grad_(False)
    loss, expected = loss_of(model(TOKENS)), loss_of(plain(TOKENS))
    (found,), (wanted,) = gradients(model, loss), gradients(plain, expected)
    torch.testing.assert_close(found, wanted)
    for each in (plain, model):
        each.requires_grad_(False)
    assert not model(TOKENS).requires_grad
    assert not loss_of(model(TOKENS)).requires_grad


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"layer: expected a torch\.nn\.Linear.*got Factor"):
        defer_logits(Factor(D, V))
    with pytest.raises(TypeError, match="got Embedding"):
        defer_logits(nn.Embedding(V, D))
    layer = nn.Linear(D, V)
    with pytest.raises(TypeError, match="layer: expected a deferred layer, got Linear"):
        undefer(layer)
    with pytest.raises(TypeError, match="head: expected a head of hstree or None, got str"):
        defer_logits(layer, "sampled")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head: expected n_classes=50, as the layer has, got 51"):
        defer_logits(layer, hstree.Softmax(D, V + 1))
    assert type(layer) is nn.Linear
    defer_logits(layer)
    with pytest.raises(ValueError, match="expected a layer that is not deferred"):
        defer_logits(layer)
    hooked = nn.Linear(D, V)
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="whose forward was replaced"):
        defer_logits(hooked)


def test_hidden_vectors_of_another_size_or_dtype(model: Model) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # torch's own
        model.lm_head(torch.randn(3, D + 1))
    with pytest.raises(RuntimeError, match="dtype"):
        model.lm_head(torch.randn(3, D, dtype=torch.float64))
    assert model.lm_head(torch.randn(D)).shape == (V,)
    assert model.lm_head(torch.randn(0, D)).shape == (0, V)
