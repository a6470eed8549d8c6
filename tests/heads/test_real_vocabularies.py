"""Heads from counts that have the zeros of real vocabularies: rows without a token, tokens that no
text has, and texts that are small for their vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

import hstree
from hstree.heads.base import Head

D = 16
Counts = npt.NDArray[np.int64]


def zipf(n_classes: int, n_seen: int, rows: npt.ArrayLike) -> Counts:
    """Counts from 1 up for ``n_seen`` of the rows, in random order, and 0 for all others."""
    rng = np.random.default_rng(0)
    counts = np.zeros(n_classes, np.int64)
    rank = np.arange(1, n_seen + 1)
    counts[rng.choice(rows, n_seen, replace=False)] = np.maximum(3 * n_seen // rank, 1)
    return counts


def kokoro() -> Counts:
    """config.json of kokoro-onnx 0.6.1: 178 rows, 114 symbols, row 0 free and the last one not."""
    counts = zipf(178, 114, np.arange(1, 178))
    counts[177] = max(counts[177], 1)
    return counts


def mistral() -> Counts:
    """SentencePiece model v3 of mistral-common 1.13.1: V = 32,768. The first 771 rows hold <unk>
    and control pieces, then come 256 for bytes, 140 of which no text has."""
    return zipf(32_768, 19_000, np.arange(771 + 140, 32_768))


def cl100k() -> Counts:
    """cl100k_base of tiktoken 0.14.0: n_vocab = 100,277, tokens end before row 100,256. A text of
    50,000 tokens (the help topics of Python 3.11) has 4% of them."""
    return zipf(100_277, 4_400, np.arange(100_256))


def short() -> Counts:
    """The first 4,096 rows of :func:`mistral`."""
    return zipf(4096, 2400, np.arange(771 + 140, 4096))


def text(counts: Counts) -> Counts:
    """Tokens with these counts, in random order."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))


Vocabulary = Callable[[], Counts]
VOCABULARIES: list[Vocabulary] = [kokoro, mistral, cl100k]
HEADS: dict[str, Callable[[Counts], Head]] = {
    "trees": lambda counts: hstree.TreeEnsemble.from_counts(D, counts),
    "paths": lambda counts: hstree.TreeEnsemble.from_counts(D, counts, binary=True, n_trees=2),
    "forest": lambda counts: hstree.ForestSoftmax(D, len(counts), n_trees=2, frequencies=counts),
    "sampled": lambda counts: hstree.SampledSoftmax(D, len(counts), frequencies=counts),
    "adaptive": lambda counts: hstree.AdaptiveSoftmax(D, len(counts), frequencies=counts),
}
OF_TEXT: dict[str, Callable[[Counts], Head]] = {
    "trees of a text": lambda counts: hstree.TreeEnsemble.from_tokens(
        D, len(counts), text(counts), n_trees=2
    ),
    "paths of a text": lambda counts: hstree.TreeEnsemble.from_tokens(
        D, len(counts), text(counts), n_trees=2, binary=True
    ),
    "forest of a text": lambda counts: hstree.ForestSoftmax.from_tokens(
        D, len(counts), text(counts), n_trees=2
    ),
}
CASES = [(vocabulary, name) for vocabulary in VOCABULARIES for name in HEADS]
CASES += [(vocabulary, name) for vocabulary in (kokoro, short) for name in OF_TEXT]


@pytest.mark.parametrize(("vocabulary", "name"), CASES)
def test_classes_that_never_occur(vocabulary: Vocabulary, name: str) -> None:
    """A step on them is finite, and they keep some probability."""
    torch.manual_seed(0)
    counts = vocabulary()
    unseen = torch.from_numpy(np.flatnonzero(counts == 0))
    head = (HEADS | OF_TEXT)[name](counts)
    hidden = torch.randn(4, D)
    target = torch.stack([unseen[0], unseen[-1], torch.tensor(int(counts.argmax())), unseen[0]])
    loss = head(hidden, target).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in head.parameters())
    log_prob = head.eval().log_prob(hidden).double()
    assert torch.isfinite(log_prob).all()
    torch.testing.assert_close(log_prob.logsumexp(1), torch.zeros(4).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("vocabulary", "name"), [case for case in CASES if case[1] != "adaptive"])
def test_distribution_at_the_start(vocabulary: Vocabulary, name: str) -> None:
    """A class that never occurs is half as probable as the rarest other, and no top k has it."""
    counts = vocabulary()
    mass = np.where(counts > 0, counts, counts[counts > 0].min() / 2)
    head = (HEADS | OF_TEXT)[name](counts).eval()
    hidden = torch.zeros(1, D)  # the biases alone
    expected = torch.from_numpy(np.log(mass / mass.sum())).float()
    torch.testing.assert_close(head.log_prob(hidden)[0], expected, atol=2e-4, rtol=0)
    likely = head.topk(hidden, 100)[1][0].numpy()
    assert (counts[likely] > 0).all()


@pytest.mark.parametrize("rows", [100_261, 100_352])
def test_counts_of_another_size(rows: int) -> None:
    """Tokens of cl100k_base without its gaps, and n_vocab rounded up to 128: counts of n_vocab
    classes are refused, instead of being cut or padded."""
    with pytest.raises(ValueError, match=rf"frequencies: .* shape \({rows},\), got .*100277"):
        hstree.SampledSoftmax(D, rows, frequencies=cl100k())


@pytest.mark.parametrize("name", HEADS)
def test_more_classes_than_a_float16_counts(name: str) -> None:
    """log_softmax of torch 2.13.0 and of JAX 0.10.2 sums the exponentials in float16, so that
    65,520 equal logits have a loss of inf on a CPU (Qwen's vocabulary has 151,936 rows)."""
    n_classes = 80_000  # the last cluster of the adaptive head has 70,000
    head = HEADS[name](np.ones(n_classes, np.int64)).half()
    hidden = torch.zeros(2, D, dtype=torch.float16, requires_grad=True)
    target = torch.tensor([5, n_classes - 1])
    loss = head(hidden, target).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in head.parameters())
    log_prob = head.eval().log_prob(hidden)[[0, 1], target].float()
    expected = head.float().log_prob(hidden.float())[[0, 1], target]
    torch.testing.assert_close(log_prob, expected, atol=0.01, rtol=0)
    if name != "adaptive":  # which has no biases that the counts could set
        uniform = torch.full((2,), -np.log(n_classes)).float()
        torch.testing.assert_close(expected, uniform, atol=0.01, rtol=0)
