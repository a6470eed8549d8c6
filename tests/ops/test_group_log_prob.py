"""torch.ops.hstree.group_log_prob and its gradients."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops import group_log_prob
from ops.apart import (
    CAPABILITIES,
    apart,
    best_capability,
    corrupt,
    every_instruction_set,
    outcomes,
    with_instruction_set,
)
from ops.cases import (
    BACKEND,
    DTYPES,
    broken,
    measures_memory,
    name_of,
    replayed_alike,
    same_bits,
    strided,
    threads,
    with_dtypes,
)
from ops.group_cases import (
    BACKWARD,
    BLOCKS,
    CASES,
    FORWARD,
    TILES,
    Batch,
    Case,
    backward,
    check,
    draw,
    gradients,
    log_prob_of,
    tables_of,
)

USUAL = CASES[0]
SMALL = Case("small", rows=5, trees=2, classes=6, clusters=3, features=4)
WITHOUT_BIAS = Case("small, no bias", rows=4, trees=1, classes=5, clusters=2, features=3,
                    bias=False)  # fmt: skip
MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]
MANY = Case("rows and features for two threads", rows=300, trees=2, classes=50, features=219)
PANELS = Case("panels of classes", rows=40, trees=2, classes=2100, clusters=2)
# Scores above 1 MiB lie in pages of their own.
LARGE = Case("many scores", rows=300, trees=2, classes=700, clusters=1, features=20)


def saved_of(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(FORWARD(*batch.arguments())[1:])


@pytest.mark.parametrize(
    ("case", "dtype"), with_dtypes(CASES) + with_dtypes(TILES, pytest.mark.slow), ids=name_of
)
def test_equals_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check(draw(case, dtype), device)


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(BLOCKS), ids=name_of)
def test_blocks_equal_reference(case: Case, dtype: torch.dtype) -> None:
    check(draw(case, dtype), torch.device("cpu"))


def test_literal_values(device: torch.device) -> None:
    """The groups (0, 1), (2, 3, 4) and 0, (1, 2), 3, 4."""
    weight = torch.tensor([[1.0], [3.0], [1.0], [2.0], [5.0]], device=device).log()
    cluster = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 3]], dtype=torch.int32)
    order, begin, width = tables_of(cluster, 4)
    log_prob = group_log_prob(
        torch.ones(6, 1, device=device),
        weight,
        torch.tensor([[0.0] * 5, [0.0, 0.0, 6.0, 0.0, 0.0]], device=device).log1p(),
        torch.tensor([0, 1, 2, 3, -1, 4], device=device),
        *(table.to(device) for table in (cluster, order, begin)),
        max_width=width,
    )
    first = [1 / 4, 3 / 4, 1 / 8, 2 / 8, 1.0, 5 / 8]
    second = [1.0, 3 / 10, 7 / 10, 1.0, 1.0, 1.0]
    torch.testing.assert_close(log_prob.exp().t().tolist(), [first, second])


def test_one_group_is_cross_entropy(device: torch.device) -> None:
    """Values and gradients of F.cross_entropy(F.linear(...)), once for each tree."""
    case = Case("one group", rows=60, trees=2, classes=40, clusters=1, ignored=0.1)
    batch = draw(case).to(device)
    log_prob, *grads = gradients(batch)
    given = (batch.hidden, batch.weight, batch.bias)
    hidden, weight, bias = leaves = [x.clone().requires_grad_() for x in given]
    target = batch.target.masked_fill(batch.target < 0, -100)
    losses = [F.cross_entropy(F.linear(hidden, weight, b), target, reduction="none") for b in bias]
    loss = torch.stack(losses, 1)
    loss.backward(-batch.grad)
    torch.testing.assert_close(log_prob, -loss.detach())
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """What float32 gives for the same values, to nearest: no sum in the low precision."""
    batch = draw(MANY, dtype)
    log_prob, *grads = gradients(batch)
    expected_log_prob, *expected = gradients(batch.map(Tensor.float))
    torch.testing.assert_close(log_prob, expected_log_prob, rtol=1e-5, atol=1e-4)
    rtol = 0.505 * torch.finfo(dtype).eps
    for got, wanted in zip(grads, expected, strict=True):
        atol = 1e-5 * wanted.abs().max().item()
        torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=atol)


def test_large_scores(device: torch.device) -> None:
    """The case does what it is for: log-probabilities near -1,000, and some of 0."""
    case = next(case for case in CASES if case.scale > 1)
    log_prob = log_prob_of(draw(case, torch.float32).to(device))
    assert log_prob.isfinite().all()
    assert log_prob.min() < -1_000


@pytest.mark.parametrize("how", ["sliced", "transposed"])
def test_noncontiguous(how: str, device: torch.device) -> None:
    batch = draw(USUAL, torch.float32).to(device)
    tensors = {n: strided(t, how) for n, t in vars(batch).items() if torch.is_tensor(t)}
    other = replace(batch, **tensors)
    assert not any(t.is_contiguous() for t in (other.hidden, other.weight, other.grad))
    same_bits(gradients(other), gradients(batch))
    same_bits(gradients(other, sparse=True), gradients(batch))


def test_clusters_of_a_longer_table(device: torch.device) -> None:
    """A slice of the columns, as the table of the roots has two more, is read where it is."""
    batch = draw(USUAL, torch.float32).to(device)
    longer = F.pad(batch.cluster, (0, 2), value=-1)
    same_bits(gradients(replace(batch, cluster=longer[:, :-2])), gradients(batch))


def test_expanded_gradient(device: torch.device) -> None:
    """log_prob.sum().backward() hands down one number with strides 0."""
    batch = draw(USUAL, torch.float32).to(device)
    ones = replace(batch, grad=torch.ones_like(batch.grad))
    expanded = replace(batch, grad=torch.ones((), device=device).expand_as(batch.grad))
    same_bits(gradients(expanded), gradients(ones))


@pytest.mark.parametrize(
    ("case", "dtype"),
    # A sparse tensor without features has no elements.
    with_dtypes(case for case in CASES if case.features),
    ids=name_of,
)
def test_sparse_is_dense(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit: each visited class once, in increasing order, and each visited bias once."""
    batch = draw(case, dtype).to(device)
    dense, sparse = gradients(batch), gradients(batch, sparse=True)
    same_bits(sparse, dense)
    weight, *bias = sparse[2:]
    assert weight.is_sparse
    assert weight._indices()[0].tolist() == sorted({v for _, v in batch.visited()})
    for grad in bias:
        pairs = list(map(tuple, grad._indices().t().tolist()))
        assert pairs == sorted(batch.visited())


