"""hstree.ops.mark_targets: after it a target is a class, -1 or V."""

from __future__ import annotations

import pytest
import torch

from hstree.ops import mark_targets


@pytest.mark.parametrize("ignore_index", [-100, -1, 2, 9])
def test_classes_and_ignored_rows(ignore_index: int) -> None:
    target = torch.tensor([3, ignore_index, 0, 4])
    assert mark_targets(target, 5, ignore_index).tolist() == [3, -1, 0, 4]
    assert mark_targets(target[:0], 5, ignore_index).shape == (0,)


@pytest.mark.parametrize("bad", [-1, -7, 5, 6, 2**40])
def test_what_is_no_class(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, or V where looking would cost a synchronisation or a second graph."""
    target = torch.tensor([3, bad, -100])
    with pytest.raises(ValueError, match=rf"target: expected values in \[0, 5\) .*, got {bad}"):
        mark_targets(target, 5, -100)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert mark_targets(target, 5, -100).tolist() == [3, 5, -1]


def test_dtypes() -> None:
    target = torch.tensor([3, 255, 0], dtype=torch.uint8)
    marked = mark_targets(target, 5, 255)
    assert marked.tolist() == [3, -1, 0]
    assert marked.dtype == torch.int64
    with pytest.raises(ValueError, match=r"expected values in .* or ignore_index -100, got 255"):
        mark_targets(target, 5, -100)  # not the 156 that it is in uint8
    for dtype in (torch.int32, torch.float32, torch.bool):
        with pytest.raises(ValueError, match=f"target: expected dtype torch.int64 .*, got {dtype}"):
            mark_targets(target.to(dtype), 5, -100)
    with pytest.raises(TypeError, match="classes: expected a tensor, got list"):
        mark_targets([3, 0], 5, -100, name="classes")  # type: ignore[arg-type]


def test_on_the_device(device: torch.device) -> None:
    target = torch.tensor([3, -100, 0], device=device)
    assert mark_targets(target, 5, -100).tolist() == [3, -1, 0]


def test_classes_alone_are_returned_as_they_are() -> None:
    """By which a head sees that no row is ignored."""
    target = torch.tensor([3, 0, 4])
    assert mark_targets(target, 5, -100) is target
    assert mark_targets(target, 5, 3) is not target
