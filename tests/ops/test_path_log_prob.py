"""torch.ops.hstree.path_log_prob, its gradients, and torch.ops.hstree.forward."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hstree.ops import path_log_prob
from ops.against_reference import check
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
    BLOCKS,
    CASES,
    DTYPES,
    PATH,
    TILES,
    Batch,
    Case,
    Saved,
    broken,
    name_of,
    replayed_alike,
    same_bits,
    strided,
    threads,
    with_dtypes,
)

USUAL = Case("ragged paths, odd subset", subset=7)
SMALL = Case("small", rows=5, trees=2, classes=6, in_features=4, subset=3)
WITHOUT_SUBSET = Case("no subset, blocks of vectors", rows=70, in_features=83)
MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]
MANY = Case("rows and features for two threads", rows=300, trees=2, classes=50, in_features=219,
            subset=170)  # fmt: skip


def every_case() -> list[Tensor]:
    """Checks every case in every dtype on the CPU; returns the results of a larger batch."""
    for case in (*CASES, *BLOCKS):
        for dtype in DTYPES:
            check(case, dtype, torch.device("cpu"))
    return PATH.gradients(PATH.batch(MANY, torch.float32))


def corrupt_tables() -> tuple[int, int]:
    random = np.random.default_rng(0)
    tables = ("target", "path_offset", "path", "leaf_position", "feature_index")

    def attempt(seed: int) -> None:
        case = Case("corrupt", rows=40, subset=7, classes=int(random.integers(1, 30)))
        batch = PATH.batch(case, torch.float32, seed)
        saved = PATH.saved(batch)
        table = tables[random.integers(len(tables))]
        bad = replace(batch, **{table: corrupt(getattr(batch, table), random)})
        PATH.forward(*bad.arguments())
        for sparse in (False, True):
            for mask in ((True, True, True), (True, False, False)):
                PATH.backward(bad, saved, mask, sparse)

    return outcomes(partial(attempt, seed) for seed in range(400))


SEVEN_TREES = Case("seven trees", trees=7, in_features=83, subset=41)
TWO_GROUPS = Case("more than is gathered at once", rows=1500, in_features=330, subset=300)


def only_tree(batch: Batch, t: int) -> Batch:
    """The batch with one of its trees."""
    one = slice(t, t + 1)
    tables = ("weight", "bias", "path_offset", "leaf_position", "feature_index")
    return replace(
        batch, grad=batch.grad[:, one], **{name: getattr(batch, name)[one] for name in tables}
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    with_dtypes(CASES) + with_dtypes(TILES, pytest.mark.slow),
    ids=name_of,
)
def test_equals_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check(case, dtype, device)


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(BLOCKS), ids=name_of)
def test_blocks_equal_reference(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """What float32 gives for the same values, to nearest: no sum in the low precision."""
    batch = PATH.batch(MANY, dtype).to(device)
    log_prob, *grads = PATH.gradients(batch)
    expected_log_prob, *expected = PATH.gradients(batch.map(Tensor.float))
    torch.testing.assert_close(log_prob, expected_log_prob, rtol=1e-5, atol=1e-4)
    rtol = 0.505 * torch.finfo(dtype).eps
    for got, wanted in zip(grads, expected, strict=True):
        atol = 1e-5 * wanted.abs().max().item()
        torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=atol)


def test_values_of_order_100_saturate() -> None:
    """The case does what it is for: log-probabilities near -10,000, and some of 0."""
    case = next(case for case in CASES if case.scale == 100)
    log_prob = PATH.log_prob(PATH.batch(case, torch.float32))
    assert log_prob.isfinite().all()
    assert log_prob.min() < -10_000


@pytest.mark.parametrize("how", ["sliced", "transposed"])
def test_noncontiguous(how: str, device: torch.device) -> None:
    batch = PATH.batch(USUAL, torch.float32).to(device)
    tensors = {n: strided(t, how) for n, t in vars(batch).items() if torch.is_tensor(t)}
    other = replace(batch, **tensors)
    assert not any(t.is_contiguous() for t in (other.hidden, other.weight, other.grad))
    same_bits(PATH.gradients(other), PATH.gradients(batch))
    same_bits(PATH.gradients(other, sparse=True), PATH.gradients(batch))


@pytest.mark.parametrize(
    ("case", "dtype"),
    # A sparse tensor without features has no elements.
    with_dtypes(case for case in CASES if case.in_features),
    ids=name_of,
)
def test_sparse_is_dense(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit, each visited row once and no other."""
    batch = PATH.batch(case, dtype).to(device)
    dense, sparse = PATH.gradients(batch), PATH.gradients(batch, sparse=True)
    same_bits(sparse, dense)
    for grad in sparse[2:]:
        assert grad.is_sparse
        index = grad._indices().t().tolist()
        rows = [(t, row) for t, row in index]
        assert len(rows) == len(set(rows))
        assert set(rows) == batch.visited()
        assert len(grad._values()) == len(rows)


