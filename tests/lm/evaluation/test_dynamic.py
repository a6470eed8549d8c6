"""Dynamic evaluation against the rule written out for one parameter after the other."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from lm.evaluation.support import KINDS, language_model, text
from torch import Tensor

from hstree.lm.evaluation import dynamic, evaluate_dynamic, evaluate_stream, gradient_rms
from hstree.lm.models import LanguageModel

TRAIN, TEST = text(203, seed=1), text(38, seed=2)


def reference_gradients(
    model: LanguageModel, streams: list[Any], length: int
) -> Iterator[tuple[list[float], dict[str, Tensor]]]:
    """For each segment of streams of n words log P of all words, and the gradients of their mean
    negative; from the probabilities of all classes, one word after the other."""
    state = None
    for begin in range(0, len(streams[0]) - 1, length):
        end = min(begin + length, len(streams[0]) - 1)
        model.zero_grad()
        if state is not None:
            state = tuple((h.detach(), c.detach()) for h, c in state)
        found = []
        for place in range(begin, end):
            now = torch.tensor([[int(stream[place]) for stream in streams]])
            hidden, state = model.hidden(now, state)
            log_prob = model.head.log_prob(hidden[0])
            for row, stream in enumerate(streams):
                if stream[place + 1] >= 0:
                    found.append(log_prob[row, int(stream[place + 1])])
        (-torch.stack(found).mean()).backward()
        yield (
            [value.item() for value in found],
            {
                name: p.grad.to_dense().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            },
        )


def reference_rms(model: LanguageModel, batch_size: int, length: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model).eval()
    size = -(-(len(TRAIN) - 1) // batch_size)
    padded = np.concatenate([TRAIN, np.full(size * batch_size + 1 - len(TRAIN), -1)])
    streams = [padded[size * b : size * (b + 1) + 1] for b in range(batch_size)]
    assert (streams[-1] < 0).sum() > 0
    streams[-1] = [*np.maximum(streams[-1][:1], 0), *streams[-1][1:]]
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    n_batches = 0
    for _, gradients in reference_gradients(model, streams, length):
        n_batches += 1
        for name, gradient in gradients.items():
            squares[name] += gradient**2
    return {
        name: (squares[name] / n_batches).sqrt()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def reference_loss(
    model: LanguageModel,
    tokens: npt.NDArray[np.int32],
    rms: dict[str, Tensor] | None,
    learning_rate: float,
    decay: float,
    epsilon: float,
    length: int,
) -> float:
    model = copy.deepcopy(model).eval()
    start = copy.deepcopy(dict(model.named_parameters()))
    log_prob: list[float] = []
    for found, gradients in reference_gradients(model, [tokens], length):
        log_prob += found
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            gradient = gradients.get(name, torch.zeros_like(p))
            step, back = learning_rate * gradient, torch.full_like(p, decay)
            if rms is not None:
                means = [value.mean().item() for value in rms.values()]
                step = step / (rms[name] + epsilon)
                back = (decay * rms[name] / (sum(means) / len(means))).clamp(max=1.0)
            with torch.no_grad():
                p += back * (start[name] - p) - step
    assert len(log_prob) == len(tokens) - 1
    return -sum(log_prob) / len(log_prob)


@pytest.mark.parametrize("kind", [*KINDS, "softmax, really tied", "plif-frozen"])
def test_rule(kind: str) -> None:
    model = language_model(kind)
    rms = gradient_rms(model, TRAIN, segment=5, batch_size=7)
    expected = reference_rms(model, 7, 5)
    assert rms.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(rms[name], value, rtol=1e-3, atol=1e-6, msg=name)

    options: dict[str, Any] = {"learning_rate": 3e-3, "decay": 0.05, "epsilon": 1e-3}
    static = evaluate_stream(model, TEST)
    loss = evaluate_dynamic(model, TEST, rms, segment=5, **options)
    assert loss == pytest.approx(reference_loss(model, TEST, rms, length=5, **options), rel=1e-4)
    assert abs(loss - static) > 1e-2
    options["learning_rate"] = 0.05
    loss = evaluate_dynamic(model, TEST, segment=6, **options)
    assert loss == pytest.approx(reference_loss(model, TEST, None, length=6, **options), rel=1e-4)
    assert abs(loss - static) > 1e-2


@pytest.mark.parametrize("kind", ["mos", "softmax, really tied"])
@pytest.mark.parametrize("decay", [0.075, 60.0])
def test_hyperparameters_of_the_first_published_code(
    kind: str, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of its rule, with sums over batches and over tensors in place of the
    means; with a decay of 60 it is limited to 1 / decay in some places."""
    model = language_model(kind).double()
    eta, epsilon = 0.02, 0.002
    learner = copy.deepcopy(model).eval()
    start = {name: p.detach().clone() for name, p in learner.named_parameters()}
    squares = {name: torch.zeros_like(p) for name, p in start.items()}
    n_batches = 0
    for _, gradients in reference_gradients(learner, [TRAIN[:102], TRAIN[101:]], 5):
        n_batches += 1
        for name, gradient in gradients.items():
            squares[name] += gradient**2
    root = {name: square.sqrt() for name, square in squares.items()}
    total = sum(value.mean() for value in root.values())
    rates = {name: (value / total).clamp(max=1 / decay) for name, value in root.items()}
    assert (decay > 1) == any(bool((rate == 1 / decay).any()) for rate in rates.values())
    segments = reference_gradients(learner, [TEST[:21]], 5)
    for _, gradients in segments:
        with torch.no_grad():
            for name, p in learner.named_parameters():
                back = decay * rates[name] * (start[name] - p)
                p += back - eta * gradients[name] / (root[name] + epsilon)

    copies: list[LanguageModel] = []

    def spy(original: LanguageModel) -> LanguageModel:
        copies.append(copy.deepcopy(original))
        return copies[-1]

    monkeypatch.setattr(dynamic, "copy", SimpleNamespace(deepcopy=spy))
    rms = gradient_rms(model, TRAIN, segment=5, batch_size=2)
    assert n_batches == 21
    assert len(rms) == len(start)
    evaluate_dynamic(
        model,
        TEST[:21],
        rms,
        learning_rate=eta / math.sqrt(n_batches),
        decay=decay / len(rms),
        epsilon=epsilon / math.sqrt(n_batches),
        segment=5,
    )
    found = dict(copies[-1].named_parameters())
    for name, expected in learner.named_parameters():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=name)
        assert not torch.equal(expected, start[name]), name


