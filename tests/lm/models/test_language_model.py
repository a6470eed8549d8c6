"""The language model against its parts, and sampling."""

from __future__ import annotations

import pytest
import torch

from hstree.heads import DOC, MixtureOfSoftmaxes, Softmax
from hstree.lm.model import AWDLSTM, LanguageModel, activation_penalty

V = 11


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(AWDLSTM(V, 5, 7, layers=2, dropout=0.4), Softmax(7, V)).eval()


def test_forward_is_backbone_and_head(model: LanguageModel) -> None:
    tokens, targets = torch.randint(V, (6, 3)), torch.randint(V, (6, 3))
    (log_prob, loss), state, read = model(tokens, targets)
    expected = model.backbone(tokens)
    torch.testing.assert_close(read, expected)
    torch.testing.assert_close(state, expected.state)
    output = model.head(expected.hidden, targets)
    torch.testing.assert_close(log_prob, output.output)
    torch.testing.assert_close(loss, output.loss)
    assert log_prob.shape == (6, 3)
    assert read.hidden.shape == (6, 3, model.backbone.out_features)
    torch.testing.assert_close(model.hidden(tokens), (expected.hidden, expected.state))


def test_state_goes_on(model: LanguageModel) -> None:
    tokens, targets = torch.randint(V, (2, 9, 3)).unbind()
    whole = model(tokens, targets)
    first = model(tokens[:4], targets[:4])
    second = model(tokens[4:], targets[4:], first.state)
    log_prob = torch.cat([first.head.output, second.head.output])
    torch.testing.assert_close(log_prob, whole.head.output)
    torch.testing.assert_close(second.state, whole.state)


def test_penalty_reaches_the_backbone(model: LanguageModel) -> None:
    """One backward pass for the loss and the penalty of what the head has read."""
    tokens, targets = torch.randint(V, (2, 6, 3)).unbind()
    (_, loss), _, read = model.train()(tokens, targets)
    penalty = activation_penalty(read, 2.0, 1.0)
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss + penalty, parameters, retain_graph=True)
    parts = [
        torch.autograd.grad(part, parameters, retain_graph=True, materialize_grads=True)
        for part in (loss, penalty)
    ]
    for total, of_loss, of_penalty in zip(found, *parts, strict=True):
        torch.testing.assert_close(total, of_loss + of_penalty)
    assert parts[1][0].any()


def test_dropout_only_in_training(model: LanguageModel) -> None:
    tokens = torch.randint(V, (5, 2))
    torch.testing.assert_close(model.hidden(tokens)[0], model.hidden(tokens)[0])
    model.train()
    dropped = model.hidden(tokens)[0]
    assert (dropped == 0).any()
    assert not torch.equal(dropped, model.hidden(tokens)[0])


def test_dropped_words_stay_in_a_tied_head() -> None:
    """The dropout of words is of the input alone: the head's rows are whole."""
    torch.manual_seed(6)
    backbone = AWDLSTM(V, 7, 7, dropout_embedding=0.5)
    model = LanguageModel(backbone, Softmax(7, V, embedding=backbone.embedding)).train()
    tokens, targets = torch.randint(V, (2, 6, 3)).unbind()
    (log_prob, _), _, read = model(tokens, targets)
    logits = read.hidden @ backbone.embedding.weight.T + model.head.bias
    expected = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(log_prob, expected)


def test_heads_that_read_time_or_layers() -> None:
    """Mixtures drop latent features alike in all steps; DOC reads every layer."""
    torch.manual_seed(7)
    tokens, targets = torch.randint(V, (2, 6, 3)).unbind()
    backbone = AWDLSTM(V, 5, 7, 2, all_layers=True, dropout=0.3, weight_dropout=0.5)
    doc = DOC(19, V, layer_sizes=backbone.layer_sizes, latent_features=4)
    mixture = MixtureOfSoftmaxes(7, V, components=2, latent_features=4, latent_dropout=0.3)
    for model in (
        LanguageModel(backbone, doc),
        LanguageModel(AWDLSTM(V, 5, 7, 2, dropout=0.3, weight_dropout=0.5), mixture),
    ):
        model(tokens, targets).head.loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


def test_a_tied_weight_is_one_parameter() -> None:
    backbone = AWDLSTM(V, 7, 7)
    tied = LanguageModel(backbone, Softmax(7, V, embedding=backbone.embedding))
    own, shared = (list(module.parameters()) for module in (tied, backbone))
    assert sum(p.numel() for p in own) == sum(p.numel() for p in shared) + V


def test_sizes_must_fit() -> None:
    backbone = AWDLSTM(V, 5, 7)
    with pytest.raises(ValueError, match=r"expected in_features = 7 .* got 8"):
        LanguageModel(backbone, Softmax(8, V))
    with pytest.raises(ValueError, match=r"expected n_classes = 11 .* got 12"):
        LanguageModel(backbone, Softmax(7, 12))
