"""Parameter groups, clipping and schedules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.data import CorpusStatistics
from hstree.heads import ParameterGroup, Softmax, head_names
from hstree.models import LanguageModel, LSTMBackbone
from hstree.training import ConfigError, TrainConfig, build_model
from hstree.training.optimizer import (
    build_optimizers,
    clip_gradients,
    scheduled_learning_rate,
    set_learning_rate,
)

V, D = 9, 6


class SparseSoftmax(Softmax):
    """A softmax whose weight gets row-sparse gradients, as trees with ``sparse=True`` do."""

    def target_loss(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weight = F.embedding(torch.arange(self.n_classes), self.weight, sparse=True)
        output = -F.cross_entropy(F.linear(rows, weight, self.bias), target, reduction="none")
        return output, self.reduced(output, target)

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup([self.weight], 4.0, sparse=True), ParameterGroup([self.bias], 2.0)]


def make_model(head: type[Softmax] = Softmax, tied: bool = False, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    backbone = LSTMBackbone(V, D, D)
    embedding = {"embedding": backbone.embedding} if tied else {}
    return LanguageModel(backbone, head(D, V, **embedding, **options))


def rates(model: LanguageModel, config: TrainConfig) -> dict[str, float]:
    optimizers = build_optimizers(model, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        (names[id(parameter)], group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert len(found) == len(dict(found)), "a parameter is in two groups"
    return dict(found)


def test_head_learns_at_its_own_rate() -> None:
    model = make_model(learning_rate_factor=8.0)
    found = rates(model, TrainConfig(learning_rate=0.5))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert found["head.weight"] == found["head.bias"] == 4.0
    assert found["backbone.embedding.weight"] == found["backbone.lstms.0.weight_hh_l0"] == 0.5


def test_tied_weight_learns_with_the_backbone() -> None:
    found = rates(make_model(tied=True), TrainConfig(learning_rate=0.5))
    assert found["backbone.embedding.weight"] == 0.5
    assert found["head.bias"] == 4.0
    assert "head.weight" not in found


def test_sparse_groups_go_to_sparse_adam() -> None:
    model = make_model(SparseSoftmax)
    optimizers = build_optimizers(model, TrainConfig(learning_rate=0.5))
    assert [type(optimizer) for optimizer in optimizers] == [
        torch.optim.AdamW,
        torch.optim.SparseAdam,
    ]
    assert rates(model, TrainConfig(learning_rate=0.5))["head.weight"] == 2.0
    set_learning_rate(optimizers, 0.1)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.1, 0.2]
    assert optimizers[1].param_groups[0]["lr"] == 0.4


class OwnRate(Softmax):
    """A softmax whose bias has a learning rate of its own, as the slopes of a PLIF do."""

    def parameter_groups(self) -> list[ParameterGroup]:
        return [
            ParameterGroup([self.weight], 4.0),
            ParameterGroup([self.bias], 4.0, learning_rate=0.02),
        ]


def test_a_learning_rate_of_its_own_is_the_top_of_the_schedule() -> None:
    """It is absolute, whatever the learning rate of the backbone, and has its schedule."""
    model = make_model(OwnRate)
    for learning_rate in (0.5, 3e-4):
        found = rates(model, TrainConfig(learning_rate=learning_rate))
        assert found["head.bias"] == pytest.approx(0.02)
        assert found["head.weight"] == pytest.approx(4 * learning_rate)

    config = TrainConfig(learning_rate=0.5, warmup=10)
    optimizers = build_optimizers(model, config)
    course = []
    for step in range(60):
        set_learning_rate(optimizers, scheduled_learning_rate(config, step, 60))
        course.append([group["lr"] for group in optimizers[0].param_groups])
    backbone, weight, bias = zip(*course, strict=True)
    assert max(bias) == pytest.approx(0.02)
    assert min(bias) < 1e-3
    assert weight == pytest.approx([4 * rate for rate in backbone])
    assert bias == pytest.approx([0.04 * rate for rate in backbone])


def test_a_sparse_group_may_have_a_learning_rate_of_its_own() -> None:
    class Own(SparseSoftmax):
        def parameter_groups(self) -> list[ParameterGroup]:
            weight, bias = super().parameter_groups()
            weight.learning_rate = 0.02
            return [weight, bias]

    found = rates(make_model(Own), TrainConfig(learning_rate=0.5))
    assert found["head.weight"] == pytest.approx(0.02)
    assert found["head.bias"] == 1.0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", head_names())
def test_every_parameter_of_every_head_is_optimised(head: str, tied: bool) -> None:
    config = TrainConfig(
        head=head,
        embedding_size=16,
        hidden_size=16,
        n_trees=2,
        root=4,
        recipe="huffman",
        tied=tied,
        head_option=("node_vectors=shared",) if head == "trees" else (),
    )
    statistics = CorpusStatistics.from_tokens(np.arange(40) % 20, 20)
    if head == "adaptive" and tied:
        with pytest.raises(ConfigError, match="--tied: the head 'adaptive' cannot be tied"):
            build_model(config, 20, statistics)
        return
    model = build_model(config, 20, statistics)
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(rates(model, config)) == expected
    assert tied == any(p is model.backbone.embedding.weight for p in model.head.parameters())


def test_slopes_learn_at_the_published_rate() -> None:
    config = TrainConfig(head="plif", head_option=("intervals=30",), learning_rate=0.5)
    model = build_model(config, 20, CorpusStatistics.from_tokens(np.arange(40) % 20, 20))
    found = {round(rate, 12) for name, rate in rates(model, config).items() if "function" in name}
    assert found == {0.02}


def test_forgotten_parameters_are_an_error() -> None:
    class Forgetful(Softmax):
        def parameter_groups(self) -> list[ParameterGroup]:
            return [ParameterGroup([self.weight], 1.0)]

    with pytest.raises(ValueError, match=r"leaves out head\.bias"):
        build_optimizers(make_model(Forgetful), TrainConfig())


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_sparse_equals_dense(max_norm: float) -> None:
    tokens, targets = torch.randint(V, (5, 4)), torch.randint(V, (5, 4))
    norms, gradients = [], []
    for head in (Softmax, SparseSoftmax):
        model = make_model(head)
        for _ in range(2):  # accumulated gradients make uncoalesced sparse ones
            model(tokens, targets)[0].loss.backward()
        assert model.head.weight.grad.is_sparse == (head is SparseSoftmax)
        norms.append(clip_gradients(model.parameters(), max_norm))
        gradients.append([parameter.grad.to_dense() for parameter in model.parameters()])
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    after = torch.cat([gradient.flatten() for gradient in gradients[0]]).norm()
    assert float(after) == pytest.approx(min(max_norm, float(norms[0])), rel=1e-4)


def test_clipping_against_torch() -> None:
    ours, theirs = make_model(), make_model()
    tokens, targets = torch.randint(V, (5, 4)), torch.randint(V, (5, 4))
    for model in (ours, theirs):
        model(tokens, targets)[0].loss.backward()
    norm = clip_gradients(ours.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    torch.testing.assert_close(norm, expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert float(clip_gradients([nn.Parameter(torch.ones(2))], 1.0)) == 0.0


def test_schedules() -> None:
    total = 110
    for schedule in ("cosine", "linear", "constant"):
        config = TrainConfig(learning_rate=0.1, warmup=10, schedule=schedule)
        rate = [scheduled_learning_rate(config, step, total) for step in range(total)]
        assert rate[:10] == pytest.approx([0.1 * (step + 1) / 11 for step in range(10)])
        assert rate[10] == pytest.approx(0.1)
        assert min(rate) > 0
        middle = {"cosine": 0.1 * (1 + math.cos(math.pi / 4)) / 2, "linear": 0.075}
        assert rate[35] == pytest.approx(middle.get(schedule, 0.1))
    # A run shorter than its warm-up still warms up over its first half only.
    short = TrainConfig(learning_rate=0.1, warmup=1000)
    assert scheduled_learning_rate(short, 5, 10) == pytest.approx(0.1)
