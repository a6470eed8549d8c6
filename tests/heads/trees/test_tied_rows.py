"""Trees that read the rows of a softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heads.support import D, V, draw, trees
from hstree import Softmax, TreeEnsemble, load_head

SHAPES: list[dict[str, Any]] = [
    {"root": 6},
    {"root": 6, "levels": 3, "leaf": 3},
    {"root": 2, "leaf": 4},
    {"root": 6, "leaf": 3, "n_trees": 2, "subset_size": 6},
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def softmax_and_contexts(n_classes: int = 200, n_contexts: int = 2000) -> tuple[nn.Linear, Tensor]:
    """Rows around eight directions, and hidden states around eight others."""
    generator = torch.Generator().manual_seed(0)

    def around(n: int, spread: float, scale: float) -> Tensor:
        centers = torch.randn(8, D, generator=generator)
        of = torch.randint(8, (n,), generator=generator)
        return scale * (centers[of] + spread * torch.randn(n, D, generator=generator))

    linear = nn.Linear(D, n_classes)
    with torch.no_grad():
        linear.weight.copy_(around(n_classes, 0.5, 1.0))
    return linear, around(n_contexts, 0.5, 0.7)


def divergence(linear: nn.Linear, head: TreeEnsemble, hidden: Tensor) -> float:
    with torch.no_grad():
        p, q = linear(hidden).log_softmax(1), head.log_prob(hidden)
        return (p.exp() * (p - q)).sum(1).mean().item()


@every_shape
def test_reads_the_rows_of_the_softmax(shape: dict[str, Any]) -> None:
    """Only nodes and biases are added; the derivative at ``at`` is that of the softmax."""
    linear, hidden = softmax_and_contexts()
    whole = {name: value for name, value in shape.items() if name != "subset_size"}
    head = TreeEnsemble.from_linear(linear, at=hidden[0], **whole)
    assert head.output_embedding is linear.weight
    assert head.tied
    assert head.config()["tied"]
    at = hidden[:1].clone().requires_grad_()
    wanted, got = linear(at).log_softmax(1), head.log_prob(at)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(x[0, 5], at)[0] for x in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_defaults_add_one_root() -> None:
    """Two levels, one tree, T C D + T C + T V numbers."""
    linear = nn.Linear(D, 5000)
    head = TreeEnsemble.from_linear(linear)
    assert [(tree.root_width, tree.height) for tree in head.trees] == [(1024, 2)]
    own = sum(p.numel() for p in head.parameters() if p is not linear.weight)
    assert own == 1024 * D + 1024 + 5000
    groups = head.parameter_groups(lr=0.1)
    assert not any(p is linear.weight for group in groups for p in group["params"])


def test_leaves_follow_the_softmax() -> None:
    linear, hidden = softmax_and_contexts()
    head = TreeEnsemble.from_linear(linear, root=6)
    classes = torch.from_numpy(head.trees[0].order[: head.trees[0].boundary[1]].copy()).long()
    with torch.no_grad():
        linear.weight.mul_(1.5)
    within = (linear(hidden) - linear.bias)[:, classes] + head.nodes.leaf_bias[0, classes]
    got = head.log_prob(hidden)[:, classes].log_softmax(1)
    torch.testing.assert_close(got, within.log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_of_the_softmax(dtype: torch.dtype) -> None:
    linear, hidden = softmax_and_contexts()
    linear, hidden = linear.to(dtype), hidden.to(dtype)
    head = TreeEnsemble.from_linear(linear, root=6)
    assert head.output_embedding is linear.weight
    assert {p.dtype for p in head.parameters()} == {dtype}
    assert head.log_prob(hidden).isfinite().all()
    assert head.to(torch.float32).output_embedding is linear.weight
    assert linear.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", [nn.Linear, Softmax], ids=["linear", "head"])
def test_saved_without_the_rows(kind: Any, tmp_path: Path) -> None:
    softmax, hidden = kind(D, 200), draw(5, D)
    head = TreeEnsemble.from_linear(softmax, root=6)
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
    head = TreeEnsemble.from_linear(linear, root=6)
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


def test_bad_arguments() -> None:
    linear = nn.Linear(D, V)
    with pytest.raises(ValueError, match="node_vectors: expected one of leaves, got 'free'"):
        TreeEnsemble.from_linear(linear, node_vectors="free")
    with pytest.raises(ValueError, match="vectors: expected None together with trees"):
        TreeEnsemble.from_linear(linear, trees(), vectors=linear.weight)
    with pytest.raises(ValueError, match="vectors: expected shape"):
        TreeEnsemble.from_linear(linear, vectors=torch.zeros(3, 2), root=6)


# Nodes fitted to the softmax


def test_a_root_over_all_classes_is_exact() -> None:
    linear, hidden = softmax_and_contexts()
    head = TreeEnsemble.from_linear(linear)
    assert head.trees[0].root_width == 200
    torch.testing.assert_close(
        head.log_prob(hidden), linear(hidden).log_softmax(1), rtol=1e-4, atol=1e-4
    )


def test_the_expansion_about_the_mean_is_closer() -> None:
    linear, hidden = softmax_and_contexts()
    near, far = (TreeEnsemble.from_linear(linear, root=20, at=at) for at in (hidden.mean(0), None))
    assert divergence(linear, near, hidden) < 0.8 * divergence(linear, far, hidden)
