"""Every operator with gradients: by autograd and by torch.func against its reference in float64, of
one leaf alone, compiled, and as torch.library.opcheck wants it; second derivatives, torch.func.vmap
and forward mode are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from reference.feature_gather import feature_gather_reference
from reference.forest_log_prob import forest_log_prob_reference
from reference.mixture_log_prob import mixture_log_prob_reference
from reference.piecewise import piecewise_reference
from reference.target_log_softmax import target_log_softmax_reference
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.testing import assert_close

from hstree.ops import (
    LogitFunction,
    feature_gather,
    forest_log_prob,
    mixture_log_prob,
    path_log_prob,
    piecewise,
    plif_table,
    target_log_softmax,
)
from ops import group_cases, tree_softmax_cases
from ops.cases import PATH, Case
from ops.limited import Recorder

# In torch's own code, the first time that forward mode is at work.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ROWS = 4
SMALL = Case("small", rows=ROWS, trees=2, classes=7, in_features=5, subset=3, ignored=0.3)


@dataclass
class Subject:
    """An op as a function of a target [N] and of leaves in float64.

    Attributes:
        op: (target, *leaves) -> output, differentiable in the leaves.
        reference: the same in plain torch; a target of constants.
        twice: whether it can be differentiated twice in reverse mode.
    """

    op: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    target: Tensor
    leaves: tuple[Tensor, ...]
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
            weight = torch.linspace(-1, 2, output.numel(), device=output.device)
            return (output * weight.view_as(output)).sum()

        return scalar

    def required(self, *wanted: int) -> list[Tensor]:
        """Copies of the leaves, of which these require gradients."""
        return [x.clone().requires_grad_(i in wanted) for i, x in enumerate(self.leaves)]


DEVICE = torch.device("cpu")


def draw(*size: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=random, dtype=torch.float64).to(DEVICE)


def classes() -> Tensor:
    return torch.tensor([2, -1, 0, 5], device=DEVICE)


def on_paths(case: Case = SMALL, whole: bool = False) -> Subject:
    batch = PATH.batch(case).to(DEVICE)

    def call(target: Tensor, *leaves: Tensor) -> Tensor:
        names = ("hidden", "weight", "bias")
        given = replace(batch, target=target, **dict(zip(names, leaves, strict=False)))
        return torch.ops.hstree.forward(*given.arguments())[0] if whole else PATH.log_prob(given)

    def plain(target: Tensor, *leaves: Tensor) -> Tensor:
        hidden, weight, bias = (*leaves, None)[:3]
        return PATH.reference(hidden, weight, bias, target, *batch.arguments()[4:])[0]

    leaves = tuple(x for x in (batch.hidden, batch.weight, batch.bias) if x is not None)
    return Subject(call, plain, batch.target, leaves)


def in_groups(bias: bool = True) -> Subject:
    case = group_cases.Case("small", ROWS, 2, 7, 3, features=5, bias=bias, ignored=0.3)
    batch = group_cases.draw(case).to(DEVICE)

    def given(target: Tensor, leaves: tuple[Tensor, ...]) -> group_cases.Batch:
        names = ("hidden", "weight", "bias")
        return replace(batch, target=target, **dict(zip(names, leaves, strict=False)))

    leaves = tuple(x for x in (batch.hidden, batch.weight, batch.bias) if x is not None)
    return Subject(
        lambda target, *leaves: group_cases.log_prob_of(given(target, leaves)),
        lambda target, *leaves: group_cases.reference(given(target, leaves)),
        batch.target,
        leaves,
    )


def of_logits(table: Tensor | None = None, **function: float) -> Subject:
    given = () if table is None else (table,)

    def call(target: Tensor, logits: Tensor, *table: Tensor) -> Tensor:
        return target_log_softmax(logits, target, table=(*table, None)[0], **function)

    def plain(target: Tensor, logits: Tensor, *table: Tensor) -> Tensor:
        return target_log_softmax_reference(logits, target, table=(*table, None)[0], **function)

    return Subject(call, plain, classes(), (3 * draw(ROWS, 6), *given))


def of_mixture(
    output: str,
    table: Tensor | None = None,
    components: int = 3,
    row_weight: Tensor | None = None,
) -> Subject:
    """``output``: log_prob, mean or sum."""
    leaves = [draw(ROWS, components, 3), draw(6, 3, seed=2), draw(6, seed=3)]
    if components > 1:
        leaves.append(draw(ROWS, components, seed=1).log_softmax(1))
    if table is not None:
        leaves.append(table)

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
        factor = torch.ones_like(log_prob) if row_weight is None else row_weight
        factor = factor.masked_fill(target == -1, 0)
        count = factor.sum() if output == "mean" else 1
        return (-(factor * log_prob).sum() / count).expand(1)

    return Subject(call, plain, classes(), tuple(leaves))


def of_forest(offset: Tensor | None = None) -> Subject:
    """Clusters [V, T] and offsets [V] are no leaves: they have no gradient."""
    cluster = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0], [1, 0], [2, 1]], device=DEVICE).int()

    def call(target: Tensor, *leaves: Tensor) -> Tensor:
        return forest_log_prob(*leaves, cluster, target, offset=offset, chunk_rows=3)[1].expand(1)

    def plain(target: Tensor, *leaves: Tensor) -> Tensor:
        log_prob = forest_log_prob_reference(*leaves, cluster, target, offset)
        return (-log_prob.sum() / (target != -1).sum()).expand(1)

    leaves = (draw(ROWS, 3), draw(ROWS, 2), draw(ROWS, 2, 3), draw(6, 3), draw(6, seed=1))
    return Subject(call, plain, classes(), leaves)


def of_all_classes(*shapes: str, root: int = 0, groups: bool = False) -> Subject:
    case = tree_softmax_cases.Case("small", shapes, 7, root, rows=ROWS)
    batch = tree_softmax_cases.draw(case, groups=groups).to(DEVICE)

    def call(_: Tensor, *leaves: Tensor) -> Tensor:
        return tree_softmax_cases.mixed(batch.with_leaves(leaves))

    def plain(_: Tensor, *leaves: Tensor) -> Tensor:
        return tree_softmax_cases.reference(batch.with_leaves(leaves))

    return Subject(call, plain, torch.zeros(ROWS, device=DEVICE), batch.leaves)


def subjects() -> dict[str, Subject]:
    index = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32, device=DEVICE)
    slopes = draw(5, seed=4).exp()
    linear = LogitFunction.plif(slopes, 2.0).table
    assert linear is not None
    cubic = torch.cat([linear, 0.1 * draw(5, 2, seed=6)], 1)
    nothing = torch.zeros(ROWS, device=DEVICE)
    return {
        "path_log_prob": on_paths(),
        "path_log_prob, all features, no bias": on_paths(replace(SMALL, subset=None, bias=False)),
        "forward": on_paths(whole=True),
        "group_log_prob": in_groups(),
        "group_log_prob, no bias": in_groups(bias=False),
        "feature_gather": Subject(
            lambda _, hidden: feature_gather(hidden, index).square(),
            lambda _, hidden: feature_gather_reference(hidden, index).square(),
            nothing,
            (draw(ROWS, 3),),
        ),
        "target_log_softmax": of_logits(),
        "target_log_softmax, gss": of_logits(c=-0.5, k=2.5),
        "target_log_softmax, table": of_logits(linear, radius=2.0),
        "mixture_log_prob": of_mixture("log_prob"),
        "mixture_log_prob, mean": of_mixture("mean"),
        "mixture_log_prob, sum, table": of_mixture("sum", linear),
        "mixture_log_prob, one component": of_mixture("mean", components=1),
        "mixture_log_prob, row_weight": of_mixture(
            "mean", row_weight=torch.linspace(0.5, 2, ROWS, dtype=torch.float64, device=DEVICE)
        ),
        "forest_log_prob, mean": of_forest(),
        "forest_log_prob, offset": of_forest(draw(6, seed=2)),
        "piecewise": Subject(
            lambda _, x, table: piecewise(x, table, 2.0),
            lambda _, x, table: piecewise_reference(x, table, 2.0),
            nothing,
            (2 * draw(ROWS, 3), linear),
        ),
        "piecewise, cubic": Subject(
            lambda _, x, table: piecewise(x, table, 2.0),
            lambda _, x, table: piecewise_reference(x, table, 2.0),
            nothing,
            (2 * draw(ROWS, 3), cubic),
        ),
        "plif_table": Subject(
            lambda _, slopes: plif_table(slopes, 2.0),
            lambda _, slopes: 0.8 * torch.stack([slopes.cumsum(0) - slopes, slopes], 1),
            nothing,
            (slopes,),
            twice=True,
        ),
        "tree_log_softmax": of_all_classes("chain", "random"),
        "tree_log_softmax, wide roots": of_all_classes("random", "flat", root=3),
        "tree_log_softmax, groups": of_all_classes("levels", "levels", groups=True),
    }


every_op = pytest.mark.parametrize("name", subjects())


# plif_table is made of torch's operators; what target_log_softmax keeps of an ignored row is not
# initialized, so that test_target_log_softmax.py has its own test.
OF_HSTREE = [n for n in subjects() if not n.startswith(("plif_table", "target_log_softmax"))]


@pytest.fixture
def subject(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setitem(globals(), "DEVICE", device)
    return subjects()[name]


close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
COMPILED = (
    "path_log_prob",
    "group_log_prob",
    "target_log_softmax, table",
    "mixture_log_prob, mean",
    "forest_log_prob, mean",
    "piecewise",
    "plif_table",
    "tree_log_softmax",
)


@every_op
def test_grad(name: str, subject: Subject) -> None:
    """Of the loss by all leaves, by torch.func and by autograd."""
    expected = grad(subject.total(subject.reference), subject.every)(*subject.leaves)
    if name != "forward":  # the name of an op: torch.func is not for these
        got = grad(subject.total(subject.op), subject.every)(*subject.leaves)
        assert_close(got, expected, **close)
    leaves = subject.required(*subject.every)
    got = torch.autograd.grad(subject.total(subject.op)(*leaves), leaves)
    assert_close(got, expected, **close)
    assert all(x.any() for x in got)


@every_op
def test_gradcheck(subject: Subject) -> None:
    leaves = subject.required(*subject.every)
    assert torch.autograd.gradcheck(subject.of_leaves(subject.op), leaves, fast_mode=True)


@every_op
def test_each_leaf_alone(subject: Subject) -> None:
    """What is frozen gets no gradient and changes no other; without gradients nothing is kept."""
    total, leaves = subject.total(subject.op), subject.required(*subject.every)
    expected = torch.autograd.grad(total(*leaves), leaves)
    for i, gradient in enumerate(expected):
        leaves = subject.required(i)
        total(*leaves).backward()
        assert_close(leaves[i].grad, gradient, **close)
        assert [x.grad is None for x in leaves] == [k != i for k in subject.every]
    with torch.no_grad():
        assert not total(*leaves).requires_grad
    with torch.inference_mode():
        assert torch.equal(total(*leaves), total(*subject.leaves))


@every_op
def test_expanded_gradient(subject: Subject) -> None:
    """output.sum().backward() hands down one number with strides 0."""
    leaves = subject.required(*subject.every)
    got = torch.autograd.grad(subject.op(subject.target, *leaves).sum(), leaves)
    output = subject.op(subject.target, *leaves)
    assert_close(got, torch.autograd.grad(output, leaves, torch.ones_like(output)), **close)


@pytest.mark.parametrize("name", OF_HSTREE)
def test_opcheck(subject: Subject) -> None:
    """Each call of a step: schema, fake tensors, registration and dynamic shapes."""
    leaves = subject.required(*subject.every)
    with Recorder() as recorder:
        subject.total(subject.op)(*leaves).backward()
    for number, (name, args) in enumerate(recorder.arguments.items()):
        if number == 0:  # the forward pass
            for x in args:
                if isinstance(x, Tensor) and any(torch.equal(x, leaf) for leaf in leaves):
                    x.requires_grad_()
        op = getattr(torch.ops.hstree, name.removesuffix(".default"))
        torch.library.opcheck(op.default, tuple(args))
    assert recorder.arguments


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize("name", COMPILED)
def test_compile(subject: Subject) -> None:
    """Forward and backward in one graph with dynamic shapes."""
    torch._dynamo.reset()
    total, leaves = subject.total(subject.op), subject.required(*subject.every)
    compiled = torch.compile(
        lambda *leaves: total(*(2 * x for x in leaves)),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    got = torch.autograd.grad(compiled(*leaves), leaves)
    expected = torch.autograd.grad(total(*(2 * x for x in leaves)), leaves)
    assert_close(got, expected, **close)


@every_op
def test_second_derivative(name: str, subject: Subject) -> None:
    """An error, also where the upstream gradient has no graph; right where the op is linear."""

    def slope(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *leaves: grad(subject.total(function))(*leaves).square().sum()

    if subject.twice:
        got = grad(slope(subject.op))(*subject.leaves)
        assert_close(got, grad(slope(subject.reference))(*subject.leaves), **close)
        return
    message = "expected to be differentiated once, got a second derivative"
    if name != "forward":
        with pytest.raises(RuntimeError, match=message):
            grad(slope(subject.op))(*subject.leaves)
    leaves = subject.required(*subject.every)
    (first, *_) = torch.autograd.grad(subject.total(subject.op)(*leaves), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        first.square().sum().backward()


@every_op
def test_other_transforms_are_refused(name: str, subject: Subject) -> None:
    """No number without its derivative, and none of another element of a batch."""
    function = subject.of_leaves(subject.op)
    if name != "forward":
        with pytest.raises(NotImplementedError, match="must implement the jvp function"):
            jvp(function, subject.leaves, subject.leaves)
        with pytest.raises(RuntimeError, match="does not have vmap support"):
            vmap(function)(*(x.expand(2, *x.shape) for x in subject.leaves))


def test_row_sparse_gradients_are_dense_under_a_transform() -> None:
    paths = PATH.batch(SMALL)
    groups = group_cases.draw(group_cases.CASES[0])

    def of_paths(weight: Tensor, sparse: bool) -> Tensor:
        return PATH.log_prob(replace(paths, weight=weight), sparse).sin().sum()

    def of_groups(weight: Tensor, sparse: bool) -> Tensor:
        return group_cases.log_prob_of(replace(groups, weight=weight), sparse).sin().sum()

    for total, weight in ((of_paths, paths.weight), (of_groups, groups.weight)):
        assert_close(grad(total)(weight, True), grad(total)(weight, False), **close)


@pytest.mark.parametrize("nodes", [0, 1], ids=["no vectors", "a vector"])
def test_paths_of_no_nodes(nodes: int) -> None:
    """An empty table, as of trees over one class: 0, with gradients of 0."""
    hidden, weight = torch.randn(2, 3), torch.randn(1, nodes, 3)
    offset = torch.zeros(1, 2, dtype=torch.int64)
    path, position = torch.zeros(0, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)

    def log_prob(hidden: Tensor, weight: Tensor) -> Tensor:
        target = torch.tensor([0, -1])
        return path_log_prob(hidden, weight, None, target, offset, path, position, max_depth=2)

    assert_close(log_prob(hidden, weight), torch.zeros(2, 1))
    gradients = grad(lambda *leaves: log_prob(*leaves).sum(), (0, 1))(hidden, weight)
    assert not any(x.any() for x in gradients)