@pytest.mark.parametrize("case", [MANY, PANELS, LARGE, *BLOCKS], ids=str)
def test_same_bits_for_every_run_and_number_of_threads(case: Case) -> None:
    """Dense or row-sparse."""
    for dtype in (torch.float32, torch.bfloat16) if case is MANY else (torch.float32,):
        batch = draw(case, dtype)
        with threads(1):
            first = gradients(batch)
        for count in (1, 2, 3):
            with threads(count):
                same_bits(gradients(batch), first)
                same_bits(gradients(batch, sparse=True), first)


@pytest.mark.parametrize("case", [USUAL, MANY, PANELS], ids=str)
def test_rows_do_not_depend_on_each_other(case: Case, device: torch.device) -> None:
    """log_prob and grad_hidden of a row are the same bits in a batch of its own."""
    batch = draw(case, torch.float32).to(device)
    log_prob, grad_hidden, *_ = gradients(batch)
    for i in range(0, len(batch.target), 7):
        row = slice(i, i + 1)
        hidden, target, grad = batch.hidden[row], batch.target[row], batch.grad[row]
        one = replace(batch, hidden=hidden, target=target, grad=grad)
        same_bits(gradients(one)[:2], [log_prob[row], grad_hidden[row]])


def test_ignored_rows_count_nothing(device: torch.device) -> None:
    """Also where their contexts are NaN."""
    batch = draw(USUAL, torch.float32).to(device)
    expected, ignored = gradients(batch), batch.target == -1
    hidden = batch.hidden.masked_fill(ignored[:, None], torch.nan)
    assert ignored.any()
    for sparse in (False, True):
        same_bits(gradients(replace(batch, hidden=hidden), sparse=sparse), expected)


