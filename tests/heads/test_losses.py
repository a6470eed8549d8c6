"""Options of the loss and the entropy, against torch's own on the logits of every head."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.support import HEADS, ORDER, D, V, allocations, draw, draw_targets, make, randomise
from hstree.heads import (
    Head,
    Mixtape,
    Softmax,
    head_class,
    head_names,
)
from hstree.ops.mixture_log_prob import CHUNK_BYTES, LOSS

every_head = pytest.mark.parametrize("kind", HEADS)
REDUCTIONS = ("none", "sum", "mean")
WEIGHT = torch.linspace(0, 2, V, dtype=torch.float64)[ORDER]
OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"class_weight": WEIGHT},
    "smoothing": {"label_smoothing": 0.2},
    "both": {"class_weight": WEIGHT, "label_smoothing": 0.2},
}
NORMALISED = [name for name in head_names() if head_class(name).has_normalizer]
"""Names of the heads that have one normalizer."""
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def build(kind: str, **options: Any) -> Head:
    """A head in float64, its class weights too."""
    head = make(kind, **options).double()
    if head.class_weight is not None:
        head.class_weight.copy_(options["class_weight"])
    return head


def batch(rows: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    target = draw_targets(rows)
    target[::4] = -100
    return draw(rows, D, dtype=dtype).requires_grad_(), target


def gradients(head: Head, hidden: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Of the loss, rows of which have different factors, in hidden and every parameter; a parameter
    that it does not touch has 0."""
    learned = {name: p for name, p in head.named_parameters() if p.requires_grad}
    factor = torch.linspace(-1, 2, loss.numel()).to(loss) if loss.dim() else 3.0
    total = (loss * factor).sum()
    got = torch.autograd.grad(total, [hidden, *learned.values()], allow_unused=True)
    tensors = zip(["hidden", *learned], got, [hidden, *learned.values()], strict=True)
    return {
        name: torch.zeros_like(tensor) if grad is None else grad.to_dense()
        for name, grad, tensor in tensors
    }


def assert_same(head: Head, hidden: Tensor, loss: Tensor, expected: Tensor, **close: Any) -> None:
    """Two losses and their gradients."""
    close = close or CLOSE
    torch.testing.assert_close(loss, expected, **close)
    wanted = gradients(head, hidden, expected)
    for name, grad in gradients(head, hidden, loss).items():
        torch.testing.assert_close(
            grad, wanted[name], **close, msg=lambda text, name=name: f"{name}: {text}"
        )


def kinds_for(option: str) -> list[str]:
    """Heads that take the option: row-sparse gradients cannot reach every class."""
    return [kind for kind in HEADS if option == "weights" or "sparse" not in kind]


@pytest.mark.parametrize(
    ("reduction", "option", "kind"),
    [
        (reduction, option, kind)
        for reduction, option in [
            *product(REDUCTIONS, ["both"]),
            ("mean", "weights"),
            ("mean", "smoothing"),
        ]
        for kind in kinds_for(option)
    ],
)
def test_loss_is_cross_entropy(kind: str, option: str, reduction: str) -> None:
    head = build(kind, reduction=reduction, **OPTIONS[option])
    hidden, target = batch()
    output, loss = head(hidden, target)
    plain = build(kind, reduction="none")
    torch.testing.assert_close(output, plain(hidden, target).output, **CLOSE)
    expected = F.cross_entropy(
        head.log_prob(hidden),  # a log-softmax of log-probabilities changes nothing
        target,
        weight=head.class_weight,
        label_smoothing=head.label_smoothing,
        reduction=reduction,
    )
    assert_same(head, hidden, loss, expected)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_softmax_is_a_linear_layer(option: str, bias: bool) -> None:
    """Without the head's own log-probabilities."""
    head = randomise(Softmax(D, V, bias=bias, **OPTIONS[option])).double()
    hidden, target = batch()
    logits = F.linear(hidden, head.weight, head.bias)
    smoothing = head.label_smoothing
    expected = F.cross_entropy(logits, target, weight=head.class_weight, label_smoothing=smoothing)
    assert_same(head, hidden, head(hidden, target).loss, expected)


