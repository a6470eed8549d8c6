"""hstree.optim.clip_grad_norm_ beside torch's of the same gradients, dense."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hstree.heads import TreeEnsemble
from hstree.optim import clip_grad_norm_
from hstree.trees import random_tree

NORMS = [1.0, 2.0, 3.0, math.inf]


class Model(nn.Module):
    """Gradients of every kind: dense, of trees, and of an embedding, whose rows repeat."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 6, sparse=True)
        self.body = nn.Linear(6, 8)
        trees = [random_tree(30, seed=seed) for seed in (1, 2)]
        self.head = TreeEnsemble(8, 30, trees, gate="context", sparse=True)
        nn.init.normal_(self.head.below.weight)
        self.unused = nn.Parameter(torch.ones(3))

    def backward(self, times: int) -> None:
        for _ in range(times):
            token, target = torch.randint(9, (40,)), torch.randint(30, (40,))
            self.head(self.body(self.embedding(token)), target).loss.backward()


def dense_copies(model: nn.Module) -> list[nn.Parameter]:
    copies = []
    for parameter in model.parameters():
        copied = nn.Parameter(parameter.detach().clone())
        if parameter.grad is not None:
            copied.grad = parameter.grad.to_dense().clone()
        copies.append(copied)
    return copies


@pytest.mark.parametrize("times", [1, 2], ids=["one pass", "two passes"])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_equals_torch_on_dense_gradients(max_norm: float, norm_type: float, times: int) -> None:
    model = Model()
    model.backward(times)
    assert {p.grad.is_sparse for p in model.parameters() if p.grad is not None} == {True, False}
    copies = dense_copies(model)
    got = clip_grad_norm_(model.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(copies, max_norm, norm_type)
    torch.testing.assert_close(got, expected)
    for parameter, copied in zip(model.parameters(), copies, strict=True):
        if copied.grad is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad.to_dense(), copied.grad)
    again = clip_grad_norm_(model.parameters(), math.inf, norm_type)
    assert float(again) == pytest.approx(min(max_norm, float(got)), rel=1e-4)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_dense_gradients_are_clipped_by_torch(foreach: bool | None) -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.ones(2, 5)).square().sum().backward()
    got = clip_grad_norm_(models[0].parameters(), 0.1, foreach=foreach)
    assert torch.equal(got, nn.utils.clip_grad_norm_(models[1].parameters(), 0.1, foreach=foreach))
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_one_parameter_and_none() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    assert float(clip_grad_norm_(embedding.weight, 1.0)) == 0.0
    embedding(torch.tensor([4, 4])).sum().backward()
    assert float(clip_grad_norm_(embedding.weight, 1.0)) == pytest.approx(math.sqrt(8))
    assert clip_grad_norm_([], 1.0) == 0


def test_gradient_without_rows() -> None:
    own = nn.Parameter(torch.ones(4, 3))
    own.grad = torch.zeros(4, 3).to_sparse(1)
    assert own.grad._nnz() == 0
    assert [float(clip_grad_norm_(own, 1.0, norm)) for norm in NORMS] == [0.0] * len(NORMS)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_that_is_not_finite(bad: float) -> None:
    embedding, bias = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2))
    (embedding(torch.tensor([1])) * bias).sum().backward()
    embedding.weight.grad._values()[0, 0] = bad
    before = bias.grad.clone()
    parameters = [bias, embedding.weight]
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert torch.equal(bias.grad, before)
    assert not clip_grad_norm_(parameters, 1.0).isfinite()
