"""The tree operators on random trees against their references in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from reference.group_log_prob import group_log_prob_reference
from reference.path_log_prob import path_log_prob_reference
from reference.tree_log_softmax import tree_log_softmax_reference
from torch import Tensor

from fuzz.problems import SETTINGS, Problem, Setting
from fuzz.scale import cases
from fuzz.tensors import check_close, exact_leaves, same_bits, sums, truth
from hstree import ops


def function_of(problem: Problem) -> Any:
    return ops.group_log_prob if problem.setting.groups else ops.path_log_prob


def target_arguments(problem: Problem) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments after hidden, weight and bias, and the keyword."""
    tables, classes = problem.tables, problem.setting.n_classes
    if problem.setting.groups:
        cluster, begin = tables["root_child"][:, :classes].contiguous(), tables["begin"]
        widest = int(begin.diff(dim=1).max())
        return [problem.target, cluster, tables["order"], begin], {"max_width": widest}
    own = [tables[name] for name in ("path_offset", "path", "leaf_position")]
    longest = int(own[0].diff(dim=1).max())
    return [problem.target, *own, problem.feature_index], {"max_depth": longest}


def of_targets(problem: Problem, sparse: bool, grad: Tensor) -> list[Tensor]:
    """log_prob, and the gradients of hidden, weight and bias where there is one."""
    given_, keyword = target_arguments(problem)
    leaves = [problem.hidden, problem.weight, problem.bias]
    leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
    log_prob = function_of(problem)(*leaves, *given_, sparse=sparse, **keyword)
    log_prob.backward(grad)
    return [log_prob.detach(), *(x.grad for x in leaves if x is not None)]


def true_of_targets(problem: Problem, grad: Tensor) -> list[Any]:
    """The same in float64 from the formulas."""
    leaves = exact_leaves(problem.hidden, problem.weight, problem.bias)
    given_, keyword = target_arguments(problem)
    if problem.setting.groups:
        log_prob = group_log_prob_reference(*leaves, *given_[:2])
    else:
        log_prob, _ = path_log_prob_reference(*leaves, *given_, **keyword)
    return [truth(log_prob), *gradients(log_prob, leaves, grad)]


def gradients(output: Tensor, leaves: list[Any], grad: Tensor) -> list[Any]:
    """As arrays, zeros where nothing depends on a leaf."""
    if output.requires_grad:
        output.backward(grad.double())
    return [np.zeros(x.shape) if x.grad is None else truth(x.grad) for x in leaves if x is not None]


@given(setting=SETTINGS, sparse=st.booleans())
@settings(max_examples=cases(40))
def test_log_prob_of_targets_and_gradients(setting: Setting, sparse: bool) -> None:
    problem = Problem(setting)
    shape = (setting.rows, setting.n_trees)
    grad = torch.from_numpy(problem.random.standard_normal(shape)).to(sums(problem.dtype))
    got = of_targets(problem, sparse, grad)
    true = true_of_targets(problem, grad)
    scale = problem.magnitude()
    names = ["log_prob", "gradient of hidden", "gradient of weight", "gradient of bias"]
    for name, value, expected in zip(names, got, true, strict=False):
        dense = value.to_dense() if value.is_sparse else value
        of_rows = 1 if name in names[:2] else max(1, setting.rows)
        check_close(name, dense, expected, scale=scale * of_rows)
    again = of_targets(problem, sparse, grad)
    assert all(map(same_bits, got, again))


