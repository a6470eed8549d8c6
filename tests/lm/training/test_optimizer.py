"""Parameter groups and schedules."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.heads import Softmax, head_names
from hstree.lm.config import ConfigError, TrainConfig
from hstree.lm.data import CorpusStatistics
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.train import (
    averaged_weights,
    build_model,
    build_optimizers,
    scheduled_learning_rate,
    set_learning_rate,
    window_lengths,
)
from hstree.optim import AdamW

V, D = 9, 6


def group(params: list[nn.Parameter], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"params": params, "lr": lr, "weight_decay": weight_decay}


class SparseSoftmax(Softmax):
    """A softmax whose weight gets row-sparse gradients, as trees with ``sparse=True`` do."""

    def target_loss(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weight = F.embedding(torch.arange(self.n_classes), self.weight, sparse=True)
        output = -F.cross_entropy(F.linear(hidden, weight, self.bias), target, reduction="none")
        return output, self.reduced(-output, self.target_weight(target, output.dtype))

    def parameter_groups(
        self, lr: float, weight_decay: float = 0.01, **_: Any
    ) -> list[dict[str, Any]]:
        return [group([p], f * lr, weight_decay) for p, f in ((self.weight, 4), (self.bias, 2))]

    def sparse_parameters(self) -> list[nn.Parameter]:
        return [self.weight]


def make_model(head: type[Softmax] = Softmax, tied: bool = False, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    backbone = AWDLSTM(V, D, D)
    embedding = {"embedding": backbone.embedding} if tied else {}
    return LanguageModel(backbone, head(D, V, **embedding, **options))


def rates(model: LanguageModel, config: TrainConfig, *, averaged: bool = False) -> dict[str, float]:
    optimizers = build_optimizers(model, config, averaged=averaged)
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
    model = make_model()
    found = rates(model, TrainConfig(learning_rate=0.5, head_learning_rate_factor=8.0))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert found["head.weight"] == found["head.bias"] == 4.0
    assert found["backbone.embedding.weight"] == found["backbone.lstms.0.weight_hh_l0"] == 0.5


def test_tied_weight_learns_with_the_backbone() -> None:
    found = rates(make_model(tied=True), TrainConfig(learning_rate=0.5))
    assert found["backbone.embedding.weight"] == 0.5
    assert found["head.bias"] == 4.0
    assert "head.weight" not in found


def test_sparse_groups_have_an_optimizer_without_weight_decay() -> None:
    model = make_model(SparseSoftmax)
    optimizers = build_optimizers(model, TrainConfig(learning_rate=0.5))
    assert [type(optimizer) for optimizer in optimizers] == [AdamW, AdamW]
    decays = [[g["weight_decay"] for g in optimizer.param_groups] for optimizer in optimizers]
    assert decays == [[TrainConfig.weight_decay] * 2, [0.0]]
    assert rates(model, TrainConfig(learning_rate=0.5))["head.weight"] == 2.0
    set_learning_rate(optimizers, 0.1)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.1, 0.2]
    assert optimizers[1].param_groups[0]["lr"] == 0.4


class Groups(Softmax):
    """A softmax whose bias has a learning rate of its own."""

    def parameter_groups(
        self, lr: float, weight_decay: float = 0.01, **_: Any
    ) -> list[dict[str, Any]]:
        return [group([self.weight], 4 * lr, weight_decay), group([self.bias], 0.02, 0.0)]


RULES = {
    "adamw": ("adamw", False, AdamW),
    "sgd": ("sgd", False, torch.optim.SGD),
    "asgd": ("sgd", True, torch.optim.ASGD),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_optimizer_honours_the_groups_of_the_head(rule: str) -> None:
    name, averaged, kind = RULES[rule]
    config = TrainConfig(optimizer=name, learning_rate=20.0, weight_decay=0.3)
    model = make_model(Groups)
    found = rates(model, config, averaged=averaged)
    assert found["head.weight"] == 80.0
    assert found["head.bias"] == pytest.approx(0.02)
    assert found["backbone.lstms.0.bias_hh_l0"] == 20.0
    (optimizer,) = build_optimizers(model, config, averaged=averaged)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.3]
    set_learning_rate([optimizer], 10.0)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([10.0, 40.0, 0.01])


def trained(model: LanguageModel, config: TrainConfig, words: int = V) -> list[nn.Parameter]:
    """The parameters after three steps on a text of the first words."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(words, (5, 4), generator=random)
    targets = torch.randint(V, (5, 4), generator=random)
    optimizers = build_optimizers(model, config)
    for _ in range(3):
        model(tokens, targets).head.loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def test_sgd_of_sparse_gradients_equals_that_of_dense_ones() -> None:
    """But for the weight decay, which row-sparse groups do not have."""
    config = TrainConfig(optimizer="sgd", learning_rate=0.5, weight_decay=0.0)

    class Dense(Softmax):
        parameter_groups = SparseSoftmax.parameter_groups

    optimizers = build_optimizers(make_model(SparseSoftmax), config)
    assert {type(optimizer) for optimizer in optimizers} == {torch.optim.SGD}
    after = [trained(make_model(head), config) for head in (Dense, SparseSoftmax)]
    torch.testing.assert_close(after[0], after[1])
    decayed = build_optimizers(make_model(SparseSoftmax), TrainConfig(optimizer="sgd"))
    assert decayed[1].param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("tied", [False, True])