def test_same_bits_for_every_run_and_number_of_threads() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        batch = PATH.batch(MANY, dtype)
        with threads(1):
            first = PATH.gradients(batch)
            same_bits(PATH.gradients(batch), first)
        for count in (2, 3):
            with threads(count):
                same_bits(PATH.gradients(batch), first)
                same_bits(PATH.gradients(batch, sparse=True), first)


@pytest.mark.parametrize("case", [USUAL, MANY], ids=str)
def test_rows_do_not_depend_on_each_other(device: torch.device, case: Case) -> None:
    """log_prob and grad_hidden of a row are the same bits in a batch of its own."""
    batch = PATH.batch(case, torch.float32).to(device)
    log_prob, grad_hidden, *_ = PATH.gradients(batch)
    for i in range(0, len(batch.target), 7):
        row = slice(i, i + 1)
        one = replace(
            batch, hidden=batch.hidden[row], target=batch.target[row], grad=batch.grad[row]
        )
        same_bits(PATH.gradients(one)[:2], [log_prob[row], grad_hidden[row]])


def test_ignored_rows_count_nothing(device: torch.device) -> None:
    """Also where their contexts are NaN."""
    batch = PATH.batch(USUAL, torch.float32).to(device)
    expected, ignored = PATH.gradients(batch), batch.target == -1
    hidden = batch.hidden.masked_fill(ignored[:, None], torch.nan)
    assert ignored.any()
    for sparse in (False, True):
        same_bits(PATH.gradients(replace(batch, hidden=hidden), sparse=sparse), expected)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("case", [USUAL, MANY, WITHOUT_SUBSET], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_what_is_not_wanted_is_not_computed(
    case: Case, dtype: torch.dtype, sparse: bool, device: torch.device
) -> None:
    """Of each set of wanted gradients the bits are the same, and the others are empty."""
    batch = PATH.batch(case, dtype).to(device)
    batch = replace(batch, grad=batch.grad.float())
    saved = PATH.saved(batch)
    every = PATH.backward(batch, saved, sparse=sparse)
    assert all(gradient.numel() for gradient in every[:3])
    for mask in MASKS:
        some = PATH.backward(batch, saved, mask, sparse)
        for got, expected, wanted in zip(some[:3], every[:3], mask, strict=True):
            assert torch.equal(got, expected if wanted else expected.flatten()[:0])
            assert got.dtype == dtype
        same_bits([*some[3:]], [*every[3:]])


def test_a_mask_has_three_values(device: torch.device) -> None:
    batch = PATH.batch(USUAL, torch.float32).to(device)
    saved = PATH.saved(batch)
    for mask in ((True,), (True,) * 4):
        with pytest.raises(RuntimeError, match=f"output_mask: expected 3 .* got {len(mask)}"):
            PATH.backward(batch, saved, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sums_have_their_dtype_on_the_meta_device(dtype: torch.dtype) -> None:
    batch = PATH.batch(SMALL, dtype)
    meta = PATH.log_prob(batch.to(torch.device("meta")))
    assert (meta.dtype, meta.shape) == (PATH.log_prob(batch).dtype, (SMALL.rows, SMALL.trees))


def test_frozen_weights_ask_for_no_gradient(device: torch.device) -> None:
    batch = PATH.batch(USUAL, torch.float32).to(device)
    asked: list[tuple[bool, ...]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.hstree.path_log_prob_backward.default:
                asked.append((*map(bool, args[-2]), args[-1]))
            return func(*args, **(kwargs or {}))

    for name, *expected in (
        ("hidden", True, False, False, False),
        ("weight", False, True, False, True),
        ("bias", False, False, True, True),
    ):
        for sparse in (False, True):
            leaf = getattr(batch, name).clone().requires_grad_()
            log_prob = PATH.log_prob(replace(batch, **{name: leaf}), sparse)
            with Record():
                log_prob.backward(batch.grad)
            assert asked.pop() == (*expected[:3], sparse and expected[3])
            assert leaf.grad is not None


def test_score_is_not_differentiable(device: torch.device) -> None:
    batch = PATH.batch(SMALL).to(device)
    batch.weight.requires_grad_()
    log_prob, score = PATH.forward(*batch.arguments())
    assert log_prob.requires_grad
    assert not score.requires_grad


# torch's machinery


def opcheck_backward(batch: Batch, masks: Iterable[tuple[bool, ...]]) -> None:
    given = batch.grad, batch.hidden, batch.weight, *batch.tables(), *PATH.saved(batch)
    backward = torch.ops.hstree.path_log_prob_backward.default
    for mask in masks:
        for sparse in (False, True):
            torch.library.opcheck(backward, (*given, mask, sparse))


@pytest.mark.slow
def test_opcheck_of_every_mask() -> None:
    opcheck_backward(PATH.batch(SMALL, torch.float32), MASKS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(BACKEND, marks=pytest.mark.slow)])
def test_compile(device: torch.device, backend: str) -> None:
    """Forward and backward, for batches of two sizes."""
    torch._dynamo.reset()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, batch: Batch) -> Tensor:
        log_prob = PATH.log_prob(replace(batch, hidden=hidden * 2, weight=weight, bias=bias))
        return (log_prob * batch.grad).sum()

    def run(function: Any, rows: int) -> list[Tensor]:
        batch = PATH.batch(replace(USUAL, rows=rows), torch.float32).to(device)
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
    batch = PATH.batch(SMALL, torch.float32)
    expected = PATH.gradients(batch, sparse=True)
    batch.weight.requires_grad_()

    def double(batch: Batch) -> Tensor:
        return PATH.log_prob(batch, sparse=True) * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass sparse=False"):
        torch.compile(double, fullgraph=True, backend="eager")(batch)
    log_prob = torch.compile(double, backend="eager")(batch)
    log_prob.backward(batch.grad / 2)
    same_bits([log_prob.detach() / 2, batch.weight.grad], [expected[0], expected[2]])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_autocast(sparse: bool, device: torch.device) -> None:
    """hidden takes the weights' dtype; the weights stay as they are."""
    batch = PATH.batch(USUAL, torch.float32).to(device)
    low = batch.hidden.bfloat16().requires_grad_()
    batch.weight.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        log_prob = PATH.log_prob(replace(batch, hidden=low), sparse)
    log_prob.backward(batch.grad)
    assert log_prob.dtype == torch.float32
    plain = replace(batch, hidden=low.detach().float(), weight=batch.weight.detach())
    expected = PATH.gradients(plain, sparse)
    same_bits(
        [log_prob.detach(), low.grad, batch.weight.grad],
        [expected[0], expected[1].bfloat16(), expected[2]],
    )


# Bad input


def raises(batch: Batch, match: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^hstree::path_log_prob: {match}"):
        PATH.forward(*batch.arguments())


def backward_raises(batch: Batch, saved: Saved, match: str) -> None:
    for sparse in (False, True):
        with pytest.raises(RuntimeError, match=rf"^hstree::path_log_prob_backward: {match}"):
            PATH.backward(batch, saved, sparse=sparse)


BAD_SHAPES = [
    ("hidden", lambda x: x[0], r"hidden: expected shape \[N, D\], got \[19\]"),
    ("hidden", Tensor.int, "hidden: expected dtype float32, float64, bfloat16 or .*, got Int"),
    ("weight", lambda w: w[0], r"weight: expected shape \[T, M, S\], got \[\d+, 7\]"),
    ("weight", Tensor.double, "weight: expected the dtype of hidden, Float, got Double"),
    ("weight", lambda w: w[1:], r"weight: expected size 3 \(trees of leaf_position\)"),
    ("weight", lambda w: w[:, :, 1:], r"feature_index: expected size 6 \(features of weight\)"),
    ("target", lambda y: y[1:], r"target: expected size 29 \(rows of hidden\)"),
    ("target", lambda y: y[None], r"target: expected shape \[N\], got \[1, 29\]"),
    ("target", Tensor.int, "target: expected dtype Long, got Int"),
    ("path_offset", lambda o: o[0], r"path_offset: expected shape \[T, V \+ 1\], got \[24\]"),
    ("path_offset", lambda o: o[:2], r"path_offset: expected size 3 \(trees of leaf_position\)"),
    ("path_offset", lambda o: o[:, 1:], r"path_offset: expected size 24 \(classes of leaf_pos"),
    ("path_offset", Tensor.int, "path_offset: expected dtype Long, got Int"),
    ("path", lambda p: p[None], r"path: expected shape "),
    ("path", Tensor.long, "path: expected dtype Int, got Long"),
    ("leaf_position", lambda p: p[0], r"leaf_position: expected shape \[T, V\], got \[23\]"),
    ("leaf_position", lambda p: p[:, 1:], r"path_offset: expected size 23 \(classes of leaf"),
    ("leaf_position", Tensor.long, "leaf_position: expected dtype Int, got Long"),
    ("feature_index", lambda i: i[0], r"feature_index: expected shape \[T, S\], got \[7\]"),
    ("feature_index", lambda i: i[1:], r"feature_index: expected size 3 \(trees of leaf_"),
    ("feature_index", lambda i: i[:, 1:], r"feature_index: expected size 7 \(features of we"),
    ("feature_index", Tensor.long, "feature_index: expected dtype Int, got Long"),
    ("feature_index", None, r"weight: expected size 19 \(features of hidden, as there is no"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "match"), BAD_SHAPES, ids=lambda x: str(getattr(x, "__name__", x))[:40]
)
def test_bad_shape_or_dtype(name: str, value: Any, match: str, device: torch.device) -> None:
    batch = PATH.batch(USUAL, torch.float32).to(device)
    saved = PATH.saved(batch)
    bad = broken(batch, name, value)
    raises(bad, match)
    backward_raises(bad, saved, match)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda b: b[0], r"bias: expected shape \[T, .\]"),
        (lambda b: b[1:], r"bias: expected size 3 \(trees of leaf_position\)"),
        (lambda b: b[:, 1:], r"bias: expected size \d+ \(rows of weight in a tree\)"),
        (Tensor.double, "bias: expected the dtype of weight, Float, got Double"),
    ],
    ids=["dim", "trees", "rows", "dtype"],
)
def test_bad_bias(value: Any, match: str, device: torch.device) -> None:
    raises(broken(PATH.batch(USUAL, torch.float32).to(device), "bias", value), match)