@given(setting=SETTINGS, value=st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(max_examples=cases(30))
def test_a_row_that_is_not_finite_changes_no_other(setting: Setting, value: float) -> None:
    setting = replace(setting, rows=max(2, setting.rows), layout="contiguous")
    problem = Problem(setting)
    given_, keyword = target_arguments(problem)

    def log_prob_of(hidden: Tensor) -> Any:
        rest = (problem.weight, problem.bias, *given_)
        return function_of(problem)(hidden, *rest, **keyword)

    clean = log_prob_of(problem.hidden)
    bad = int(problem.random.integers(setting.rows))
    hidden = problem.hidden.clone()
    hidden[bad, problem.random.integers(setting.features)] = value
    log_prob = log_prob_of(hidden)
    others = torch.arange(setting.rows) != bad
    assert same_bits(log_prob[others], clean[others])
    if problem.target[bad] < 0:
        assert not log_prob[bad].any()
    elif np.isnan(value) and setting.subset is None:
        wanted = int(problem.target[bad])
        if setting.groups:
            cluster = given_[1]
            visited = (cluster == cluster[:, wanted, None]).sum(1) > 1
        else:
            visited = given_[1].diff(dim=1)[:, wanted] > 0
        assert torch.equal(log_prob[bad].isnan(), visited)


@given(setting=SETTINGS, size=st.sampled_from([1e-42, 1e-30, 1e30]), in_weight=st.booleans())
@settings(max_examples=cases(20))
def test_tiny_and_huge_numbers(setting: Setting, size: float, in_weight: bool) -> None:
    setting = replace(setting, scale=1.0, bias=False, layout="contiguous")
    problem = Problem(setting)
    if setting.dtype == "float16":
        size = {1e-42: 1e-7, 1e-30: 1e-6, 1e30: 6e4 / 8}[size]  # within its range
    if in_weight:
        problem.weight = (problem.weight.double() * size).to(problem.dtype)
    else:
        problem.hidden = (problem.hidden.double() * size).to(problem.dtype)
    grad = torch.ones(setting.rows, setting.n_trees, dtype=sums(problem.dtype))
    log_prob, *gradients = of_targets(problem, False, grad)
    true = true_of_targets(problem, grad)
    check_close("log_prob", log_prob, true[0], scale=problem.magnitude() * max(1.0, size))
    for gradient in gradients:
        limit = torch.finfo(problem.dtype).max / 1e3
        if size > 1 and np.abs(true[1]).max(initial=0) < limit > np.abs(true[2]).max(initial=0):
            assert gradient.isfinite().all()


def all_classes(problem: Problem, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of tree_log_softmax: score [T, R, N] and the others."""
    s, binary = problem.setting, problem.n_binary
    rows = problem.random.standard_normal((s.n_trees, binary + problem.root_width, s.rows))
    score = problem.laid(torch.from_numpy(3 * s.scale * rows).to(dtype))
    gate = problem.laid(problem.log_gate.to(dtype))
    keywords: dict[str, Any] = {"root_begin": binary}
    if s.groups:
        of_classes = s.scale * problem.random.standard_normal((s.rows, s.n_classes))
        bias = s.scale * problem.random.standard_normal((s.n_trees, s.n_classes))
        keywords["class_score"] = problem.laid(torch.from_numpy(of_classes).to(dtype))
        keywords["class_bias"] = problem.laid(torch.from_numpy(bias).to(dtype))
    return [score, gate, problem.tables["node"], problem.tables["edge"], s.n_classes], keywords


def tree_log_softmax_and_gradients(
    score: Tensor, gate: Tensor, tables: list[Any], keywords: dict[str, Any], grad: Tensor
) -> list[Tensor]:
    names = [name for name in ("class_score", "class_bias") if name in keywords]
    leaves = [x.detach().requires_grad_() for x in (score, gate)]
    more = {name: keywords[name].detach().requires_grad_() for name in names}
    log_prob = ops.tree_log_softmax(*leaves, *tables, **keywords | more)
    log_prob.backward(grad)
    return [log_prob.detach(), *(x.grad for x in [*leaves, *more.values()])]


def true_log_prob(
    score: Tensor, gate: Tensor, tables: list[Any], keywords: dict[str, Any]
) -> tuple[Tensor, list[Any]]:
    """log P [N, V] in float64, and the leaves that it depends on."""
    of_classes = (keywords.get("class_score"), keywords.get("class_bias"))
    leaves = exact_leaves(score, gate, *of_classes)
    begin = keywords["root_begin"]
    return tree_log_softmax_reference(*leaves[:2], *tables, begin, *leaves[2:]), leaves


@given(setting=SETTINGS)
@settings(max_examples=cases(30))
def test_tree_log_softmax_and_gradients(setting: Setting) -> None:
    problem = Problem(setting)
    s, dtype = setting, sums(problem.dtype)
    (score, gate, *tables), keywords = all_classes(problem, dtype)
    grad = torch.from_numpy(problem.random.standard_normal((s.rows, s.n_classes))).to(dtype)
    got = tree_log_softmax_and_gradients(score, gate, tables, keywords, grad)
    log_prob, leaves = true_log_prob(score, gate, tables, keywords)
    true = [truth(log_prob), *gradients(log_prob, leaves, grad)]
    for name, value, expected in zip(
        ["log_prob", "score", "log_gate", "class_score", "class_bias"], got, true, strict=False
    ):
        scale = (20 + s.n_classes) * (s.rows if name == "class_bias" else 1)
        check_close(name, value, expected, scale=scale)


@given(setting=SETTINGS, k=st.integers(1, 400))
@settings(max_examples=cases(20))
def test_top_classes_of_groups(setting: Setting, k: int) -> None:
    problem = Problem(replace(setting, groups=True))
    (score, gate, *tables), keywords = all_classes(problem, sums(problem.dtype))
    k = min(k, setting.n_classes)
    values, classes = ops.group_topk(score, gate, *tables, k, **keywords)
    true = truth(true_log_prob(score, gate, tables, keywords)[0])
    found = (classes[:, 0] >= 0).numpy()  # no row that was given up
    true, values, classes = true[found], values[found], classes.numpy()[found]
    scale = 20 + setting.n_classes
    check_close("topk", values, -np.sort(-true, axis=1)[:, :k], scale=scale)
    check_close("topk classes", values, np.take_along_axis(true, classes, 1), scale=scale)
    assert found.all() or setting.scale > 1


@given(
    setting=SETTINGS,
    temperature=st.sampled_from([1.0, 0.3, 4.0]),
    k=st.integers(1, 400),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=cases(40))
def test_top_classes_and_draws(setting: Setting, temperature: float, k: int, seed: int) -> None:
    problem = Problem(setting)
    s, arguments = setting, problem.search_arguments()
    k = min(k, s.n_classes)
    values, classes = ops.tree_topk(*arguments, k)
    drawn, of_drawn = ops.sample(*arguments, torch.tensor([seed]), n=9, temperature=temperature)
    scale, rows = problem.magnitude(), np.arange(s.rows)[:, None]
    true = problem.log_prob()
    check_close("topk", values, -np.sort(-true, axis=1)[:, :k], scale=scale)
    check_close("topk classes", values, true[rows, classes.numpy()], scale=scale)
    assert all(len(set(row)) == k for row in classes.tolist())
    true = problem.log_prob(temperature)
    scale /= min(1.0, temperature)
    assert ((drawn >= 0) & (drawn < s.n_classes)).all()
    check_close("drawn", of_drawn, true[rows, drawn.numpy()], scale=scale)


@given(setting=SETTINGS)
@settings(max_examples=cases(15))
def test_every_draw_has_its_probability(setting: Setting) -> None:
    """The numbers of draws of each class, all rows together, against their sums."""
    problem = Problem(replace(setting, n_classes=1 + setting.n_classes % 9))
    n = 300
    seed = torch.tensor([setting.seed])
    drawn, _ = ops.sample(*problem.search_arguments(), seed, n=n)
    share = np.exp(problem.log_prob())
    counts = np.bincount(drawn.flatten().numpy(), minlength=share.shape[1])
    deviation = np.sqrt((n * share * np.maximum(1 - share, 0)).sum(0))
    assert (np.abs(counts - n * share.sum(0)) <= 7 * deviation + 3).all()


@given(setting=SETTINGS)
@settings(max_examples=cases(20))
def test_feature_gather(setting: Setting) -> None:
    problem = Problem(replace(setting, subset=setting.subset or 3))
    assert problem.feature_index is not None
    hidden = problem.hidden.detach().requires_grad_()
    gathered = ops.feature_gather(hidden, problem.feature_index)
    index = problem.feature_index.numpy()
    np.testing.assert_array_equal(truth(gathered), truth(hidden)[:, index])
    grad = problem.draw(*gathered.shape)
    gathered.backward(grad)
    expected = np.zeros(hidden.shape)
    for t in range(setting.n_trees):
        expected[:, index[t]] += truth(grad)[:, t]
    check_close("gradient of hidden", hidden.grad, expected, scale=5.0)