def test_sgd_of_sparse_embeddings_equals_that_of_dense_ones(tied: bool) -> None:
    config = TrainConfig(optimizer="sgd", learning_rate=0.5, weight_decay=0.0)
    after = []
    for sparse in (False, True):
        model = make_model(tied=tied)
        model.backbone.embedding.sparse = sparse
        after.append(trained(model, config))
    torch.testing.assert_close(after[0], after[1])


@pytest.mark.parametrize("sparse", [False, True])
def test_adamw_leaves_other_rows_of_sparse_embeddings_alone(sparse: bool) -> None:
    model = make_model()
    model.backbone.embedding.sparse = sparse
    before = model.backbone.embedding.weight.detach().clone()
    trained(model, TrainConfig(learning_rate=0.5, weight_decay=0.1), words=4)
    moved = (model.backbone.embedding.weight != before).any(1)
    assert moved.tolist() == [True] * 4 + [not sparse] * (V - 4)  # a dense step decays all


def test_a_row_sparse_embedding_does_not_decay() -> None:
    model = make_model()
    model.backbone.embedding.sparse = True
    optimizers = build_optimizers(model, TrainConfig(learning_rate=0.5))
    (group,) = optimizers[1].param_groups
    assert group["params"] == [model.backbone.embedding.weight]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.0)


def test_averaging_refuses_sparse_gradients() -> None:
    config = TrainConfig(optimizer="sgd")
    model = make_model()
    model.backbone.embedding.sparse = True
    for refused in (model, make_model(SparseSoftmax)):
        with pytest.raises(ConfigError, match="without --sparse and --sparse-embedding"):
            build_optimizers(refused, config, averaged=True)


def test_averages_leave_other_parameters_alone() -> None:
    """Parameters without a gradient have no average; other optimisers have none at all."""
    model = make_model()
    model.head.bias.requires_grad_(False)
    tokens, targets = torch.randint(V, (5, 4)), torch.randint(V, (5, 4))
    config = TrainConfig(optimizer="sgd", learning_rate=0.5)
    for averaged in (False, True):
        optimizers = build_optimizers(model, config, averaged=averaged)
        with averaged_weights(optimizers):  # before the first step there is nothing to average
            pass
        for _ in range(4):
            model(tokens, targets).head.loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        before = [parameter.clone() for parameter in model.parameters()]
        with suppress(KeyboardInterrupt), averaged_weights(optimizers):
            same = [
                name
                for (name, parameter), old in zip(model.named_parameters(), before, strict=True)
                if torch.equal(parameter, old)
            ]
            raise KeyboardInterrupt
        assert same == (["head.bias"] if averaged else [n for n, _ in model.named_parameters()])
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old)


def test_window_lengths() -> None:
    assert list(window_lengths(25, 10, None)) == [10, 10, 10]
    assert list(window_lengths(20, 10, None)) == [10, 10]
    drawn = np.array(list(window_lengths(1_000_000, 70, np.random.default_rng(0))))
    assert drawn[:-1].sum() < 1_000_000 <= drawn.sum()
    assert drawn.min() >= 5
    half = drawn < 52  # 3.5 standard deviations from either mean
    assert half.mean() == pytest.approx(0.05, abs=0.006)
    # Rounding towards zero takes half a step off the mean.
    assert drawn[~half].mean() == pytest.approx(69.5, abs=0.15)
    assert drawn[half].mean() == pytest.approx(34.5, abs=0.7)
    assert drawn[~half].std() == pytest.approx(5, rel=0.03)
    assert drawn.max() > 73
    capped = np.array(list(window_lengths(1_000_000, 70, np.random.default_rng(0), 3)))
    n = min(len(capped), len(drawn)) - 1  # the same draws, of which the long ones are cut
    assert (capped[:n] == np.minimum(drawn[:n], 73)).all()
    assert list(window_lengths(25, 10, None, 3)) == [10, 10, 10]
    short = list(window_lengths(1000, 1, np.random.default_rng(0)))
    assert min(short) == 5


def test_a_learning_rate_of_its_own_is_the_top_of_the_schedule() -> None:
    """It is absolute, whatever the learning rate of the backbone, and has its schedule."""
    model = make_model(Groups)
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
        def parameter_groups(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
            weight, bias = super().parameter_groups(*args, **options)
            return [weight | {"lr": 0.02}, bias]

    found = rates(make_model(Own), TrainConfig(learning_rate=0.5))
    assert found["head.weight"] == pytest.approx(0.02)
    assert found["head.bias"] == 1.0


def test_biases_decay_as_in_published_language_models() -> None:
    """And as in runs that were saved earlier; the slopes of a PLIF do not."""
    config = TrainConfig(
        head="plif", head_option=("intervals=30",), weight_decay=0.3, optimizer="sgd"
    )
    model = build_model(config, 20, CorpusStatistics.from_tokens(np.arange(40) % 20, 20))
    (optimizer,) = build_optimizers(model, config)
    _, head, function = optimizer.param_groups
    assert [p.shape for p in head["params"]] == [model.head.weight.shape, model.head.bias.shape]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert function["params"] == [model.head.function.v]


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
        head_option=("node_vectors=leaves",) if head == "trees" else (),
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
        def parameter_groups(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
            return super().parameter_groups(*args, **options)[:1]

    with pytest.raises(ValueError, match=r"leaves out head\.bias"):
        build_optimizers(make_model(Forgetful), TrainConfig())


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