def test_bad_gradient_or_score(device: torch.device) -> None:
    batch = PATH.batch(USUAL, torch.float32).to(device)
    saved = score, *others = PATH.saved(batch)
    order, plan = others
    for value, match in (
        (lambda g: g[0], r"grad_log_prob: expected shape \[N, T\], got \[3\]"),
        (lambda g: g[1:], r"grad_log_prob: expected size 29 \(rows of hidden\)"),
        (lambda g: g[:, 1:], r"grad_log_prob: expected size 3 \(trees of leaf_position\)"),
        (Tensor.double, "grad_log_prob: expected dtype Float, got Double"),
    ):
        backward_raises(broken(batch, "grad", value), saved, match)
    for value, match in (
        (score[0], r"score: expected shape \[N, T, max_"),
        (score[1:], r"score: expected size 29 \(rows of hidden\)"),
        (score[:, 1:], r"score: expected size 3 \(trees of leaf_position\)"),
        (score.double(), "score: expected dtype Float, got Double"),
    ):
        backward_raises(batch, (value, *others), match)
    for value, match in (
        (order[0], r"order: expected shape \[T, N\], got \[29\]"),
        (order[1:], r"order: expected size 3 \(trees of leaf_position\)"),
        (order[:, 1:], r"order: expected size 29 \(rows of hidden\)"),
        (order.int(), "order: expected dtype Long, got Int"),
    ):
        backward_raises(batch, (score, value, plan), match)


