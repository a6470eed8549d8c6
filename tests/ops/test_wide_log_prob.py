"""The wide op: torch.ops.hstree.wide_log_prob, its backward and its sparse backward."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from hstree.ops import wide_log_prob
from ops.against_reference import check_batch
from ops.cases import BLOCKS, WIDE, Batch, Case, threads
from ops.tree_op_suite import USUAL, TreeOpSuite, same_bits

BIG = Case("a gradient above 1 MiB", rows=700, trees=2, classes=900, in_features=210, widest=30)

FOREST = Case("many outermost nodes", rows=300, trees=2, classes=700, in_features=130, widest=90,
              ignored=0.1, scale=0.3)  # fmt: skip


def without_root(batch: Batch) -> Batch:
    """The batch with the root's decision left out of every path."""
    offset = batch.offset.clone()
    kept = []
    for t, begins in enumerate(batch.offset.tolist()):
        for c, (begin, end) in enumerate(itertools.pairwise(begins)):
            offset[t, c] = len(kept)
            kept += batch.path[begin + 1 : end].tolist()
        offset[t, -1] = len(kept)
    widths = batch.path[batch.offset[:, 0], 1].tolist()
    rows_of = [[rows[n:] for rows in tree] for tree, n in zip(batch.rows_of, widths, strict=True)]
    path = torch.tensor(kept, dtype=torch.int32)
    return replace(batch, offset=offset, path=path, rows_of=rows_of)


