"""Batches against a loop over the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hstree.lm.data import Streams

# 25 targets fill 5 streams of 5; 26 leave gaps in the last; 9 targets leave the last streams of 7
# and 8 without any; one stream; as many streams as targets.
SIZES = [(26, 5), (27, 5), (10, 7), (10, 8), (27, 1), (8, 7), (101, 10), (7, 4), (2, 1)]


def reference(tokens: np.ndarray, batch_size: int, ignore: int) -> tuple[np.ndarray, np.ndarray]:
    length = int(np.ceil((len(tokens) - 1) / batch_size))
    inputs = np.zeros((length, batch_size), np.int64)
    targets = np.full((length, batch_size), ignore)
    for position in range(len(tokens) - 1):
        stream, step = divmod(position, length)
        inputs[step, stream] = tokens[position]
        targets[step, stream] = tokens[position + 1]
    return inputs, targets


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
@pytest.mark.parametrize(("n_tokens", "batch_size"), SIZES)
def test_every_window_against_a_loop(n_tokens: int, batch_size: int, dtype: type) -> None:
    """Windows that may be changed, and consecutive ones, which cover the streams."""
    tokens = np.random.default_rng(n_tokens).integers(1, 1000, n_tokens).astype(dtype)
    inputs, targets = reference(tokens, batch_size, -7)
    streams = Streams(tokens, batch_size, ignore_index=-7)
    assert len(streams) == len(inputs)
    assert (streams.batch_size, streams.ignore_index) == (batch_size, -7)
    for length in (1, 2, 3, len(streams), 99):
        for start in range(len(streams)):
            window = streams.window(start, length)
            for found, wanted in zip(window, (inputs, targets), strict=True):
                assert found.dtype == torch.int64
                assert found.is_contiguous()
                assert np.array_equal(found.numpy(), wanted[start : start + length])
                found.zero_()
        for stop in (None, 1):
            pieces = [*streams.windows(length, stop)]
            assert all(len(read) == length for read, _ in pieces[:-1])
            for found, wanted in zip(zip(*pieces, strict=True), (inputs, targets), strict=True):
                assert np.array_equal(torch.cat(found).numpy(), wanted[:stop])


def test_memory_map_is_read_only_where_needed(tmp_path: Path) -> None:
    """A sparse file of 40 GB, of which a window of 20 x 70 tokens is there to read."""
    n_tokens, batch_size, start = 10**10 + 7, 20, 12345
    length = -(-(n_tokens - 1) // batch_size)
    written = np.random.default_rng(0).integers(1, 1000, (batch_size, 71), dtype=np.int32)
    with (tmp_path / "tokens").open("wb") as file:
        file.truncate(4 * n_tokens)
        for stream, row in enumerate(written):
            file.seek(4 * (stream * length + start))
            file.write(row.tobytes())
    tokens = np.memmap(tmp_path / "tokens", np.int32, mode="r")
    streams = Streams(tokens, batch_size)
    inputs, targets = streams.window(start, 70)
    assert np.array_equal(inputs.numpy(), written[:, :-1].T)
    assert np.array_equal(targets.numpy(), written[:, 1:].T)
    assert streams.window(len(streams) - 1, 70)[1][0, -1] == -100


def test_bad_values() -> None:
    for tokens, batch_size, message in [
        (np.arange(5), 5, "expected at least 6 tokens for a batch size of 5, got 5"),
        ([], 1, "expected at least 2 tokens for a batch size of 1, got 0"),
        (np.arange(5), 0, "batch_size: expected a whole number of at least 1, got 0"),
        (np.zeros(9), 2, r"tokens: expected integers .* got float64 of shape \(9,"),
        (np.zeros((3, 3), np.int64), 2, r"one dimension, got int64 of shape \(3, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            Streams(tokens, batch_size)
    streams = Streams(np.arange(9), 2)
    for length in (0, -1):
        message = f"length: expected a whole number of at least 1, got {length}"
        with pytest.raises(ValueError, match=message):
            streams.windows(length)
        with pytest.raises(ValueError, match=message):
            streams.window(0, length)
    for start in (-1, 4):
        with pytest.raises(ValueError, match=f"start: .* from 0 to 3, got {start}"):
            streams.window(start, 2)
