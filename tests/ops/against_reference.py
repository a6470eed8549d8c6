"""The path op against its reference in float64, element by element."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.bounds import Checked, close
from ops.cases import PATH, Batch, Case, Saved, filled_memory

CPU = torch.device("cpu")


def slopes(batch: Batch) -> Tensor:
    """Derivatives of log_prob by the score of each node, [N, T, M]: those by the biases, of each
    row alone."""
    shape = batch.weight.shape[:2]
    result = batch.weight.new_zeros(len(batch.hidden), *shape)
    for i in range(len(batch.hidden)):
        bias = torch.zeros(shape, dtype=torch.float64) if batch.bias is None else batch.bias
        bias = bias.clone().requires_grad_()
        row = slice(i, i + 1)
        one = replace(batch, hidden=batch.hidden[row], target=batch.target[row], bias=bias)
        log_prob = PATH.reference(*one.arguments())[0]
        if log_prob.requires_grad:
            (result[i],) = torch.autograd.grad(log_prob.sum(), bias)
    return result


@dataclass
class Truth:
    """The results of a batch in float64, each with the magnitude of its terms."""

    log_prob: Checked
    score: Checked
    gradients: list[Checked]  # of hidden, weight and, if there is one, bias


def truth(batch: Batch) -> Truth:
    batch = batch.map(lambda x: x.detach().to(CPU, torch.float64)).to(CPU)
    leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias) if x is not None]
    log_prob, score = PATH.reference(*batch.arguments())
    if log_prob.requires_grad:
        log_prob.backward(batch.grad)
    values = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    with torch.no_grad():
        with torch.enable_grad():
            slope = slopes(batch).abs()
        slope = slope.clamp(min=2.0**-100).masked_fill(slope == 0, 0)  # float32 underflows
        hidden, weight = batch.hidden.abs(), dense_weight(batch).abs()
        of_log_prob, of_score = terms_of_scores(batch, log_prob, score, hidden, weight)
        by_row = batch.grad.abs().unsqueeze(2) * slope
        terms = [torch.einsum("ntm,tmd->nd", by_row, weight)]
        of_weight = torch.einsum("ntm,nd->tmd", by_row, hidden)
        if batch.feature_index is not None:
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


def dense_weight(batch: Batch) -> Tensor:
    """The weight rows of each tree over all features, [T, M, D]."""
    if batch.feature_index is None:
        return batch.weight
    index = batch.feature_index.long().unsqueeze(1).expand_as(batch.weight)
    shape = (*batch.weight.shape[:2], batch.hidden.shape[1])
    return batch.weight.new_zeros(shape).scatter(2, index, batch.weight)


def terms_of_scores(
    batch: Batch, log_prob: Tensor, score: Tensor, hidden: Tensor, weight: Tensor
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
            of_score[i, t, : len(rows)] = terms
            of_log_prob[i, t] = len(rows) * terms.max() + log_prob[i, t].abs()
    return of_log_prob, of_score


def check_forward(batch: Batch, true: Truth, log_prob: Tensor, score: Tensor) -> None:
    unit = torch.finfo(score.dtype).eps / 2
    terms = batch.weight.shape[-1]
    given = score.cpu().double().numpy()
    # What is beyond the nodes on a path is not initialized.
    given[true.score.terms == 0] = 0
    close("score", given, true.score, terms, unit, 0.0, 0.0)
    got = log_prob.cpu().double().numpy()
    close("log_prob", got, true.log_prob, terms + batch.max_depth, unit, 0.0, 0.0)


def check_gradients(batch: Batch, true: Truth, gradients: tuple[Tensor, ...]) -> None:
    """Of the true scores, rounded."""
    sums = torch.promote_types(batch.hidden.dtype, torch.float32)
    unit = torch.finfo(sums).eps / 2
    trees, rows = len(batch.leaf_position), len(batch.target)
    terms = max(trees * batch.max_depth, rows)
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


def check(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check_batch(PATH.batch(case, dtype), device)


def check_batch(batch: Batch, device: torch.device) -> None:
    """log_prob, score and every gradient. Of the vectors of ignored rows, which are NaN, nothing
    may go anywhere."""
    true = truth(batch)
    batch = replace(batch, hidden=batch.hidden.masked_fill(batch.target[:, None] < 0, torch.nan))
    given = batch.to(device)
    with filled_memory() if device == CPU else nullcontext():
        log_prob, *saved = PATH.operator(*given.arguments())
        score, *others = saved
        sums = torch.promote_types(batch.hidden.dtype, torch.float32)
        assert log_prob.dtype == score.dtype == sums
        check_forward(batch, true, log_prob, score)
        rounded: Saved = (torch.from_numpy(true.score.value).to(device, sums), *others)
        grad = replace(given, grad=given.grad.to(sums))
        check_gradients(batch, true, PATH.backward(grad, rounded))
        # The public function is these ops.
        own = PATH.backward(grad, saved)
        for a, b in zip(PATH.gradients(given), (log_prob, *own), strict=False):
            assert torch.equal(a, b)
    ignored = given.target < 0
    assert not log_prob[ignored].any()
    assert not own[0][ignored].any()
