"""The loss over a text against one stream after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hstree.heads import Softmax
from hstree.lm.data import Streams
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.train import evaluate

V = 11


@pytest.mark.parametrize("length", [5, 128])
def test_every_target_counts_once(length: int) -> None:
    torch.manual_seed(0)
    model = LanguageModel(AWDLSTM(V, 5, 7, 2, dropout=0.4, weight_dropout=0.5), Softmax(7, V))
    tokens = torch.randint(V, (53,)).numpy()
    streams = Streams(tokens, 4)
    inputs, targets = streams.window(0, len(streams))
    model.train()
    loss = evaluate(model, tokens, 4, length=length)
    assert model.training
    model.eval()
    total, count = 0.0, 0
    for stream in range(4):
        keep = targets[:, stream] != -100
        hidden, _ = model.hidden(inputs[keep, stream, None])
        log_prob = model.head.log_prob(hidden[:, 0])
        total -= log_prob.gather(1, targets[keep, stream, None]).sum().item()
        count += int(keep.sum())
    assert count == 52
    assert loss == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("length", [3, 128])
def test_a_part_is_the_beginning_of_every_stream(length: int) -> None:
    """Its targets have the loss that they have in the whole, and lie in all of the text."""
    torch.manual_seed(0)
    model = LanguageModel(AWDLSTM(V, 5, 7), Softmax(7, V)).eval()
    tokens = torch.randint(V, (53,)).numpy()
    inputs, targets = Streams(tokens, 4).window(0, 13)
    hidden, _ = model.hidden(inputs)
    log_prob = model.head.log_prob(hidden.flatten(0, 1)).view(13, 4, V)
    loss = -log_prob.gather(2, targets[..., None])[..., 0]
    for n_targets, steps in ((1, 1), (4, 1), (5, 2), (19, 5), (20, 5), (49, 13), (52, 13)):
        part = evaluate(model, tokens, 4, length=length, n_targets=n_targets)
        assert part == pytest.approx(loss[:steps].mean().item(), rel=1e-5)
    assert evaluate(model, tokens, 4, n_targets=10**9) == evaluate(model, tokens, 4)
    with pytest.raises(ValueError, match="n_targets: expected a whole number of at least 1, got 0"):
        evaluate(model, tokens, 4, n_targets=0)


def test_an_error_leaves_the_mode() -> None:
    model = LanguageModel(AWDLSTM(V, 5, 7), Softmax(7, V)).train()
    tokens = np.array([0, 1, 2, V])
    with pytest.raises(ValueError, match="target"):
        evaluate(model, tokens, 1)
    assert model.training
