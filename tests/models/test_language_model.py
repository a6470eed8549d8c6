"""The language model against its parts, and sampling."""

from __future__ import annotations

import json
from typing import Any

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


def lstm_cells(backbone: LSTMBackbone) -> list[torch.nn.LSTMCell]:
    """The layers as cells that share their weights."""
    cells = []
    for lstm in backbone.lstms:
        cell = torch.nn.LSTMCell(lstm.input_size, lstm.hidden_size)
        cell.load_state_dict({name.removesuffix("_l0"): p for name, p in lstm.named_parameters()})
        cells.append(cell)
    return cells


@pytest.mark.parametrize("context_size", [None, 7, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_one_after_the_other(layers: int, context_size: int | None) -> None:
    """Against LSTM cells run step by step."""
    torch.manual_seed(1)
    backbone = LSTMBackbone(V, 5, 7, layers, context_size=context_size).eval()
    sizes = (5, *[7] * (layers - 1), context_size or 7)
    assert backbone.layer_sizes == sizes
    assert backbone.out_features == sizes[-1]
    tokens = torch.randint(V, (6, 3))
    cells = lstm_cells(backbone)
    state = [(torch.randn(3, size), torch.randn(3, size)) for size in sizes[1:]]
    start = tuple((h[None], c[None]) for h, c in state)
    expected = []
    for step in tokens:
        x = backbone.embedding.weight[step]
        every = [x]
        for number, cell in enumerate(cells):
            state[number] = cell(x, state[number])
            x = state[number][0]
            every.append(x)
        expected.append(torch.cat(every, dim=1))
    hidden, end = backbone(tokens, start)
    every_layer = torch.stack(expected)
    torch.testing.assert_close(hidden, every_layer[..., -sizes[-1] :])
    torch.testing.assert_close(end, tuple((h[None], c[None]) for h, c in state))

    reader = LSTMBackbone(V, 5, 7, layers, context_size=context_size, all_layers=True).eval()
    reader.load_state_dict(backbone.state_dict())
    assert reader.layer_sizes == sizes
    assert reader.out_features == sum(sizes)
    torch.testing.assert_close(reader(tokens, start)[0], every_layer)


def test_equal_layers_are_those_of_one_lstm() -> None:
    """A seed gives the weights and hidden vectors of a ``torch.nn.LSTM`` of several layers."""
    torch.manual_seed(3)
    backbone = LSTMBackbone(V, 5, 7, layers=3).eval()
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(V, 5)
    torch.nn.init.uniform_(embedding.weight, -0.1, 0.1)
    lstm = torch.nn.LSTM(5, 7, 3)
    tokens = torch.randint(V, (6, 3))
    hidden, (h, c) = lstm(embedding(tokens))
    found, state = backbone(tokens)
    torch.testing.assert_close(found, hidden)
    torch.testing.assert_close(torch.cat([pair[0] for pair in state]), h)
    torch.testing.assert_close(torch.cat([pair[1] for pair in state]), c)


def test_each_layer_reads_the_dropped_output_of_the_one_before() -> None:
    torch.manual_seed(4)
    backbone = LSTMBackbone(V, 5, 7, 3, dropout=0.4, context_size=4, all_layers=True).train()
    tokens = torch.randint(V, (6, 3))
    hidden, _ = backbone(tokens)
    parts = hidden.split(backbone.layer_sizes, dim=-1)
    undropped = [backbone.embedding(tokens)]
    undropped += [lstm(part)[0] for lstm, part in zip(backbone.lstms, parts[:-1], strict=True)]
    for part, whole in zip(parts, undropped, strict=True):
        kept = part != 0
        assert 0.2 < kept.float().mean() < 0.95
        torch.testing.assert_close(part[kept], whole[kept] / 0.6)
    torch.manual_seed(5)
    everything, _ = backbone(tokens)
    backbone.all_layers = False
    torch.manual_seed(5)
    torch.testing.assert_close(backbone(tokens)[0], everything[..., -4:])


def test_forward_is_backbone_and_head(model: LanguageModel) -> None:
    tokens, targets = torch.randint(V, (6, 3)), torch.randint(V, (6, 3))
    output, state = model(tokens, targets)
    hidden, end = model.backbone(tokens)
    expected = model.head(hidden, targets)
    torch.testing.assert_close(output.output, expected.output)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(state, end)
    assert output.output.shape == (6, 3)
    assert hidden.shape == (6, 3, model.backbone.out_features)


def test_state_needs_a_pair_for_each_layer(model: LanguageModel) -> None:
    tokens = torch.randint(V, (6, 3))
    state = model.backbone.initial_state(3)
    assert [(h.shape, c.shape) for h, c in state] == [((1, 3, 7), (1, 3, 7))] * 2
    assert not any(part.any() for pair in state for part in pair)
    with pytest.raises(ValueError, match=r"state: expected a pair .* each of 2 layers, got 1"):
        model.hidden(tokens, state[:1])


def test_state_carries_over_windows(model: LanguageModel) -> None:
    tokens = torch.randint(V, (9, 2))
    whole, end = model.hidden(tokens)
    first, state = model.hidden(tokens[:4])
    second, state = model.hidden(tokens[4:], detach(state))
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(state, end)
    assert all(part.requires_grad for pair in state for part in pair)
    assert not any(part.requires_grad for pair in detach(state) for part in pair)


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


@pytest.mark.parametrize("options", [{}, {"context_size": 3}, {"all_layers": True}])
def test_backbone_config_round_trip(options: dict[str, Any]) -> None:
    backbone = LSTMBackbone(V, 5, 7, layers=2, dropout=0.4, **options)
    config = backbone.config()
    other = LSTMBackbone.from_config(json.loads(json.dumps(config)))
    assert other.config() == config
    assert config.items() >= options.items()
    assert other.out_features == backbone.out_features
    other.load_state_dict(backbone.state_dict())
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
    with pytest.raises(ValueError, match="context_size: expected at least 1, got 0"):
        LSTMBackbone(V, 5, 7, context_size=0)
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
