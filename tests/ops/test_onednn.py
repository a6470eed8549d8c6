"""Products by oneDNN against float64, for factors of every layout, and where they are used."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hstree
from hstree import _numerics

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


LAYOUTS = "rows", "columns", "rows with gaps", "columns with gaps"


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The matrix, its numbers by rows or by columns, or with gaps between the rows or columns."""
    if layout.startswith("columns"):
        return laid_out(matrix.t(), layout.replace("columns", "rows")).t()
    gap = 5 if layout.endswith("gaps") else 0
    wide = torch.full((len(matrix), matrix.shape[1] + gap), torch.nan)
    wide[:, : matrix.shape[1]] = matrix
    return wide[:, : matrix.shape[1]]


@pytest.mark.parametrize("shape", [(300, 40, 200), (200, 300, 40), (7, 600, 501)])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("panel", [2**19, 10_000])  # one, and several with a rest
def test_product(
    panel: int,
    first: str,
    second: str,
    shape: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_numerics, "ONEDNN_PANEL", panel)
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    exact = a.double() @ b.double()
    a, b = laid_out(a, first), laid_out(b, second)
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
    close(_numerics.onednn_product(a, b).double(), exact)
    close(
        _numerics.onednn_product(a.expand(2, -1, -1), b.expand(2, -1, -1)).double(),
        exact.expand(2, -1, -1),
    )
    out = laid_out(torch.zeros(rows, columns), "rows with gaps")
    for addend in (torch.randn(columns), torch.randn(rows, 1)):
        _numerics.write_onednn_product(out, a, b, addend)
        close(out.double(), exact + addend.double())
    before = out.double()
    _numerics.write_onednn_product(out, a, b, out)
    close(out.double(), before + exact)


@pytest.fixture
def mkl_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numerics, "_beats_mkl", lambda: True)


@pytest.mark.usefixtures("mkl_is_slow")
def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(256, 128), torch.randn(128, 256)
    assert _numerics.onednn_is_faster(a, b)
    assert _numerics.onednn_is_faster(nn.Parameter(a), b.t().contiguous().t())
    assert not _numerics.onednn_is_faster(a[:16], b)  # too small
    assert not _numerics.onednn_is_faster(a.double(), b.double())
    assert not _numerics.onednn_is_faster(a.to("meta"), b.to("meta"))
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # torch.backends.mkldnn
    assert not _numerics.onednn_is_faster(a, b)


HEADS = {
    "softmax": lambda: hstree.Softmax(64, 520),
    "mos": lambda: hstree.MixtureOfSoftmaxes(64, 520, components=3),
    "forest": lambda: hstree.ForestSoftmax(64, 520, clusters=128),
    "sampled": lambda: hstree.SampledSoftmax(64, 520, negatives=300, distribution="uniform",
                                             in_batch=False),
}  # fmt: skip


@pytest.mark.usefixtures("mkl_is_slow")
@pytest.mark.parametrize("name", HEADS)
def test_heads_use_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of float64, in training and for log-probabilities of all classes."""
    monkeypatch.setattr(_numerics, "ONEDNN_LEAST", 2**10)
    calls = []
    product = _numerics._onednn
    monkeypatch.setattr(_numerics, "_onednn", lambda a, b: calls.append(a.shape) or product(a, b))
    torch.manual_seed(0)
    head, hidden, target = HEADS[name](), torch.randn(60, 64), torch.randint(520, (60,))
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    target[::7] = -100

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        copy = head.to(dtype)
        copy.zero_grad()
        context = hidden.to(dtype, copy=True).requires_grad_()
        torch.manual_seed(1)
        (copy(context, target).loss + copy.log_prob(context)[:, 3].sum()).backward()
        return [context.grad, *(p.grad.clone() for p in copy.parameters())]

    found = gradients(torch.float32)
    assert len(calls) >= 6  # scores, and gradients of both factors, twice
    calls.clear()
    expected = gradients(torch.float64)
    assert not calls
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("mkl_is_slow")
def test_derivatives_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of gradients, second derivatives and the transforms of torch.func."""
    monkeypatch.setattr(_numerics, "ONEDNN_LEAST", 2**10)
    head, hidden = hstree.Softmax(64, 520), torch.randn(60, 64, requires_grad=True)
    log_prob, by_row = head.log_prob(hidden), torch.randn(3, 60, 520)
    single = [torch.autograd.grad(log_prob, hidden, v, retain_graph=True)[0] for v in by_row]
    (batched,) = torch.autograd.grad(
        log_prob, hidden, by_row, is_grads_batched=True, retain_graph=True
    )
    torch.testing.assert_close(batched, torch.stack(single))

    def of_first(context: Tensor) -> Tensor:
        return head.log_prob(context)[:, 0].sum()

    def of_gradient(dtype: torch.dtype) -> Tensor:
        head.to(dtype)
        context = hidden.detach().to(dtype, copy=True).requires_grad_()
        (first,) = torch.autograd.grad(of_first(context), context, create_graph=True)
        torch.testing.assert_close(torch.func.grad(of_first)(context), first)
        return torch.autograd.grad(first.pow(2).sum(), context)[0].double()

    torch.testing.assert_close(of_gradient(torch.float32), of_gradient(torch.float64),
                               atol=1e-6, rtol=1e-3)  # fmt: skip
