"""Small models, which are plain by design, are deferred here, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import hstree.deferred
from hstree.deferred import Source


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Trainers collect garbage at their end. Without what was imported, it takes no time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of any size are deferred; the result has an entry, their rows, for logits that were
    computed."""
    found: list[int] = []
    compute = Source.compute

    def count(self: Source) -> object:
        if self.value is None:
            found.append(self.hidden.shape[:-1].numel())
        return compute(self)

    monkeypatch.setattr(Source, "compute", count)
    monkeypatch.setattr(hstree.deferred, "LEAST", 0)
    return found
