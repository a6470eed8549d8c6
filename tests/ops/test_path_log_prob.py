"""torch.ops.hstree.path_log_prob, its gradients, and torch.ops.hstree.forward."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import ClassVar

import pytest
import torch

from hstree.ops import path_log_prob
from ops.cases import DTYPES, PATH, Batch, Case, name_of
from ops.tree_op_suite import USUAL, TreeOpSuite, same_bits

SEVEN_TREES = Case("seven trees", trees=7, in_features=83, subset=41)
TWO_GROUPS = Case("more than is gathered at once", rows=1500, in_features=330, subset=300)


def only_tree(batch: Batch, t: int) -> Batch:
    """The batch with one of its trees."""
    one = slice(t, t + 1)
    tables = ("weight", "bias", "offset", "leaf_position", "feature_index")
    return replace(
        batch, grad=batch.grad[:, one], **{name: getattr(batch, name)[one] for name in tables}
    )


class TestPath(TreeOpSuite):
    op = PATH
    names: ClassVar = {"offset": "path_offset", "path": "path"}
    limit = 64

    def test_forward_is_another_name(self, device: torch.device) -> None:
        """With a schema of its own, which callers of torch.ops.hstree.forward rely on."""
        schema = str(torch.ops.hstree.forward.default._schema)
        assert schema == (
            "hstree::forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
            "Tensor path_offset, Tensor path, Tensor leaf_position, Tensor? feature_index, "
            "int max_depth) -> (Tensor log_prob, Tensor score)"
        )
        batch = self.op.batch(USUAL, torch.float32).to(device)
        batch.weight.requires_grad_()
        expected = self.op.operator(*batch.arguments())
        outputs = torch.ops.hstree.forward(*batch.arguments())
        same_bits(outputs, expected[:2])
        grads = [torch.autograd.grad(log_prob.sum(), batch.weight)[0]
                 for log_prob, *_ in (outputs, expected)]  # fmt: skip
        same_bits(grads[:1], grads[1:])

    def test_literal_values(self, device: torch.device) -> None:
        """The tree ((0, 1), 2): P(left at the root) = 3/4, P(left below) = 1/5."""
        weight = torch.tensor([[[math.log(3.0)], [-math.log(4.0)]]], device=device)
        path = [0 << 1 | 1, 1 << 1 | 1, 0 << 1 | 1, 1 << 1 | 0, 0 << 1 | 0]
        log_prob = path_log_prob(
            torch.ones(4, 1, device=device),
            weight,
            None,
            torch.tensor([2, 0, -7, 1], device=device),
            torch.tensor([[0, 2, 4, 5]], device=device),
            torch.tensor(path, dtype=torch.int32, device=device),
            torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device),
            max_depth=2,
        )
        expected = torch.tensor([[1 / 4], [3 / 4 * 1 / 5], [1.0], [3 / 4 * 4 / 5]], device=device)
        torch.testing.assert_close(log_prob.exp(), expected)

    @pytest.mark.parametrize("case", [SEVEN_TREES, TWO_GROUPS], ids=str)
    def test_trees_do_not_depend_on_each_other(self, case: Case) -> None:
        batch = self.op.batch(case, torch.float32)
        log_prob, grad_hidden, *others = self.op.gradients(batch)
        alone = [self.op.gradients(only_tree(batch, t)) for t in range(case.trees)]
        assert torch.equal(log_prob, torch.cat([one[0] for one in alone], 1))
        for n, grad in enumerate(others, 2):
            assert torch.equal(grad, torch.cat([one[n] for one in alone]))
        # Added up one after another.
        assert torch.equal(grad_hidden, reduce(torch.add, [one[1] for one in alone]))

    def test_empty_path_beside_another(self, device: torch.device) -> None:
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
    def test_log_sigmoid_over_its_whole_range(
        self, dtype: torch.dtype, device: torch.device
    ) -> None:
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
    def test_gradients_of_any_magnitude(self, exponent: int, device: torch.device) -> None:
        """CUDA's matrix instructions take factors of 8 bits: none is lost, whatever the upstream
        scale."""
        batch = PATH.batch(USUAL, torch.bfloat16).to(device)
        batch = replace(batch, grad=batch.grad.float())
        _, score, *_ = PATH.operator(*batch.arguments())
        plain = PATH.backward(batch, score)
        scaled = PATH.backward(replace(batch, grad=batch.grad * 2.0**exponent), score)
        for got, expected in zip(scaled[:3], plain[:3], strict=True):
            assert torch.equal(got, expected * 2.0**exponent)

    def test_infinite_and_nan_scores(self, device: torch.device) -> None:
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

    def test_node_out_of_range(self) -> None:
        batch = PATH.batch(USUAL, torch.float32)
        score = PATH.forward(*batch.arguments())[1]
        nodes = batch.weight.shape[1]
        c = int(batch.target[batch.target >= 0][0])
        e = int(batch.offset[0, c])
        for entry in (nodes << 1, -1, -(2**31), 2**31 - 1):
            bad = batch.path.clone()
            bad[e] = entry
            match = rf"path\[{e}\]: expected a node in \[0, {nodes}\), got {entry >> 1}"
            self.raises(replace(batch, path=bad), match)
            self.backward_raises(replace(batch, path=bad), score, match)