def test_a_class_alone_reads_nothing(device: torch.device) -> None:
    """Log-probability 0 without a gradient, whatever its row of E is."""
    batch = draw(Case("alone", classes=9, clusters=9), torch.float32).to(device)
    got = gradients(replace(batch, weight=torch.full_like(batch.weight, torch.nan)))
    assert not any(x.any() for x in got)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@measures_memory
@pytest.mark.parametrize("width", [700, 70_000])
def test_nothing_is_padded_to_the_widest_group(width: int) -> None:
    """Scores of more than 1 MiB and of more than 64 MiB, of which the rows fill few; freed."""
    rows, others = 2_000, 100
    cluster = torch.cat([torch.zeros(width), 1 + torch.arange(others) // 5]).int()[None]
    order, begin, widest = tables_of(cluster, 21)
    case = Case("wide", rows=rows, trees=1, classes=width + others, clusters=1, ignored=0.0)
    batch = replace(draw(case, torch.float32), cluster=cluster, order=order, begin=begin)
    batch = replace(batch, max_width=widest, target=width + torch.randint(others, (rows,)))
    with torch.no_grad():
        tight = replace(batch, max_width=5)
        narrow = [FORWARD(*tight.arguments())[0] for _ in range(2)]
        memory = resident_bytes()
        kept = [FORWARD(*batch.arguments()) for _ in range(4)]
        assert resident_bytes() - memory < 2**26
    assert all(torch.equal(log_prob, narrow[0]) for log_prob, *_ in kept)
    assert kept[0][1].nbytes > (2**26 if width > 700 else 2**20)


@pytest.mark.parametrize("case", [SMALL, WITHOUT_BIAS], ids=str)
def test_gradcheck(case: Case, device: torch.device) -> None:
    batch = draw(case).to(device)
    given = (batch.hidden, batch.weight, batch.bias)
    leaves = [x.requires_grad_() for x in given if x is not None]

    def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return log_prob_of(replace(batch, hidden=hidden, weight=weight, bias=bias))

    assert torch.autograd.gradcheck(log_prob, leaves)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_some_inputs_require_grad(
    wanted: tuple[int, ...], sparse: bool, device: torch.device
) -> None:
    batch = draw(USUAL, torch.float32).to(device)
    expected = gradients(batch)[1:]
    leaves = [batch.hidden.clone(), batch.weight.clone(), batch.bias.clone()]
    for i in wanted:
        leaves[i].requires_grad_()
    other = replace(batch, hidden=leaves[0], weight=leaves[1], bias=leaves[2])
    log_prob_of(other, sparse).backward(batch.grad)
    for i, leaf in enumerate(leaves):
        if i in wanted:
            same_bits([leaf.grad], [expected[i]])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("case", [USUAL, MANY], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_what_is_not_wanted_is_not_computed(
    case: Case, dtype: torch.dtype, sparse: bool, device: torch.device
) -> None:
    """Of each set of wanted gradients the bits are the same, and the others are empty."""
    batch = draw(case, dtype).to(device)
    batch = replace(batch, grad=batch.grad.float())
    saved = saved_of(batch)
    every = backward(batch, saved, sparse=sparse)
    assert all(gradient.numel() for gradient in every[:3])
    for mask in MASKS:
        some = backward(batch, saved, mask, sparse)
        for got, expected, wanted in zip(some[:3], every[:3], mask, strict=True):
            assert torch.equal(got, expected if wanted else expected.flatten()[:0])
            assert got.dtype == dtype
        same_bits([*some[3:]], [*every[3:]])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_no_grad(sparse: bool, device: torch.device) -> None:
    batch = draw(SMALL, torch.float32).to(device)
    batch.weight.requires_grad_()
    with torch.no_grad():
        assert not log_prob_of(batch, sparse).requires_grad
    with torch.inference_mode():
        assert torch.equal(log_prob_of(batch, sparse), log_prob_of(batch.map(Tensor.detach)))


def test_only_log_prob_is_differentiable() -> None:
    batch = draw(SMALL)
    batch.weight.requires_grad_()
    outputs = FORWARD(*batch.arguments())
    assert [x.requires_grad for x in outputs] == [True, False, False]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_second_derivative_raises(sparse: bool) -> None:
    batch = draw(SMALL).map(lambda x: x.requires_grad_())
    log_prob = log_prob_of(batch, sparse)
    (grad,) = torch.autograd.grad(log_prob.sum(), batch.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        grad.square().sum().backward()


# torch's machinery


@pytest.mark.parametrize("case", [SMALL, WITHOUT_BIAS], ids=str)
def test_opcheck(case: Case, device: torch.device) -> None:
    batch = draw(case, torch.float32).to(device)
    given = (batch.grad, *batch.arguments(), *saved_of(batch))
    for mask in MASKS if case is SMALL else MASKS[:1]:
        torch.library.opcheck(BACKWARD, (*given, mask, False))
    torch.library.opcheck(BACKWARD, (*given, (True, True, True), True))
    for x in (batch.hidden, batch.weight, batch.bias):
        if x is not None:
            x.requires_grad_()
    torch.library.opcheck(FORWARD, batch.arguments())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(BACKEND, marks=pytest.mark.slow)])
def test_compile(device: torch.device, backend: str) -> None:
    """Forward and backward in one graph, for batches of two sizes."""
    torch._dynamo.reset()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, batch: Batch) -> Tensor:
        log_prob = log_prob_of(replace(batch, hidden=hidden * 2, weight=weight, bias=bias))
        return (log_prob * batch.grad).sum()

    def run(function: Any, rows: int) -> list[Tensor]:
        batch = draw(replace(USUAL, rows=rows), torch.float32).to(device)
        leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
        function(*leaves, batch).backward()
        return [leaf.grad for leaf in leaves]

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for rows in (29, 41):
        for got, expected in zip(run(compiled, rows), run(loss, rows), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # in torch's own code
def test_compile_sparse() -> None:
    """No sparse gradients in a graph: an error where one graph is asked for, else a break."""
    torch._dynamo.reset()
    batch = draw(SMALL, torch.float32)
    expected = gradients(batch, sparse=True)
    batch.weight.requires_grad_()

    def double(batch: Batch) -> Tensor:
        return log_prob_of(batch, sparse=True) * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass sparse=False"):
        torch.compile(double, fullgraph=True, backend="eager")(batch)
    log_prob = torch.compile(double, backend="eager")(batch)
    log_prob.backward(batch.grad / 2)
    same_bits([log_prob.detach() / 2, batch.weight.grad], [expected[0], expected[2]])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_autocast_on_a_cpu(sparse: bool) -> None:
    """hidden takes the weights' dtype; the weights stay as they are."""
    batch = draw(USUAL, torch.float32)
    low = batch.hidden.bfloat16().requires_grad_()
    batch.weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        log_prob = log_prob_of(replace(batch, hidden=low), sparse)
    log_prob.backward(batch.grad)
    assert log_prob.dtype == torch.float32
    plain = replace(batch, hidden=low.detach().float(), weight=batch.weight.detach())
    expected = gradients(plain, sparse)
    same_bits(
        [log_prob.detach(), low.grad, batch.weight.grad],
        [expected[0], expected[1].bfloat16(), expected[2]],
    )


@pytest.mark.cuda
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_a_gpu(sparse: bool, dtype: torch.dtype) -> None:
    """All arguments take the dtype of autocast, and gradients that of the arguments: bit for bit
    those of explicit casts."""
    batch = draw(USUAL, torch.float32).to(torch.device("cuda"))
    with torch.autocast("cuda", dtype):
        got = gradients(batch, sparse)
    assert [x.dtype for x in got] == 4 * [torch.float32]
    assert [x.is_sparse for x in got] == [False, False, sparse, sparse]
    names = ("hidden", "weight", "bias")
    low = replace(batch, **{name: getattr(batch, name).to(dtype) for name in names})
    log_prob, *others = gradients(low, sparse)
    same_bits(got, [log_prob, *(x.float() for x in others)])


# Bad input


def raises(batch: Batch, match: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^hstree::group_log_prob: {match}"):
        FORWARD(*batch.arguments())


def backward_raises(batch: Batch, saved: tuple[Tensor, ...], match: str) -> None:
    for sparse in (False, True):
        with pytest.raises(RuntimeError, match=rf"^hstree::group_log_prob_backward: {match}"):
            backward(batch, saved, sparse=sparse)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("hidden", lambda x: x[0], r"hidden: expected shape \[N, D\], got \[19\]"),
        ("hidden", Tensor.int, "hidden: expected dtype float32, float64, bfloat16 or .*, got Int"),
        ("weight", lambda w: w[None], r"weight: expected shape \[V, D\], got \[1, 23, 19\]"),
        ("weight", Tensor.double, "weight: expected the dtype of hidden, Float, got Double"),
        ("weight", lambda w: w[1:], r"cluster: expected size 22 \(classes of weight\)"),
        ("weight", lambda w: w[:, 1:], r"weight: expected size 19 \(features of hidden\)"),
        ("target", lambda y: y[1:], r"target: expected size 29 \(rows of hidden\)"),
        ("target", lambda y: y[None], r"target: expected shape \[N\], got \[1, 29\]"),
        ("target", Tensor.int, "target: expected dtype Long, got Int"),
        ("cluster", lambda c: c[0], r"cluster: expected shape \[T, V\], got \[23\]"),
        ("cluster", lambda c: c[1:], r"cluster: expected size 3 \(trees of order\)"),
        ("cluster", lambda c: c[:, 1:], r"cluster: expected size 23 \(classes of weight\)"),
        ("cluster", Tensor.long, "cluster: expected dtype Int, got Long"),
        ("order", lambda o: o[0], r"order: expected shape \[T, V\], got \[23\]"),
        ("order", lambda o: o[:, 1:], r"order: expected size 23 \(classes of weight\)"),
        ("order", Tensor.long, "order: expected dtype Int, got Long"),
        ("begin", lambda b: b[0], r"begin: expected shape \[T, C \+ 1\], got \[7\]"),
        ("begin", lambda b: b[1:], r"begin: expected size 3 \(trees of order\)"),
        ("begin", lambda b: b[:, :0], r"begin: expected shape \[T, C \+ 1\], got \[3, 0\]"),
        ("begin", Tensor.long, "begin: expected dtype Int, got Long"),
        ("max_width", -1, r"max_width: expected 0 to 23 \(the number of classes\), got -1"),
        ("max_width", 24, r"max_width: expected 0 to 23 \(the number of classes\), got 24"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)  # fmt: skip
def test_bad_shape_or_dtype(name: str, value: Any, match: str, device: torch.device) -> None:
    batch = draw(USUAL, torch.float32).to(device)
    saved = saved_of(batch)
    bad = broken(batch, name, value)
    raises(bad, match)
    backward_raises(bad, saved, match)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda b: b[0], r"bias: expected shape \[T, V\]"),
        (lambda b: b[1:], r"bias: expected size 3 \(trees of order\)"),
        (lambda b: b[:, 1:], r"bias: expected size 23 \(classes of weight\)"),
        (Tensor.double, "bias: expected the dtype of weight, Float, got Double"),
    ],
    ids=["dim", "trees", "rows", "dtype"],
)
def test_bad_bias(value: Any, match: str, device: torch.device) -> None:
    raises(broken(draw(USUAL, torch.float32).to(device), "bias", value), match)