def test_order_out_of_range() -> None:
    batch = PATH.batch(USUAL, torch.float32)
    score, order, plan = PATH.saved(batch)
    for row in (-1, 29):
        bad = order.clone()
        bad[1, 5] = row
        match = rf"order: expected rows in \[0, 29\), got {row}"
        backward_raises(batch, (score, bad, plan), match)


def test_target_out_of_range() -> None:
    batch = PATH.batch(USUAL, torch.float32)
    saved = PATH.saved(batch)
    for value in (23, 2**31, 2**62):
        bad = broken(batch, "target[3]", value)
        match = rf"target\[3\]: expected less than 23 \(the number of classes\), got {value}"
        raises(bad, match)
        backward_raises(bad, saved, match)


def test_path_offset_out_of_range() -> None:
    batch = PATH.batch(USUAL, torch.float32)
    saved = PATH.saved(batch)
    c = int(batch.target[batch.target >= 0][0])
    end = len(batch.path)
    begin = int(batch.path_offset[1, c])
    for place, value in (
        (c, -1), (c + 1, begin - 1), (c + 1, -(2**40)), (c + 1, end + 1), (c, 2**62),
    ):  # fmt: skip
        bad = broken(batch, f"path_offset[1,{place}]", value)
        # Another class may come first in leaf order and have a path too long.
        bad = replace(bad, target=torch.full_like(bad.target, c))
        match = rf"path_offset of class {c}: expected an interval within \[0, {end}\]"
        raises(bad, match)
        backward_raises(bad, saved, match)


