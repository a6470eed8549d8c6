"""What the path op, the wide op and the leaf op must all do; test_path_log_prob.py,
test_wide_log_prob.py and test_leaf_log_prob.py run it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hstree.ops import tree_op
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
    BLOCKS,
    CASES,
    DTYPES,
    OPS,
    TILES,
    Batch,
    Case,
    TreeOpUnderTest,
    name_of,
    threads,
    with_dtypes,
)

USUAL = Case("ragged paths, odd subset", subset=7)
SMALL = Case("small", rows=5, trees=2, classes=6, in_features=4, subset=3, widest=4)
WITHOUT_OPTIONS = Case("small, no bias, no subset", rows=4, trees=1, classes=5, in_features=3,
                       bias=False, widest=4)  # fmt: skip
WITHOUT_SUBSET = Case("no subset, blocks of vectors", rows=70, in_features=83)
MASKS = [mask for mask in itertools.product([True, False], repeat=3) if any(mask)]
MANY = Case("rows and features for two threads", rows=300, trees=2, classes=50, in_features=219,
            subset=170)  # fmt: skip
BACKEND = "inductor" if shutil.which("g++") or shutil.which("c++") else "aot_eager"


def same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.to_dense(), b.to_dense())


def strided(tensor: Tensor, how: str) -> Tensor:
    """The same values, not contiguous."""
    if how == "transposed" and tensor.dim() > 1:
        other = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    else:  # every other element of a longer tensor, from the second on
        longer = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
        other = longer[..., 1::2]
        other.copy_(tensor)
    assert torch.equal(other, tensor)
    return other


def broken(batch: Batch, name: str, value: Any) -> Batch:
    """The batch with an argument replaced, or one of its elements: name = "target[3]"."""
    if "[" not in name:
        change = value(getattr(batch, name)) if callable(value) else value
        return replace(batch, **{name: change})
    name, place = name.rstrip("]").split("[")
    tensor = getattr(batch, name).clone()
    tensor[tuple(int(i) for i in place.split(","))] = value
    return replace(batch, **{name: tensor})


def every_case(name: str) -> list[Tensor]:
    """Checks every case in every dtype on the CPU; returns the results of a larger batch."""
    op = OPS[name]
    for case in (*CASES, *BLOCKS):
        for dtype in DTYPES:
            check(op, case, dtype, torch.device("cpu"))
    return op.gradients(op.batch(MANY, torch.float32))


def corrupt_tables(name: str) -> tuple[int, int]:
    op, random = OPS[name], np.random.default_rng(0)
    tables = ("target", "offset", "path", "leaf_position", "feature_index")

    def attempt(seed: int) -> None:
        case = Case("corrupt", rows=40, subset=7, classes=int(random.integers(1, 30)))
        batch = op.batch(case, torch.float32, seed)
        score = op.forward(*batch.arguments())[1]
        table = tables[random.integers(len(tables))]
        bad = replace(batch, **{table: corrupt(getattr(batch, table), random)})
        op.forward(*bad.arguments())
        for sparse in (False, True):
            for mask in ((True, True, True), (True, False, False)):
                op.backward(bad, score, mask=mask, sparse=sparse)

    return outcomes(partial(attempt, seed) for seed in range(400))


class TreeOpSuite:
    op: ClassVar[TreeOpUnderTest]

    @pytest.mark.parametrize(
        ("case", "dtype"),
        with_dtypes(CASES) + with_dtypes(TILES, pytest.mark.slow),
        ids=name_of,
    )
    def test_equals_reference(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        check(self.op, case, dtype, device)

    @pytest.mark.parametrize(("case", "dtype"), with_dtypes(BLOCKS), ids=name_of)
    def test_blocks_equal_reference(self, case: Case, dtype: torch.dtype) -> None:
        check(self.op, case, dtype, torch.device("cpu"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_low_precision_is_rounded_once(self, dtype: torch.dtype, device: torch.device) -> None:
        """What float32 gives for the same values, to nearest: no sum in the low precision."""
        batch = self.op.batch(MANY, dtype).to(device)
        log_prob, *grads = self.op.gradients(batch)
        expected_log_prob, *expected = self.op.gradients(batch.map(Tensor.float))
        torch.testing.assert_close(log_prob, expected_log_prob, rtol=1e-5, atol=1e-4)
        rtol = 0.505 * torch.finfo(dtype).eps
        for got, wanted in zip(grads, expected, strict=True):
            atol = 1e-5 * wanted.abs().max().item()
            torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=atol)

    def test_values_of_order_100_saturate(self) -> None:
        """The case does what it is for: log-probabilities near -10,000, and some of 0."""
        case = next(case for case in CASES if case.scale == 100)
        log_prob = self.op.log_prob(self.op.batch(case, torch.float32))
        assert log_prob.isfinite().all()
        assert log_prob.min() < -10_000

    @pytest.mark.parametrize("how", ["sliced", "transposed"])
    def test_noncontiguous(self, how: str, device: torch.device) -> None:
        batch = self.op.batch(USUAL, torch.float32).to(device)
        tensors = {n: strided(t, how) for n, t in vars(batch).items() if torch.is_tensor(t)}
        other = replace(batch, **tensors)
        assert not any(t.is_contiguous() for t in (other.hidden, other.weight, other.grad))
        same_bits(self.op.gradients(other), self.op.gradients(batch))
        same_bits(self.op.gradients(other, sparse=True), self.op.gradients(batch))

    def test_expanded_gradient(self, device: torch.device) -> None:
        """log_prob.sum().backward() hands down one number with strides 0."""
        batch = self.op.batch(USUAL, torch.float32).to(device)
        ones = replace(batch, grad=torch.ones_like(batch.grad))
        expanded = replace(batch, grad=torch.ones((), device=device).expand_as(batch.grad))
        assert expanded.grad.stride() == (0, 0)
        same_bits(self.op.gradients(expanded), self.op.gradients(ones))

    @pytest.mark.parametrize(
        ("case", "dtype"),
        # A sparse tensor without features has no elements.
        with_dtypes(case for case in CASES if case.in_features),
        ids=name_of,
    )
    def test_sparse_is_dense(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        """Bit for bit, each visited row once and no other."""
        batch = self.op.batch(case, dtype).to(device)
        dense, sparse = self.op.gradients(batch), self.op.gradients(batch, sparse=True)
        same_bits(sparse, dense)
        for grad in sparse[2:]:
            assert grad.is_sparse
            index = grad._indices().t().tolist()
            rows = [(t, row) for t, row in index]
            assert len(rows) == len(set(rows))
            assert set(rows) == batch.visited()
            assert len(grad._values()) == len(rows)

    def test_same_bits_for_every_run_and_number_of_threads(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            batch = self.op.batch(MANY, dtype)
            with threads(1):
                first = self.op.gradients(batch)
                same_bits(self.op.gradients(batch), first)
            for count in (2, 3):
                with threads(count):
                    same_bits(self.op.gradients(batch), first)
                    same_bits(self.op.gradients(batch, sparse=True), first)

    def test_rows_do_not_depend_on_each_other(
        self, device: torch.device, case: Case = USUAL
    ) -> None:
        """log_prob and grad_hidden of a row are the same bits in a batch of its own."""
        batch = self.op.batch(case, torch.float32).to(device)
        log_prob, grad_hidden, *_ = self.op.gradients(batch)
        for i in range(0, len(batch.target), 7):
            row = slice(i, i + 1)
            one = replace(
                batch, hidden=batch.hidden[row], target=batch.target[row], grad=batch.grad[row]
            )
            same_bits(self.op.gradients(one)[:2], [log_prob[row], grad_hidden[row]])

    def test_ignored_rows_count_nothing(self, device: torch.device) -> None:
        """Also where their contexts are NaN."""
        batch = self.op.batch(USUAL, torch.float32).to(device)
        expected, ignored = self.op.gradients(batch), batch.target == -1
        hidden = batch.hidden.masked_fill(ignored[:, None], torch.nan)
        assert ignored.any()
        for sparse in (False, True):
            same_bits(self.op.gradients(replace(batch, hidden=hidden), sparse=sparse), expected)

    def test_many_rows_do_not_depend_on_each_other(self) -> None:
        self.test_rows_do_not_depend_on_each_other(torch.device("cpu"), MANY)

    @pytest.mark.parametrize("case", [SMALL, WITHOUT_OPTIONS], ids=str)
    def test_gradcheck(self, case: Case, device: torch.device) -> None:
        batch = self.op.batch(case).to(device)
        leaves = [
            x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias) if x is not None
        ]

        def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return self.op.log_prob(replace(batch, hidden=hidden, weight=weight, bias=bias))

        assert torch.autograd.gradcheck(log_prob, leaves)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    def test_some_inputs_require_grad(
        self, wanted: tuple[int, ...], sparse: bool, device: torch.device
    ) -> None:
        batch = self.op.batch(USUAL, torch.float32).to(device)
        expected = self.op.gradients(batch)[1:]
        leaves = [batch.hidden.clone(), batch.weight.clone(), batch.bias.clone()]
        for i in wanted:
            leaves[i].requires_grad_()
        other = replace(batch, hidden=leaves[0], weight=leaves[1], bias=leaves[2])
        self.op.log_prob(other, sparse).backward(batch.grad)
        for i, leaf in enumerate(leaves):
            if i in wanted:
                same_bits([leaf.grad], [expected[i]])
            else:
                assert leaf.grad is None

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    @pytest.mark.parametrize("case", [USUAL, MANY, WITHOUT_SUBSET], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
    def test_what_is_not_wanted_is_not_computed(
        self, case: Case, dtype: torch.dtype, sparse: bool, device: torch.device
    ) -> None:
        """Of each set of wanted gradients the bits are the same, and the others are empty."""
        batch = self.op.batch(case, dtype).to(device)
        batch = replace(batch, grad=batch.grad.float())
        _, *saved = self.op.operator(*batch.arguments())
        saved = saved if saved[-1].numel() else saved[:-1]
        every = self.op.backward(batch, *saved, sparse=sparse)
        assert all(gradient.numel() for gradient in every[:3])
        for mask in MASKS:
            some = self.op.backward(batch, *saved, mask=mask, sparse=sparse)
            for got, expected, wanted in zip(some[:3], every[:3], mask, strict=True):
                assert torch.equal(got, expected if wanted else expected.flatten()[:0])
                assert got.dtype == dtype
            same_bits([*some[3:]], [*every[3:]])

    def test_a_mask_has_three_values(self, device: torch.device) -> None:
        batch = self.op.batch(USUAL, torch.float32).to(device)
        _, *saved = self.op.operator(*batch.arguments())
        saved = saved if saved[-1].numel() else saved[:-1]
        for mask in ((True,), (True,) * 4):
            with pytest.raises(RuntimeError, match=f"output_mask: expected 3 .* got {len(mask)}"):
                self.op.backward(batch, *saved, mask=mask)

    def test_frozen_weights_ask_for_no_gradient(
        self, monkeypatch: pytest.MonkeyPatch, device: torch.device
    ) -> None:
        batch = self.op.batch(USUAL, torch.float32).to(device)
        op = getattr(tree_op, f"_{self.op.name.removesuffix('_log_prob')}_op")
        backward, asked = op.backward, []

        def record(*arguments: Any) -> Any:
            asked.append((*map(bool, arguments[-2]), arguments[-1]))
            return backward(*arguments)

        monkeypatch.setattr(op, "backward", record)
        for name, *expected in (
            ("hidden", True, False, False, False),
            ("weight", False, True, False, True),
            ("bias", False, False, True, True),
        ):
            for sparse in (False, True):
                leaf = getattr(batch, name).clone().requires_grad_()
                self.op.log_prob(replace(batch, **{name: leaf}), sparse).backward(batch.grad)
                assert asked.pop() == (*expected[:3], sparse and expected[3])
                assert leaf.grad is not None

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    def test_no_grad(self, sparse: bool, device: torch.device) -> None:
        batch = self.op.batch(SMALL, torch.float32).to(device)
        batch.weight.requires_grad_()
        with torch.no_grad():
            assert not self.op.log_prob(batch, sparse).requires_grad
        with torch.inference_mode():
            assert torch.equal(
                self.op.log_prob(batch, sparse), self.op.log_prob(batch.map(Tensor.detach))
            )

    def test_score_is_not_differentiable(self, device: torch.device) -> None:
        batch = self.op.batch(SMALL).to(device)
        batch.weight.requires_grad_()
        log_prob, score = self.op.forward(*batch.arguments())
        assert log_prob.requires_grad
        assert not score.requires_grad

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    def test_second_derivative_raises(self, sparse: bool) -> None:
        batch = self.op.batch(SMALL).map(lambda x: x.requires_grad_())
        log_prob = self.op.log_prob(batch, sparse)
        (grad,) = torch.autograd.grad(log_prob.sum(), batch.hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="expected to be differentiated once"):
            grad.square().sum().backward()

    # torch's machinery

    def opcheck_backward(self, batch: Batch, masks: Iterable[tuple[bool, ...]]) -> None:
        score = self.op.forward(*batch.arguments())[1]
        arguments = (batch.grad, batch.hidden, batch.weight, *batch.tables(), score, None, None)
        backward = getattr(torch.ops.hstree, f"{self.op.name}_backward").default
        for mask in masks:
            for sparse in (False, True):
                torch.library.opcheck(backward, (*arguments, mask, sparse))

    @pytest.mark.slow
    def test_opcheck_of_every_mask(self) -> None:
        self.opcheck_backward(self.op.batch(SMALL, torch.float32), MASKS)

    @pytest.mark.parametrize("case", [SMALL, WITHOUT_OPTIONS], ids=str)
    def test_opcheck(self, case: Case, device: torch.device) -> None:
        batch = self.op.batch(case, torch.float32).to(device)
        self.opcheck_backward(batch, [(True, True, True), (True, False, True)])
        for x in (batch.hidden, batch.weight, batch.bias):
            if x is not None:
                x.requires_grad_()
        torch.library.opcheck(self.op.operator, batch.arguments())

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param(BACKEND, marks=pytest.mark.slow)]
    )
    def test_compile(self, device: torch.device, backend: str) -> None:
        """Forward and backward, for batches of two sizes."""
        torch._dynamo.reset()

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor, batch: Batch) -> Tensor:
            log_prob = self.op.log_prob(replace(batch, hidden=hidden * 2, weight=weight, bias=bias))
            return (log_prob * batch.grad).sum()

        def run(function: Any, rows: int) -> list[Tensor]:
            batch = self.op.batch(replace(USUAL, rows=rows), torch.float32).to(device)
            leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
            function(*leaves, batch).backward()
            return [leaf.grad for leaf in leaves]

        compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
        for rows in (29, 41):
            for got, expected in zip(run(compiled, rows), run(loss, rows), strict=True):
                torch.testing.assert_close(got, expected)

    @pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # in torch's own code
    def test_compile_sparse(self) -> None:
        """No sparse gradients in a graph: an error where one graph is asked for, else a break."""
        torch._dynamo.reset()
        batch = self.op.batch(SMALL, torch.float32)
        expected = self.op.gradients(batch, sparse=True)
        batch.weight.requires_grad_()

        def double(batch: Batch) -> Tensor:
            return self.op.log_prob(batch, sparse=True) * 2

        with pytest.raises(torch._dynamo.exc.Unsupported, match="pass sparse=False"):
            torch.compile(double, fullgraph=True, backend="eager")(batch)
        log_prob = torch.compile(double, backend="eager")(batch)
        log_prob.backward(batch.grad / 2)
        same_bits([log_prob.detach() / 2, batch.weight.grad], [expected[0], expected[2]])

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    def test_autocast(
        self, sparse: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """hidden takes the weights' dtype; the weights stay as they are."""
        monkeypatch.setattr(tree_op, "has_tensor_cores", lambda _: False)
        batch = self.op.batch(USUAL, torch.float32).to(device)
        low = batch.hidden.bfloat16().requires_grad_()
        batch.weight.requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            log_prob = self.op.log_prob(replace(batch, hidden=low), sparse)
        log_prob.backward(batch.grad)
        assert log_prob.dtype == torch.float32
        plain = replace(batch, hidden=low.detach().float(), weight=batch.weight.detach())
        expected = self.op.gradients(plain, sparse)
        same_bits(
            [log_prob.detach(), low.grad, batch.weight.grad],
            [expected[0], expected[1].bfloat16(), expected[2]],
        )

    # Bad input

    def raises(self, batch: Batch, match: str) -> None:
        with pytest.raises(RuntimeError, match=rf"^hstree::{self.op.name}: {match}"):
            self.op.forward(*batch.arguments())

    def backward_raises(self, batch: Batch, score: Tensor, match: str) -> None:
        for sparse in (False, True):
            with pytest.raises(RuntimeError, match=rf"^hstree::{self.op.name}_backward: {match}"):
                self.op.backward(batch, score, sparse=sparse)

    BAD_SHAPES: ClassVar = [
        ("hidden", lambda x: x[0], r"hidden: expected shape \[N, D\], got \[19\]"),
        ("hidden", Tensor.int, "hidden: expected dtype float32, float64, bfloat16 or .*, got Int"),
        ("weight", lambda w: w[0], r"weight: expected shape \[T, ., S\], got \[\d+, 7\]"),
        ("weight", Tensor.double, "weight: expected the dtype of hidden, Float, got Double"),
        ("weight", lambda w: w[1:], r"weight: expected size 3 \(trees of leaf_position\)"),
        ("weight", lambda w: w[:, :, 1:], r"feature_index: expected size 6 \(features of weight\)"),
        ("target", lambda y: y[1:], r"target: expected size 29 \(rows of hidden\)"),
        ("target", lambda y: y[None], r"target: expected shape \[N\], got \[1, 29\]"),
        ("target", Tensor.int, "target: expected dtype Long, got Int"),
        ("offset", lambda o: o[0], r"{offset}: expected shape \[T, V \+ 1\], got \[24\]"),
        ("offset", lambda o: o[:2], r"{offset}: expected size 3 \(trees of leaf_position\)"),
        ("offset", lambda o: o[:, 1:], r"{offset}: expected size 24 \(classes of leaf_position"),
        ("offset", Tensor.int, "{offset}: expected dtype Long, got Int"),
        ("path", lambda p: p[None], r"{path}: expected shape "),
        ("path", Tensor.long, "{path}: expected dtype Int, got Long"),
        ("leaf_position", lambda p: p[0], r"leaf_position: expected shape \[T, V\], got \[23\]"),
        ("leaf_position", lambda p: p[:, 1:], r"{offset}: expected size 23 \(classes of leaf_p"),
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
    def test_bad_shape_or_dtype(
        self, name: str, value: Any, match: str, device: torch.device
    ) -> None:
        batch = self.op.batch(USUAL, torch.float32).to(device)
        score = self.op.forward(*batch.arguments())[1]
        match = match.format(offset=self.names["offset"], path=self.names["path"])
        bad = broken(batch, name, value)
        self.raises(bad, match)
        self.backward_raises(bad, score, match)

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
    def test_bad_bias(self, value: Any, match: str, device: torch.device) -> None:
        self.raises(broken(self.op.batch(USUAL, torch.float32).to(device), "bias", value), match)

    def test_bad_gradient_or_score(self, device: torch.device) -> None:
        batch = self.op.batch(USUAL, torch.float32).to(device)
        score = self.op.forward(*batch.arguments())[1]
        for value, match in (
            (lambda g: g[0], r"grad_log_prob: expected shape \[N, T\], got \[3\]"),
            (lambda g: g[1:], r"grad_log_prob: expected size 29 \(rows of hidden\)"),
            (lambda g: g[:, 1:], r"grad_log_prob: expected size 3 \(trees of leaf_position\)"),
            (Tensor.double, "grad_log_prob: expected dtype Float, got Double"),
        ):
            self.backward_raises(broken(batch, "grad", value), score, match)
        for value, match in (
            (score[0], r"score: expected shape \[N, T, max_"),
            (score[1:], r"score: expected size 29 \(rows of hidden\)"),
            (score[:, 1:], r"score: expected size 3 \(trees of leaf_position\)"),
            (score.double(), "score: expected dtype Float, got Double"),
        ):
            self.backward_raises(batch, value, match)

    def test_target_out_of_range(self) -> None:
        batch = self.op.batch(USUAL, torch.float32)
        score = self.op.forward(*batch.arguments())[1]
        for value in (23, 2**31, 2**62):
            bad = broken(batch, "target[3]", value)
            match = rf"target\[3\]: expected less than 23 \(the number of classes\), got {value}"
            self.raises(bad, match)
            self.backward_raises(bad, score, match)

    def test_offset_out_of_range(self) -> None:
        batch = self.op.batch(USUAL, torch.float32)
        score = self.op.forward(*batch.arguments())[1]
        c = int(batch.target[batch.target >= 0][0])
        end = len(batch.path)
        begin = int(batch.offset[1, c])
        for place, value in (
            (c, -1), (c + 1, begin - 1), (c + 1, -(2**40)), (c + 1, end + 1), (c, 2**62),
        ):  # fmt: skip
            bad = broken(batch, f"offset[1,{place}]", value)
            # Another class may come first in leaf order and have a path too long.
            bad = replace(bad, target=torch.full_like(bad.target, c))
            match = (
                rf"{self.names['offset']} of class {c}: expected an interval within \[0, {end}\]"
            )
            self.raises(bad, match)
            self.backward_raises(bad, score, match)

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
    def test_bad_feature_index(self, values: list[int], lowest: int, bad: int) -> None:
        batch = self.op.batch(USUAL, torch.float32)
        score = self.op.forward(*batch.arguments())[1]
        batch.feature_index[1] = torch.tensor(values)
        place = values.index(bad, 1) if values.count(bad) == 1 and bad != -1 else 0
        place = 3 if bad == 3 else place
        match = rf"feature_index\[1, {place}\]: expected a value in \[{lowest}, 19\).*got {bad}"
        self.raises(batch, match)
        self.backward_raises(batch, score, match)

    def test_longest(self) -> None:
        batch = self.op.batch(USUAL, torch.float32)
        score = self.op.forward(*batch.arguments())[1]
        longest = max(
            len(rows_of[y]) for rows_of in batch.rows_of for y in batch.target.tolist() if y >= 0
        )
        name = self.op.longest_name
        match = rf"{name}: the .* class \d+ ha.* got {name} = {longest - 1}"
        self.raises(replace(batch, longest=longest - 1), match)
        self.backward_raises(batch, score[:, :, : longest - 1], match)
        limit = self.limit
        for value in (-1, limit + 1, 2**40):
            self.raises(
                replace(batch, longest=value), f"{name}: expected 0 to {limit}, got {value}"
            )
        more, _ = self.op.forward(*replace(batch, longest=batch.longest + 3).arguments())
        assert torch.equal(more, self.op.log_prob(batch))

    def test_wrong_leaf_positions_only_change_the_order(self) -> None:
        """They may give wrong weight gradients, but never a stray access or another log_prob."""
        batch = self.op.batch(USUAL, torch.float32)
        expected = self.op.gradients(batch)
        random = torch.Generator().manual_seed(0)
        info = torch.iinfo(torch.int32)
        for low, high in ((0, 23), (info.min, info.max), (0, 1)):
            position = torch.randint(low, high, (3, 23), dtype=torch.int32, generator=random)
            got = self.op.gradients(replace(batch, leaf_position=position))
            assert torch.equal(got[0], expected[0])
            torch.testing.assert_close(got[1], expected[1])

    @pytest.mark.cuda
    def test_cuda_gives_nan_where_the_cpu_raises(self) -> None:
        """Values are not looked at on a GPU: a row out of range is NaN, without gradient."""
        batch = self.op.batch(USUAL, torch.float32).to(torch.device("cuda"))
        batch = replace(batch, target=batch.target.clamp(min=0))
        expected = self.op.gradients(batch)
        bad = broken(batch, "target[3]", 23)
        got = self.op.gradients(bad)
        assert got[0][3].isnan().all()
        assert not got[1][3].any()
        same_bits([got[0][4:], got[1][4:]], [expected[0][4:], expected[1][4:]])
        assert all(g.isfinite().all() for g in got[1:])

    @pytest.mark.cuda
    def test_devices_must_agree(self) -> None:
        batch = self.op.batch(USUAL, torch.float32)
        cuda = torch.device("cuda")
        for name in ("weight", "target", "offset", "path", "leaf_position", "feature_index"):
            bad = broken(batch.to(cuda), name, getattr(batch, name))
            self.raises(bad, rf"{self.names.get(name, name)}: expected device cuda")

    def test_corrupt_tables_never_crash(self, tmp_path: Path) -> None:
        """Random numbers in the tables, in a process of its own: an error or a result."""
        call = f"corrupt_tables({self.op.name!r})"
        refused, accepted = apart("ops.tree_op_suite", call, tmp_path)
        assert refused > 100
        assert accepted > 10

    @pytest.mark.slow
    @every_instruction_set
    def test_every_instruction_set(self, capability: str, tmp_path: Path) -> None:
        """The cases again with the vector code of each instruction set."""
        call = f"every_case({self.op.name!r})"
        results = with_instruction_set(capability, "ops.tree_op_suite", call, tmp_path)
        mine = self.op.gradients(self.op.batch(MANY, torch.float32))
        torch.testing.assert_close(results, mine, rtol=1e-4, atol=1e-4)
        is_best = CAPABILITIES.index(capability) == best_capability()
        if not is_best and "HSTREE_CPU_CAPABILITY" not in os.environ:
            # Sums in another order: that other code ran.
            assert not all(torch.equal(a, b) for a, b in zip(results, mine, strict=True))

    # A GPU alone

    @pytest.mark.cuda
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("subset", [64, 1024, 1152, 2048])
    def test_fast_paths(self, subset: int, dtype: torch.dtype) -> None:
        """Subsets of one to four chunks: rows long enough for every access."""
        case = Case("fast", rows=500, trees=3, classes=300, in_features=4096, subset=subset)
        batch = self.op.batch(case, dtype)
        generator = torch.Generator().manual_seed(0)
        for index in batch.feature_index:
            index.copy_(torch.randperm(4096, generator=generator)[:subset].sort().values)
        self.equals_cpu(replace(batch, hidden=batch.hidden / 8, weight=batch.weight / 8))

    def equals_cpu(self, batch: Batch) -> None:
        """Log-probabilities and gradients of a GPU are those of the CPU, to rounding."""
        expected = self.op.gradients(batch)
        got = self.op.gradients(batch.to(torch.device("cuda")))
        unit = torch.finfo(batch.hidden.dtype).eps
        torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-4, atol=1e-3)
        for on_gpu, on_cpu in zip(got[1:], expected[1:], strict=True):
            atol = unit * on_cpu.abs().max().item()
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2 * unit, atol=atol)

    @pytest.mark.cuda
    def test_gradients_at_full_size(self) -> None:
        """As many rows and features as a large model has; against the op of the CPU in float32."""
        case = Case("full size", rows=8192, trees=2, classes=20_000, in_features=4096, subset=1024)
        batch = self.op.batch(case, torch.float32)
        batch = replace(batch, hidden=batch.hidden / 32, weight=batch.weight / 32)
        batch = batch.map(Tensor.bfloat16)
        expected = self.op.gradients(batch.map(Tensor.float), sparse=True)
        got = self.op.gradients(batch.to(torch.device("cuda")), sparse=True)
        unit = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-4, atol=1e-3)
        assert torch.equal(got[2]._indices().cpu(), expected[2]._indices())
        values = [(got[1], expected[1])]
        # The CPU and a GPU list the biases in different orders.
        sparse = [
            (a.cpu().coalesce(), b.coalesce()) for a, b in zip(got[2:], expected[2:], strict=True)
        ]
        assert all(torch.equal(a._indices(), b._indices()) for a, b in sparse)
        values += [(a._values(), b._values()) for a, b in sparse]
        for on_gpu, on_cpu in values:
            atol = unit * on_cpu.abs().max().item()
            torch.testing.assert_close(on_gpu.cpu().float(), on_cpu, rtol=2 * unit, atol=atol)

    @pytest.mark.cuda
    def test_dense_step_in_a_cuda_graph(self) -> None:
        """Forward and dense backward never wait for the device, so a graph can hold them."""
        batch = self.op.batch(USUAL, torch.float32).to(torch.device("cuda"))
        expected = self.op.gradients(batch)
        leaves = [
            x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)
        ]
        static = replace(batch, hidden=leaves[0], weight=leaves[1], bias=leaves[2])

        def step() -> Tensor:
            log_prob = self.op.log_prob(static)
            log_prob.backward(batch.grad)
            return log_prob

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                for leaf in leaves:
                    leaf.grad = None
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            log_prob = step()
        for leaf in leaves:
            leaf.grad.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        same_bits([log_prob.detach(), *(leaf.grad for leaf in leaves)], expected)
