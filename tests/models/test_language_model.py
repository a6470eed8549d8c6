"""The language model against its parts, and sampling."""

from __future__ import annotations

import copy

import pytest
import torch

from hstree.data import batchify
from hstree.heads import Softmax
from hstree.models import (
    LanguageModel,
    LSTMBackbone,
    detach,
    evaluate_loss,
    generate,
    parameter_count,
)

V = 11


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LSTMBackbone(V, 5, 7, layers=2, dropout=0.4), Softmax(7, V)).eval()


def test_forward_is_embedding_lstm_head(model: LanguageModel) -> None:
    tokens, targets = torch.randint(V, (6, 3)), torch.randint(V, (6, 3))
    output, state = model(tokens, targets)
    hidden, (h, c) = model.backbone.lstm(model.backbone.embedding(tokens))
    expected = model.head(hidden, targets)
    torch.testing.assert_close(output.output, expected.output)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(state, (h, c))
    assert output.output.shape == (6, 3)
    assert hidden.shape == (6, 3, model.backbone.out_features)


def test_state_carries_over_windows(model: LanguageModel) -> None:
    tokens = torch.randint(V, (9, 2))
    whole, end = model.hidden(tokens)
    first, state = model.hidden(tokens[:4])
    second, state = model.hidden(tokens[4:], detach(state))
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(state, end)
    assert not detach(state)[0].requires_grad


def test_dropout_only_in_training(model: LanguageModel) -> None:
    tokens = torch.randint(V, (5, 2))
    torch.testing.assert_close(model.hidden(tokens)[0], model.hidden(tokens)[0])
    model.train()
    dropped = model.hidden(tokens)[0]
    assert (dropped == 0).any()
    assert not torch.equal(dropped, model.hidden(tokens)[0])


def test_evaluate_loss_counts_every_target_once(model: LanguageModel) -> None:
    tokens = torch.randint(V, (53,)).numpy()
    inputs, targets = batchify(tokens, 4)
    model.train()
    loss = evaluate_loss(model, inputs, targets, length=5)
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


def test_backbone_config_round_trip(model: LanguageModel) -> None:
    config = model.backbone.config()
    other = LSTMBackbone.from_config(copy.deepcopy(config))
    assert other.config() == config
    other.load_state_dict(model.backbone.state_dict())
    with pytest.raises(ValueError, match="expected the kind 'lstm', got 'gru'"):
        LSTMBackbone.from_config(config | {"kind": "gru"})
    with pytest.raises(ValueError, match="unexpected keyword argument 'colour'"):
        LSTMBackbone.from_config(config | {"colour": 1})


def test_parameter_count() -> None:
    lstm = 4 * 7 * (5 + 7 + 2)
    assert parameter_count(LSTMBackbone(V, 5, 7)) == V * 5 + lstm
    backbone = LSTMBackbone(V, 7, 7)
    tied = LanguageModel(backbone, Softmax(7, V, embedding=backbone.embedding))
    assert parameter_count(tied) == parameter_count(backbone) + V


def test_sizes_must_fit() -> None:
    backbone = LSTMBackbone(V, 5, 7)
    with pytest.raises(ValueError, match=r"expected in_features = 7 .* got 8"):
        LanguageModel(backbone, Softmax(8, V))
    with pytest.raises(ValueError, match=r"expected n_classes = 11 .* got 12"):
        LanguageModel(backbone, Softmax(7, 12))
    with pytest.raises(ValueError, match="hidden_size: expected at least 1, got 0"):
        LSTMBackbone(V, 5, 0)
    with pytest.raises(ValueError, match="dropout: expected a probability"):
        LSTMBackbone(V, 5, 7, dropout=1.0)


def test_generate_is_seeded(model: LanguageModel) -> None:
    first = generate(model, [3], 20, 2, seed=5)
    assert first == generate(model, [3], 20, 2, seed=5)
    assert first != generate(model, [3], 20, 2, seed=6)
    assert [len(sample) for sample in first] == [20, 20]
    assert all(0 <= word < V for sample in first for word in sample)
    assert generate(model, [3], 0) == [[]]


def test_generate_avoids_a_class(model: LanguageModel) -> None:
    with torch.no_grad():
        model.head.bias[4] = 2.0  # about half of all draws
    assert any(4 in sample for sample in generate(model, [1], 30, 3))
    assert not any(4 in sample for sample in generate(model, [1], 30, 3, avoid=4))


def test_generate_follows_the_model() -> None:
    """Frequencies of many draws against the model's probabilities."""
    torch.manual_seed(2)
    model = LanguageModel(LSTMBackbone(4, 3, 3), Softmax(3, 4)).eval()
    with torch.no_grad():
        model.head.weight.mul_(30)
        expected = model.head.log_prob(model.hidden(torch.tensor([[2]]))[0][0]).exp()[0]
    draws = torch.tensor(generate(model, [2], 1, 4000, seed=1)).flatten()
    share = torch.bincount(draws, minlength=4) / 4000
    deviation = (expected * (1 - expected) / 4000).sqrt()
    assert ((share - expected).abs() < 4 * deviation + 1e-6).all()
    assert expected.max() - expected.min() > 0.1


def test_generate_refuses(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="prompt: expected class ids"):
        generate(model, [], 3)
    with pytest.raises(ValueError, match=r"prompt: expected class ids in \[0, 11\)"):
        generate(model, [11], 3)
    with pytest.raises(ValueError, match="temperature: expected a positive number, got 0"):
        generate(model, [1], 3, temperature=0.0)
    with pytest.raises(ValueError, match="sampler of the head 'softmax' has none"):
        generate(model, [1], 3, temperature=0.5)