@pytest.mark.parametrize(
    ("values", "lowest", "bad"),
    [
        ([0, 1, 2, 3, 4, 5, 19], 6, 19),
        ([-1, 1, 2, 3, 4, 5, 6], 0, -1),
        ([0, 1, 3, 3, 4, 5, 6], 4, 3),
        ([0, 1, 5, 3, 6, 7, 8], 6, 3),
        ([0, 1, 2, 3, 4, 5, 2**31 - 1], 6, 2**31 - 1),
    ],
    ids=["too large", "negative", "duplicate", "unsorted", "largest"],
)
def test_bad_feature_index(values: list[int], lowest: int, bad: int) -> None:
    batch = PATH.batch(USUAL, torch.float32)
    saved = PATH.saved(batch)
    batch.feature_index[1] = torch.tensor(values)
    place = values.index(bad, 1) if values.count(bad) == 1 and bad != -1 else 0
    place = 3 if bad == 3 else place
    match = rf"feature_index\[1, {place}\]: expected a value in \[{lowest}, 19\).*got {bad}"
    raises(batch, match)
    backward_raises(batch, saved, match)


def test_max_depth() -> None:
    batch = PATH.batch(USUAL, torch.float32)
    score, *others = PATH.saved(batch)
    longest = max(
        len(rows_of[y]) for rows_of in batch.rows_of for y in batch.target.tolist() if y >= 0
    )
    match = rf"max_depth: the path of class \d+ has {longest} nodes, got max_depth = {longest - 1}"
    raises(replace(batch, max_depth=longest - 1), match)
    backward_raises(batch, (score[:, :, : longest - 1], *others), match)
    for value in (-1, 65, 2**40):
        raises(replace(batch, max_depth=value), f"max_depth: expected 0 to 64, got {value}")
    more, _ = PATH.forward(*replace(batch, max_depth=batch.max_depth + 3).arguments())
    assert torch.equal(more, PATH.log_prob(batch))


