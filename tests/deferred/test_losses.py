"""Deferred logits give what the plain layer gives, whatever is done with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree import deferred
from hstree.deferred import DeferredLogits, Source, defer_logits

V, D, BATCH, TIME = 500, 16, 4, 9
TARGET = torch.randint(V, (BATCH, TIME), generator=torch.Generator().manual_seed(1))
TARGET[0, :3] = -1
KNOWN = TARGET.clamp_min(0)


class Model(nn.Module):
    """Embeddings tied to the output layer, and a loop of nobody's."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.lm_head = nn.Linear(D, V, bias=bias)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.rnn(self.embedding(tokens))[0])


TOKENS = torch.randint(V, (BATCH, TIME), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each time that logits are computed; small calls are deferred, too."""
    found: list[int] = []
    compute = Source.compute

    def counted(source: Source) -> Tensor:
        if source.value is None:
            found.append(1)
        return compute(source)

    monkeypatch.setattr(Source, "compute", counted)
    monkeypatch.setattr(deferred, "LEAST", 0)
    return found


class Own(torch.autograd.Function):
    """Code with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        p = logits.float().softmax(-1)
        ctx.save_for_backward(p, target)
        return -p.gather(-1, target[..., None]).log().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, target = ctx.saved_tensors
        return grad * (p - F.one_hot(target, V)), None


def flat(z: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.view(-1, V), TARGET.view(-1), ignore_index=-1, **options)


def selected(z: Tensor) -> Tensor:
    """Log-probabilities of tokens, as reinforcement learning reads them."""
    at = torch.gather(z, dim=-1, index=KNOWN.unsqueeze(-1)).squeeze(-1)
    return at - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def entropy(z: Tensor) -> Tensor:
    parts = []
    for chunk in z.reshape(-1, V).split(7):
        log_p = F.log_softmax(chunk, dim=-1)
        parts.append(-(torch.exp(log_p) * log_p).sum(-1))
    return torch.cat(parts).mean()


def masked(z: Tensor) -> Tensor:
    return F.cross_entropy(z[TARGET >= 0], TARGET[TARGET >= 0])


def shifted(z: Tensor) -> Tensor:
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    return loss(z[..., :-1, :].contiguous().view(-1, V), TARGET[..., 1:].contiguous().view(-1))


def edited(z: Tensor) -> Tensor:
    z[:, :, 5] = -30.0  # as a model that masks a token
    return flat(z)


def edited_view(z: Tensor) -> Tensor:
    rows = z.view(-1, V)
    rows[3:9].mul_(0.5)
    return flat(z) + rows.logsumexp(-1).mean()


def copied_before_an_edit(z: Tensor) -> Tensor:
    half, same = z / 2, z.clone()
    z.zero_()
    return flat(half) + flat(same) + z.sum()


FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": flat,
    "flatten": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten(), ignore_index=-1),
    "float": lambda z: flat(z.float()),
    "shifted": shifted,
    "B V T": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET, ignore_index=-1),
    "B V T, permute": lambda z: F.cross_entropy(z.permute(0, 2, 1), TARGET, ignore_index=-1),
    "B V T, mT": lambda z: F.cross_entropy(z[:, 2:].mT, TARGET[:, 2:], ignore_index=-1),
    "smoothing": lambda z: flat(z, label_smoothing=0.1),
    "class weights": lambda z: flat(z, weight=torch.linspace(0.5, 2, V)),
    "both": lambda z: flat(z, weight=torch.linspace(0.5, 2, V), label_smoothing=0.1),
    "sum": lambda z: flat(z, reduction="sum"),
    "none": lambda z: flat(z, reduction="none").mul(torch.arange(36.0)).sum(),
    "log_softmax, gather": lambda z: -z.log_softmax(-1).gather(-1, KNOWN[..., None]).mean(),
    "nll_loss": lambda z: F.nll_loss(
        F.log_softmax(z.view(-1, V), -1), TARGET.view(-1), ignore_index=-1
    ),
    "selected": lambda z: selected(z / 0.7).mean(),
    "masked": masked,
    "rows by number": lambda z: F.cross_entropy(
        z[torch.tensor([1, 3])].view(-1, V), KNOWN[1::2].reshape(-1)
    ),
    "list of rows": lambda z: sum(F.cross_entropy(a, b) for a, b in zip(z, KNOWN, strict=True)),  # type: ignore[return-value]
    "unbind": lambda z: sum(
        F.cross_entropy(a, b) for a, b in zip(z.unbind(1), KNOWN.T, strict=True)
    ),  # type: ignore[return-value]
    "chunk": lambda z: sum(
        F.cross_entropy(a.flatten(0, 1), b.flatten())
        for a, b in zip(z.chunk(2, dim=1), KNOWN.chunk(2, 1), strict=True)
    ),  # type: ignore[return-value]
    "cap": lambda z: flat((z.float() / 30).tanh().mul(30)),
    "scaled cap": lambda z: flat((z * 3 / 2.5).tanh() * 2.5),
    "temperature": lambda z: flat(z / torch.tensor(2.0)),
    "number first": lambda z: flat(0.25 * z),
    "z-loss": lambda z: flat(z) + 1e-2 * z.logsumexp(-1).square().mean(),
    "two losses": lambda z: flat(z) + masked(z) + shifted(z),
    "accuracy": lambda z: flat(z) + (z.detach().argmax(-1) == TARGET).float().mean(),
}
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": lambda z: flat(z) + entropy(z),
    "probability targets": lambda z: F.cross_entropy(z.view(-1, V), torch.full((36, V), 1 / V)),
    "kl_div": lambda z: F.kl_div(
        z.log_softmax(-1), torch.full((BATCH, TIME, V), 1 / V), reduction="sum"
    ),
    "own function": lambda z: Own.apply(z, KNOWN),  # type: ignore[no-untyped-call]
    "own function of a view": lambda z: Own.apply(z[:, :-1].float() / 2, KNOWN[:, :-1]),  # type: ignore[no-untyped-call]
    "stack": lambda z: flat(torch.cat([z[:, :4], z[:, 4:]], 1)),
    "sum with another": lambda z: flat(z + torch.linspace(0, 1, V)),
    "negative factor": lambda z: flat(-1 * z),
    "in place": edited,
    "in place, a view": edited_view,
    "in place, after copies": copied_before_an_edit,
    "returned by an edit": lambda z: flat(z.div_(2)),
    "more classes gathered": lambda z: z.gather(-1, KNOWN[..., None].expand(-1, -1, 3)).sum(),
    "logsumexp of all": lambda z: z.logsumexp((0, 1, 2)),
    "vmap": lambda z: torch.vmap(lambda a, b: -a.log_softmax(-1)[b])(
        z.reshape(-1, V), KNOWN.view(-1)
    ).mean(),
    "multi-margin": lambda z: F.multi_margin_loss(z.view(-1, V), KNOWN.view(-1)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*FUSED, *READ])
