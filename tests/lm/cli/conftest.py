"""A small corpus and two finished runs on it, for all tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm.training.toy import small_config, write_corpus

from hstree.lm.train import train


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data")


@pytest.fixture(scope="session")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, ``trees`` and ``softmax``."""
    folder = tmp_path_factory.mktemp("runs")
    for head in ("trees", "softmax"):
        options = {"sparse": True} if head == "trees" else {}
        train(small_config(data, folder / head, head=head, **options))
    return folder
