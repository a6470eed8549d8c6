"""The baselines of the contests compute the same functions, losses and counts as hstree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.baselines import bag_dot, gathered_dot, torch_mixture_loss, torch_plif
from benchmarks.contest import Size
from benchmarks.memory import peak_extra_bytes
from benchmarks.paths import draw_paths
from benchmarks.word2vec import corpus, pairs, visits
from hstree.heads import MixtureOfSoftmaxes
from hstree.ops import plif


@pytest.mark.parametrize("n_trees", [1, 8])
@pytest.mark.parametrize("dot", [gathered_dot, bag_dot])
def test_baselines_are_the_same_trees(n_trees: int, dot: Any) -> None:
    """The vectorized baseline trees compute the same log-probabilities and gradients as hstree."""
    paths = draw_paths(Size(30, 16, 50, 16), n_trees)
    for got, want in zip(paths.results(), paths.torch_results(torch.float32, dot), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_plif_by_gather_is_the_same_function() -> None:
    input = (4 * torch.randn(7, 50, dtype=torch.float64)).requires_grad_()
    slopes = torch.rand(30, dtype=torch.float64).add_(0.1).requires_grad_()
    grad = torch.randn(7, 50, dtype=torch.float64)
    results = []
    for function in (plif, torch_plif):
        output = function(input, slopes, 5.0)
        results.append((output, *torch.autograd.grad(output, (input, slopes), grad)))
    torch.testing.assert_close(*results)


def test_mixture_of_all_log_probabilities_is_the_same_loss() -> None:
    head = MixtureOfSoftmaxes(12, 40, components=3, latent_features=8).double()
    hidden, target = torch.randn(9, 12, dtype=torch.float64), torch.randint(40, (9,))
    latent, log_prior = head.components(head.encode(hidden))
    assert head.bias is not None
    losses = [
        head(hidden, target).loss,
        torch_mixture_loss(latent, log_prior, head.weight, head.bias, target),
    ]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, list(head.parameters())) for loss in losses]
    torch.testing.assert_close(*gradients)


def test_peak_memory_counts_what_a_step_frees_again() -> None:
    peak = peak_extra_bytes(lambda: float(torch.ones(2**25).sum()))
    if peak is None:
        pytest.skip("no /proc/self/clear_refs")
    assert abs(peak - 2**27) < 2**23  # the kernel's memory counts are not exact


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
