"""The tree ops against their references in float64, element by element."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.bounds import Checked, close
from ops.cases import Batch, Case, TreeOpUnderTest, filled_memory

CPU = torch.device("cpu")


def slopes(op: TreeOpUnderTest, batch: Batch) -> Tensor:
    """Derivatives of log_prob by the score of each weight row, [N, T, M]: those by the biases, of
    each row alone."""
    trees, classes = batch.leaf_position.shape
    shape = (trees, classes if op.shared else batch.weight.shape[1])
    result = batch.weight.new_zeros(len(batch.hidden), *shape)
    for i in range(len(batch.hidden)):
        bias = torch.zeros(shape, dtype=torch.float64) if batch.bias is None else batch.bias
        bias = bias.clone().requires_grad_()
        row = slice(i, i + 1)
        one = replace(batch, hidden=batch.hidden[row], target=batch.target[row], bias=bias)
        log_prob = op.reference(*one.arguments())[0]
        if log_prob.requires_grad:
            (result[i],) = torch.autograd.grad(log_prob.sum(), bias)
    return result


@dataclass
class Truth:
    """The results of a batch in float64, each with the magnitude of its terms."""

    log_prob: Checked
    score: Checked
    gradients: list[Checked]  # of hidden, weight and, if there is one, bias


def truth(op: TreeOpUnderTest, batch: Batch) -> Truth:
    batch = batch.map(lambda x: x.detach().to(CPU, torch.float64)).to(CPU)
    leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias) if x is not None]
    log_prob, score = op.reference(*batch.arguments())
    if log_prob.requires_grad:
        log_prob.backward(batch.grad)
    values = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    with torch.no_grad():
        slope = slopes_of_terms(op, batch)
        hidden, weight = batch.hidden.abs(), dense_weight(op, batch).abs()
        of_log_prob, of_score = terms_of_scores(op, batch, log_prob, score, hidden, weight)
        by_row = batch.grad.abs().unsqueeze(2) * slope
        terms = [torch.einsum("ntm,tmd->nd", by_row, weight)]
        of_weight = torch.einsum("ntm,nd->tmd", by_row, hidden)
        if op.shared:
            of_weight = of_weight.sum(0)
        elif batch.feature_index is not None:
            index = batch.feature_index.long().unsqueeze(1).expand(-1, weight.shape[1], -1)
            of_weight = of_weight.gather(2, index)
        terms += [of_weight, by_row.sum(0)]

    def checked(value: Tensor, terms: Tensor) -> Checked:
        return Checked(value.detach().numpy(), terms.numpy())

    return Truth(
        checked(log_prob, of_log_prob),
        checked(score, of_score),
        [checked(value, of) for value, of in zip(values, terms, strict=False)],
    )


def slopes_of_terms(op: TreeOpUnderTest, batch: Batch) -> Tensor:
    """|slope|, or 1 + p for a chosen child, whose slope 1 - p may cancel."""
    with torch.enable_grad():
        slope = slopes(op, batch)
    terms = torch.where((slope > 0) & op.wide, 2 - slope, slope.abs())
    return terms.clamp(min=2.0**-100).masked_fill(slope == 0, 0)  # float32 underflows


def dense_weight(op: TreeOpUnderTest, batch: Batch) -> Tensor:
    """The weight rows of each tree over all features, [T, M, D]."""
    trees = len(batch.leaf_position)
    if op.shared:
        return batch.weight.expand(trees, -1, -1)
    if batch.feature_index is None:
        return batch.weight
    index = batch.feature_index.long().unsqueeze(1).expand_as(batch.weight)
    shape = (*batch.weight.shape[:2], batch.hidden.shape[1])
    return batch.weight.new_zeros(shape).scatter(2, index, batch.weight)


def terms_of_scores(
    op: TreeOpUnderTest,
    batch: Batch,
    log_prob: Tensor,
    score: Tensor,
    hidden: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Magnitudes of the terms of log_prob and score, from those of hidden and the dense weight."""
    of_rows = torch.einsum("nd,tmd->ntm", hidden, weight)
    if batch.bias is not None:
        of_rows = of_rows + batch.bias.abs()
    of_log_prob, of_score = torch.zeros_like(log_prob), torch.zeros_like(score)
    for i, y in enumerate(batch.target.tolist()):
        for t in range(len(batch.leaf_position) if y >= 0 else 0):
            rows = batch.rows_of[t][y]
            if not rows:
                continue
            terms = of_rows[i, t, rows]
            if op.wide:
                terms = 2 * terms.max() + score[i, t, : len(rows)].abs()
            nodes = batch.offset[t, y + 1] - batch.offset[t, y]
            of_score[i, t, : len(rows)] = terms
            of_log_prob[i, t] = nodes * terms.max() + log_prob[i, t].abs()
    return of_log_prob, of_score


