"""Mixtures of trees whose classes have probability 0 or 1 up to rounding, and bits that the number
of threads must not change."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from ops.cases import threads
from torch import Tensor

from fuzz.problems import SETTINGS, Problem, Setting
from fuzz.scale import cases
from fuzz.tensors import check_close, same_bits, sums, truth
from fuzz.test_ops import all_classes, tree_log_softmax_and_gradients, true_log_prob
from hstree import ops


@given(
    setting=SETTINGS,
    size=st.sampled_from([30.0, 1e3, 1e30]),
    closed=st.booleans(),
    double=st.booleans(),
)
@settings(max_examples=cases(30))
def test_tree_log_softmax_of_impossible_classes(
    setting: Setting, size: float, closed: bool, double: bool
) -> None:
    """Scores up to 1e30, and trees whose weight is 0: no NaN, forward or backward."""
    setting = replace(setting, scale=1.0)
    problem = Problem(setting)
    dtype = torch.float64 if double else torch.float32
    (score, gate, *tables), keywords = all_classes(problem, dtype)
    score = score * size
    for name in ("class_score", "class_bias"):
        if name in keywords:
            keywords[name] = keywords[name] * size
    gate = gate.clone()
    if closed:
        gate[:, 1:] = -torch.inf
        gate[:, 0] = 0.0
    grad = torch.ones(setting.rows, setting.n_classes, dtype=dtype)
    log_prob, *gradients = tree_log_softmax_and_gradients(score, gate, tables, keywords, grad)
    true = truth(true_log_prob(score, gate, tables, keywords)[0])
    check_close("log_prob", log_prob, true, scale=size * (20 + setting.n_classes))
    if size < 1e30:
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient.isnan().any() for gradient in gradients)


@given(setting=SETTINGS, size=st.sampled_from([30.0, 1e3, 1e15]), closed=st.booleans())
@settings(max_examples=cases(30))
def test_search_of_impossible_classes(setting: Setting, size: float, closed: bool) -> None:
    setting = replace(setting, scale=1.0, dtype="float32" if setting.seed % 2 else "float64")
    problem = Problem(setting)
    problem.weight = problem.weight * size
    if closed:
        problem.log_gate = problem.log_gate.clone()
        problem.log_gate[:, 1:] = -torch.inf
        problem.log_gate[:, 0] = 0.0
    true = problem.log_prob()
    arguments, rows = problem.search_arguments(), np.arange(setting.rows)[:, None]
    scale = problem.magnitude() * size
    k = min(5, setting.n_classes)
    values, classes = ops.tree_topk(*arguments, k)
    check_close("topk", values, true[rows, classes.numpy()], scale=scale)
    check_close("topk", values, -np.sort(-true, 1)[:, :k], scale=scale)
    drawn, of_drawn = ops.sample(*arguments, torch.tensor([setting.seed]), n=5)
    check_close("drawn", of_drawn, true[rows, drawn.numpy()], scale=scale)


@given(setting=SETTINGS)
@settings(max_examples=cases(5))
def test_one_thread_and_two_give_the_same_bits(setting: Setting) -> None:
    problem = Problem(replace(setting, rows=100 + setting.rows, n_classes=64 + setting.n_classes))
    (score, gate, *tables), keywords = all_classes(problem, sums(problem.dtype))
    arguments = problem.search_arguments()
    seed = torch.tensor([setting.seed])
    knots = torch.randn(50, 4, generator=torch.Generator().manual_seed(setting.seed % 2**31))

    def compute() -> list[Tensor]:
        grad = torch.ones(score.shape[2], tables[-1], dtype=score.dtype)
        table = knots.to(score.dtype).requires_grad_()
        x = score.detach().requires_grad_()
        value = ops.piecewise(x, table, 2.0)
        value.backward(x.detach())
        return [
            *(value.detach(), x.grad, table.grad),
            *tree_log_softmax_and_gradients(score, gate, tables, keywords, grad),
            *ops.tree_topk(*arguments, 9),
            *ops.sample(*arguments, seed, n=9),
        ]

    alone = compute()
    with threads(2):
        together = compute()
    assert all(map(same_bits, alone, together))