def test_losses_and_gradients(name: str, bias: bool, reads: list[int]) -> None:
    loss = (FUSED | READ)[name]
    plain = Model(bias)
    model = copy.deepcopy(plain)
    assert defer_logits(model.lm_head) is model.lm_head
    results = []
    for each in (plain, model):
        value = loss(each(TOKENS))
        value.backward()
        results.append((value.detach(), [p.grad for p in each.parameters()]))
    assert bool(reads) == (name in READ)
    (expected, wanted), (value, found) = results
    torch.testing.assert_close(value, expected)
    assert value.dtype == expected.dtype
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["view", "float", "selected", "B V T", "none"])
def test_dtypes(name: str, dtype: torch.dtype, reads: list[int]) -> None:
    plain = Model().to(dtype)
    model = copy.deepcopy(plain)
    defer_logits(model.lm_head)
    exact = FUSED[name](copy.deepcopy(plain).double()(TOKENS))
    logits = model(TOKENS)
    assert logits.dtype == dtype
    value, expected = FUSED[name](logits), FUSED[name](plain(TOKENS))
    assert value.dtype == expected.dtype
    assert not reads
    # No worse than the plain layer in that precision.
    error, own = (expected - exact).abs(), (value - exact).abs()
    assert (
        own
        <= error + 2 * max(torch.finfo(each).eps for each in (dtype, expected.dtype)) * exact.abs()
    )


