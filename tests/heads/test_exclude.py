"""Classes that a query leaves out: every query equals the masked and renormalized distribution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.support import HEADS, SOME, D, V, draw, make
from hstree import ScreenedSoftmax, TreeEnsemble
from hstree.heads import Head


def screened() -> Head:
    linear = torch.nn.Linear(D, V)
    return ScreenedSoftmax.from_linear(linear, rank=D, bits=8, exact=6).eval()


def searched() -> TreeEnsemble:
    """Trees whose best classes are searched for."""
    head = TreeEnsemble.from_counts(
        D, range(5000, 0, -1), n_trees=2, clusters=2, binary=True
    ).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * draw(*parameter.shape))
    return head


MAKE: dict[str, Callable[[], Head]] = {kind: lambda kind=kind: make(kind).eval() for kind in HEADS}
MAKE |= {"screened": screened, "trees, searched": searched}
every_head = pytest.mark.parametrize("kind", MAKE)
some_heads = pytest.mark.parametrize("kind", [*SOME, "forest", "screened", "trees, searched"])


def renormalized(log_prob: Tensor, exclude: Tensor) -> Tensor:
    """Row by row in float64; -1 is nothing."""
    rows = log_prob.detach().double().view(-1, log_prob.shape[-1]).clone()
    for n, row in enumerate(rows):
        given = exclude if exclude.dim() == 1 else exclude.reshape(len(rows), -1)[n]
        for c in given.tolist():
            if c >= 0:
                row[c] = -torch.inf
        row -= row.logsumexp(0)
    return rows.view(log_prob.shape)


def excludes(n_classes: int) -> dict[str, Tensor]:
    """For hidden [2, 3, D]."""
    random = torch.Generator().manual_seed(2)
    of_rows = torch.randint(n_classes, (2, 3, 7), generator=random)
    of_rows[0, 1, 2:] = -1
    of_rows[1, 0] = -1
    of_rows[1, 2] = of_rows[1, 2, 0]  # the same one seven times
    return {
        "all rows": torch.tensor([5, 0, 11, 5]),
        "one": torch.tensor([n_classes - 1]),
        "padding alone": torch.full((2, 3, 2), -1),
        "none": torch.empty(2, 3, 0, dtype=torch.int64),
        "each row": of_rows,
    }


@every_head
@pytest.mark.parametrize("of", excludes(V))
def test_log_prob_and_topk(kind: str, of: str) -> None:
    head, hidden = MAKE[kind](), draw(2, 3, D)
    exclude = excludes(head.n_classes)[of]
    expected = renormalized(head.log_prob(hidden), exclude)
    got = head.log_prob(hidden, exclude=exclude)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
    if kind == "screened" and exclude.shape[-1] > 2:
        return  # more than 6 classes are then scored exactly
    best = head.predict(hidden, exclude=exclude)[..., None]
    for k in (1, 4):
        with torch.no_grad():
            values, classes = head.topk(hidden, k, exclude=exclude)
        wanted = expected.topk(k).values
        torch.testing.assert_close(values.double(), wanted, rtol=0, atol=2e-5)
        torch.testing.assert_close(expected.gather(-1, classes), wanted, rtol=0, atol=2e-5)
        assert (classes.sort(-1).values.diff(dim=-1) > 0).all()
        torch.testing.assert_close(expected.gather(-1, best), wanted[..., :1], rtol=0, atol=2e-5)


@every_head
def test_almost_all_of_the_probability(kind: str) -> None:
    """What is left is far smaller than the rounding error of 1 minus the rest."""
    head = MAKE[kind]()
    hidden = 3 * draw(5, D)
    with torch.no_grad():
        exclude = head.log_prob(hidden).topk(head.n_classes - 3).indices
        exact = copy.deepcopy(head).double() if kind != "screened" else head
        expected = renormalized(exact.log_prob(hidden.double()), exclude)
        for got in (
            head.log_prob(hidden, exclude=exclude),
            exact.log_prob(hidden, exclude=exclude),
        ):
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-3)
        values, classes = head.topk(hidden, 3, exclude=exclude)
        assert torch.equal(classes.sort(1).values, expected.isfinite().nonzero()[:, 1].view(5, 3))
        if kind != "screened":
            torch.testing.assert_close(
                values.double(), expected.gather(1, classes), rtol=0, atol=1e-3
            )
        torch.testing.assert_close(values.exp().sum(1), torch.ones(5), rtol=0, atol=1e-5)


@every_head
@pytest.mark.parametrize(("n", "temperature"), [(None, 1.0), (3, 1.0), (2, 0.5)])
def test_draws(kind: str, n: int | None, temperature: float) -> None:
    """Frequencies and log-probabilities, with classes excluded that have little and most of the
    probability."""
    head, rows = MAKE[kind](), 500 if kind == "trees, searched" else 6000
    hidden = draw(1, D).expand(rows, -1)
    every = torch.arange(head.n_classes)[None]
    log_prob = head.candidate_log_prob(hidden[:1], every, temperature=temperature, ignore_index=-1)
    for size in (3, head.n_classes - 4):
        exclude = log_prob[0].topk(size).indices
        expected = renormalized(log_prob, exclude)[0]
        generator = torch.Generator().manual_seed(size)
        drawn, of_drawn = head.sample(
            hidden, n, temperature=temperature, generator=generator, exclude=exclude,
            return_log_prob=True,
        )  # fmt: skip
        assert drawn.shape == ((rows,) if n is None else (rows, n))
        torch.testing.assert_close(of_drawn.double(), expected[drawn], rtol=0, atol=1e-3)
        share = torch.bincount(drawn.flatten(), minlength=head.n_classes) / drawn.numel()
        prob = expected.exp()
        assert (share[exclude] == 0).all()
        error = 5 * (prob * (1 - prob) / drawn.numel()).sqrt() + 2 / drawn.numel()
        assert ((share - prob).abs() <= error).all()


@some_heads
def test_draws_of_different_rows(kind: str) -> None:
    head, hidden = MAKE[kind](), draw(2, 3, D)
    exclude = excludes(head.n_classes)["each row"]
    drawn, log_prob = head.sample(hidden, 50, exclude=exclude, return_log_prob=True)
    assert drawn.shape == (2, 3, 50)
    assert not (drawn[..., None] == exclude[..., None, :]).any()
    expected = renormalized(head.log_prob(hidden), exclude).gather(-1, drawn)
    torch.testing.assert_close(log_prob.double(), expected, rtol=0, atol=2e-5)
    assert head.sample(hidden[0, 0], exclude=exclude[0, 0]).shape == ()
    assert head.sample(hidden[:0], 2, exclude=exclude[:0]).shape == (0, 3, 2)
    assert head.topk(hidden[:0], 2, exclude=exclude[:0])[1].shape == (0, 3, 2)
    assert head.log_prob(hidden[:0], exclude=torch.tensor([1])).shape == (0, 3, head.n_classes)


@pytest.mark.parametrize("kind", [*SOME, "forest", "trees, searched"])
def test_gradients(kind: str) -> None:
    """Of log_prob and of the values of topk, those of a masked log_softmax."""
    head = MAKE[kind]().double()
    hidden = draw(4, D).double()
    exclude = torch.tensor([[3, -1], [7, 8], [-1, -1], [0, 1]])
    exclude = torch.cat([exclude, head.log_prob(hidden).topk(2).indices], 1)
    mask = torch.zeros(4, head.n_classes, dtype=torch.bool)
    for n, row in enumerate(exclude.tolist()):
        mask[n, [c for c in row if c >= 0]] = True

    def plain(hidden: Tensor) -> Tensor:
        return head.log_prob(hidden).masked_fill(mask, -torch.inf).log_softmax(1)

    weight = draw(4, 5).double()
    classes = plain(hidden).topk(5).indices
    routes = [
        lambda x: plain(x).gather(1, classes),
        lambda x: head.log_prob(x, exclude=exclude).gather(1, classes),
        lambda x: head.topk(x, 5, exclude=exclude)[0],
    ]
    grads = []
    for route in routes:
        x = hidden.clone().requires_grad_()
        inputs = [x, *(p for p in head.parameters() if p.requires_grad)]
        got = torch.autograd.grad((route(x) * weight).sum(), inputs, allow_unused=True)
        grads.append([torch.zeros(1) if grad is None else grad for grad in got])
    for others in grads[1:]:
        torch.testing.assert_close(others, grads[0], rtol=1e-8, atol=1e-10)


def test_trees_score_no_more_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search and draws again, not all classes, where few classes are excluded."""
    head, hidden = searched(), draw(2, D)
    log_prob = head.log_prob(hidden)
    exclude = torch.stack([log_prob.topk(40).indices[:, 20], log_prob.topk(40).indices[:, 30]], 1)
    expected = renormalized(log_prob, exclude)

    def refused(*arguments: Any) -> Any:
        raise AssertionError("all classes are scored")

    monkeypatch.setattr(head, "_of_all", refused)
    with torch.no_grad():
        values, _ = head.topk(hidden, 3, exclude=exclude)
        drawn = head.sample(hidden, 20, exclude=exclude)
    torch.testing.assert_close(values.double(), expected.topk(3).values, rtol=0, atol=2e-5)
    assert not (drawn[..., None] == exclude[:, None, :]).any()


