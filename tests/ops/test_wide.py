"""The wide op: torch.ops.hstree.wide_log_prob, its backward and its sparse backward."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from hstree.ops import wide_log_prob
from ops.cases import WIDE, Case
from ops.tree_op_suite import USUAL, TreeOpSuite


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
        input = batch.input.clone().requires_grad_()
        loss = F.cross_entropy(
            F.linear(input, leaves[0], leaves[1]),
            order[batch.target.clamp(min=0)].masked_fill(batch.target < 0, -100),
            reduction="none",
        )
        loss.backward(-batch.grad[:, 0])
        torch.testing.assert_close(log_prob[:, 0], -loss.detach())
        for got, leaf in zip(grads, (input, *leaves), strict=True):
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
