"""One launch of two processes serves the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.processes import launch


@pytest.fixture(scope="session")
def two() -> list[dict[str, Any]]:
    """What each of two processes returns for every scenario."""
    return launch(
        [
            "distributed.test_training",
            "distributed.test_meta",
            "distributed.test_deferred_logits",
        ]
    )