class TestWide(TreeOpSuite):
    op = WIDE
    names: ClassVar = {"offset": "wide_offset", "path": "wide_path"}
    limit = 2**20

    def test_literal_values(self, device: torch.device) -> None:
        """The tree ((0, 1, 2), 3, 4): P = (1/2, 1/4, 1/4) at the root, (1/8, 1/8, 6/8) below."""
        weight = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 6.0]], device=device).log().unsqueeze(2)
        below = [[0, 3, 0], [3, 3, 0], [0, 3, 0], [3, 3, 1], [0, 3, 0], [3, 3, 2]]
        log_prob = wide_log_prob(
            torch.ones(6, 1, device=device),
            weight,
            None,
            torch.tensor([4, 2, -1, 0, 3, 1], device=device),
            torch.tensor([[0, 2, 4, 6, 7, 8]], device=device),
            torch.tensor([*below, [0, 3, 1], [0, 3, 2]], dtype=torch.int32, device=device),
            torch.arange(5, dtype=torch.int32, device=device)[None],
            max_width=6,
        )
        expected = torch.tensor([[1 / 4, 3 / 8, 1.0, 1 / 16, 1 / 4, 1 / 16]], device=device).t()
        torch.testing.assert_close(log_prob.exp(), expected)

    def test_one_node_is_cross_entropy(self, device: torch.device) -> None:
        """Values and gradients of F.cross_entropy(F.linear(...)) for a node over all classes."""
        case = Case("flat", rows=60, trees=1, classes=40, shape="flat", widest=40, ignored=0.1)
        batch = WIDE.batch(case).to(device)
        order = batch.leaf_position[0].long()  # the row of each class
        log_prob, *grads = WIDE.gradients(batch)
        leaves = [x[0].clone().requires_grad_() for x in (batch.weight, batch.bias)]
        hidden = batch.hidden.clone().requires_grad_()
        loss = F.cross_entropy(
            F.linear(hidden, leaves[0], leaves[1]),
            order[batch.target.clamp(min=0)].masked_fill(batch.target < 0, -100),
            reduction="none",
        )
        loss.backward(-batch.grad[:, 0])
        torch.testing.assert_close(log_prob[:, 0], -loss.detach())
        for got, leaf in zip(grads, (hidden, *leaves), strict=True):
            torch.testing.assert_close(got.view(leaf.shape), leaf.grad)

    @pytest.mark.parametrize(
        ("node", "got"),
        [
            ((-1, 2, 0), r"first_row -1, width 2, child 0"),
            ((2**31 - 1, 2**31 - 1, 0), r"first_row 2147483647, width 2147483647, child 0"),
            ((0, 0, 0), "first_row 0, width 0, child 0"),
            ((0, -1, 0), "first_row 0, width -1, child 0"),
            ((0, 2, 2), "first_row 0, width 2, child 2"),
            ((0, 2, -1), "first_row 0, width 2, child -1"),
            ((0, 10**6, 0), "first_row 0, width 1000000, child 0"),
        ],
        ids=str,
    )
    def test_block_out_of_range(self, node: tuple[int, int, int], got: str) -> None:
        batch = WIDE.batch(USUAL, torch.float32)
        score = WIDE.forward(*batch.arguments())[1]
        c = int(batch.target[batch.target >= 0][0])
        e = int(batch.offset[0, c])
        bad = batch.path.clone()
        bad[e] = torch.tensor(node)
        match = rf"wide_path\[{e}\]: expected a child of a block of rows in \[0, \d+\), got \({got}"
        self.raises(replace(batch, path=bad), match)
        self.backward_raises(replace(batch, path=bad), score, match)

    def test_entries_have_three_numbers(self) -> None:
        batch = WIDE.batch(USUAL, torch.float32)
        bad = replace(batch, path=batch.path[:, :2])
        self.raises(bad, r"wide_path: expected size 3 \(first_row, width, child\) in dimension 1")

    @pytest.mark.parametrize("case", BLOCKS, ids=str)
    def test_blocks_have_the_same_bits(self, case: Case) -> None:
        """Dense or row-sparse, for any number of threads, and each row as in a batch of its own."""
        batch = WIDE.batch(case, torch.float32)
        with threads(1):
            first = WIDE.gradients(batch)
        for count in (1, 2, 3):
            with threads(count):
                same_bits(WIDE.gradients(batch), first)
                same_bits(WIDE.gradients(batch, sparse=True), first)
        for i in range(0, len(batch.target), 7):
            row = slice(i, i + 1)
            one = replace(
                batch, hidden=batch.hidden[row], target=batch.target[row], grad=batch.grad[row]
            )
            same_bits(WIDE.gradients(one)[:2], [first[0][row], first[1][row]])

    def test_threads_share_nodes_where_those_are_many(self) -> None:
        batch = without_root(WIDE.batch(FOREST, torch.float32))
        nodes = batch.path[batch.offset[:, :-1][:, batch.target[batch.target >= 0]], 0]
        assert min(len(set(row.tolist())) for row in nodes) >= 3 * 16
        with threads(1):
            first = WIDE.gradients(batch)
        for count in (1, 2, 3):
            with threads(count):
                same_bits(WIDE.gradients(batch), first)
                same_bits(WIDE.gradients(batch, sparse=True), first)
        check_batch(WIDE, batch, torch.device("cpu"))

    def test_gradients_that_are_held_stay_as_they_are(self) -> None:
        """Memory is used again only after its gradient is gone."""
        batch = WIDE.batch(BIG, torch.float32)
        dense = WIDE.gradients(batch)
        doubled = replace(batch, grad=2 * batch.grad)
        expected = [dense[0], *(2 * grad for grad in dense[1:])]
        for _ in range(3):
            held = [WIDE.gradients(batch, sparse=True) for _ in range(3)]
            assert held[0][2]._values().nbytes > 2**20
            del held[1]
            other = WIDE.gradients(doubled, sparse=True)
            same_bits(held[0], dense)
            same_bits(held[1], dense)
            same_bits(other, expected)

    def test_an_only_child_is_certain(self, device: torch.device) -> None:
        weight = torch.randn(1, 1, 3, device=device).requires_grad_()
        log_prob = wide_log_prob(
            torch.randn(2, 3, device=device),
            weight,
            torch.randn(1, 1, device=device),
            torch.tensor([0, 0], device=device),
            torch.tensor([[0, 1]], device=device),
            torch.tensor([[0, 1, 0]], dtype=torch.int32, device=device),
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            max_width=1,
        )
        assert not log_prob.any()
        log_prob.sum().backward()
        assert not weight.grad.any()