def test_autocast_is_that_of_the_call(reads: list[int]) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    defer_logits(model.lm_head)
    with torch.autocast("cpu", torch.bfloat16):
        expected, logits = plain(TOKENS), model(TOKENS)
        value = flat(logits)
        assert (value.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    # The loss outside: logits of 16 bits, as they are outside for the plain layer.
    outside = flat(logits)
    assert outside.dtype == flat(expected).dtype == torch.bfloat16
    assert not reads
    torch.testing.assert_close(value, flat(expected.float()), rtol=2e-2, atol=2e-2)
    assert torch.equal(logits + 0, expected)


def test_what_is_read_has_the_bits_of_the_layer(reads: list[int]) -> None:
    model = Model(bias=True)
    expected = model(TOKENS).detach()
    defer_logits(model.lm_head)
    logits = model(TOKENS)
    assert isinstance(logits, DeferredLogits)
    assert not logits.computed
    assert torch.equal(logits.detach(), expected)
    assert logits.computed
    assert len(reads) == 1
    assert torch.equal(logits[1, 2:5, :7], expected[1, 2:5, :7])
    assert torch.equal(logits.sum(-1), expected.sum(-1))
    assert len(reads) == 1


def test_argmax_and_entropy_hold_a_chunk(reads: list[int]) -> None:
    model = Model()
    expected = model(TOKENS).detach()
    defer_logits(model.lm_head)
    with torch.no_grad():
        logits = model(TOKENS)  # training mode without gradients: plain
        assert type(logits) is Tensor
    logits = model(TOKENS)
    with torch.no_grad():
        assert torch.equal(logits[..., :-1, :].argmax(-1), expected[..., :-1, :].argmax(-1))
        assert not reads
        torch.testing.assert_close(entropy(logits), entropy(expected))
    assert not logits.computed  # chunks of it were


def test_evaluation_computes_no_logits_for_its_loss(reads: list[int]) -> None:
    model = Model().eval()
    expected = model(TOKENS).detach()
    defer_logits(model.lm_head)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = model(TOKENS)
            loss = flat(logits)
            assert type(model(TOKENS[:, :1])) is Tensor  # one position: decoding
        assert not reads
        assert not loss.requires_grad
        torch.testing.assert_close(loss, flat(expected))
        assert torch.equal(logits + 0, expected)  # also outside of the mode
        assert not (logits + 0).requires_grad
        reads.clear()


def test_inference_mode_keeps_the_hidden_vectors() -> None:
    """They do not tell whether they have changed."""
    layer = defer_logits(nn.Linear(16, 70_000)).eval()
    with torch.inference_mode():
        hidden = torch.randn(20, 16)
        expected = F.linear(hidden, layer.weight, layer.bias)
        logits = layer(hidden)
        hidden.zero_()
        assert torch.equal(logits + 0, expected)


@pytest.mark.parametrize("what", ["weight", "bias", "hidden"])
def test_a_read_after_a_change_raises(what: str, reads: list[int]) -> None:
    layer = defer_logits(nn.Linear(D, V))
    hidden = torch.randn(5, D)
    logits = layer(hidden)
    loss = F.cross_entropy(logits, torch.arange(5))
    loss.backward()
    with torch.no_grad():
        {"weight": layer.weight, "bias": layer.bias, "hidden": hidden}[what].add_(1)
    with pytest.raises(RuntimeError, match="logits: expected to be read before"):
        logits.max()
    with pytest.raises(RuntimeError, match="logits: expected to be read before"):
        F.cross_entropy(logits, torch.arange(5))
    assert repr(logits) == f"DeferredLogits(shape=(5, {V}), dtype=torch.float32, never computed)"


def test_logits_that_were_read_outlive_a_step(reads: list[int]) -> None:
    model = Model()
    defer_logits(model.lm_head)
    logits = model(TOKENS)
    flat(logits).backward()
    best = logits.argmax(-1)
    kept = logits.detach() + 0
    torch.optim.SGD(model.parameters(), 1.0).step()
    assert torch.equal(logits.argmax(-1), best)
    assert torch.equal(logits.detach(), kept)


def test_two_backward_passes(reads: list[int]) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    defer_logits(model.lm_head)
    for each in (plain, model):
        loss = flat(each(TOKENS))
        loss.backward(retain_graph=True)
        loss.backward()
    assert not reads
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_all_rows_ignored_and_bad_targets(reads: list[int]) -> None:
    layer = defer_logits(nn.Linear(D, V))
    logits = layer(torch.randn(5, D))
    assert F.cross_entropy(logits, torch.full((5,), -100)).isnan()
    assert F.cross_entropy(logits, torch.full((5,), -100), reduction="sum") == 0
    with pytest.raises(ValueError, match=r"target: expected values in \[0, 500\)"):
        F.cross_entropy(logits, torch.full((5,), V))
    with pytest.raises(ValueError, match="batch_size"):  # torch's own
        F.cross_entropy(logits, torch.arange(4))
    assert len(reads) == 1


def test_memory_of_a_step() -> None:
    """Nothing of size N x V is allocated: rows of a chunk, and the gradients."""
    rows, classes, features = 2048, 50_000, 16
    layer = defer_logits(nn.Linear(features, classes, bias=False))
    hidden, target = torch.randn(rows, features), torch.randint(classes, (rows,))
    with torch.profiler.profile(profile_memory=True) as profile:
        F.cross_entropy(layer(hidden).float().view(-1, classes), target).backward()
    most = max(event.cpu_memory_usage for event in profile.events())
    assert most < rows * classes * 4 / 4
