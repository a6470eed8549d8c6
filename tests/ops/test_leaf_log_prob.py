"""The leaf op: torch.ops.hstree.leaf_log_prob, its backward and its sparse backward."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops import leaf_log_prob, tree_op
from ops.cases import (
    BLOCKS,
    CASES,
    LEAF,
    PANELS,
    Case,
    measures_memory,
    name_of,
    threads,
    with_dtypes,
)
from ops.tree_op_suite import USUAL, TreeOpSuite, broken, same_bits

# Scores above 1 MiB lie in pages of their own.
LARGE = Case(
    "many scores", rows=300, trees=2, classes=700, in_features=20, shape="flat", widest=700
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestLeaf(TreeOpSuite):
    op = LEAF
    names: ClassVar = {"offset": "group_offset", "path": "group", "feature_index": "leaf_class"}
    limit = 2**20

    def test_rows_of_panels_do_not_depend_on_each_other(self) -> None:
        self.test_rows_do_not_depend_on_each_other(torch.device("cpu"), PANELS)

    def test_literal_values(self, device: torch.device) -> None:
        """The trees ((0, 1), (2, 3, 4)) and (0, (2, 1), 3, 4), whose root is no group."""
        weight = torch.tensor([[1.0], [3.0], [1.0], [2.0], [5.0]], device=device).log()
        of_first = [[0, 2, 0], [0, 2, 1], [2, 3, 0], [2, 3, 1], [2, 3, 2]]
        log_prob = leaf_log_prob(
            torch.ones(6, 1, device=device),
            weight,
            torch.tensor([[0.0] * 5, [0.0, 0.0, 6.0, 0.0, 0.0]], device=device).log1p(),
            torch.tensor([0, 1, 2, 3, -1, 4], device=device),
            torch.tensor([[0, 1, 2, 3, 4, 5], [5, 5, 6, 7, 7, 7]], device=device),
            torch.tensor([*of_first, [1, 2, 1], [1, 2, 0]], dtype=torch.int32, device=device),
            torch.tensor([[0, 1, 2, 3, 4], [0, 2, 1, 3, 4]], dtype=torch.int32, device=device),
            torch.tensor([[0, 1, 2, 3, 4], [0, 2, 1, 3, 4]], dtype=torch.int32, device=device),
            max_width=3,
        )
        first = [1 / 4, 3 / 4, 1 / 8, 2 / 8, 1.0, 5 / 8]
        second = [1.0, 3 / 10, 7 / 10, 1.0, 1.0, 1.0]
        torch.testing.assert_close(log_prob.exp().t().tolist(), [first, second])

    @pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_autocast_with_tensor_cores(
        self,
        sparse: bool,
        dtype: torch.dtype,
        device: torch.device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """All arguments take the dtype of autocast, and gradients that of the arguments: bit for
        bit those of explicit casts."""
        monkeypatch.setattr(tree_op, "has_tensor_cores", lambda _: True)
        batch = LEAF.batch(USUAL, torch.float32).to(device)
        with torch.autocast(device.type, dtype):
            got = LEAF.gradients(batch, sparse)
        assert [x.dtype for x in got] == 4 * [torch.float32]
        assert [x.is_sparse for x in got] == [False, False, sparse, sparse]
        low = replace(
            batch, **{name: getattr(batch, name).to(dtype) for name in ("hidden", "weight", "bias")}
        )
        log_prob, *gradients = LEAF.gradients(low, sparse)
        same_bits(got, [log_prob, *(x.float() for x in gradients)])

    def test_one_group_is_cross_entropy(self, device: torch.device) -> None:
        """Values and gradients of F.cross_entropy(F.linear(...)), once for each tree."""
        case = Case("flat", rows=60, trees=2, classes=40, shape="flat", widest=40, ignored=0.1)
        batch = LEAF.batch(case).to(device)
        log_prob, *grads = LEAF.gradients(batch)
        hidden, weight, bias = leaves = [
            x.clone().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)
        ]
        target = batch.target.masked_fill(batch.target < 0, -100)
        losses = [
            F.cross_entropy(F.linear(hidden, weight, b), target, reduction="none") for b in bias
        ]
        loss = torch.stack(losses, 1)
        loss.backward(-batch.grad)
        torch.testing.assert_close(log_prob, -loss.detach())
        for got, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(got, leaf.grad)

    @pytest.mark.parametrize("case", [*BLOCKS, LARGE], ids=str)
    def test_blocks_have_the_same_bits(self, case: Case) -> None:
        """Dense or row-sparse, for any number of threads."""
        batch = LEAF.batch(case, torch.float32)
        with threads(1):
            first = LEAF.gradients(batch)
        for count in (1, 2, 3):
            with threads(count):
                same_bits(LEAF.gradients(batch), first)
                same_bits(LEAF.gradients(batch, sparse=True), first)

    @measures_memory
    @pytest.mark.parametrize("widest", [700, 70_000])
    def test_scores_hold_what_the_groups_need(self, widest: int) -> None:
        """Scores of more than 1 MiB and of more than 64 MiB: not initialized, and freed."""
        batch = LEAF.batch(replace(LARGE, shape="random", widest=60), torch.float32)
        expected = LEAF.gradients(batch)
        memory = resident_bytes()
        for _ in range(20):
            same_bits(LEAF.gradients(replace(batch, longest=widest)), expected)
        assert resident_bytes() - memory < 2**26
        score = LEAF.forward(*replace(batch, longest=widest).arguments())[1]
        assert score.nbytes > (2**26 if widest > 700 else 2**20)

    @pytest.mark.parametrize(
        ("case", "dtype"),
        with_dtypes(case for case in CASES if case.in_features),
        ids=name_of,
    )
    def test_sparse_is_dense(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        """Bit for bit: each visited class once, in increasing order, and each visited bias once."""
        batch = LEAF.batch(case, dtype).to(device)
        dense, sparse = LEAF.gradients(batch), LEAF.gradients(batch, sparse=True)
        same_bits(sparse, dense)
        weight, *bias = sparse[2:]
        assert weight.is_sparse
        assert weight._indices()[0].tolist() == sorted({c for _, c in batch.visited()})
        for grad in bias:
            pairs = list(map(tuple, grad._indices().t().tolist()))
            assert len(pairs) == len(set(pairs))
            assert set(pairs) == batch.visited()

    # A GPU alone

    @pytest.mark.cuda
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("features", [64, 1024, 1152, 2048])
    def test_fast_paths(self, features: int, dtype: torch.dtype) -> None:
        """Rows of one to eight chunks of columns; runs of one to four groups of rows."""
        case = Case("fast", rows=500, trees=3, classes=300, in_features=features, widest=150)
        batch = LEAF.batch(case, dtype)
        self.equals_cpu(replace(batch, hidden=batch.hidden / 8, weight=batch.weight / 8))

    # Bad input

    @pytest.mark.parametrize(
        ("name", "value", "match"),
        [
            ("hidden", lambda x: x[0], r"hidden: expected shape \[N, D\], got \[19\]"),
            ("weight", lambda w: w[None], r"weight: expected shape \[V, D\], got \[1, 23, 19\]"),
            ("weight", lambda w: w[1:], r"weight: expected size 23 \(classes of leaf_position\)"),
            ("weight", lambda w: w[:, 1:], r"weight: expected size 19 \(features of hidden\)"),
            ("offset", lambda o: o[:2], r"group_offset: expected size 3 \(trees of leaf_position"),
            ("path", lambda p: p[:, :2], r"group: expected size 3 \(first_row, width, child\)"),
            ("path", Tensor.long, "group: expected dtype Int, got Long"),
            ("feature_index", lambda i: i[0], r"leaf_class: expected shape \[T, V\], got \[23\]"),
            ("feature_index", lambda i: i[1:], r"leaf_class: expected size 3 \(trees of leaf_pos"),
            ("feature_index", lambda i: i[:, 1:], r"leaf_class: expected size 23 \(classes of le"),
            ("feature_index", Tensor.long, "leaf_class: expected dtype Int, got Long"),
        ],
        ids=lambda x: str(getattr(x, "__name__", x))[:40],
    )  # fmt: skip
    def test_bad_shape_or_dtype(
        self, name: str, value: Any, match: str, device: torch.device
    ) -> None:
        batch = LEAF.batch(USUAL, torch.float32).to(device)
        score = LEAF.forward(*batch.arguments())[1]
        bad = broken(batch, name, value)
        self.raises(bad, match)
        self.backward_raises(bad, score, match)

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            (lambda b: b[0], r"bias: expected shape \[T, V\]"),
            (lambda b: b[1:], r"bias: expected size 3 \(trees of leaf_position\)"),
            (lambda b: b[:, 1:], r"bias: expected size 23 \(rows of weight\)"),
            (Tensor.double, "bias: expected the dtype of weight, Float, got Double"),
        ],
        ids=["dim", "trees", "rows", "dtype"],
    )
    def test_bad_bias(self, value: Any, match: str, device: torch.device) -> None:
        self.raises(broken(LEAF.batch(USUAL, torch.float32).to(device), "bias", value), match)

    def test_bad_feature_index(self) -> None:
        """leaf_class out of range, in a group that a target visits."""
        batch = LEAF.batch(USUAL, torch.float32)
        score = LEAF.forward(*batch.arguments())[1]
        c = next(y for y in batch.target.tolist() if y >= 0 and batch.rows_of[1][y])
        first_leaf = int(batch.path[batch.offset[1, c], 0])
        for value in (-1, 23, 2**31 - 1):
            bad = broken(batch, f"feature_index[1,{first_leaf}]", value)
            match = rf"leaf_class: expected a class in \[0, 23\), got {value} at leaf {first_leaf}"
            self.raises(bad, match)
            self.backward_raises(bad, score, match)

    def test_group_out_of_range(self) -> None:
        batch = LEAF.batch(USUAL, torch.float32)
        score = LEAF.forward(*batch.arguments())[1]
        c = next(y for y in batch.target.tolist() if y >= 0 and batch.rows_of[0][y])
        e = int(batch.offset[0, c])
        for node in ([-1, 2, 0], [22, 2, 0], [0, 0, 0], [0, 2, 2], [0, 2, -1], [0, 10**6, 0]):
            path = batch.path.clone()
            path[e] = torch.tensor(node)
            match = rf"group\[{e}\]: expected a child of a block of rows in \[0, 23\), got"
            self.raises(replace(batch, path=path), match)
            self.backward_raises(replace(batch, path=path), score, match)
