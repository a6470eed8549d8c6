"""Node visits of skip-gram with hierarchical softmax against gensim and fastText, on one core.

pip install -r tools/extra-benchmarks.txt
pytest benchmarks/test_word2vec.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import numpy as np
import pytest

from benchmarks.contest import TINY, Size, contest
from benchmarks.registry import CONTESTS
from benchmarks.word2vec import LIBRARIES, WORD2VEC_SIZES, corpus, pairs, visits


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("size", WORD2VEC_SIZES, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_word2vec(benchmark: Any, short: bool, library: str, size: Size) -> None:
    try:
        with warnings.catch_warnings():
            importlib.import_module(library)
    except ImportError as error:
        pytest.skip(f"{library}: {error}; pip install -r tools/extra-benchmarks.txt")
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("threads cannot be kept on one core here")
    name = f"{library}, D = {size.features}"
    size, rounds = (TINY, 1) if short else (size, 3)
    benchmark.group = f"{name} (cpu)"
    contest(benchmark, CONTESTS[name], size, "cpu", rounds)


def test_every_word_predicts_its_neighbours() -> None:
    lines = [np.array([3, 0, 1]), np.array([2, 3])]
    assert pairs(lines).tolist() == [[3, 0], [0, 3], [0, 1], [1, 0], [2, 3], [3, 2]]


def test_visits_are_the_nodes_on_the_paths_of_predicted_words() -> None:
    # Counts 1, 1, 2, 4 give codes of length 3, 3, 2, 1.
    lines = [np.array([3, 3, 2, 3, 3]), np.array([0, 2]), np.array([1])]
    predicted = [3, 3, 2, 3, 3, 3, 2, 3, 0, 2]  # words inside a line count twice
    lengths = {0: 3, 1: 3, 2: 2, 3: 1}
    assert visits(lines) == sum(lengths[word] for word in predicted)


def test_corpus_has_every_word() -> None:
    words = np.concatenate(corpus(50))
    assert len(words) == 550
    assert set(words) == set(range(50))