def test_decay_stops_at_one() -> None:
    """Where decay RMS / m is above 1, a step ends at theta_0 before the gradient is added."""
    model = language_model()
    rms = gradient_rms(model, TRAIN, batch_size=7)
    options: dict[str, Any] = {"learning_rate": 1e-2, "decay": 50.0, "epsilon": 1e-3}
    loss = evaluate_dynamic(model, TEST, rms, segment=5, **options)
    assert loss == pytest.approx(reference_loss(model, TEST, rms, length=5, **options), rel=1e-4)


def test_nothing_learned_is_the_model_as_it_is() -> None:
    model = language_model("mos")
    rms = gradient_rms(model, TRAIN, batch_size=7)
    expected = evaluate_stream(model, TEST)
    for statistics in (None, rms):
        loss = evaluate_dynamic(model, TEST, statistics, learning_rate=0.0, decay=0.0)
        assert loss == pytest.approx(expected, rel=1e-6)
        assert evaluate_dynamic(model, TEST, statistics, segment=99) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["softmax", "trees, sparse", "softmax, really tied"])
def test_the_model_does_not_change(kind: str) -> None:
    model = language_model(kind)
    frozen = "head.nodes.binary_bias" if kind.startswith("trees") else "head.bias"
    model.get_parameter(frozen).requires_grad_(False)
    with torch.no_grad():  # fills what the head keeps between calls
        model.head.log_prob(model.hidden(torch.tensor([[1]]))[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rms = gradient_rms(model, TRAIN, batch_size=7)
    assert frozen not in rms
    first = evaluate_dynamic(model, TEST, rms, learning_rate=1e-2)
    assert evaluate_dynamic(model, TEST, rms, learning_rate=1e-2) == first
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_row_sparse_gradients_are_made_dense() -> None:
    sparse, dense = language_model("trees, sparse"), language_model("trees, sparse")
    dense.head.sparse = False
    sparse.backbone.embedding.sparse = True
    rms = gradient_rms(sparse, TRAIN, batch_size=7)
    for name, value in gradient_rms(dense, TRAIN, batch_size=7).items():
        assert rms[name].layout == torch.strided
        torch.testing.assert_close(rms[name], value)
    expected = evaluate_dynamic(dense, TEST, rms, learning_rate=3e-3)
    assert evaluate_dynamic(sparse, TEST, rms, learning_rate=3e-3) == pytest.approx(expected)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reduction_of_the_head_does_not_matter(reduction: str) -> None:
    model, other = language_model("gss"), language_model("gss", reduction=reduction)
    rms = gradient_rms(model, TRAIN, batch_size=7)
    for name, value in gradient_rms(other, TRAIN, batch_size=7).items():
        torch.testing.assert_close(rms[name], value, rtol=1e-4, atol=1e-7)
    expected = evaluate_dynamic(model, TEST, learning_rate=0.05)
    assert evaluate_dynamic(other, TEST, learning_rate=0.05) == pytest.approx(expected, rel=1e-5)


def test_options_of_the_loss_are_minimised_but_not_reported() -> None:
    model, other = language_model("gss"), language_model("gss", label_smoothing=0.3, z_loss=0.1)
    other.load_state_dict(model.state_dict())
    expected = evaluate_stream(model, TEST)
    assert evaluate_dynamic(other, TEST, learning_rate=1e-9) == pytest.approx(expected, rel=1e-5)
    adapted = [evaluate_dynamic(some, TEST, learning_rate=0.05) for some in (model, other)]
    assert adapted[0] != pytest.approx(adapted[1], rel=1e-4)


def test_some_batches_only() -> None:
    model = language_model()
    some = gradient_rms(model, TRAIN, batch_size=1, max_batches=3)
    for name, value in gradient_rms(model, TRAIN[:16], batch_size=1).items():
        torch.testing.assert_close(some[name], value)


def test_works_inside_no_grad() -> None:
    model = language_model()
    expected = evaluate_dynamic(model, TEST)
    with torch.no_grad():
        assert evaluate_dynamic(model, TEST) == expected


def test_a_text_that_repeats_is_learned() -> None:
    model = language_model()
    tokens = np.tile(text(8, seed=4), 40)
    rms = gradient_rms(model, TRAIN, batch_size=7)
    static = evaluate_stream(model, tokens)
    assert evaluate_dynamic(model, tokens, rms, learning_rate=5e-3) < static - 0.5
    assert evaluate_dynamic(model, tokens) < static - 0.5


def test_bad_input() -> None:
    model = language_model()
    rms = gradient_rms(model, TRAIN, batch_size=7)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"learning_rate": -1.0}, "learning_rate: expected a finite number of at least 0, got -1"),
        ({"decay": float("nan")}, "decay: expected a finite number"),
        ({"decay": 1.5}, "decay: expected at most 1 without rms, got 1.5"),
        ({"rms": rms, "epsilon": 0.0}, "epsilon: expected a positive number with rms"),
        ({"segment": 0}, "segment: expected a whole number of at least 1, got 0"),
        (
            {"rms": {}},
            "rms: expected one tensor for each trained parameter, but backbone.emb.* are",
        ),
        ({"rms": rms | {"x": rms["head.bias"]}}, "but x is only in one of the two"),
        (
            {"rms": rms | {"head.bias": torch.ones(3)}},
            r"rms\['head.bias'\]: expected shape \(37,\), got \(3,\)",
        ),
        (
            {"rms": {name: torch.zeros_like(value) for name, value in rms.items()}},
            "rms: expected finite values, not all 0, got a mean of 0.0",
        ),
        ({"learning_rate": 1e38}, "learning_rate: the loss became .* after 5 tokens; .* 1e[+]38"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            evaluate_dynamic(model, TEST, **options)
    with pytest.raises(
        ValueError, match="expected at least 301 tokens for a batch size of 300, got 203"
    ):
        gradient_rms(model, TRAIN, batch_size=300)
    with pytest.raises(ValueError, match="max_batches: expected a whole number of at least 1"):
        gradient_rms(model, TRAIN, max_batches=0)