def check_forward(batch: Batch, true: Truth, log_prob: Tensor, score: Tensor) -> None:
    unit = torch.finfo(score.dtype).eps / 2
    terms = batch.weight.shape[-1]
    given = score.cpu().double().numpy()
    # What is beyond the nodes on a path is not initialized.
    given[true.score.terms == 0] = 0
    close("score", given, true.score, terms, unit, 0.0, 0.0)
    got = log_prob.cpu().double().numpy()
    close("log_prob", got, true.log_prob, terms + batch.longest, unit, 0.0, 0.0)


def check_gradients(
    op: TreeOpUnderTest, batch: Batch, true: Truth, gradients: tuple[Tensor, ...]
) -> None:
    """Of the true scores, rounded."""
    sums = torch.promote_types(batch.hidden.dtype, torch.float32)
    unit = torch.finfo(sums).eps / 2
    trees, rows = len(batch.leaf_position), len(batch.target)
    terms = max(trees * batch.longest, rows * (trees if op.shared else 1))
    terms += abs(true.score.value).max(initial=0.0)
    names = ("grad_hidden", "grad_weight", "grad_bias")
    for name, gradient, checked in zip(names, gradients, true.gradients, strict=False):
        assert gradient.dtype == batch.hidden.dtype
        info = torch.finfo(gradient.dtype)
        # Of the factors of CUDA's matrix products, which are sums of two elements.
        of_terms = 2.0**-16 if gradient.dtype.itemsize == 2 and name != "grad_bias" else 0.0
        got = gradient.cpu().double().numpy()
        is_finite = abs(checked.value) < 0.99 * info.max  # float16 overflows
        some = Checked(checked.value[is_finite], checked.terms[is_finite])
        tiny = info.smallest_normal * info.eps / 2
        close(name, got[is_finite], some, terms, unit, info.eps / 2, tiny, of_terms)


def check(op: TreeOpUnderTest, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check_batch(op, op.batch(case, dtype), device)


def check_batch(op: TreeOpUnderTest, batch: Batch, device: torch.device) -> None:
    """log_prob, score and every gradient. Of the vectors of ignored rows, which are NaN, nothing
    may go anywhere."""
    true = truth(op, batch)
    batch = replace(batch, hidden=batch.hidden.masked_fill(batch.target[:, None] < 0, torch.nan))
    given = batch.to(device)
    with filled_memory() if device == CPU else nullcontext():
        log_prob, score, order, *plan = op.operator(*given.arguments())
        plan = [x if x.numel() else None for x in plan]
        sums = torch.promote_types(batch.hidden.dtype, torch.float32)
        assert log_prob.dtype == score.dtype == sums
        check_forward(batch, true, log_prob, score)
        rounded = torch.from_numpy(true.score.value).to(device, sums)
        grad = replace(given, grad=given.grad.to(sums))
        check_gradients(op, batch, true, op.backward(grad, rounded, order, *plan))
        # The public function is these ops.
        own = op.backward(grad, score, order, *plan)
        for a, b in zip(op.gradients(given), (log_prob, *own), strict=False):
            assert torch.equal(a, b)
    ignored = given.target < 0
    assert not log_prob[ignored].any()
    assert not own[0][ignored].any()
