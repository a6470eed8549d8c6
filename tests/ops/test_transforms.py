"""Every operator under torch.func and in forward mode, against its reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from reference.feature_gather import feature_gather_reference
from reference.forest_log_prob import forest_log_prob_reference
from reference.leaf_order import leaf_order_reference
from reference.mixture_log_prob import mixture_log_prob_reference
from reference.piecewise import piecewise_reference
from reference.target_log_softmax import target_log_softmax_reference
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from hstree.ops import (
    LogitFunction,
    feature_gather,
    forest_log_prob,
    leaf_log_prob,
    leaf_order,
    mixture_log_prob,
    path_log_prob,
    piecewise,
    plif_table,
    sparse_adam_,
    target_log_softmax,
    tree_topk,
    wide_log_prob,
)
from ops import tree_softmax_cases
from ops.cases import LEAF, PATH, WIDE, Case, TreeOpUnderTest

# In torch's own code, the first time that forward mode is at work.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ROWS, BATCH = 4, 3
SMALL = Case("small", rows=ROWS, trees=2, classes=7, in_features=5, subset=3, widest=4, ignored=0.3)


@dataclass
class Subject:
    """An op as a function of a target [N] and of leaves in float64.

    Attributes:
        op: (target, *leaves) -> output, differentiable in the leaves.
        reference: the same in plain torch; a target of constants.
        rows: for each leaf the dimension of the rows; None: all rows share it.
        twice: whether it can be differentiated twice in reverse mode.
    """

    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    target: Tensor
    leaves: tuple[Tensor, ...]
    rows: tuple[int | None, ...]
    twice: bool = False

    def of_leaves(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *leaves: function(self.target, *leaves)

    @property
    def every(self) -> tuple[int, ...]:
        return tuple(range(len(self.leaves)))

    def total(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A scalar with gradients of every size, and no two rows alike."""

        def scalar(*leaves: Tensor) -> Tensor:
            output = function(self.target, *leaves)
            return (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum()

        return scalar

    def batches(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Targets and leaves with a batch in front, no two alike."""
        target = torch.stack([self.target.roll(i) for i in range(BATCH)])
        scales = [1 + i / 4 for i in range(BATCH)]
        return target, tuple(torch.stack([scale * x for scale in scales]) for x in self.leaves)

    def given(self, shared: bool) -> tuple[Tensor, tuple[Tensor, ...], tuple[int | None, ...]]:
        """Targets, leaves and the dimensions of the batch in all of them: what all rows share is
        one for the whole batch, or one for each element."""
        target, leaves = self.batches()
        kept = [shared and row is None for row in self.rows]
        given = zip(self.leaves, leaves, kept, strict=True)
        dims = (0, *(None if keep else 0 for keep in kept))
        return target, tuple(x if keep else b for x, b, keep in given), dims


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_paths(op: TreeOpUnderTest, case: Case = SMALL, whole: bool = False) -> Subject:
    batch = op.batch(case)

    def call(target: Tensor, *leaves: Tensor) -> Tensor:
        names = ("hidden", "weight", "bias")
        given = replace(batch, target=target, **dict(zip(names, leaves, strict=False)))
        return torch.ops.hstree.forward(*given.arguments())[0] if whole else op.log_prob(given)

    def plain(target: Tensor, *leaves: Tensor) -> Tensor:
        hidden, weight, bias = (*leaves, None)[:3]
        return op.reference(hidden, weight, bias, target, *batch.arguments()[4:])[0]

    leaves = tuple(x for x in (batch.hidden, batch.weight, batch.bias) if x is not None)
    return Subject(call, plain, batch.target, leaves, (0, None, None)[: len(leaves)])


def of_logits(table: Tensor | None = None, **function: float) -> Subject:
    given = () if table is None else (table,)

    def call(target: Tensor, logits: Tensor, *table: Tensor) -> Tensor:
        return target_log_softmax(logits, target, table=(*table, None)[0], **function)

    def plain(target: Tensor, logits: Tensor, *table: Tensor) -> Tensor:
        return target_log_softmax_reference(logits, target, table=(*table, None)[0], **function)

    target, leaves = torch.tensor([2, -1, 0, 5]), (3 * draw(ROWS, 6), *given)
    return Subject(call, plain, target, leaves, (0, None)[: len(leaves)])


def of_mixture(
    output: str,
    table: Tensor | None = None,
    components: int = 3,
    row_weight: Tensor | None = None,
) -> Subject:
    """``output``: log_prob, mean or sum."""
    leaves = [draw(ROWS, components, 3), draw(6, 3, seed=2), draw(6, seed=3)]
    rows: list[int | None] = [0, None, None]
    if components > 1:
        leaves.append(draw(ROWS, components, seed=1).log_softmax(1))
        rows.append(0)
    if table is not None:
        leaves.append(table)
        rows.append(None)

    def split(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        prior = rest[0] if components > 1 else None
        return prior, None if table is None else rest[-1]

    def call(target: Tensor, z: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        prior, of = split(rest)
        function = LogitFunction(c=-0.5, k=2.5) if of is None else LogitFunction(table=of, radius=2)
        reduction = "none" if output == "log_prob" else output
        log_prob, loss = mixture_log_prob(
            z,
            prior,
            weight,
            bias,
            target,
            function,
            row_weight=row_weight,
            reduction=reduction,
            chunk_rows=3,
        )
        return log_prob if output == "log_prob" else loss.expand(1)

    def plain(target: Tensor, z: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        prior, of = split(rest)
        log_prob = mixture_log_prob_reference(z, prior, weight, bias, target, -0.5, 2.5, of, 2.0)
        if output == "log_prob":
            return log_prob
        factor = torch.ones(len(target)) if row_weight is None else row_weight
        factor = factor.to(log_prob).masked_fill(target == -1, 0)
        count = factor.sum() if output == "mean" else 1
        return (-(factor * log_prob).sum() / count).expand(1)

    target = torch.tensor([2, -1, 0, 5])
    return Subject(call, plain, target, tuple(leaves), tuple(rows))


def of_forest(offset: Tensor | None = None) -> Subject:
    """Clusters [V, T] and offsets [V] are no leaves: they have no gradient."""
    cluster = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0], [1, 0], [2, 1]], dtype=torch.int32)

    def call(target: Tensor, *leaves: Tensor) -> Tensor:
        return forest_log_prob(*leaves, cluster, target, offset=offset, chunk_rows=3)[1].expand(1)

    def plain(target: Tensor, *leaves: Tensor) -> Tensor:
        log_prob = forest_log_prob_reference(*leaves, cluster, target, offset)
        return (-log_prob.sum() / (target != -1).sum()).expand(1)

    leaves = (draw(ROWS, 3), draw(ROWS, 2), draw(ROWS, 2, 3), draw(6, 3), draw(6, seed=1))
    return Subject(call, plain, torch.tensor([2, -1, 0, 5]), leaves, (0, 0, 0, None, None))


def of_all_classes(*shapes: str, groups: bool = False) -> Subject:
    case = tree_softmax_cases.Case("small", shapes, 7, widest=3, rows=ROWS)
    batch = tree_softmax_cases.draw(case, groups=groups)

    def call(_: Tensor, *leaves: Tensor) -> Tensor:
        return tree_softmax_cases.mixed(batch.with_leaves(leaves))

    def plain(_: Tensor, *leaves: Tensor) -> Tensor:
        return tree_softmax_cases.reference(batch.with_leaves(leaves))

    rows = (0, None, 2, 0)[-len(batch.leaves) :]
    return Subject(call, plain, torch.zeros(ROWS), batch.leaves, rows)


def subjects() -> dict[str, Subject]:
    index = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    slopes = draw(5, seed=4).exp()
    linear = LogitFunction.plif(slopes, 2.0).table
    assert linear is not None
    cubic = torch.cat([linear, 0.1 * draw(5, 2, seed=6)], 1)
    nothing = torch.zeros(ROWS)
    return {
        "path_log_prob": on_paths(PATH),
        "path_log_prob, all features, no bias": on_paths(
            PATH, replace(SMALL, subset=None, bias=False)
        ),
        "forward": on_paths(PATH, whole=True),
        "wide_log_prob": on_paths(WIDE),
        "wide_log_prob, all features, no bias": on_paths(
            WIDE, replace(SMALL, subset=None, bias=False)
        ),
        "leaf_log_prob": on_paths(LEAF),
        "leaf_log_prob, no bias": on_paths(LEAF, replace(SMALL, bias=False)),
        "feature_gather": Subject(
            lambda _, hidden: feature_gather(hidden, index),
            lambda _, hidden: feature_gather_reference(hidden, index),
            nothing,
            (draw(ROWS, 3),),
            (0,),
            twice=True,
        ),
        "target_log_softmax": of_logits(),
        "target_log_softmax, gss": of_logits(c=-0.5, k=2.5),
        "target_log_softmax, table": of_logits(linear, radius=2.0),
        "mixture_log_prob": of_mixture("log_prob"),
        "mixture_log_prob, mean": of_mixture("mean"),
        "mixture_log_prob, sum, table": of_mixture("sum", linear),
        "mixture_log_prob, one component": of_mixture("mean", components=1),
        "mixture_log_prob, row_weight": of_mixture(
            "mean", row_weight=torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
        ),
        "forest_log_prob, mean": of_forest(),
        "forest_log_prob, offset": of_forest(draw(6, seed=2)),
        "piecewise": Subject(
            lambda _, x, table: piecewise(x, table, 2.0),
            lambda _, x, table: piecewise_reference(x, table, 2.0),
            nothing,
            (2 * draw(ROWS, 3), linear),
            (0, None),
        ),
        "piecewise, cubic": Subject(
            lambda _, x, table: piecewise(x, table, 2.0),
            lambda _, x, table: piecewise_reference(x, table, 2.0),
            nothing,
            (2 * draw(ROWS, 3), cubic),
            (0, None),
        ),
        "plif_table": Subject(
            lambda _, slopes: plif_table(slopes, 2.0),
            lambda _, slopes: 0.8 * torch.stack([slopes.cumsum(0) - slopes, slopes], 1),
            nothing,
            (slopes,),
            (None,),
            twice=True,
        ),
        "tree_log_softmax": of_all_classes("random", "random", "random"),
        "leaf_tree_log_softmax": of_all_classes("random", "levels", groups=True),
        "tree_log_softmax, binary": of_all_classes("chain", "random"),
    }


SUBJECTS = subjects()
every_op = pytest.mark.parametrize("name", SUBJECTS)
close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def tangents(subject: Subject) -> tuple[Tensor, ...]:
    return tuple(draw(*x.shape, seed=20 + i) for i, x in enumerate(subject.leaves))


@contextmanager
def calls() -> Iterator[list[str]]:
    """The names of the operators that run."""
    names: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func._schema.name.removeprefix("hstree::"))
            return func(*args, **(kwargs or {}))

    with Record():
        yield names


@every_op
def test_grad(name: str) -> None:
    subject = SUBJECTS[name]
    got = grad(subject.total(subject.op), subject.every)(*subject.leaves)
    expected = grad(subject.total(subject.reference), subject.every)(*subject.leaves)
    assert_close(got, expected, **close)
    assert all(x.any() for x in got)


@every_op
def test_jacrev(name: str) -> None:
    subject = SUBJECTS[name]
    got = jacrev(subject.of_leaves(subject.op), subject.every)(*subject.leaves)
    expected = jacrev(subject.of_leaves(subject.reference), subject.every)(*subject.leaves)
    assert_close(got, expected, **close)


@every_op
def test_jvp(name: str) -> None:
    subject = SUBJECTS[name]
    along = tangents(subject)
    got = jvp(subject.of_leaves(subject.op), subject.leaves, along)
    expected = jvp(subject.of_leaves(subject.reference), subject.leaves, along)
    assert_close(got, expected, **close)
    assert got[1].any()


@every_op
def test_jvp_is_the_finite_difference(name: str) -> None:
    subject, step = SUBJECTS[name], 1e-6
    along = tangents(subject)
    _, got = jvp(subject.of_leaves(subject.op), subject.leaves, along)
    after, before = (
        subject.op(
            subject.target,
            *(x + sign * step * v for x, v in zip(subject.leaves, along, strict=True)),
        )
        for sign in (1, -1)
    )
    assert_close(got, (after - before) / (2 * step), rtol=1e-6, atol=1e-7)


@every_op
def test_jacfwd(name: str) -> None:
    subject = SUBJECTS[name]
    got = jacfwd(subject.of_leaves(subject.op), subject.every)(*subject.leaves)
    expected = jacrev(subject.of_leaves(subject.reference), subject.every)(*subject.leaves)
    assert_close(got, expected, **close)


@every_op
@pytest.mark.parametrize("graph", [False, True], ids=["no_grad", "grad"])
def test_dual_numbers(name: str, graph: bool) -> None:
    """torch.autograd.forward_ad, beside gradients or without."""
    subject = SUBJECTS[name]
    along = tangents(subject)
    expected = jvp(subject.of_leaves(subject.reference), subject.leaves, along)
    leaves = [x.clone().requires_grad_(graph) for x in subject.leaves]
    with forward_ad.dual_level(), torch.set_grad_enabled(graph):
        duals = [forward_ad.make_dual(x, v) for x, v in zip(leaves, along, strict=True)]
        output = subject.op(subject.target, *duals)
        assert_close(tuple(forward_ad.unpack_dual(output)), expected, **close)
        plain = forward_ad.unpack_dual(subject.op(subject.target, *leaves))
        assert plain.tangent is None
    if graph:
        got = torch.autograd.grad(output.sum(), leaves)
        _, back = torch.func.vjp(subject.of_leaves(subject.reference), *subject.leaves)
        assert_close(got, back(torch.ones_like(output)), **close)


@every_op
def test_gradients_within_a_dual_level(name: str) -> None:
    subject = SUBJECTS[name]
    along = tangents(subject)

    def slopes(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *leaves: grad(subject.total(function), subject.every)(*leaves)

    _, expected = jvp(slopes(subject.reference), subject.leaves, along)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, v) for x, v in zip(subject.leaves, along, strict=True)]
        for got, tangent in zip(slopes(subject.op)(*duals), expected, strict=True):
            got = forward_ad.unpack_dual(got).tangent
            assert_close(torch.zeros_like(tangent) if got is None else got, tangent, **close)


@every_op
def test_hessian(name: str) -> None:
    """Forward over reverse mode."""
    subject = SUBJECTS[name]
    got = hessian(subject.total(subject.op))(*subject.leaves)
    expected = hessian(subject.total(subject.reference))(*subject.leaves)
    assert_close(got, expected, **close)


@every_op
def test_second_derivative_in_reverse_mode(name: str) -> None:
    subject = SUBJECTS[name]

    def slope(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *leaves: grad(subject.total(function))(*leaves).square().sum()

    if subject.twice:
        got = grad(slope(subject.op))(*subject.leaves)
        assert_close(got, grad(slope(subject.reference))(*subject.leaves), **close)
        return
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        grad(slope(subject.op))(*subject.leaves)
    leaves = [x.clone().requires_grad_() for x in subject.leaves]
    (first, *_) = torch.autograd.grad(subject.total(subject.op)(*leaves), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        first.square().sum().backward()


def loop(function: Callable[..., Any], dims: tuple[int | None, ...], *given: Tensor) -> Any:
    """What vmap does."""
    each = [
        function(*(x if dim is None else x[i] for x, dim in zip(given, dims, strict=True)))
        for i in range(BATCH)
    ]
    if isinstance(each[0], Tensor):
        return torch.stack(each)
    return tuple(torch.stack(parts) for parts in zip(*each, strict=True))


every_batch = pytest.mark.parametrize(
    ("name", "shared"),
    [
        pytest.param(name, shared, id=f"{name}-{'shared' if shared else 'own'}")
        for name, subject in SUBJECTS.items()
        for shared in (True, False)
        if any(row is not None for row in subject.rows) or not shared
    ],
)


@every_batch
def test_vmap(name: str, shared: bool) -> None:
    subject = SUBJECTS[name]
    target, given, dims = subject.given(shared)
    got = vmap(subject.op, in_dims=dims)(target, *given)
    assert_close(got, loop(subject.reference, dims, target, *given), **close)


@every_batch
def test_vmap_of_grad(name: str, shared: bool) -> None:
    """Per-sample gradients of every leaf."""
    subject = SUBJECTS[name]
    target, given, dims = subject.given(shared)

    def slopes(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def of_one(target: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
            total = replace(subject, target=target).total(function)
            got: tuple[Tensor, ...] = grad(total, subject.every)(*leaves)
            return got

        return of_one

    got = vmap(slopes(subject.op), in_dims=dims)(target, *given)
    assert_close(got, loop(slopes(subject.reference), dims, target, *given), **close)


@every_batch
def test_grad_of_vmap(name: str, shared: bool) -> None:
    """In reverse and in forward mode."""
    subject = SUBJECTS[name]
    target, given, dims = subject.given(shared)

    def got(*leaves: Tensor) -> Tensor:
        return vmap(subject.op, in_dims=dims)(target, *leaves).sin().sum()

    def expected(*leaves: Tensor) -> Tensor:
        output: Tensor = loop(subject.reference, dims, target, *leaves)
        return output.sin().sum()

    assert_close(grad(got, subject.every)(*given), grad(expected, subject.every)(*given), **close)
    along = tuple(draw(*x.shape, seed=30) for x in given)
    assert_close(jvp(got, given, along), jvp(expected, given, along), **close)


@every_op
def test_batched_gradients(name: str) -> None:
    """torch.autograd.grad(is_grads_batched=True), a vmap over the backward pass alone."""
    subject = SUBJECTS[name]
    leaves = [x.clone().requires_grad_() for x in subject.leaves]
    output = subject.op(subject.target, *leaves)
    upstream = draw(BATCH, *output.shape, seed=40)
    got = torch.autograd.grad(output, leaves, upstream, is_grads_batched=True)
    plain = subject.reference(subject.target, *leaves)
    each = [torch.autograd.grad(plain, leaves, one, retain_graph=True) for one in upstream]
    assert_close(got, tuple(torch.stack(parts) for parts in zip(*each, strict=True)), **close)


@pytest.mark.parametrize(
    "name", [n for n in SUBJECTS if not n.startswith(("piecewise", "plif", "sigmoid"))]
)
def test_a_batch_of_rows_is_one_call(name: str) -> None:
    """Also where the gradient of what the rows own is asked for."""
    subject = SUBJECTS[name]
    target, given, dims = subject.given(shared=True)
    op = "path_log_prob" if name == "forward" else name.split(",")[0]

    def total(target: Tensor, *leaves: Tensor) -> Tensor:
        return subject.op(target, *leaves).sum()

    with calls() as names:
        vmap(grad(total, 1), in_dims=dims)(target, *given)
    parts = (op, "tree_log_softmax_backward") if op == "leaf_tree_log_softmax" else op
    ours = [called for called in names if called.startswith(parts)]
    assert ours[0] == op
    assert len(ours) in (2, 3)  # the backward op, and the kernel that it calls


def test_leaf_order() -> None:
    batch = PATH.batch(replace(SMALL, rows=9))
    targets = torch.stack([batch.target.roll(i) for i in range(BATCH)])
    expected = torch.stack([leaf_order_reference(t, batch.leaf_position) for t in targets])
    for target, dim in ((targets, 0), (targets.t(), 1)):
        got = vmap(leaf_order, in_dims=(dim, None))(target, batch.leaf_position)
        assert torch.equal(got, expected)
    positions = torch.stack([batch.leaf_position.flip(0), batch.leaf_position])
    got = vmap(leaf_order, in_dims=(None, 0))(batch.target, positions)
    expected = torch.stack([leaf_order_reference(batch.target, p) for p in positions])
    assert torch.equal(got, expected)
    of_none = vmap(leaf_order, in_dims=(0, None))(targets[:, :0], batch.leaf_position)
    assert of_none.shape == (BATCH, SMALL.trees, 0)


@pytest.mark.parametrize("op", [PATH, WIDE], ids=lambda op: op.name)
def test_the_order_of_a_batch_may_be_given(op: TreeOpUnderTest) -> None:
    batch = op.batch(SMALL)
    targets = torch.stack([batch.target.roll(i) for i in range(BATCH)])

    def log_prob(target: Tensor, given: bool) -> Tensor:
        order = leaf_order(target, batch.leaf_position) if given else None
        arguments = (batch.hidden, batch.weight, batch.bias, target, *batch.arguments()[4:])
        return op.operator(*arguments, order)

    for given in (True, False):
        got = vmap(lambda target, given=given: log_prob(target, given))(targets)
        for i, target in enumerate(targets):
            expected = log_prob(target, given)
            assert_close(got[0][i], expected[0])
            assert_close(got[1][i], expected[1])
            if not given:
                assert torch.equal(got[2][i], expected[2])


@pytest.mark.parametrize("op", [PATH, WIDE], ids=lambda op: op.name)
def test_row_sparse_gradients_are_dense_under_a_transform(op: TreeOpUnderTest) -> None:
    batch = op.batch(SMALL)

    def total(weight: Tensor, sparse: bool) -> Tensor:
        return op.log_prob(replace(batch, weight=weight), sparse).sin().sum()

    along = draw(*batch.weight.shape)
    expected = grad(total)(batch.weight, False)
    assert_close(grad(total)(batch.weight, True), expected, **close)
    got = jvp(lambda weight: total(weight, True), (batch.weight,), (along,))[1]
    assert_close(got, (expected * along).sum(), **close)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch.weight.requires_grad_(), along)
        assert_close(forward_ad.unpack_dual(total(dual, True)).tangent, got, **close)


@pytest.mark.parametrize("op", [PATH, WIDE], ids=lambda op: op.name)
def test_a_bad_target_is_an_error_or_nan(op: TreeOpUnderTest) -> None:
    """Of the kernel, which looks at the targets; the formula, which does not, gives NaN."""
    batch = op.batch(replace(SMALL, ignored=0.0))
    batch.target[1] = SMALL.classes
    with pytest.raises(RuntimeError, match="target"):
        vmap(lambda target: op.log_prob(replace(batch, target=target[None])))(batch.target)
    order = torch.arange(ROWS).expand(SMALL.trees, -1)
    log_prob = jvp(
        lambda hidden: op.operator(hidden, *batch.arguments()[1:], order)[0],
        (batch.hidden,),
        (batch.hidden,),
    )
    for part in log_prob:
        assert part[1].isnan().all() or not part[1].any()
        assert part[[0, 2, 3]].isfinite().all()
    assert log_prob[0][1].isnan().all()


def test_what_has_no_formula_says_so() -> None:
    subject = SUBJECTS["piecewise"]
    x, table = subject.leaves
    backward = torch.ops.hstree.piecewise_backward
    message = "hstree::piecewise_backward: has no derivative in forward mode"
    with pytest.raises(NotImplementedError, match=message):
        jvp(lambda upstream: backward(upstream, x, table, 2.0), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        backward(forward_ad.make_dual(x, x), x, table, 2.0)


@pytest.mark.parametrize("name", ["target_log_softmax_backward_", "target_log_softmax_gradient_"])
def test_what_writes_into_its_arguments_says_so(name: str) -> None:
    logits, row = draw(2, 3), draw(2)
    op = getattr(torch.ops.hstree, name)
    rest = (row,) if name == "target_log_softmax_backward_" else ()
    arguments = (row, torch.tensor([0, 1]), *rest, 0.0, 1.0, None, 1.0)
    for transform in (grad, lambda function: vmap(function, in_dims=0)):
        with pytest.raises(NotImplementedError, match=f"hstree::{name}: writes into"):
            transform(lambda x: op(x, *arguments)[0].sum())(logits)


def test_sparse_adam_is_not_transformed() -> None:
    weight, index, values = draw(3, 2), torch.tensor([[1]]), draw(1, 2)
    moments = torch.zeros_like(weight), torch.zeros_like(weight)
    rule = {"step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    with pytest.raises(NotImplementedError, match="hstree::sparse_adam_: writes into"):
        vmap(lambda weight: sparse_adam_(weight, *moments, index, values, **rule))(weight[None])


def topk_arguments() -> tuple[Any, ...]:
    node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
    edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
    leaf_edge = torch.tensor([[2, 3, 1]], dtype=torch.int32)
    return (*[None] * 6, torch.zeros(ROWS, 1).double(), None, node, edge, leaf_edge, 2)


def test_tree_topk() -> None:
    hidden, weight = draw(BATCH, ROWS, 2), draw(1, 2, 2, seed=1)
    got = vmap(lambda x: tree_topk(x, weight, *topk_arguments()))(hidden)
    for i, x in enumerate(hidden):
        values, classes = tree_topk(x, weight, *topk_arguments())
        assert torch.equal(got[0][i], values)
        assert torch.equal(got[1][i], classes)
    with pytest.raises(NotImplementedError, match="hstree::tree_topk"):
        jvp(lambda x: tree_topk(x, weight, *topk_arguments())[0], (hidden[0],), (hidden[0],))
    with pytest.raises(RuntimeError, match="hstree::tree_topk: not differentiable"):
        grad(lambda x: tree_topk(x, weight, *topk_arguments())[0].sum())(hidden[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize(
    "name",
    ["path_log_prob", "mixture_log_prob, mean", "tree_log_softmax", "leaf_tree_log_softmax"],
)
def test_compile(name: str) -> None:
    """Per-sample gradients in one graph."""
    torch._dynamo.reset()
    subject = SUBJECTS[name]

    def total(target: Tensor, *leaves: Tensor) -> Tensor:
        return subject.op(target, *leaves).sum()

    target, given, dims = subject.given(shared=True)
    slopes = vmap(grad(total, tuple(i + 1 for i in subject.every)), in_dims=dims)
    compiled = torch.compile(slopes, fullgraph=True, backend="aot_eager")
    assert_close(compiled(target, *given), slopes(target, *given), **close)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize("name", ["path_log_prob", "target_log_softmax", "piecewise"])
def test_compile_forward_mode(name: str) -> None:
    """In one graph. The compiler enters no dual level when it calls the op."""
    torch._dynamo.reset()
    subject = SUBJECTS[name]

    def along(*vectors: Tensor) -> tuple[Tensor, Tensor]:
        return jvp(subject.of_leaves(subject.op), subject.leaves, vectors)  # type: ignore[no-any-return]

    compiled = torch.compile(along, fullgraph=True, backend="aot_eager")
    got = compiled(*tangents(subject))
    assert_close(got, along(*tangents(subject)), **close)


@pytest.mark.parametrize("op", [path_log_prob, wide_log_prob, leaf_log_prob])
@pytest.mark.parametrize("rows", [0, 1], ids=["no vectors", "a vector"])
def test_no_node_of_a_kind(op: Callable[..., Tensor], rows: int) -> None:
    """An empty table, as of trees over one class: 0 in every mode, with derivatives of 0."""
    hidden, along = torch.randn(2, 3), torch.randn(2, 3)
    shared = op is leaf_log_prob
    weight = torch.randn(1, 3) if shared else torch.randn(1, rows, 3)
    columns = () if op is path_log_prob else (3,)
    longest = {"max_depth" if op is path_log_prob else "max_width": 2}
    tables = (
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(0, *columns, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32) if shared else None,
    )
    target = torch.tensor([0, -1])

    def log_prob(hidden: Tensor, weight: Tensor) -> Tensor:
        return op(hidden, weight, None, target, *tables, **longest)

    zeros = torch.zeros(2, 1)
    assert_close(log_prob(hidden, weight), zeros)
    value, tangent = jvp(log_prob, (hidden, weight), (along, torch.ones_like(weight)))
    assert_close((value, tangent), (zeros, zeros))
    assert_close(vmap(log_prob, (0, None))(hidden[None], weight), zeros[None])
    of_batch = vmap(lambda x: jvp(lambda x: log_prob(x, weight), (x,), (along,))[1])
    assert_close(of_batch(hidden[None]), zeros[None])
    if weight.numel():
        assert_close(jacfwd(log_prob, 1)(hidden, weight), torch.zeros(2, 1, *weight.shape))
    assert_close(jacfwd(grad(lambda x: log_prob(x, weight).sum()))(hidden), torch.zeros(2, 3, 2, 3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden, along)
        assert_close(forward_ad.unpack_dual(log_prob(dual, weight)).primal, zeros)
