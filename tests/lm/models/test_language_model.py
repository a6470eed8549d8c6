"""The language model against its parts, and the contexts of a text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hstree.heads import Softmax
from hstree.lm.model import AWDLSTM, LanguageModel, read_contexts, read_stream

V = 11


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(AWDLSTM(V, 5, 7, layers=2, dropout=0.4), Softmax(7, V)).eval()


def test_forward_is_backbone_and_head(model: LanguageModel) -> None:
    """In one window, and in two with the state between them."""
    tokens, targets = torch.randint(V, (2, 9, 3)).unbind()
    (log_prob, loss), state, read = model(tokens, targets)
    expected = model.backbone(tokens)
    torch.testing.assert_close(read, expected)
    torch.testing.assert_close(state, expected.state)
    output = model.head(expected.hidden, targets)
    torch.testing.assert_close(log_prob, output.output)
    torch.testing.assert_close(loss, output.loss)
    torch.testing.assert_close(model.hidden(tokens), (expected.hidden, expected.state))
    first = model(tokens[:4], targets[:4])
    second = model(tokens[4:], targets[4:], first.state)
    torch.testing.assert_close(torch.cat([first.head.output, second.head.output]), log_prob)
    torch.testing.assert_close(second.state, state)


def test_a_tied_weight_is_one_parameter_whose_rows_stay() -> None:
    """The dropout of words is of the input alone; the head reads what the others leave."""
    torch.manual_seed(6)
    backbone = AWDLSTM(V, 7, 7, dropout=0.3, dropout_embedding=0.5)
    model = LanguageModel(backbone, Softmax(7, V, embedding=backbone.embedding)).train()
    own, shared = (list(module.parameters()) for module in (model, backbone))
    assert sum(p.numel() for p in own) == sum(p.numel() for p in shared) + V
    tokens, targets = torch.randint(V, (2, 6, 3)).unbind()
    (log_prob, _), _, read = model(tokens, targets)
    logits = read.hidden @ backbone.embedding.weight.T + model.head.bias
    expected = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(log_prob, expected)


@pytest.mark.parametrize("length", [1, 4, 99])
def test_contexts_of_a_text(length: int, model: LanguageModel) -> None:
    """Those of one window, of a model that is in training mode before and after."""
    tokens = np.random.default_rng(0).integers(V, size=10).astype(np.uint16)
    expected, _ = model.hidden(torch.tensor(tokens.tolist())[:, None])
    model.train()
    torch.testing.assert_close(
        torch.cat([*read_stream(model, tokens, length=length)]), expected[:, 0]
    )
    hidden, target = zip(*read_contexts(model, tokens, length=length), strict=True)
    torch.testing.assert_close(torch.cat(hidden), expected[:-1, 0])
    assert torch.cat(target).tolist() == tokens[1:].tolist()
    assert model.training
    assert not hidden[0].requires_grad
    with pytest.raises(ValueError, match="tokens: expected at least 2, got 1"):
        next(read_contexts(model, tokens[:1]))
    with pytest.raises(
        ValueError, match=r"tokens: expected integers in one dimension, got float64"
    ):
        next(read_stream(model, [0.5, 1.5]))
    with pytest.raises(ValueError, match="length: expected a whole number of at least 1, got 0"):
        next(read_stream(model, tokens, length=0))


def test_sizes_must_fit() -> None:
    backbone = AWDLSTM(V, 5, 7)
    with pytest.raises(ValueError, match=r"head: expected in_features = 7, .* got 8"):
        LanguageModel(backbone, Softmax(8, V))
    with pytest.raises(ValueError, match=r"head: expected n_classes = 11, .* got 12"):
        LanguageModel(backbone, Softmax(7, 12))
