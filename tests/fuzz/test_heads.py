"""Every head with random options: its formula, and what must agree between its methods."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from heads.formulas import FORMULAS
from hypothesis import given, settings
from torch import Tensor

import hstree
from fuzz.scale import cases
from fuzz.some_heads import HEAD_SETTINGS, HeadSetting, build, make
from fuzz.tensors import same_bits, truth
from hstree.heads import Head, head_names

SHAPES = st.sampled_from([(5,), (), (2, 3), (0,), (1, 0, 4), (17,)])


def draw_hidden(setting: HeadSetting, shape: tuple[int, ...]) -> Tensor:
    random = np.random.default_rng(setting.seed + 1)
    return torch.from_numpy(random.standard_normal((*shape, setting.in_features)))


def draw_target(head: Head, shape: tuple[int, ...], seed: int) -> Tensor:
    random = np.random.default_rng(seed + 2)
    target = random.integers(0, head.n_classes, shape)
    ignored = random.random(shape) < 0.3
    return torch.from_numpy(np.asarray(np.where(ignored, head.ignore_index, target)))


def formula(head: Head, hidden: Tensor) -> Any:
    """Of a copy in float64."""
    rows = hidden.detach().double().reshape(-1, head.in_features)
    log_prob = FORMULAS[head.name](copy.deepcopy(head).double().eval(), rows)
    return truth(log_prob).reshape(*hidden.shape[:-1], head.n_classes)


def close(got: Tensor, true: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(truth(got), true, rtol=tolerance, atol=tolerance)


def test_every_head_has_a_formula() -> None:
    assert sorted(FORMULAS) == head_names()


@given(setting=HEAD_SETTINGS, shape=SHAPES)
@settings(max_examples=cases(70))
def test_log_prob_and_losses(setting: HeadSetting, shape: tuple[int, ...]) -> None:
    head, options = build(setting)
    hidden = draw_hidden(setting, shape).requires_grad_()
    log_prob = head.log_prob(hidden)
    true = formula(head, hidden)
    close(log_prob, true)
    close(log_prob.exp().sum(-1), np.ones(shape))
    close(head.entropy(hidden), -(np.exp(true) * true).sum(-1))
    target = draw_target(head, shape, setting.seed)
    output, loss = head(hidden, target)
    chosen, kept = target.numpy(), target.numpy() != head.ignore_index
    safe = np.where(kept, chosen, 0)
    at_target = np.take_along_axis(true, safe[..., None], -1)[..., 0]
    close(output, np.where(kept, at_target, 0.0))
    if not options["z_loss"]:
        weight = np.asarray(options.get("class_weight", np.ones(head.n_classes)))
        of_row, smoothing = weight[safe] * kept, setting.label_smoothing
        each = -(1 - smoothing) * of_row * at_target - smoothing * kept * (weight * true).mean(-1)
        if setting.reduction == "mean":
            each = each.sum() / of_row.sum() if of_row.any() else np.array(np.nan)
        close(loss, each if setting.reduction != "sum" else each.sum())
    assert loss.shape == (shape if setting.reduction == "none" else ())
    total = loss.sum()
    if total.isfinite():
        total.backward()
        for name, parameter in [("hidden", hidden), *head.named_parameters()]:
            grad = parameter.grad
            if grad is not None:
                values = grad.coalesce().values() if grad.is_sparse else grad
                assert values.isfinite().all(), name


@given(setting=HEAD_SETTINGS, shape=SHAPES, k=st.integers(1, 60), temperature=st.sampled_from(
    [1.0, 0.5, 3.0]
))  # fmt: skip
@settings(max_examples=cases(50))
def test_top_classes_draws_and_candidates(
    setting: HeadSetting, shape: tuple[int, ...], k: int, temperature: float
) -> None:
    head, _ = build(setting)
    hidden = draw_hidden(setting, shape)
    true = formula(head, hidden)
    k = min(k, head.n_classes)
    values, classes = head.topk(hidden, k)
    assert values.shape == classes.shape == (*shape, k)
    close(values, -np.sort(-true, -1)[..., :k])
    close(values, np.take_along_axis(true, classes.numpy(), -1))
    assert all(len(set(row)) == k for row in classes.reshape(-1, k).tolist())
    best = np.take_along_axis(true, head.predict(hidden).numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(best, true.max(-1), rtol=1e-9, atol=1e-9)
    draws = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(setting.seed)
        draws.append(
            head.sample(
                hidden, 4, temperature=temperature, generator=generator, return_log_prob=True
            )
        )
    (drawn, of_drawn), again = draws
    assert all(map(same_bits, draws[0], again))
    assert drawn.shape == of_drawn.shape == (*shape, 4)
    assert ((drawn >= 0) & (drawn < head.n_classes)).all()
    if head.ignore_index >= head.n_classes or head.ignore_index < 0:
        candidates = head.candidate_log_prob(hidden, drawn, temperature=temperature)
        close(candidates, truth(of_drawn))
    if head.name != "trees" or temperature == 1.0:
        sharp = true / temperature
        sharp = sharp - np.log(np.exp(sharp - sharp.max(-1, keepdims=True)).sum(-1, keepdims=True))
        sharp = sharp - (true / temperature).max(-1, keepdims=True)
        close(of_drawn, np.take_along_axis(sharp, drawn.numpy(), -1))
    marked = draw_target(head, (*shape, 3), setting.seed)
    expected = np.take_along_axis(true, np.where(marked == head.ignore_index, 0, marked), -1)
    expected = np.where(marked == head.ignore_index, 0.0, expected)
    close(head.candidate_log_prob(hidden, marked), expected)


@given(setting=HEAD_SETTINGS, dtype=st.sampled_from(["float64", "float32", "bfloat16"]))
@settings(max_examples=cases(50))
def test_copies_and_files_give_the_same_bits(setting: HeadSetting, dtype: str) -> None:
    head, _ = build(setting)
    head = head.to(getattr(torch, dtype))
    hidden = draw_hidden(setting, (5,)).to(getattr(torch, dtype))
    target = draw_target(head, (5,), setting.seed)

    def answers(head: Head) -> list[Tensor]:
        return [head.log_prob(hidden), *head(hidden, target)]

    before = answers(head)
    assert before[0].dtype == (torch.float64 if dtype == "float64" else torch.float32)
    other, _ = build(setting)
    other = other.to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(head.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "head.safetensors"
        head.save(file)
        loaded = hstree.load_head(file).eval()
        if setting.tied and hasattr(head, "tied") and head.tied:
            again = hstree.load_head(file, embedding=torch.nn.Embedding(
                head.n_classes, setting.in_features, dtype=getattr(torch, dtype)
            ))  # fmt: skip
            assert again.config() == head.config()
    untied = {"tied": False} if "tied" in head.config() else {}  # the file's copy of the weight
    assert loaded.config() == head.config() | untied
    assert type(loaded) is type(head)
    for one in (copy.deepcopy(head), other, loaded):
        assert all(map(same_bits, before, answers(one)))


@given(setting=HEAD_SETTINGS)
@settings(max_examples=cases(30))
def test_lower_precision(setting: HeadSetting) -> None:
    head, _ = build(setting)
    hidden = draw_hidden(setting, (6,)).to(torch.bfloat16)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        head = head.to(dtype)
        log_prob = head.log_prob(hidden)
        assert log_prob.dtype == torch.float32
        true = formula(head, hidden)
        size = 1 + float(np.abs(true).max())
        np.testing.assert_allclose(truth(log_prob), true, rtol=0, atol=tolerance * size)
        np.testing.assert_allclose(truth(log_prob.exp().sum(-1)), 1.0, rtol=1e-4)


ODD = [10**400, 10**9999, torch.zeros(2), np.zeros(2), torch.zeros(2, dtype=torch.int64)]
BAD: dict[str, list[Any]] = {
    "count": [0, -3, 1.5, "5", None, True, np.nan, [2], *ODD],
    "number": [np.nan, np.inf, -np.inf, "1", [1.0], 1j, *ODD],
    "positive": [0.0, -1.0, np.nan, np.inf, "1", *ODD],
    "share": [-0.1, 1.0, np.nan, "0.1", *ODD],
    "choice": ["other", "", 3, None],
    "flag": ["yes", 3, 1.0, [True], *ODD],
}
OPTIONS: dict[str, dict[str, str]] = {
    "": {
        "in_features": "count",
        "n_classes": "count",
        "reduction": "choice",
        "label_smoothing": "share",
        "z_loss": "number",
    },
    "gss": {"c": "number", "k": "positive"},
    "plif": {"intervals": "count", "radius": "positive"},
    "plif-frozen": {"intervals": "count", "radius": "positive"},
    "monotonic": {"units": "count", "intervals": "count"},
    "mos": {"components": "count", "latent_dropout": "share", "function": "choice"},
    "moc": {"components": "count", "latent_dropout": "share", "function": "choice"},
    "mos-plif": {"components": "count", "latent_dropout": "share"},
    "forest": {"n_trees": "count", "clusters": "count", "tree_dropout": "share", "gate": "choice"},
    "mixtape": {"gate_features": "count"},
    "sampled": {"negatives": "count", "distribution": "choice", "alpha": "number"},
    "trees": {"gate": "choice", "groups": "flag", "sparse": "flag"},
}


@pytest.mark.parametrize("name", head_names())
@given(data=st.data())
@settings(max_examples=cases(8))
def test_bad_options_are_named(name: str, data: st.DataObject) -> None:
    known = OPTIONS[""] | OPTIONS.get(name, {})
    option = data.draw(st.sampled_from(sorted(known)))
    value = data.draw(st.sampled_from(BAD[known[option]]))
    setting = HeadSetting(
        name, 4, 6, 1.0, False, "mean", -100, False, 0.0, 0.0, data.draw(st.integers(0, 99))
    )
    _, options = build(setting)
    arguments = {"in_features": 4, "n_classes": 6} | options | {option: value}
    with pytest.raises((ValueError, TypeError), match=rf"^{option}\b"):
        make(name, **arguments)
