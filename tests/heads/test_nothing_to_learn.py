"""Batches without anything to learn, and classes of probability 0: no gradient is NaN."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.support import HEADS, D, V, draw, make
from hstree.heads import Head, SampledSoftmax, TreeEnsemble
from hstree.trees import build_ensemble

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing and weights": {
        "label_smoothing": 0.1,
        "class_weight": torch.linspace(1, 2, V),
    },
    "smoothing and z-loss": {"label_smoothing": 0.1, "z_loss": 1e-3},
}


def has(kind: str, options: dict[str, Any]) -> bool:
    try:
        make(kind, **options)
    except (TypeError, ValueError):
        return False
    return True


ALL: list[Any] = [
    pytest.param(kind, options, id=f"{kind}-{name}")
    for kind in HEADS
    for name, options in OPTIONS.items()
    if has(kind, options)
]


def gradients(head: Head, hidden: Tensor) -> dict[str, Tensor]:
    tensors = {"hidden": hidden, **dict(head.named_parameters())}
    return {name: x.grad.to_dense() for name, x in tensors.items() if x.grad is not None}


@pytest.mark.parametrize(("kind", "options"), ALL)
@pytest.mark.parametrize("rows", [0, 4])
def test_all_rows_ignored(kind: str, options: dict[str, Any], rows: int) -> None:
    """The loss is that of torch, NaN for a mean; the gradients are 0."""
    head, target = make(kind, **options), torch.full((rows,), -100)
    for training, reduction in itertools.product((True, False), ("none", "sum", "mean")):
        head.train(training).reduction = reduction
        head.zero_grad()
        hidden = draw(rows, D).requires_grad_()
        output, loss = head(hidden, target)
        assert not output.any()
        logits = hidden.detach() @ torch.ones(D, V)
        expected = F.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss.detach(), expected, equal_nan=True)
        loss.sum().backward()
        assert hidden.grad is not None
        for name, grad in gradients(head, hidden).items():
            assert not grad.any(), (training, reduction, name)


@pytest.mark.parametrize(("kind", "options"), ALL)
def test_an_ignored_row_counts_nothing(kind: str, options: dict[str, Any]) -> None:
    """Whatever its hidden vector holds: the results are those of a vector of zeros."""
    target = torch.tensor([[0, 5, -100], [7, -100, V - 1]])
    candidates = torch.tensor([[[0, 5], [5, -100]], [[-100, -100], [-100, 7]]])
    candidates = torch.where((target == -100)[:, 1:, None], -100, candidates)
    for training, reduction in ((True, "mean"), (True, "none"), (False, "sum")):
        head = make(kind, **options).train(training)
        head.reduction = reduction
        found: list[dict[str, Tensor]] = []
        for content in (0.0, torch.nan, torch.inf):
            hidden = draw(2, 3, D).masked_fill((target == -100)[..., None], content)
            hidden.requires_grad_()
            head.zero_grad()
            torch.manual_seed(0)
            output, loss = head(hidden, target)
            of_candidates = head.candidate_log_prob(hidden[:, 1:], candidates)
            (loss.sum() + 2 * output.sum() + of_candidates.sum()).backward()
            found.append({"output": output.detach(), "loss": loss.detach()})
            found[-1] |= gradients(head, hidden)
        assert not found[0]["hidden"][target == -100].any()
        for other in found[1:]:
            for name, got in other.items():
                assert torch.equal(got, found[0][name]), (training, reduction, name)


@pytest.mark.parametrize(
    ("kind", "options"), [case for case in ALL if "class_weight" in case.values[1]]
)
def test_all_weights_zero(kind: str, options: dict[str, Any]) -> None:
    """The sum of the weights is 0, and so is the gradient of a mean."""
    weight = torch.ones(V)
    weight[:4] = 0.0
    head = make(kind, **options | {"class_weight": weight})
    hidden = draw(4, D).requires_grad_()
    loss = head(hidden, torch.arange(4)).loss
    assert loss.isnan()
    loss.backward()
    for name, grad in gradients(head, hidden).items():
        assert not grad.any(), name


def biases(head: Head) -> list[Tensor]:
    """Those of class 5, as views."""
    if isinstance(head, TreeEnsemble):
        return [head.below.bias[:, 5]] if head.groups else []
    bias = getattr(head, "bias", None)
    return [] if bias is None else [bias[5]]


@pytest.mark.parametrize("kind", [kind for kind in HEADS if biases(make(kind))])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_class_of_probability_0(kind: str, training: bool) -> None:
    """Its bias is -inf. The log-probabilities of the others, and all gradients, are those of a
    bias of -1e4, which gives it probability 0 as well."""
    found: list[dict[str, Tensor]] = []
    for value in (-torch.inf, -1e4):
        head = make(kind).train(training)
        with torch.no_grad():
            for bias in biases(head):
                bias.fill_(value)
        results: dict[str, Tensor] = {}

        def keep(
            name: str, query: Any, head: Head = head, results: dict[str, Tensor] = results
        ) -> None:
            hidden = draw(3, D).requires_grad_()
            head.zero_grad()
            torch.manual_seed(0)
            value = query(head, hidden)
            factor = torch.linspace(1, 2, value.numel()).view(value.shape)
            torch.where(value > -1e3, value * factor, 0.0).sum().backward()
            results[name] = torch.where(value > -1e3, value.detach(), -torch.inf)
            results |= {f"{name} {key}": g for key, g in gradients(head, hidden).items()}

        keep("loss", lambda head, x: head(x, torch.tensor([0, 1, -100])).loss)
        keep("output", lambda head, x: head(x, torch.tensor([0, 5, -100])).output)
        keep("log_prob", lambda head, x: head.log_prob(x))
        keep("entropy", lambda head, x: head.entropy(x))
        keep("topk", lambda head, x: head.topk(x, V)[0])
        for t in (1.0, 0.5):
            keep(
                f"candidates {t}",
                lambda head, x, t=t: head.candidate_log_prob(
                    x, torch.tensor([[0, 1, 2], [5, 1, 7], [5, 5, 5]]), temperature=t
                ),
            )
        found.append(results)
    for name, value in found[0].items():
        assert not value.isnan().any(), name
        if kind != "monotonic":  # a bounded function
            torch.testing.assert_close(value, found[1][name], msg=lambda t, name=name: name + t)


@pytest.mark.parametrize("kind", ["softmax", "moc", "mos", "mixtape", "sampled"])
def test_a_class_of_probability_0_and_weight_0(kind: str) -> None:
    """Label smoothing leaves it out: it is not 0 times infinity."""
    weight = torch.linspace(1, 2, V)
    weight[5] = 0.0
    losses, grads = [], []
    for value in (-torch.inf, -1e4):
        head = make(kind, class_weight=weight, label_smoothing=0.1)
        with torch.no_grad():
            biases(head)[0].fill_(value)
        hidden = draw(3, D).requires_grad_()
        loss = head(hidden, torch.arange(3)).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append(gradients(head, hidden))
    torch.testing.assert_close(losses[0], losses[1])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], msg=lambda text, name=name: name + text)


def test_every_negative_is_the_target() -> None:
    head = SampledSoftmax(4, 3, negatives=5, frequencies=[1, 0, 0], alpha=40.0)
    hidden, target = torch.randn(2, 4, requires_grad=True), torch.zeros(2, dtype=torch.int64)
    assert head.draw_classes(target)[0].tolist() == [0]
    loss = head(hidden, target).loss
    assert loss == 0
    loss.backward()
    for name, grad in gradients(head, hidden).items():
        assert not grad.any(), name


ONE_CLASS: list[dict[str, Any]] = [
    {},
    {"groups": True},
    {"gate": "context"},
    {"gate": "constant"},
    {"sparse": True},
    {"embedding": nn.Embedding(1, 4)},
]


@pytest.mark.parametrize("options", ONE_CLASS, ids=str)
@pytest.mark.parametrize("n_trees", [1, 3])
@pytest.mark.parametrize("learned", [True, False], ids=["hidden", "no hidden"])
def test_trees_over_one_class(options: dict[str, Any], n_trees: int, learned: bool) -> None:
    """Every result is 0 and can be differentiated, with gradients of 0."""
    head = TreeEnsemble(4, 1, build_ensemble("huffman", 1, n_trees, [1]), **options)
    hidden = torch.randn(3, 4, requires_grad=learned)
    zeros = torch.zeros(3, dtype=torch.int64)
    results = [head(hidden, zeros).loss]
    if learned or list(head.parameters()):
        results += [
            head(hidden, zeros).output,
            head.log_prob(hidden),
            head.entropy(hidden),
            head.topk(hidden, 1)[0],
            head.candidate_log_prob(hidden, zeros[:, None].expand(-1, 2)),
        ]
    for result in results:
        torch.testing.assert_close(result, torch.zeros_like(result))
        result.sum().backward()
    for grad in gradients(head, hidden).values():
        torch.testing.assert_close(grad, torch.zeros_like(grad))
    assert (hidden.grad is not None) == learned
    with torch.no_grad():
        assert not head(hidden, zeros).loss.requires_grad