def test_bad_gradient_or_saved() -> None:
    batch = draw(USUAL, torch.float32)
    score, rows = saved = saved_of(batch)
    for value, match in (
        (lambda g: g[0], r"grad_log_prob: expected shape \[N, T\], got \[3\]"),
        (lambda g: g[1:], r"grad_log_prob: expected size 29 \(rows of hidden\)"),
        (lambda g: g[:, 1:], r"grad_log_prob: expected size 3 \(trees of order\)"),
        (Tensor.double, "grad_log_prob: expected dtype Float, got Double"),
    ):
        backward_raises(broken(batch, "grad", value), saved, match)
    for value, match in (
        (score[None], r"saved: expected shape \[N T max_width\]"),
        (score[1:], r"saved: expected size \d+ \(N T max_width\)"),
        (score.double(), "saved: expected dtype Float, got Double"),
    ):
        backward_raises(batch, (value, rows), match)
    for mask in ((True,), (True,) * 4):
        with pytest.raises(RuntimeError, match=f"output_mask: expected 3 .* got {len(mask)}"):
            backward(batch, saved, mask)


def test_values_out_of_range() -> None:
    """In a tree and a cluster that a target visits."""
    batch = draw(replace(USUAL, ignored=0.0), torch.float32)
    saved, y = saved_of(batch), int(batch.target[3])
    c = int(batch.cluster[1, y])
    first, end = batch.begin[1, c : c + 2].tolist()
    assert end - first > 1
    other = next(v for v in range(23) if batch.cluster[1, v] != c)
    for name, value, match in (
        ("target[3]", 23, r"target\[3\]: expected less than 23 \(the number of classes\), got 23"),
        ("target[3]", 2**62, rf"target\[3\]: expected less than 23 .*, got {2**62}"),
        (f"cluster[1,{y}]", 6, rf"cluster\[1, {y}\]: expected a cluster in \[0, 6\), got 6"),
        (f"cluster[1,{y}]", -1, rf"cluster\[1, {y}\]: expected a cluster in \[0, 6\), got -1"),
        (f"begin[1,{c}]", -1, rf"begin\[1, {c}\]: expected the places in order of cluster {c}"),
        (f"begin[1,{c + 1}]", 24, rf"begin\[1, {c}\]: .* of 23, got \[{first}, 24\)"),
        (f"begin[1,{c + 1}]", first, rf"begin\[1, {c}\]: .* got \[{first}, {first}\)"),
        (f"order[1,{first}]", 23, rf"order\[1, {first}\]: expected a class in \[0, 23\), got 23"),
        (f"order[1,{first}]", -1, rf"order\[1, {first}\]: expected a class in \[0, 23\), got -1"),
    ):
        bad = broken(batch, name, value)
        if not name.startswith("target"):
            bad = replace(bad, target=torch.full_like(bad.target, y))
        raises(bad, match)
        backward_raises(bad, saved, match)
    order = batch.order.clone()
    order[1, first:end] = other
    match = rf"order\[1\]: expected class \d+ among those of its cluster {c}, at places {first} to"
    raises(replace(batch, order=order, target=torch.full_like(batch.target, y)), match)
    narrow = replace(batch, max_width=batch.max_width - 1)
    raises(narrow, rf"begin\[\d, \d\]: expected .* at most {batch.max_width - 1} \(max_width\)")


