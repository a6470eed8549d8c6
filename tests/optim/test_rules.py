"""Schedulers that replace learning rates, and rules by the shape of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from hstree.heads import TreeEnsemble
from hstree.optim import AdamW


def head(**options: Any) -> TreeEnsemble:
    counts = range(60, 0, -1)
    return TreeEnsemble.from_counts(6, counts, n_trees=2, clusters=4, **options)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
def test_a_cycle_keeps_the_factor_of_the_head(kind: Any) -> None:
    body = nn.Linear(2, 6)
    groups = [{"params": body.parameters()}, *head().parameter_groups(lr=0.01)]
    for factor in (1, 2.5):
        optimizer = kind(groups, lr=0.01)
        rates = [factor * group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.01 * factor] + 2 * [0.08 * factor])
        low = [0.1 * group["lr"] for group in optimizer.param_groups]
        for schedule, peak in (
            (OneCycleLR(optimizer, rates, total_steps=9, pct_start=0.5), 3),
            (CyclicLR(optimizer, low, rates, step_size_up=3, cycle_momentum=False), 3),
        ):
            for _ in range(peak):
                optimizer.step()
                schedule.step()
                of_body, *of_head = (group["lr"] for group in optimizer.param_groups)
                assert of_head == pytest.approx(2 * [8 * of_body], rel=1e-6)
            if isinstance(schedule, CyclicLR):
                assert of_body == pytest.approx(0.01 * factor)


@pytest.mark.parametrize("binary", [False, True])
def test_biases_do_not_decay_whatever_their_shape(binary: bool) -> None:
    """Some have two dimensions, so that a rule by the number of dimensions takes them for
    weights; Muon takes no vectors of trees."""
    trees = head(binary=binary)
    groups = trees.parameter_groups(lr=0.01, weight_decay=0.5)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = [name for name, p in trees.named_parameters() if name.endswith("bias")]
    assert 2 in {trees.get_parameter(name).dim() for name in names}
    for name, parameter in trees.named_parameters():
        assert decay[id(parameter)] == (0.0 if name in names else 0.5)
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon([trees.roots.weight])