@pytest.mark.parametrize("rows", [0, 1, 70, 300])
def test_the_order_is_a_stable_sort(rows: int, device: torch.device) -> None:
    """Of the leaves; rows without a target come last."""
    batch = PATH.batch(replace(USUAL, rows=rows), torch.float32).to(device)
    _, order, _ = PATH.saved(batch)
    rank = batch.leaf_position[:, batch.target.clamp(min=0)]
    rank = rank.masked_fill(batch.target < 0, 2**31 - 1)
    assert torch.equal(order, rank.argsort(dim=1, stable=True))


def test_wrong_leaf_positions_only_change_the_order() -> None:
    """They may give wrong weight gradients, but never a stray access or another log_prob."""
    batch = PATH.batch(USUAL, torch.float32)
    expected = PATH.gradients(batch)
    random = torch.Generator().manual_seed(0)
    info = torch.iinfo(torch.int32)
    for low, high in ((0, 23), (info.min, info.max), (0, 1)):
        position = torch.randint(low, high, (3, 23), dtype=torch.int32, generator=random)
        got = PATH.gradients(replace(batch, leaf_position=position))
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])


@pytest.mark.cuda
def test_cuda_gives_nan_where_the_cpu_raises() -> None:
    """Values are not looked at on a GPU: a row out of range is NaN, without gradient."""
    batch = PATH.batch(USUAL, torch.float32).to(torch.device("cuda"))
    batch = replace(batch, target=batch.target.clamp(min=0))
    expected = PATH.gradients(batch)
    bad = broken(batch, "target[3]", 23)
    got = PATH.gradients(bad)
    assert got[0][3].isnan().all()
    assert not got[1][3].any()
    same_bits([got[0][4:], got[1][4:]], [expected[0][4:], expected[1][4:]])
    assert all(g.isfinite().all() for g in got[1:])


@pytest.mark.cuda
def test_devices_must_agree() -> None:
    batch = PATH.batch(USUAL, torch.float32)
    cuda = torch.device("cuda")
    for name in ("weight", "target", "path_offset", "path", "leaf_position", "feature_index"):
        bad = broken(batch.to(cuda), name, getattr(batch, name))
        raises(bad, f"{name}: expected device cuda")


def test_corrupt_tables_never_crash(tmp_path: Path) -> None:
    """Random numbers in the tables, in a process of its own: an error or a result."""
    call = "corrupt_tables()"
    refused, accepted = apart("ops.test_path_log_prob", call, tmp_path)
    assert refused > 100
    assert accepted > 10


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    """The cases again with the vector code of each instruction set."""
    call = "every_case()"
    results = with_instruction_set(capability, "ops.test_path_log_prob", call, tmp_path)
    mine = PATH.gradients(PATH.batch(MANY, torch.float32))
    torch.testing.assert_close(results, mine, rtol=1e-4, atol=1e-4)
    is_best = CAPABILITIES.index(capability) == best_capability()
    if not is_best and "HSTREE_CPU_CAPABILITY" not in os.environ:
        # Sums in another order: that other code ran.
        assert not all(torch.equal(a, b) for a, b in zip(results, mine, strict=True))


# A GPU alone


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("subset", [64, 1024, 1152, 2048])
def test_fast_paths(subset: int, dtype: torch.dtype) -> None:
    """Subsets of one to four chunks: rows long enough for every access."""
    case = Case("fast", rows=500, trees=3, classes=300, in_features=4096, subset=subset)
    batch = PATH.batch(case, dtype)
    generator = torch.Generator().manual_seed(0)
    for index in batch.feature_index:
        index.copy_(torch.randperm(4096, generator=generator)[:subset].sort().values)
    equals_cpu(replace(batch, hidden=batch.hidden / 8, weight=batch.weight / 8))


def equals_cpu(batch: Batch) -> None:
    """Log-probabilities and gradients of a GPU are those of the CPU, to rounding."""
    expected = PATH.gradients(batch)
    got = PATH.gradients(batch.to(torch.device("cuda")))
    unit = torch.finfo(batch.hidden.dtype).eps
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-4, atol=1e-3)
    for on_gpu, on_cpu in zip(got[1:], expected[1:], strict=True):
        atol = unit * on_cpu.abs().max().item()
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2 * unit, atol=atol)


