"""torch.ops.hstree.screened_topk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.screened_topk import preview_rows, screened_topk_reference
from torch import Tensor

from hstree.ops import quantize_preview, screened_topk
from hstree.ops.screened_topk import Screened
from ops.apart import every_instruction_set, with_instruction_set
from ops.cases import threads

OP = torch.ops.hstree.screened_topk.default
CPU = torch.device("cpu")
# Rows, classes, features of the preview and of the contexts: whole blocks and groups, and none.
SHAPES = ((1, 37, 5, 3), (2, 256, 16, 19), (11, 403, 41, 70), (3, 1, 1, 1), (0, 20, 8, 4))
# Shape, n, k.
CASES = {
    "groups of several blocks, one row": ((1, 3000, 24, 5), 10, 10),
    "groups of one block, two rows": ((2, 1000, 33, 8), 30, 1),
    "more classes than blocks, four rows": ((4, 500, 70, 3), 100, 20),
    "tiles of rows, the last not full": ((11, 300, 9, 16), 5, 2),
    "more rows than at a time": ((67, 40, 4, 4), 3, 3),
    "several chunks": ((1, 5000, 5, 2), 700, 700),
    "a sort outside shared memory": ((1, 8400, 3, 2), 8300, 4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(
    shape: tuple[int, ...], bits: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Any]:
    """Arguments up to the bias."""
    rows, classes, features, in_features = shape
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random)

    preview, scale = quantize_preview(normal(classes, features), bits)
    offset = torch.full_like(scale, 1e3)  # what fills up the last block counts for nothing
    offset[:classes] = normal(classes)
    hidden, weight = normal(rows, in_features).to(dtype), normal(classes, in_features).to(dtype)
    query = 2 * normal(rows, features + 1)
    return [query, preview, scale, offset, hidden, weight, normal(classes).to(dtype)]


def on(device: torch.device, arguments: list[Any]) -> list[Any]:
    return [None if each is None else each.to(device) for each in arguments]


def check(found: Screened, arguments: list[Any], n: int, k: int, temperature: float) -> None:
    query, preview, scale, offset, hidden, weight, bias = arguments
    rows = preview_rows(preview, scale, len(weight), query.shape[1] - 1)
    previews, scores, log_rest, log_normalizer = screened_topk_reference(
        query, rows, offset, hidden, weight, bias, n, temperature
    )
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    found = Screened(*(each.cpu() for each in found))
    for got, want in zip(found[2:], (log_rest, log_normalizer, scores), strict=True):
        torch.testing.assert_close(got, want, **close)
    best = previews.topk(n).indices
    order = scores.gather(1, best).topk(k).indices
    torch.testing.assert_close(found.score, scores.gather(1, best).gather(1, order), **close)
    torch.testing.assert_close(found.score, scores.gather(1, found.classes), **close)
    assert (found.classes.sort(1).values.diff() > 0).all()


def check_all(device: torch.device = CPU) -> bool:
    """Every shape, one of them in every dtype, on this device or instruction set."""
    for shape in SHAPES:
        for bits in (4, 8):
            for dtype in DTYPES if shape == SHAPES[2] else DTYPES[:1]:
                arguments = draw(shape, bits, dtype)
                if bits == 8:
                    arguments[6] = None
                for n in sorted({1, shape[1] // 2 + 1, shape[1]}):
                    k = (n + 1) // 2
                    options: Any = {"temperature": 0.7, "all_scores": True}
                    found = screened_topk(*on(device, arguments), n, k, **options)
                    check(found, arguments, n, k, 0.7)
    for bits, number in ((4, 0), (4, 255), (8, -128), (8, 127)):  # no sum of 16 bits saturates
        arguments = draw((2, 40, 64, 8), bits)
        arguments[0][0, :-1], arguments[0][1, :-1] = 1.0, -1.0
        arguments[1].fill_(number)
        arguments[2].mul_(1e-3)
        found = screened_topk(*on(device, arguments), 7, 5, all_scores=True)
        check(found, arguments, 7, 5, 1.0)
    return True


@every_instruction_set
def test_equals_the_reference(capability: str, tmp_path: Path) -> None:
    assert with_instruction_set(capability, "ops.test_screened_topk", "check_all()", tmp_path)


def test_equals_the_reference_on_each_device(device: torch.device) -> None:
    check_all(device)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", CASES)
def test_larger_case_equals_the_reference(case: str, bits: int, device: torch.device) -> None:
    shape, n, k = CASES[case]
    arguments = draw(shape, bits)
    found = screened_topk(*on(device, arguments), n, k, all_scores=True)
    check(found, arguments, n, k, 1.0)


def test_misaligned_tables(device: torch.device) -> None:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)

    arguments = on(device, draw((5, 200, 20, 16), 4, torch.bfloat16))
    expected = screened_topk(*arguments, 9, 9, all_scores=True)
    found = screened_topk(*map(moved, arguments), 9, 9, all_scores=True)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_signs_of_zero_make_no_difference(device: torch.device) -> None:
    """Neither to previews nor to scores."""
    query, preview, scale, offset, hidden, weight, _ = on(device, draw((2, 100, 8, 1), 8))
    place = torch.arange(100, device=device)
    query.zero_()
    query[:, -1] = -0.0
    offset[:100] = torch.where(place % 3 > 0, 0.0, -0.0)
    weight[:] = torch.where(place % 2 > 0, 0.0, -0.0)[:, None]
    found = screened_topk(query, preview, 0 * scale, offset, hidden, weight, None, 40, 40)
    assert found.classes.tolist() == [list(range(40))] * 2


def test_a_score_that_is_nan_comes_first(device: torch.device) -> None:
    arguments = on(device, draw((2, 50, 8, 4), 8))
    expected = screened_topk(*arguments, 50, 50)
    arguments[5][[20, 30]] = torch.nan
    found = screened_topk(*arguments, 50, 50)
    assert found.classes[:, :2].tolist() == [[20, 30]] * 2
    assert found.score[:, :2].isnan().all()
    assert found.log_normalizer.isnan().all()
    for got, want in zip(found.classes[:, 2:], expected.classes, strict=True):
        assert got.tolist() == [v for v in want.tolist() if v not in (20, 30)]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_rows_are_near(bits: int) -> None:
    rows = torch.randn(21, 13)
    rows[3] = 0
    preview, scale = quantize_preview(rows, bits)
    error = (preview_rows(preview, scale, 21, 13) - rows).abs()
    assert (error <= rows.abs().amax(1, keepdim=True) / (2**bits - 2) * 1.0001).all()


def test_equal_previews_and_scores_come_by_number(device: torch.device) -> None:
    query, preview, scale, offset, hidden, weight, _ = on(device, draw((3, 200, 8, 4), 4))
    offset[:200] = 0
    tied = screened_topk(query, preview, 0 * scale, offset, hidden, 0 * weight, None, 50, 20)
    assert tied.classes.tolist() == [list(range(20))] * 3
    assert (tied.score == 0).all()


def test_same_bits_for_every_number_of_threads_and_rows() -> None:
    arguments = draw((19, 3000, 30, 12), 4)
    expected = screened_topk(*arguments, 100, 100, all_scores=True)
    for count in (1, 2, 3):
        with threads(count):
            for rows in (slice(None), slice(0, 1), slice(3, 10), slice(9, 19)):
                some = [arguments[0][rows], *arguments[1:4], arguments[4][rows], *arguments[5:]]
                found = screened_topk(*some, 100, 100, all_scores=True)
                for got, want in zip(found, expected, strict=True):
                    assert torch.equal(got, want[rows])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [2, -1])
def test_rows_that_are_not_finite(device: torch.device, value: float, place: int) -> None:
    arguments = on(device, draw((4, 50, 8, 4), 8))
    expected = OP(*arguments, 5, 3, 1.0, True)
    arguments[0][1, place] = value
    found = OP(*arguments, 5, 3, 1.0, True)
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])
        assert got[1].tolist() == [0, 1, 2] if i == 1 else got[1].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_features_are_as_zero(bits: int, device: torch.device) -> None:
    """127 divided by the largest of them overflows."""
    arguments = on(device, draw((2, 50, 8, 4), bits))
    arguments[0][0, :-1], arguments[0][1, :-1] = 0.0, 1e-37 * torch.randn(8).sign()
    arguments[0][1, -1], arguments[4][1] = arguments[0][0, -1], arguments[4][0]
    for result in OP(*arguments, 5, 3, 1.0, True):
        assert torch.equal(result[0], result[1])
        assert result.isfinite().all()


def test_impossible_classes_come_last(device: torch.device) -> None:
    arguments = on(device, draw((2, 50, 8, 4), 4))
    arguments[3][5:50] = -torch.inf
    arguments[2][7] = torch.nan
    found = screened_topk(*arguments, 5, 5)
    assert found.classes.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (found.log_rest == -torch.inf).all()
    assert screened_topk(*arguments, 6, 6).classes.sort(1).values[:, -1].tolist() == [5, 5]


def test_opcheck_and_no_derivative() -> None:
    arguments = draw((4, 50, 8, 4), 4)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OP, (*arguments, 5, 3, 1.0, True), test_utils=tests)
    arguments[-3].requires_grad_()  # hidden
    with pytest.raises(RuntimeError, match="hstree::screened_topk: not differentiable"):
        screened_topk(*arguments, 5, 3).score.sum().backward()


def test_wrong_arguments() -> None:
    arguments = draw((2, 50, 9, 4), 4)

    def refused(message: str, place: int | None = None, value: Any = None, **other: Any) -> None:
        changed = list(arguments)
        if place is not None:
            changed[place] = value
        with pytest.raises(RuntimeError, match=f"hstree::screened_topk: {message}"):
            screened_topk(*changed, **{"n": 5, "k": 3} | other)

    query, preview, scale, offset, hidden, weight, bias = arguments
    refused(r"query: expected shape \[N, R \+ 1\]", 0, query[0])
    refused(r"query: .* R of at least 1", 0, query[:, :1])
    refused("query: expected dtype Float", 0, query.double())
    refused("preview: expected dtype int8 or uint8", 1, preview.int())
    refused("preview: expected size 4 .16 rows", 1, preview[1:])
    refused("preview: expected size 2 .8 of R", 1, preview[:, 1:])
    refused("scale: expected size 64", 2, scale[1:])
    refused("offset: expected dtype Float", 3, offset.double())
    refused("hidden: expected size 2 .rows of query", 4, hidden[1:])
    refused("hidden: expected dtype float32, bfloat16 or float16", 4, hidden.double())
    refused("weight: expected dtype Float", 5, weight.bfloat16())
    refused("bias: expected size 50", 6, bias[1:])
    refused("n: expected 1 to 50", n=51)
    refused("k: expected 1 to 5", k=6)
    refused("temperature: expected a positive number", temperature=0.0)
