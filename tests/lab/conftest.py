"""Runs that the commands of the laboratory read."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm.training.toy import small_config, write_corpus

from hstree.lm.train import train

RUNS = {
    "softmax": {"embedding_size": 6, "context_size": 6, "tied": True},
    "mos": {},
    "plif": {},
    "trees": {"n_trees": 2, "clusters": 4},
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, and a finished run of each head of ``RUNS``."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data")
    for head, options in RUNS.items():
        train(small_config(data, folder / head, head=head, epochs=1, **options))
    return folder


@pytest.fixture
def runs(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the working folder."""
    monkeypatch.chdir(trained)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    return trained