def logits_of(head: Any, hidden: Tensor) -> Tensor:
    """f of the scores [N, V], normalised by one log-sum-exp."""
    encoded = head.encode(hidden)
    if isinstance(head, Mixtape):
        return head.class_scores(encoded)
    logits = F.linear(encoded, head.weight, head.bias)
    return head.function(logits.dtype)(logits)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("option", [None, "both"])
@pytest.mark.parametrize(
    "kind",
    [kind for kind in HEADS if kind.split(",")[0] in NORMALISED and "sparse" not in kind],
)
def test_z_loss(kind: str, option: str | None, reduction: str) -> None:
    head = build(kind, reduction=reduction, z_loss=0.1, **OPTIONS.get(option or "", {}))
    hidden, target = batch()
    logits, kept = logits_of(head, hidden), target != -100
    square = torch.where(kept, 0.1 * logits.logsumexp(1).square(), 0.0)
    reduced = {"none": square, "sum": square.sum(), "mean": square.sum() / kept.sum()}
    expected = reduced[reduction] + F.cross_entropy(
        logits,
        target,
        weight=head.class_weight,
        label_smoothing=head.label_smoothing,
        reduction=reduction,
    )
    assert_same(head, hidden, head(hidden, target).loss, expected)


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind.split(",")[0] not in NORMALISED])
def test_z_loss_is_refused(kind: str) -> None:
    name = type(make(kind)).__name__
    match = f"z_loss: expected 0 for {name}, which has no normalizer of all .* got 0.1"
    with pytest.raises(ValueError, match=match):
        make(kind, z_loss=0.1)


def test_options_that_reach_every_class_are_refused_with_sparse_gradients() -> None:
    with pytest.raises(ValueError, match="label_smoothing: expected 0 for trees with sparse=True"):
        make("trees, sparse", label_smoothing=0.1)
    for option in ("label_smoothing", "z_loss"):
        match = f"{option}: expected 0 for the head 'sampled' with sparse=True, .* got 0.1"
        with pytest.raises(ValueError, match=match):
            make("sampled, sparse, tied", **{option: 0.1})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing: expected a probability in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing: .* got -0.1"),
        ({"z_loss": -1.0}, "z_loss: expected a number of at least 0, got -1.0"),
        ({"z_loss": "big"}, "z_loss: expected a finite number, got 'big'"),
        (
            {"class_weight": torch.ones(V - 1)},
            rf"class_weight: expected {V} numbers, .* got shape \(36,\)",
        ),
        ({"class_weight": 2.0}, rf"class_weight: expected {V} numbers, .* got shape \(\)"),
        ({"class_weight": "balanced"}, f"class_weight: expected {V} numbers, got"),
        ({"class_weight": [True] * V}, "class_weight: .* torch.bool"),
        ({"class_weight": [1.0] * (V - 1) + [-2.0]}, r"class_weight\[36\]: .*at least 0, got -2.0"),
        ({"class_weight": [1.0] * (V - 1) + [float("nan")]}, r"class_weight\[36\]: .* got nan"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Softmax(D, V, **options)


def test_repr_says_what_is_set() -> None:
    assert Softmax(4, 3).extra_repr() == "in_features=4, n_classes=3, reduction='mean'"
    head = Softmax(4, 3, class_weight=[1, 2, 3], label_smoothing=0.1, z_loss=1e-4)
    assert head.extra_repr() == (
        "in_features=4, n_classes=3, reduction='mean', class_weight=[V], label_smoothing=0.1, "
        "z_loss=0.0001"
    )
    assert head.class_weight.dtype == torch.float32


def test_class_weight_of_zero() -> None:
    """Rows that do not count but are not ignored: they have an output; NaN if there is no other, as
    F.cross_entropy."""
    weight = torch.ones(V)
    weight[3] = 0
    head = make("softmax", class_weight=weight)
    hidden = draw(5, D).requires_grad_()
    output, loss = head(hidden, torch.full((5,), 3))
    assert (output < 0).all()
    assert loss.isnan()
    loss = head(hidden, torch.tensor([3, 3, 4, 3, 3])).loss
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad[2].any()
    assert not grad[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("kind", ["softmax", "gss", "mos", "mixtape", "adaptive", "trees"])
def test_autocast(kind: str, device: torch.device) -> None:
    z_loss = {"z_loss": 0.01} if kind in NORMALISED else {}
    head = make(kind, device, class_weight=WEIGHT, label_smoothing=0.1, **z_loss)
    hidden, target = draw(64, D).to(device), draw_targets(64).to(device)
    expected, entropy = head(hidden, target).loss, head.entropy(hidden)
    low = hidden.bfloat16().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        loss, of_low = head(low, target).loss, head.entropy(low)
    assert loss.dtype == of_low.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(of_low, entropy, rtol=0.02, atol=0.02)
    loss.backward()
    assert low.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in head.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) for kind in ("softmax", "gss", "trees")],
)
def test_compile(kind: str) -> None:
    torch._dynamo.reset()
    z_loss = {"z_loss": 0.01} if kind in NORMALISED else {}
    head = make(kind, class_weight=WEIGHT, label_smoothing=0.1, **z_loss)
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 12):
        hidden, target = batch(rows, torch.float32)
        expected = head(hidden, target).loss
        assert_same(head, hidden, compiled(hidden, target).loss, expected, rtol=1e-5, atol=1e-5)


