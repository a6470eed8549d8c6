"""The interface that every head has, over one head of every kind."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.support import FREQUENCIES, HEADS, PIECES, SOME, D, V, draw, draw_targets, make
from hstree._files import read_tensors
from hstree.heads import (
    Head,
    Softmax,
    build_head,
    head_class,
    head_names,
)
from hstree.heads import load_head as load
from hstree.lm.config import TrainConfig

every_head = pytest.mark.parametrize("kind", HEADS)
some_heads = pytest.mark.parametrize("kind", SOME)
DIFFERENTIABLE = [kind for kind in HEADS if "sparse" not in kind]


def gradients(head: Head, loss: Tensor, hidden: Tensor) -> list[Tensor]:
    head.zero_grad()
    hidden.grad = None
    loss.backward()
    return [hidden.grad, *(p.grad.to_dense() for p in head.parameters() if p.grad is not None)]


@every_head
def test_shapes(kind: str, device: torch.device) -> None:
    head = make(kind, device)
    for leading in ((), (6,), (2, 3), (2, 0), (0,)):
        head.reduction = "none"
        hidden, target = draw(*leading, D).to(device), draw_targets(*leading).to(device)
        output, loss = head(hidden, target)
        assert output.shape == loss.shape == leading
        assert torch.equal(output, -loss)
        assert head.log_prob(hidden).shape == (*leading, V)
        assert head.predict(hidden).shape == leading
        values, classes = head.topk(hidden, 4)
        assert values.shape == classes.shape == (*leading, 4)
        sample = head.sample(hidden)
        assert sample.shape == leading
        assert sample.dtype == torch.int64
        for reduction in ("sum", "mean"):
            head.reduction = reduction
            assert head(hidden, target).loss.shape == ()


@every_head
def test_probabilities(kind: str, device: torch.device) -> None:
    """They sum to 1; forward, predict and topk agree with them; leading dimensions are free."""
    head = make(kind, device)
    hidden, target = draw(40, D).to(device), draw_targets(40).to(device)
    log_prob = head.log_prob(hidden)
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(40, device=device))
    expected = log_prob.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(head(hidden, target).output, expected)
    torch.testing.assert_close(head.log_prob(hidden.view(4, 10, D)), log_prob.view(4, 10, V))
    output = head(hidden.view(4, 10, D), target.view(4, 10)).output
    torch.testing.assert_close(output, expected.view(4, 10))
    assert torch.equal(head.predict(hidden), log_prob.argmax(-1))
    values, classes = head.topk(hidden, V)
    torch.testing.assert_close(values, log_prob.sort(-1, descending=True).values)
    torch.testing.assert_close(log_prob.gather(1, classes), values)
    assert torch.equal(classes.sort().values, torch.arange(V, device=device).expand(40, V))
    values, classes = head.topk(hidden, 1)
    assert torch.equal(classes[:, 0], head.predict(hidden))


@every_head
def test_scores(kind: str, device: torch.device) -> None:
    """Logits of heads with one softmax, on the scale of the head; a sentence for all others."""
    head, hidden = make(kind, device), draw(2, 3, D).to(device)
    if not head.has_normalizer:
        with pytest.raises(NotImplementedError, match=f"scores: {type(head).__name__} has no"):
            head.scores(hidden)
        return
    scores = head.scores(hidden)
    assert (scores.shape, scores.dtype) == ((2, 3, V), torch.float32)
    torch.testing.assert_close(scores.log_softmax(-1), head.log_prob(hidden))
    if kind.startswith(("softmax", "sampled")):
        weight: Any = head.weight
        expected = F.linear(hidden, weight, head.bias)
        if "capped" in kind:
            expected = 40.0 * (0.7 * expected / 40.0).tanh()
        torch.testing.assert_close(scores, expected)
    target = draw_targets(2, 3).to(device)
    chosen = scores.gather(-1, target[..., None])[..., 0]
    got = head.target_score(head.encoded_rows(hidden), target.flatten()).view(2, 3)
    torch.testing.assert_close(got, chosen)


@every_head
def test_topk_is_differentiable(kind: str, device: torch.device) -> None:
    head = make(kind, device)
    hidden = draw(7, D).to(device).requires_grad_()
    weight = torch.linspace(-1, 2, 28, device=device).view(7, 4)
    values, classes = head.topk(hidden, 4)
    got = gradients(head, (values * weight).sum(), hidden)
    expected = head.log_prob(hidden).gather(1, classes)
    wanted = gradients(head, (expected * weight).sum(), hidden)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        assert not head.topk(hidden, 4)[0].requires_grad


@every_head
@pytest.mark.parametrize(
    ("reduction", "ignore_index"), [("none", 7), ("sum", 0), ("mean", -1), ("mean", V + 5)]
)
def test_loss_is_cross_entropy(
    kind: str, reduction: str, ignore_index: int, device: torch.device
) -> None:
    """Value and gradients, with an upstream gradient that differs from row to row."""
    head = make(kind, device, reduction=reduction, ignore_index=ignore_index)
    hidden, target = draw(24, D).to(device).requires_grad_(), draw_targets(24).to(device)
    target[::4] = ignore_index
    output, loss = head(hidden, target)
    assert not output[::4].any()
    log_prob = head.log_prob(hidden)
    expected = F.nll_loss(log_prob, target.masked_fill(target == ignore_index, -100),
                          reduction=reduction)  # fmt: skip
    torch.testing.assert_close(loss, expected)
    weight = torch.linspace(-1, 2, 24, device=device) if reduction == "none" else 3.0
    got = gradients(head, (loss * weight).sum(), hidden)
    assert not got[0][::4].any()
    wanted = gradients(head, (expected * weight).sum(), hidden)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@every_head
def test_strided_contexts(kind: str, device: torch.device) -> None:
    """Views that are not contiguous, and one row many times."""
    head = make(kind, device, reduction="none")
    big = draw(4, 6, 2 * D).to(device)
    target = draw_targets(4, 6).to(device).t()
    for hidden in (big[..., ::2].transpose(0, 1), big[0, 0, :D].expand(6, 4, D)):
        assert not hidden.is_contiguous()
        got = []
        for some in (hidden, hidden.contiguous()):
            leaf = some.detach().requires_grad_()
            output, loss = head(leaf, target)
            got.append([head.log_prob(leaf), output, *gradients(head, loss.sum(), leaf)])
        for a, b in zip(*got, strict=True):
            torch.testing.assert_close(a, b)


@every_head
def test_a_bad_row_stays_alone(kind: str, device: torch.device) -> None:
    head = make(kind, device)
    hidden, target = draw(9, D).to(device), draw_targets(9).to(device)
    expected = head(hidden, target).output
    hidden[4] = torch.nan
    output = head(hidden, target).output
    assert output[4].isnan()
    keep = torch.arange(9, device=device) != 4
    torch.testing.assert_close(output[keep], expected[keep])


@some_heads
def test_targets_of_torch(kind: str) -> None:
    """uint8 as in torch; a sentence for what is no tensor."""
    head, hidden = make(kind, ignore_index=255), draw(4, D)
    target = torch.tensor([0, 36, 255, 7])
    expected = head(hidden, target)
    got = head(hidden, target.to(torch.uint8))
    assert torch.equal(got.output, expected.output)
    assert torch.equal(got.loss, expected.loss)
    assert got.output[2] == 0
    candidates = target.view(4, 1)
    assert torch.equal(
        head.candidate_log_prob(hidden, candidates.to(torch.uint8)),
        head.candidate_log_prob(hidden, candidates),
    )
    packed = nn.utils.rnn.pack_sequence([target])
    for bad, message in (
        ([0, 36, 255, 7], "target: expected a tensor, got list; torch.as_tensor makes one of it"),
        (3, "target: expected a tensor, got int; torch.as_tensor makes one of it"),
        (np.int64(3), "target: expected a tensor, got numpy.int64; torch.as_tensor makes one of"),
        (target.numpy(), "target: expected a tensor, got numpy.ndarray; torch.as_tensor makes"),
        (packed, "target: expected a tensor, got a PackedSequence; pass its field data"),
        (None, "target: expected a tensor, got NoneType"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            head(hidden, bad)
        with pytest.raises(TypeError, match=f"^{message.replace('target', 'candidates')}"):
            head.candidate_log_prob(hidden, bad)
    packed = nn.utils.rnn.pack_sequence([hidden])
    for query in (
        lambda hidden: head(hidden, target),
        head.log_prob,
        head.predict,
        head.sample,
        head.entropy,
        lambda hidden: head.candidate_log_prob(hidden, candidates),
    ):
        with pytest.raises(TypeError, match=r"^hidden: expected a tensor, got a PackedSequence; "):
            query(packed)
        with pytest.raises(TypeError, match=r"^hidden: expected a tensor, got list; "):
            query(hidden.tolist())


@some_heads
def test_bad_input(kind: str) -> None:
    head = make(kind)
    hidden, target = draw(4, D), draw_targets(4)
    for bad, match in (
        (target[:3], r"target: expected shape \(4,\) for hidden of shape \(4, 10\), got \(3,\)"),
        (target[None], r"target: expected shape \(4,\).*got \(1, 4\)$"),
        (
            target[:, None],
            r"got \(4, 1\); repeat the hidden vectors of a row for each of its labels",
        ),
        (target.int(), "target: expected dtype torch.int64 or torch.uint8, got torch.int32"),
        (target.float(), "target: expected dtype torch.int64 or torch.uint8, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=match):
            head(hidden, bad)
    for value in (V, -1, -101, 2**40):
        bad = target.clone()
        bad[2] = value
        with pytest.raises(
            ValueError, match=rf"target: .*\[0, 37\) or ignore_index -100, got {value}"
        ):
            head(hidden, bad)
    for function in (head.log_prob, head.predict, head.sample, lambda h: head(h, target)):
        with pytest.raises(ValueError, match=r"hidden: expected shape \[..., 10\], got \(4, 9\)"):
            function(hidden[:, 1:])
        with pytest.raises(ValueError, match="hidden: expected a floating-point dtype, got"):
            function(hidden.long())
    for k in (0, V + 1, 2.5, "3", None, True):
        message = re.escape(f"k: expected a whole number from 1 to 37, got {k!r}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            head.topk(hidden, k)


@some_heads
def test_bad_options(kind: str) -> None:
    for options, match in (
        ({"reduction": "avg"}, "reduction: expected one of none, sum, mean, got 'avg'"),
        *(
            ({"ignore_index": bad}, "ignore_index: expected a whole number from -9223372036854")
            for bad in (0.5, 2**63, True, "0", None)
        ),
    ):
        with pytest.raises(ValueError, match=match):
            HEADS[kind](**options)


@every_head
def test_sample_is_reproducible(kind: str, device: torch.device) -> None:
    head, hidden = make(kind, device), draw(50, D).to(device)
    draws = [
        head.sample(hidden, generator=torch.Generator(device).manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not draws[0].requires_grad


@every_head
def test_save_and_load(kind: str, tmp_path: Path) -> None:
    head = make(kind, ignore_index=3, reduction="sum", class_weight=torch.linspace(0, 2, V))
    head.save(tmp_path / "head")
    assert os.listdir(tmp_path) == ["head"]
    other = load(tmp_path / "head")
    assert type(other) is type(head)
    assert other.config() | {"tied": None} == head.config() | {"tied": None}
    assert all(tensor.data_ptr() % 64 == 0 for tensor in other.state_dict().values())
    assert torch.equal(other.class_weight, head.class_weight)
    hidden, target = draw(9, D), draw_targets(9)
    assert torch.equal(other.log_prob(hidden), head.log_prob(hidden))
    assert torch.equal(other(hidden, target).loss, head(hidden, target).loss)
    assert other.state_dict().keys() == head.state_dict().keys()
    head.save(str(tmp_path / "head"))  # a path as text; over an existing file
    learned = {name for name, p in head.named_parameters() if p.requires_grad}
    assert {name for name, p in other.named_parameters() if p.requires_grad} == learned
    assert len(learned) == len(list(head.parameters())) - ("frozen" in kind)


@every_head
def test_save_keeps_the_dtype(kind: str, tmp_path: Path) -> None:
    make(kind).bfloat16().save(tmp_path / "head")
    assert {p.dtype for p in load(tmp_path / "head").parameters()} == {torch.bfloat16}


def test_load_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="file"):
        load(path)
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(
        ValueError, match=r"path: expected a safetensors file, got .*file, which is another"
    ):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="expected a safetensors file, got"):
        load(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(
        ValueError, match=r"got .*, a safetensors file without hstree\.head metadata"
    ):
        load(path)
    make("trees").save(path)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 9):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="expected a safetensors file, got"):
            load(path)
    save_file({}, path, {"hstree.head": json.dumps({"name": "gone", "config": {}})})
    with pytest.raises(ValueError, match=r"head: expected one of adaptive, .*, got 'gone'"):
        load(path)
    with pytest.raises(ValueError, match="path: expected a file, got the folder"):
        load(tmp_path)


def test_save_leaves_nothing_half_written(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"No such file|not found"):
        make("softmax").save(tmp_path / "missing" / "head")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [kind for kind in HEADS if "tied" in kind])
def test_tied(kind: str, tmp_path: Path) -> None:
    """The embedding's own parameter, which is not in the head's groups, nor in a file beside it."""
    head = make(kind)
    embedding = nn.Embedding(V, D)
    other = type(head).from_config(head.config(), head.state_dict(), embedding)
    assert any(p is embedding.weight for p in other.parameters())
    groups = other.parameter_groups(lr=0.1)
    assert not any(p is embedding.weight for group in groups for p in group["params"])
    assert other.config()["tied"]
    other.save(tmp_path / "head", embedding=embedding)
    names = {name for name, p in other.named_parameters() if p is embedding.weight}
    tensors, _ = read_tensors(tmp_path / "head")
    assert set(tensors) == set(other.state_dict()) - names
    loaded = load(tmp_path / "head", embedding=embedding)
    assert torch.equal(loaded.log_prob(draw(5, D)), other.log_prob(draw(5, D)))
    wrong = nn.Embedding(V, D + 1)
    with pytest.raises(
        ValueError, match=r"embedding: expected a weight of shape \(37, 10\).*\(37, 11\)"
    ):
        type(head).from_config(head.config(), head.state_dict(), wrong)


@every_head
def test_parameter_groups(kind: str) -> None:
    """Every parameter once, tied and frozen ones excepted; weights alone decay. Learned slopes have
    a learning rate of their own, all others the factor."""
    head = make(kind)
    embedding = "below.weight" if "trees" in kind else "weight"
    tied = {embedding} if "tied" in kind else set()
    own = {n: p for n, p in head.named_parameters() if n not in tied and p.requires_grad}
    names = {id(p): name for name, p in own.items()}
    groups = head.parameter_groups(lr=0.1, weight_decay=0.5, factor=3.0)
    assert all(set(group) == {"params", "lr", "weight_decay"} for group in groups)
    found = [(names[id(p)], group) for group in groups for p in group["params"]]
    assert sorted(name for name, _ in found) == sorted(own)
    for name, group in found:
        slopes = name == "function.v" and "plif" in kind
        assert group["lr"] == pytest.approx(0.02 if slopes else 0.3)
        weight = name.endswith(("weight", "embedding")) or ("head" in name and "bias" not in name)
        decays = "function" not in name and weight
        assert group["weight_decay"] == (0.5 if decays else 0.0), name
    torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize(
    ("features", "hidden", "factor"),
    [
        (100, None, 8.0),
        (900, None, 3.0),  # 90 / sqrt(900): a root mean square of 1
        (900, torch.full((4, 5, 900), -0.2), 8.0),
        (900, torch.full((4, 5, 900), -2.0), 1.5),
        (900, torch.full((4, 900), 2.0, dtype=torch.bfloat16), 1.5),
    ],
)
def test_the_learning_rate_falls_with_the_norm(
    features: int, hidden: torch.Tensor | None, factor: float
) -> None:
    head = Softmax(features, 3)
    groups = head.parameter_groups(0.1, hidden=hidden)
    assert [g["lr"] for g in groups] == pytest.approx([0.1 * factor] * 2, rel=1e-3)
    groups = head.parameter_groups(0.1, factor=5.0, hidden=hidden)
    assert {group["lr"] for group in groups} == {0.5}


SLOPES = {
    "slope_std": 0.03,
    "slope_learning_rate": 5.0,
    "slope_decay": 1.2e-6,
}


@pytest.mark.parametrize("name", ["plif", "plif-frozen", "mos-plif"])
def test_options_of_slopes(name: str, tmp_path: Path) -> None:
    """From the command line to the saved file and the parameter groups."""
    options = PIECES | SLOPES
    if name == "mos-plif":
        texts = ["components=2", f"function_options={json.dumps(options)}"]
    else:
        texts = [f"{option}={json.dumps(value)}" for option, value in options.items()]
    config = TrainConfig(head=name, head_option=tuple(texts))
    head: Any = build_head(name, D, V, frequencies=counts_of_text(), **config.head_options())
    head.save(tmp_path / "head")
    loaded: Any = load(tmp_path / "head")
    assert loaded.config() == head.config()
    for some in (head, loaded):
        assert options.items() <= some.function.config().items()
        groups = some.parameter_groups(lr=0.1, weight_decay=0.5)
        found = [g for g in groups if any(p is some.function.v for p in g["params"])]
        rates = [(g["lr"], g["weight_decay"], len(g["params"])) for g in found]
        assert rates == ([] if name == "plif-frozen" else [(5.0, 1.2e-6, 1)])


@every_head
def test_sparse_parameters(kind: str) -> None:
    head = make(kind)
    sparse = {id(p) for p in head.sparse_parameters()}
    assert bool(sparse) == ("sparse" in kind)
    head(draw(9, D), draw_targets(9)).loss.backward()
    for parameter in head.parameters():
        if parameter.grad is not None:
            assert parameter.grad.is_sparse == (id(parameter) in sparse)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": 0}, "lr: expected a finite positive number, got 0"),
        ({"lr": "1"}, "lr: expected a finite positive number, got '1'"),
        ({"factor": 0}, "factor: expected a finite positive number, got 0"),
        ({"factor": float("inf")}, "factor: expected a finite positive number, got inf"),
        ({"factor": float("nan")}, "factor: expected a finite positive number, got nan"),
        ({"weight_decay": -0.5}, r"weight_decay: expected a number of at least 0, got -0\.5"),
        ({"weight_decay": float("nan")}, "weight_decay: expected a finite number, got nan"),
        ({"hidden": torch.ones(2, 3)}, r"hidden: expected shape \[\.\.\., 10\], got \(2, 3\)"),
        ({"hidden": torch.zeros(2, D)}, "hidden: mean norm: expected a finite positive number"),
    ],
)
def test_bad_parameter_groups(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make("softmax").parameter_groups(**{"lr": 0.1} | options)


@every_head
def test_deepcopy_and_state_dict(kind: str) -> None:
    head, hidden = make(kind), draw(5, D)
    before = head.log_prob(hidden).detach()
    other = copy.deepcopy(head)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5).add_(0.1)
    assert torch.equal(head.log_prob(hidden), before)
    assert not torch.allclose(other.log_prob(hidden), before)
    incompatible = other.load_state_dict(head.state_dict())
    assert not incompatible.missing_keys
    assert not incompatible.unexpected_keys
    assert torch.equal(other.log_prob(hidden), before)


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
def test_gradcheck(kind: str) -> None:
    """float64: hidden and every parameter, through forward and through log_prob."""
    head = make(kind, reduction="none").double()
    hidden, target = draw(3, D, dtype=torch.float64).requires_grad_(), draw_targets(3)
    target[1] = -100
    leaves = (hidden, *(p for p in head.parameters() if p.requires_grad))
    assert torch.autograd.gradcheck(lambda *_: head(hidden, target).loss, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *_: head.log_prob(hidden), leaves, fast_mode=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@every_head
def test_second_derivatives_are_refused_or_right(kind: str, reduction: str) -> None:
    """Of a function of the loss, so that the gradient has a graph in any case."""
    head = make(kind, reduction=reduction).double()
    hidden, target = draw(4, D, dtype=torch.float64).requires_grad_(), draw_targets(4)
    loss = head(hidden, target).loss.sum() ** 2
    try:
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        (got,) = torch.autograd.grad(grad.square().sum(), hidden)
    except RuntimeError as error:
        assert re.search("differentiated once|no autograd formula", str(error))  # noqa: PT017
        return
    loss = F.nll_loss(head.log_prob(hidden), target, reduction=reduction).sum() ** 2
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (expected,) = torch.autograd.grad(grad.square().sum(), hidden)
    torch.testing.assert_close(got, expected)


@every_head
def test_gradients_through_output_and_loss(kind: str) -> None:
    """Both at once, a second time, and into the context vectors alone."""
    head = make(kind).double()
    hidden, target = draw(9, D, dtype=torch.float64).requires_grad_(), draw_targets(9)
    target[4] = -100
    weight = torch.linspace(-1, 2, 9, dtype=torch.float64)
    output, loss = head(hidden, target)
    got = []
    for last in (False, True):
        head.zero_grad()
        hidden.grad = None
        ((output * weight).sum() - 3 * loss).backward(retain_graph=not last)
        got.append(
            [hidden.grad, *(p.grad.to_dense() for p in head.parameters() if p.requires_grad)]
        )
    log_prob = head.log_prob(hidden)
    ignored = target == -100
    output = log_prob.gather(1, target.clamp(min=0)[:, None])[:, 0].masked_fill(ignored, 0)
    loss = -output.sum() / 8
    expected = gradients(head, (output * weight).sum() - 3 * loss, hidden)
    for again in got:
        for a, b in zip(again, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    head.requires_grad_(False)
    for reduction in ("none", "mean"):
        head.reduction = reduction
        (alone,) = torch.autograd.grad((head(hidden, target).loss * weight).sum(), hidden)
        scale = weight if reduction == "none" else weight.sum() / 8
        loss = F.nll_loss(head.log_prob(hidden), target, reduction="none")
        (expected_alone,) = torch.autograd.grad((loss * scale).sum(), hidden)
        torch.testing.assert_close(alone, expected_alone, rtol=1e-9, atol=1e-11)


@every_head
def test_autocast(kind: str, device: torch.device) -> None:
    head = make(kind, device)
    hidden, target = draw(64, D).to(device), draw_targets(64).to(device)
    expected = head(hidden, target).loss
    low = hidden.bfloat16().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        output, loss = head(low, target)
        log_prob = head.log_prob(low)
    assert output.dtype == loss.dtype == log_prob.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(
        log_prob.exp().sum(-1), torch.ones(64, device=device), rtol=1e-5, atol=1e-5
    )
    loss.backward()
    assert low.grad.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in head.parameters() if p.grad is not None)


def text() -> npt.NDArray[np.int64]:
    random = np.random.default_rng(0)
    return random.choice(V, 3000, p=FREQUENCIES / FREQUENCIES.sum())


def counts_of_text() -> npt.NDArray[np.int64]:
    return np.bincount(text(), minlength=V)


@pytest.mark.parametrize("name", head_names())
def test_build_head(name: str) -> None:
    """A head of the right size, the same for the same seed."""
    options: dict[str, Any] = {
        "trees": {"clusters": 8, "n_trees": 2},
        "adaptive": {"cutoffs": (6,)},
        "plif": {"intervals": 5000},
        "plif-frozen": {"intervals": 5000},
        "mos": {"latent_features": 7, "components": 4},
        "mos-plif": {"components": 2, "function_options": {"intervals": 5000}},
    }.get(name, {})
    heads = []
    for _ in range(2):
        torch.manual_seed(0)
        options |= {"seed": 3, "reduction": "sum"}
        given = {"frequencies": counts_of_text(), "tokens": text()}
        heads.append(build_head(name, D, V, **given, **options))
    assert (heads[0].in_features, heads[0].n_classes, heads[0].reduction) == (D, V, "sum")
    hidden = draw(4, D)
    assert torch.equal(heads[0].log_prob(hidden), heads[1].log_prob(hidden))
    if name in ("mos", "mos-plif", "moc"):  # their context vectors are not 0
        with torch.no_grad():
            heads[0].weight.zero_()
    if name != "adaptive":  # the bias alone is the unigram distribution
        counts = counts_of_text()
        counts = np.where(counts, counts, 0.5)
        log_prob = heads[0].log_prob(torch.zeros(1, D))[0].detach().numpy()
        np.testing.assert_allclose(np.exp(log_prob), counts / counts.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in head_names() if issubclass(head_class(name), Softmax)]
)
def test_bias_start(name: str) -> None:
    """Zero on request, also after a reset; nothing else changes."""
    options: dict[str, Any] = {"intervals": 50} if name == "plif" else {}
    heads: list[Any] = []
    for texts in ((), ("bias_start=unigram",), ("bias_start=zero",)):
        given = TrainConfig(head=name, head_option=texts).head_options()
        torch.manual_seed(0)
        heads.append(build_head(name, D, V, frequencies=counts_of_text(), **options, **given))
    default, unigram, zero = (head.state_dict() for head in heads)
    for key, value in default.items():
        assert torch.equal(unigram[key], value)
        assert torch.equal(zero[key], torch.zeros(V) if key == "bias" else value), key
    assert default["bias"].any()
    with torch.no_grad():
        heads[2].bias.fill_(3.0)
    heads[2].reset_parameters()
    assert not heads[2].bias.any()
    heads[1].reset_parameters()
    assert heads[1].bias.any()
    for bad in ("Zero", None, 0):
        with pytest.raises(
            ValueError, match=f"bias_start: expected one of unigram, zero, got {bad!r}"
        ):
            build_head(name, D, V, frequencies=counts_of_text(), bias_start=bad, **options)


def test_build_head_tied() -> None:
    embedding = nn.Embedding(V, D)
    for name in ("softmax", "gss", "mos", "moc", "mixtape"):
        more = 0 if name in ("softmax", "gss") else 3  # context vectors may have another size
        tied: Any = build_head(name, D + more, V, frequencies=FREQUENCIES, embedding=embedding)
        assert tied.weight is embedding.weight
        own: Any = build_head(name, D + more, V, frequencies=FREQUENCIES)
        assert own.weight is not embedding.weight
    leaves: Any = build_head("trees", D, V, tokens=text(), embedding=embedding, clusters=4)
    assert leaves.output_embedding is embedding.weight


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize(
    "kind",  # slow, for every head: test_life.py
    ["softmax", "trees, groups"],
)
def test_compile(kind: str) -> None:
    """One graph, two batch sizes: loss and gradients."""
    torch._dynamo.reset()
    head = make(kind)
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (7, 12):
        hidden, target = draw(rows, D).requires_grad_(), draw_targets(rows)
        target[1] = -100
        expected = gradients(head, head(hidden, target).loss, hidden)
        got = gradients(head, compiled(hidden, target).loss, hidden)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_compile_sparse_raises() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(make("trees, sparse"), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass sparse=False"):
        compiled(draw(3, D), draw_targets(3))
