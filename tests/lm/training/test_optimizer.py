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


def test_a_shared_matrix_is_as_sparse_as_the_gradient_of_the_embedding() -> None:
    """A sampled head names it, too, but the embedding makes the sum dense."""
    statistics = CorpusStatistics.from_tokens(np.arange(40) % 20, 20)
    for sparse in (False, True):
        config = TrainConfig(
            head="sampled", sparse=True, sparse_embedding=sparse, tied=True,
            embedding_size=8, hidden_size=8,
        )  # fmt: skip
        model = build_model(config, 20, statistics)
        dense, rows = build_optimizers(model, config)
        shared = model.backbone.embedding.weight
        for optimizer, expected in ((dense, not sparse), (rows, sparse)):
            found = [p is shared for g in optimizer.param_groups for p in g["params"]]
            assert any(found) == expected
        assert all(g["weight_decay"] == 0.0 for g in rows.param_groups)
        assert rates(model, config)["backbone.embedding.weight"] == config.learning_rate


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


@pytest.mark.parametrize("averaged", [False, True])
def test_biases_decay_as_in_published_language_models(averaged: bool) -> None:
    """The slopes of a PLIF do not, and have a learning rate of their own, whatever that of the
    backbone: the top of the same schedule."""
    config = TrainConfig(
        head="plif",
        head_option=("intervals=30",),
        weight_decay=0.3,
        optimizer="sgd",
        learning_rate=0.5,
        head_learning_rate_factor=8.0,
    )
    model = build_model(config, 20, CorpusStatistics.from_tokens(np.arange(40) % 20, 20))
    (optimizer,) = build_optimizers(model, config, averaged=averaged)
    assert type(optimizer) is (torch.optim.ASGD if averaged else torch.optim.SGD)
    _, head, function = optimizer.param_groups
    assert [p.shape for p in head["params"]] == [model.head.weight.shape, model.head.bias.shape]
    assert function["params"] == [model.head.function.v]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5, 4.0, 0.02])
    set_learning_rate([optimizer], 0.25)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.25, 2.0, 0.01])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", head_names())
def test_every_parameter_of_every_head_is_optimised(head: str, tied: bool) -> None:
    config = TrainConfig(
        head=head,
        embedding_size=16,
        hidden_size=16,
        n_trees=2,
        clusters=4,
        recipe="huffman",
        tied=tied,
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