@pytest.mark.cuda
def test_cuda_gives_nan_where_the_cpu_raises() -> None:
    """Values are not looked at on a GPU: a row out of range is NaN, without gradient."""
    batch = draw(replace(USUAL, ignored=0.0), torch.float32).to(torch.device("cuda"))
    expected = gradients(batch)
    got = gradients(broken(batch, "target[3]", 23))
    assert got[0][3].isnan().all()
    assert not got[1][3].any()
    same_bits([got[0][4:], got[1][4:]], [expected[0][4:], expected[1][4:]])
    assert all(g.isfinite().all() for g in got[1:])


@pytest.mark.cuda
def test_devices_must_agree() -> None:
    batch = draw(USUAL, torch.float32)
    for name in ("weight", "target", "cluster", "order", "begin"):
        bad = broken(batch.to(torch.device("cuda")), name, getattr(batch, name))
        raises(bad, f"{name}: expected device cuda")


def corrupt_tables() -> tuple[int, int]:
    random = np.random.default_rng(0)
    tables = ("target", "cluster", "order", "begin")

    def attempt(seed: int) -> None:
        classes = int(random.integers(1, 30))
        clusters = int(random.integers(1, classes + 1))
        batch = draw(Case("corrupt", 40, classes=classes, clusters=clusters), torch.float32, seed)
        saved = saved_of(batch)
        table = tables[random.integers(len(tables))]
        bad = replace(batch, **{table: corrupt(getattr(batch, table), random)})
        FORWARD(*bad.arguments())
        for sparse in (False, True):
            for mask in ((True, True, True), (True, False, False)):
                backward(bad, saved, mask, sparse)

    return outcomes(partial(attempt, seed) for seed in range(400))