@pytest.mark.cuda
def test_gradients_at_full_size() -> None:
    """As many rows and features as a large model has; against the op of the CPU in float32."""
    case = Case("full size", rows=8192, trees=2, classes=20_000, in_features=4096, subset=1024)
    batch = PATH.batch(case, torch.float32)
    batch = replace(batch, hidden=batch.hidden / 32, weight=batch.weight / 32)
    batch = batch.map(Tensor.bfloat16)
    expected = PATH.gradients(batch.map(Tensor.float), sparse=True)
    got = PATH.gradients(batch.to(torch.device("cuda")), sparse=True)
    unit = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-4, atol=1e-3)
    assert torch.equal(got[2]._indices().cpu(), expected[2]._indices())
    values = [(got[1], expected[1])]
    sparse = [
        (a.cpu().coalesce(), b.coalesce()) for a, b in zip(got[2:], expected[2:], strict=True)
    ]
    assert all(torch.equal(a._indices(), b._indices()) for a, b in sparse)
    values += [(a._values(), b._values()) for a, b in sparse]
    for on_gpu, on_cpu in values:
        atol = unit * on_cpu.abs().max().item()
        torch.testing.assert_close(on_gpu.cpu().float(), on_cpu, rtol=2 * unit, atol=atol)


@pytest.mark.cuda
def test_dense_step_in_a_cuda_graph() -> None:
    """Forward and dense backward never wait for the device, so a graph can hold them."""
    batch = PATH.batch(USUAL, torch.float32).to(torch.device("cuda"))
    replayed_alike(batch, PATH.log_prob, PATH.gradients(batch))


def test_forward_is_another_name(device: torch.device) -> None:
    """With a schema of its own, which callers of torch.ops.hstree.forward rely on."""
    schema = str(torch.ops.hstree.forward.default._schema)
    assert schema == (
        "hstree::forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
        "Tensor path_offset, Tensor path, Tensor leaf_position, Tensor? feature_index, "
        "int max_depth) -> (Tensor log_prob, Tensor score)"
    )
    batch = PATH.batch(USUAL, torch.float32).to(device)
    batch.weight.requires_grad_()
    expected = PATH.operator(*batch.arguments())
    outputs = torch.ops.hstree.forward(*batch.arguments())
    same_bits(outputs, expected[:2])
    grads = [torch.autograd.grad(log_prob.sum(), batch.weight)[0]
             for log_prob, *_ in (outputs, expected)]  # fmt: skip
    same_bits(grads[:1], grads[1:])


@pytest.mark.parametrize("case", [SEVEN_TREES, TWO_GROUPS], ids=str)
def test_trees_do_not_depend_on_each_other(case: Case) -> None:
    batch = PATH.batch(case, torch.float32)
    log_prob, grad_hidden, *others = PATH.gradients(batch)
    alone = [PATH.gradients(only_tree(batch, t)) for t in range(case.trees)]
    assert torch.equal(log_prob, torch.cat([one[0] for one in alone], 1))
    for n, grad in enumerate(others, 2):
        assert torch.equal(grad, torch.cat([one[n] for one in alone]))
    # Added up one after another.
    assert torch.equal(grad_hidden, reduce(torch.add, [one[1] for one in alone]))