@every_head
def test_entropy(kind: str) -> None:
    head = build(kind)
    hidden = draw(2, 9, D, dtype=torch.float64).requires_grad_()
    entropy = head.entropy(hidden)
    assert entropy.shape == (2, 9)
    log_prob = head.log_prob(hidden)
    expected = torch.distributions.Categorical(logits=log_prob.detach()).entropy()
    torch.testing.assert_close(entropy, expected, **CLOSE)
    assert_same(head, hidden, entropy.flatten(), -(log_prob.exp() * log_prob).sum(-1).flatten())
    assert not head.eval().requires_grad_(False).entropy(hidden.detach()).requires_grad
    assert head.entropy(hidden[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("kind", ["softmax", "mos", "trees"])
def test_entropy_of_certain_rows(kind: str) -> None:
    """Probabilities of 0: entropy 0, and a gradient that is finite."""
    head = randomise(HEADS[kind](), scale=1e4)
    hidden = draw(5, D).requires_grad_()
    entropy = head.entropy(hidden)
    assert (head.log_prob(hidden).exp() == 0).any()
    assert torch.allclose(entropy, torch.zeros(5), atol=0.1)
    entropy.sum().backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "option"), [("softmax", "weights"), ("mos", "weights"), ("softmax", "smoothing")]
)
def test_gradients_come_with_the_loss(
    kind: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logits are computed again in the backward pass."""
    head = build(kind, **OPTIONS[option])
    hidden, target = batch()
    loss = head(hidden, target).loss
    monkeypatch.setattr(LOSS, "backward_op", None)
    loss.backward()
    assert hidden.grad.any()


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time give the same losses."""
    hidden, target = batch()
    whole = [build(kind, **OPTIONS["both"]) for kind in ("mixtape", "mos", "trees, groups")]
    expected = [(head(hidden, target).loss, head.entropy(hidden)) for head in whole]
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 3 * V * 8)
    for head, (loss, entropy) in zip(whole, expected, strict=True):
        assert_same(head, hidden, head(hidden, target).loss, loss)
        assert_same(head, hidden, head.entropy(hidden), entropy)


def test_no_tensor_of_all_logits() -> None:
    """Label smoothing, z-loss, class weights and entropy of a softmax, forward and backward."""
    rows, classes = 1500, 10_000
    options = {"class_weight": torch.ones(classes), "label_smoothing": 0.1, "z_loss": 1e-4}
    hidden, target = draw(rows, 8).requires_grad_(), draw_targets(rows, n_classes=classes)
    for head in (Softmax(8, classes, label_smoothing=0.1), Softmax(8, classes, **options)):
        largest, most = allocations(lambda head=head: head(hidden, target).loss.backward())
        assert largest <= 2**24
        assert most <= rows * classes * 4 * 0.7
    _, most = allocations(lambda: head.entropy(hidden).sum().backward())
    assert most <= 5 * 2**24 + 2**22  # of one chunk: logits, two log-softmaxes, their gradients