def test_corrupt_tables_never_crash(tmp_path: Path) -> None:
    """Random numbers in the tables, in a process of its own: an error or a result."""
    refused, accepted = apart("ops.test_group_log_prob", "corrupt_tables()", tmp_path)
    assert refused > 100
    assert accepted > 10


def every_case() -> list[Tensor]:
    """Checks every case in every dtype on the CPU; returns the results of a larger batch."""
    for case in (*CASES, *BLOCKS):
        for dtype in DTYPES:
            check(draw(case, dtype), torch.device("cpu"))
    return gradients(draw(MANY, torch.float32))


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    """The cases again with the vector code of each instruction set."""
    module = "ops.test_group_log_prob"
    results = with_instruction_set(capability, module, "every_case()", tmp_path)
    mine = gradients(draw(MANY, torch.float32))
    torch.testing.assert_close(results, mine, rtol=1e-4, atol=1e-4)
    is_best = CAPABILITIES.index(capability) == best_capability()
    if not is_best and "HSTREE_CPU_CAPABILITY" not in os.environ:
        # Sums in another order: that other code ran.
        assert not all(torch.equal(a, b) for a, b in zip(results, mine, strict=True))


# A GPU alone


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", [64, 768, 1152])
def test_fast_paths(features: int, dtype: torch.dtype) -> None:
    """Log-probabilities and gradients of many tiles are those of the CPU, to rounding."""
    case = Case("fast", rows=2_000, trees=3, classes=1_500, clusters=6, features=features)
    batch = draw(case, dtype)
    batch = replace(batch, hidden=batch.hidden / 8, weight=batch.weight / 8)
    expected, got = gradients(batch), gradients(batch.to(torch.device("cuda")))
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-4, atol=1e-3)
    for on_gpu, on_cpu in zip(got[1:], expected[1:], strict=True):
        atol = unit * on_cpu.abs().max().item()
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2 * unit, atol=atol)


@pytest.mark.cuda
def test_memory_on_a_gpu() -> None:
    """Beside the gradients nothing of the size of the widest group times the rows."""
    device, rows, width = torch.device("cuda"), 4096, 20_000
    cluster = torch.cat([torch.zeros(width), 1 + torch.arange(5_000) // 100]).int()[None]
    order, begin, widest = tables_of(cluster, 51)
    case = Case("wide", rows=rows, trees=1, classes=25_000, clusters=1, features=64, ignored=0.0)
    batch = replace(draw(case, torch.bfloat16), cluster=cluster, order=order, begin=begin)
    batch = replace(batch, max_width=widest).to(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(batch)
    assert torch.cuda.max_memory_allocated() - before < rows * widest * 4


@pytest.mark.cuda
def test_dense_step_in_a_cuda_graph() -> None:
    """Forward and dense backward never wait for the device, so a graph can hold them."""
    batch = draw(USUAL, torch.float32).to(torch.device("cuda"))
    replayed_alike(batch, log_prob_of, gradients(batch))
