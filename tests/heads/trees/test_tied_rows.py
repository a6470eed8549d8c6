"""Trees that read the rows of a softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from heads.support import D, draw, randomise
from hstree import Softmax, TreeEnsemble, load_head

COUNTS = np.arange(200, 0, -1)


def tied(softmax: Any, **shape: Any) -> TreeEnsemble:
    """One tree of two levels, with parameters of any value."""
    options = {"n_trees": 1, "root": 6, "embedding": softmax} | shape
    head = TreeEnsemble.from_counts(D, COUNTS, **options)
    weight = softmax.weight.detach().clone()
    randomise(head)
    with torch.no_grad():
        softmax.weight.copy_(weight)
    return head


@pytest.mark.parametrize("shape", [
    {"root": 200},
    {"root": 6},
    {"root": 6, "levels": 3, "leaf": 3},
    {"root": 2, "leaf": 4},
    {"root": 6, "leaf": 3, "n_trees": 2, "subset_size": 6},
], ids=str)  # fmt: skip
def test_reads_the_rows_of_the_softmax(shape: dict[str, Any]) -> None:
    """Only nodes and biases are added, and those of another optimizer are not trained twice."""
    linear = nn.Linear(D, 200)
    head = tied(linear, **shape)
    assert head.output_embedding is linear.weight
    assert head.tied
    assert head.config()["tied"]
    groups = head.parameter_groups(lr=0.1)
    assert not any(p is linear.weight for group in groups for p in group["params"])


def test_a_tree_of_two_levels_adds_a_root_and_biases() -> None:
    linear = nn.Linear(D, 200)
    own = sum(p.numel() for p in tied(linear).parameters() if p is not linear.weight)
    assert own == 6 * D + 6 + 200


def test_leaves_follow_the_softmax() -> None:
    linear, hidden = nn.Linear(D, 200), draw(9, D)
    head = tied(linear)
    classes = torch.from_numpy(head.trees[0].order[: head.trees[0].boundary[1]].copy()).long()
    with torch.no_grad():
        linear.weight.mul_(1.5)
    within = (linear(hidden) - linear.bias)[:, classes] + head.nodes.leaf_bias[0, classes]
    got = head.log_prob(hidden)[:, classes].log_softmax(1)
    torch.testing.assert_close(got, within.log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_of_the_softmax(dtype: torch.dtype) -> None:
    linear, hidden = nn.Linear(D, 200, dtype=dtype), draw(9, D, dtype=dtype)
    head = tied(linear).to(dtype)
    assert head.output_embedding is linear.weight
    assert {p.dtype for p in head.parameters()} == {dtype}
    assert head.log_prob(hidden).isfinite().all()
    assert head.to(torch.float32).output_embedding is linear.weight
    assert linear.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", [nn.Linear, Softmax], ids=["linear", "head"])
def test_saved_without_the_rows(kind: Any, tmp_path: Path) -> None:
    softmax, hidden = kind(D, 200), draw(5, D)
    head = tied(softmax)
    expected = head.log_prob(hidden)
    head.save(tmp_path / "whole")
    head.save(tmp_path / "tied", embedding=softmax)
    sizes = [(tmp_path / name).stat().st_size for name in ("whole", "tied")]
    assert sizes[0] - sizes[1] > 4 * 200 * D
    loaded = load_head(tmp_path / "tied", embedding=softmax)
    assert loaded.output_embedding is softmax.weight
    assert torch.equal(loaded.log_prob(hidden), expected)
    whole = load_head(tmp_path / "whole", embedding=softmax)
    assert whole.output_embedding is softmax.weight
    alone = load_head(tmp_path / "whole")
    assert alone.output_embedding is not softmax.weight
    assert not alone.config()["tied"]
    assert torch.equal(alone.log_prob(hidden), expected)


def test_bad_embeddings(tmp_path: Path) -> None:
    linear, path = nn.Linear(D, 200), tmp_path / "tied"
    head = tied(linear)
    with pytest.raises(ValueError, match="embedding: expected the module to whose weight the head"):
        head.save(path, embedding=nn.Linear(D, 200))
    assert not path.exists()
    head.save(path, embedding=linear)
    with pytest.raises(ValueError, match=r"embedding: expected the module .* the file was written"):
        load_head(path)
    with pytest.raises(ValueError, match=r"embedding: expected a weight of shape \(200, 10\)"):
        load_head(path, embedding=nn.Linear(D, 201))
    Softmax(D, 200).save(path)
    with pytest.raises(ValueError, match=r"embedding: expected None, since .* no tied head"):
        load_head(path, embedding=linear)