def test_empty_path_beside_another(device: torch.device) -> None:
    """A path without nodes begins where the next class's path begins: they are not the same."""
    hidden = torch.ones(2, 1, device=device, requires_grad=True)
    log_prob = path_log_prob(
        hidden,
        torch.full((1, 1, 1), math.log(3.0), device=device),
        None,
        torch.tensor([0, 1], device=device),
        torch.tensor([[0, 0, 1]], device=device),
        torch.tensor([0 << 1 | 1], dtype=torch.int32, device=device),
        torch.tensor([[0, 1]], dtype=torch.int32, device=device),
        max_depth=1,
    )
    torch.testing.assert_close(log_prob.exp(), torch.tensor([[1.0], [3 / 4]], device=device))
    log_prob.sum().backward()
    expected = torch.tensor([[0.0], [math.log(3.0) / 4]], device=device)
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_log_sigmoid_over_its_whole_range(dtype: torch.dtype, device: torch.device) -> None:
    """One node, weight 1: the score is hidden. log_prob and its slope to rounding, also in the
    tails and at inf."""
    far = torch.tensor([1e-4, 1000.0, 60000.0, torch.inf])
    z = torch.cat([torch.linspace(-200, 200, 4001), far, -far]).to(dtype)
    hidden = z[:, None].to(device, copy=True).requires_grad_()
    log_prob = path_log_prob(
        hidden,
        torch.ones(1, 1, 1, dtype=dtype, device=device),
        None,
        torch.zeros(len(z), dtype=torch.int64, device=device),
        torch.tensor([[0, 1, 2]], device=device),
        torch.tensor([1, 0], dtype=torch.int32, device=device),
        torch.tensor([[0, 1]], dtype=torch.int32, device=device),
        max_depth=1,
    )
    log_prob.sum().backward()
    true = z.double()[:, None]
    sums, info = torch.finfo(log_prob.dtype), torch.finfo(dtype)
    got, slope = log_prob.detach().cpu().double(), hidden.grad.cpu().double()
    # exp gives 0 a little before the smallest normal number.
    tight, smallest = 2 * sums.eps, 2 * sums.smallest_normal
    expected = -torch.logaddexp(torch.zeros_like(true), -true)
    torch.testing.assert_close(got, expected, rtol=tight, atol=smallest)
    tiny = smallest + info.smallest_normal * info.eps / 2
    rounding = info.eps / 2 if dtype.itemsize == 2 else 0
    torch.testing.assert_close(slope, (-true).sigmoid(), rtol=tight + rounding, atol=tiny)


@pytest.mark.parametrize("exponent", [-80, -20, 20, 80])
def test_gradients_of_any_magnitude(exponent: int, device: torch.device) -> None:
    """CUDA's matrix instructions take factors of 8 bits: none is lost, whatever the upstream
    scale."""
    batch = PATH.batch(USUAL, torch.bfloat16).to(device)
    batch = replace(batch, grad=batch.grad.float())
    saved = PATH.saved(batch)
    plain = PATH.backward(batch, saved)
    scaled = PATH.backward(replace(batch, grad=batch.grad * 2.0**exponent), saved)
    for got, expected in zip(scaled[:3], plain[:3], strict=True):
        assert torch.equal(got, expected * 2.0**exponent)


def test_infinite_and_nan_scores(device: torch.device) -> None:
    batch = PATH.batch(USUAL, torch.float32).to(device)
    batch = replace(batch, target=batch.target.clamp(min=0), feature_index=None,
                    weight=torch.ones_like(batch.weight), bias=None,
                    hidden=batch.hidden[:, :7].clone())  # fmt: skip
    batch.hidden[0] = torch.nan
    batch.hidden[1] = torch.inf
    batch.hidden[2] = -torch.inf
    log_prob = PATH.log_prob(batch)
    expected = PATH.reference(*batch.to(torch.device("cpu")).arguments())[0]
    torch.testing.assert_close(log_prob.cpu(), expected, equal_nan=True)
    assert log_prob[0].isnan().all()
    assert log_prob[3:].isfinite().all()


def test_node_out_of_range() -> None:
    batch = PATH.batch(USUAL, torch.float32)
    saved = PATH.saved(batch)
    nodes = batch.weight.shape[1]
    c = int(batch.target[batch.target >= 0][0])
    e = int(batch.path_offset[0, c])
    for entry in (nodes << 1, -1, -(2**31), 2**31 - 1):
        bad = batch.path.clone()
        bad[e] = entry
        match = rf"path\[{e}\]: expected a node in \[0, {nodes}\), got {entry >> 1}"
        raises(replace(batch, path=bad), match)
        backward_raises(replace(batch, path=bad), saved, match)
