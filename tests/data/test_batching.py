"""Batches against a loop over the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hstree.data import batchify, windows


# 25 targets fill 5 streams of 5; 26 leave gaps in the last; one stream; as many streams as targets.
@pytest.mark.parametrize(
    ("n_tokens", "batch_size"), [(26, 5), (27, 5), (27, 1), (8, 7), (101, 10), (7, 4)]
)
def test_batchify_against_a_loop(n_tokens: int, batch_size: int) -> None:
    tokens = np.random.default_rng(n_tokens).integers(1, 1000, n_tokens).astype(np.int32)
    inputs, targets = batchify(tokens, batch_size, ignore_index=-7)
    length = int(np.ceil((n_tokens - 1) / batch_size))
    assert inputs.shape == targets.shape == (length, batch_size)
    assert inputs.dtype == targets.dtype == torch.int64
    for stream in range(batch_size):
        for step in range(length):
            position = stream * length + step
            if position < n_tokens - 1:
                assert inputs[step, stream] == tokens[position]
                assert targets[step, stream] == tokens[position + 1]
            else:
                assert inputs[step, stream] == 0
                assert targets[step, stream] == -7


def test_every_token_but_the_first_is_a_target_once() -> None:
    tokens = np.arange(100, 223, dtype=np.int32)
    _, targets = batchify(tokens, 8)
    kept = targets[targets != -100]
    assert sorted(kept.tolist()) == tokens[1:].tolist()


@pytest.mark.parametrize("length", [1, 3, 5, 100])
def test_windows_cover_the_stream(length: int) -> None:
    inputs, targets = batchify(np.arange(60), 4)
    pieces = list(windows(inputs, targets, length))
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), inputs)
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), targets)
    assert all(len(piece[0]) == length for piece in pieces[:-1])


def test_too_few_tokens() -> None:
    with pytest.raises(ValueError, match=r"5 tokens are too few for a batch of 5 .* at least 6"):
        batchify(np.arange(5), 5)
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        batchify(np.arange(5), 0)
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        list(windows(torch.zeros(2, 2), torch.zeros(2, 2), 0))