@pytest.mark.parametrize("kind", ["mos", "forest"])
def test_mixtures_draw_from_one_component(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = make(kind).eval(), draw(8, D)
    rare = head.log_prob(hidden).mean(0).argmin()[None]

    def refused(*arguments: Any) -> Any:
        raise AssertionError("all components are scored")

    monkeypatch.setattr(head, "class_log_prob", refused)
    assert (head.sample(hidden, exclude=rare) != rare).all()


def test_a_screen_scores_as_many_more_exactly() -> None:
    """So that the best of the others are found by their exact scores."""
    linear, hidden = torch.nn.Linear(D, V), draw(9, D)
    head = ScreenedSoftmax.from_linear(linear, rank=D, bits=4, exact=2).eval()
    exact = linear(hidden).log_softmax(1)
    exclude = exact.topk(V - 5).indices
    values, classes = head.topk(hidden, 5, exclude=exclude)  # all classes are scored exactly
    expected = renormalized(exact, exclude)
    assert torch.equal(classes, expected.topk(5).indices)
    torch.testing.assert_close(values.double(), expected.topk(5).values, rtol=0, atol=1e-5)


@some_heads
def test_bad_arguments(kind: str) -> None:
    head, hidden = MAKE[kind](), draw(2, D)
    size = head.n_classes
    everything = torch.arange(size)
    for use in (head.log_prob, head.predict, head.sample, partial(head.topk, k=2)):
        for bad, match in [
            *(
                (torch.zeros(size, dtype=dtype), rf"exclude: expected .* torch.int64, got {dtype}")
                for dtype in (torch.float32, torch.bool, torch.int32, torch.uint8)
            ),
            (torch.tensor(3), r"exclude: expected shape \[K\] or \[2, K\], got \[\]"),
            (torch.zeros(3, 4, dtype=torch.int64), r"or \[2, K\], got \[3, 4\]"),
            (torch.zeros(1, 2, 4, dtype=torch.int64), r"or \[2, K\], got \[1, 2, 4\]"),
            (torch.tensor([0, size]), rf"exclude: .* \[0, {size}\) or -1, got {size}"),
            (torch.tensor([0, -2]), rf"exclude: .* \[0, {size}\) or -1, got -2"),
            (everything, rf"exclude: expected at least \d of the {size} classes .*, got 0"),
            (everything.repeat(2, 2), rf"exclude: expected at least \d of the {size} .*, got 0"),
        ]:
            with pytest.raises(ValueError, match=match):
                use(hidden, exclude=bad)
        with pytest.raises(TypeError, match="exclude: expected a tensor, got list"):
            use(hidden, exclude=[0, 1])
    with pytest.raises(ValueError, match=rf"at least 4 of the {size} classes to be left .*, got 3"):
        head.topk(hidden, 4, exclude=everything[3:])
    with pytest.raises(ValueError, match=r"exclude: expected shape \[K\], got \[1, 2\]"):
        head.log_prob(hidden[0], exclude=torch.tensor([[1, 2]]))
    assert (
        head.topk(hidden, 3, exclude=everything[3:])[1].sort(1).values.tolist() == [[0, 1, 2]] * 2
    )


def test_other_layouts_of_the_classes() -> None:
    head, hidden = make("softmax"), draw(4, D)
    exclude = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = head.log_prob(hidden, exclude=exclude.t().contiguous())
    assert torch.equal(head.log_prob(hidden, exclude=exclude.t()), expected)


@pytest.mark.parametrize(
    "kind", ["softmax", pytest.param("trees, searched", marks=pytest.mark.slow)]
)
def test_compiled_exported_and_mapped(kind: str) -> None:
    torch._dynamo.reset()
    head, hidden, exclude = (
        MAKE[kind](),
        draw(4, D),
        torch.tensor([[1, 2], [3, -1], [0, 0], [9, 4]]),
    )

    def use(hidden: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
        return head.log_prob(hidden, exclude=exclude), head.topk(hidden, 3, exclude=exclude)[0]

    with torch.no_grad():
        expected = use(hidden, exclude)
        compiled = torch.compile(use, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (4, 3):
            got = compiled(hidden[:rows], exclude[:rows])
            torch.testing.assert_close(got, tuple(part[:rows] for part in expected))

    class Query(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
            return use(hidden, exclude)

    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Query(), (hidden, exclude), dynamic_shapes=({0: rows}, {0: rows}))
    torch.testing.assert_close(
        program.module()(hidden[:3], exclude[:3]), tuple(p[:3] for p in expected)
    )


@pytest.mark.parametrize("kind", [*SOME, "forest", "mos"])
def test_meta_device(kind: str) -> None:
    """Where values are not read."""
    head, hidden, exclude = make(kind).to("meta"), draw(4, D).to("meta"), torch.tensor([1, V - 1])
    exclude = exclude.to("meta")
    assert head.log_prob(hidden, exclude=exclude).shape == (4, V)
    assert head.topk(hidden, 3, exclude=exclude)[1].shape == (4, 3)
    drawn, log_prob = head.sample(hidden, exclude=exclude, return_log_prob=True)
    assert drawn.shape == log_prob.shape == (4,)


def test_the_same_draws_without_excluded_classes() -> None:
    head, hidden = searched(), draw(4, D)
    first, second = (
        head.sample(hidden, 3, generator=torch.Generator().manual_seed(1), exclude=exclude)
        for exclude in (None, torch.full((4, 2), -1))
    )
    assert torch.equal(first, second)
