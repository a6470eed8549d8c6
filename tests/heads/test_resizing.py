"""Heads with more or fewer classes: what they keep of what they have learned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import hstree
from hstree.heads import (
    ForestSoftmax,
    SampledSoftmax,
    Softmax,
    load_head,
)
from hstree.trees import build_ensemble

from .support import (
    FREQUENCIES,
    HEADS,
    D,
    V,
    draw,
    draw_targets,
    embedding,
    make,
)

SIZES = (V - 9, V, V + 9)
COMPONENTS = ("mos", "mos, tied")
WITHOUT = [k for k in HEADS if k.startswith(("trees", "adaptive", "mixtape"))]
RESIZED = [k for k in HEADS if k not in WITHOUT]
FLAT = [k for k in RESIZED if not k.startswith("forest") and k not in COMPONENTS]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-9}


def hidden() -> Tensor:
    return draw(6, D).double()


def renormalised(log_prob: Tensor, kept: int) -> Tensor:
    return log_prob[..., :kept].log_softmax(-1)


@pytest.mark.parametrize("size", [*SIZES, 3])
@pytest.mark.parametrize("kind", RESIZED)
def test_every_head(kind: str, size: int, tmp_path: Path) -> None:
    """Its kind, options, dtype, mode and what is trained; it is on its own, and a good head."""
    head = make(kind, reduction="sum", class_weight=range(1, V + 1)).double().eval()
    frozen = [name for name, _ in head.named_parameters()][1:]
    for name in frozen[:1]:
        head.get_parameter(name).requires_grad_(False)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    if isinstance(head, ForestSoftmax) and size < head.clusters:
        with pytest.raises(ValueError, match=f"at least {head.clusters}, the number of clusters"):
            head.resized(size)
        return
    state = torch.random.get_rng_state()
    made = head.resized(size)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(made) is type(head)
    assert not made.training
    assert made.n_classes == size
    different = {"n_classes", "tied"}
    for name, value in head.config().items():
        assert name in different or made.config()[name] == value, name
    for name, parameter in made.named_parameters():
        assert parameter.dtype == torch.float64
        if name in dict(head.named_parameters()):
            assert parameter.requires_grad == head.get_parameter(name).requires_grad
    memory, of_made = (
        {tensor.data_ptr() for tensor in [*each.parameters(), *each.buffers()] if tensor.numel()}
        for each in (head, made)
    )
    assert not memory & of_made
    assert made.class_weight is not None
    kept = min(size, V)
    assert made.class_weight[:kept].tolist() == list(range(1, kept + 1))
    assert set(made.class_weight[kept:].tolist()) <= {(1 + V) / 2}

    x = hidden()
    log_prob = made.log_prob(x)
    torch.testing.assert_close(log_prob.exp().sum(1), torch.ones(6).double(), **CLOSE)
    if size == V:
        assert torch.equal(log_prob, head.log_prob(x))
    target = torch.tensor([0, size - 1, 1, size // 2, size - 1, 2])
    output, loss = made(x, target)
    torch.testing.assert_close(output, log_prob.gather(1, target[:, None])[:, 0])
    loss.backward()
    for name, value in head.state_dict().items():
        assert torch.equal(value, before[name]), name
    made.save(tmp_path / "head")
    assert torch.equal(load_head(tmp_path / "head").eval().log_prob(x), made.log_prob(x))
    made.reset_parameters()
    probability = made.log_prob(x).exp()
    torch.testing.assert_close(probability.sum(1), torch.ones(6).double(), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", RESIZED)
def test_rows_of_old_classes_are_copied(kind: str, dtype: torch.dtype) -> None:
    head = make(kind).to(dtype)
    made = head.resized(V + 5).resized(V)
    x = draw(6, D)
    assert torch.equal(made.eval().log_prob(x), head.eval().log_prob(x))
    for name, value in head.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", FLAT)
def test_one_softmax_is_renormalised(kind: str, size: int) -> None:
    head, x = make(kind).double().eval(), hidden()
    kept = min(size, V)
    log_prob = head.resized(size).log_prob(x)
    expected = renormalised(head.log_prob(x), kept)
    torch.testing.assert_close(renormalised(log_prob, kept), expected, **CLOSE)
    assert (log_prob[:, kept:] < -1).all()


def test_new_rows_are_the_mean() -> None:
    head = Softmax(3, 4)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 2, 3], [3, 2, 1], [0, 0, 0], [0, 4, 0]]))
        head.bias.copy_(torch.tensor([1.0, 2, 3, -math.inf]))
    made = head.resized(6)
    assert made.weight[4:].tolist() == [[1, 2, 1], [1, 2, 1]]
    assert made.bias.tolist() == [1, 2, 3, -math.inf, 2, 2]
    nn.init.normal_(head.bias)
    new = head.resized(6).log_prob(torch.randn(50, 3)).exp()[:, 4:]
    assert (new < (1 - new.sum(1, keepdim=True)) / 4).all()  # Jensen


@pytest.mark.parametrize("kind", COMPONENTS)
@pytest.mark.parametrize("size", SIZES)
def test_components_are_renormalised(kind: str, size: int) -> None:
    head, x = make(kind).double().eval(), hidden()
    assert isinstance(head, Softmax)
    made, kept = head.resized(size), min(size, V)
    latent, log_prior = head.components(head.encode(x))
    assert torch.equal(made.components(made.encode(x))[1], log_prior)
    for k in range(latent.shape[1]):
        torch.testing.assert_close(
            renormalised(made.component_scores(latent[:, k]).log_softmax(1), kept),
            renormalised(head.component_scores(latent[:, k]).log_softmax(1), kept),
            **CLOSE,
        )


@pytest.mark.parametrize(
    "kind",
    [
        k
        for k in RESIZED
        if k not in ("softmax, capped, no bias", "sampled, sparse, tied")
        and not k.startswith("forest")  # in test_forest.py
    ],
)
def test_frequencies_are_the_share_of_new_classes(kind: str) -> None:
    """Where the vectors are zero."""
    head = make(kind).double().eval()
    counts = np.arange(V + 3) + 1.0
    made = head.resized(V + 3, frequencies=counts)
    with torch.no_grad():
        made.weight.zero_()
    new = made.log_prob(hidden())[:, V:].exp()
    share = torch.from_numpy(counts[V:] / counts.sum())
    torch.testing.assert_close(new, share.expand_as(new), rtol=1e-8, atol=0)
    assert np.array_equal(made.frequencies, counts)


def test_negatives_of_new_classes() -> None:
    head = SampledSoftmax(D, V, negatives=8, frequencies=FREQUENCIES)

    def share(head: SampledSoftmax) -> np.ndarray[Any, Any]:
        width = np.diff(head.cumulative.numpy().astype(float), prepend=0)
        return width / width.sum()

    more = head.resized(V + 2).share.numpy()
    np.testing.assert_allclose(more[:V] / more[:V].sum(), FREQUENCIES / FREQUENCIES.sum())
    np.testing.assert_allclose(more[V:], more[:V].mean())
    more = share(head.resized(V + 2))
    np.testing.assert_allclose(more[:V] / more[:V].sum(), share(head))
    np.testing.assert_allclose(more[V:], more[:V].mean())
    counts = np.append(FREQUENCIES, [5, 7])
    fresh = SampledSoftmax(D, V + 2, negatives=8, frequencies=counts)
    made = head.resized(V + 2, frequencies=counts)
    np.testing.assert_allclose(share(made), share(fresh))
    assert torch.equal(made.share, fresh.share)
    fewer = share(head.resized(V - 5))
    np.testing.assert_allclose(fewer, share(head)[:-5] / share(head)[:-5].sum())


@pytest.mark.parametrize("kind", [k for k in RESIZED if k.endswith("tied")])
def test_tied_heads(kind: str) -> None:
    head = make(kind)
    alone = head.resized(V + 2)
    assert not alone.config()["tied"]
    larger = nn.Embedding(V + 2, D)
    made = head.resized(V + 2, embedding=larger)
    assert any(parameter is larger.weight for parameter in made.parameters())
    assert made.config()["tied"]
    assert all(p is not larger.weight for g in made.parameter_groups(1.0) for p in g["params"])
    with pytest.raises(ValueError, match=r"embedding: expected a weight of shape \(40, 10\)"):
        head.resized(V + 3, embedding=larger)


def test_what_cannot_be_resized() -> None:
    head = Softmax(D, V, ignore_index=V + 2)
    assert head.resized(V + 2).n_classes == V + 2
    with pytest.raises(ValueError, match=f"expected at most {V + 2}, the ignore_index"):
        head.resized(V + 3)
    for wrong in (0, 2.5, "3", None, True):
        with pytest.raises(ValueError, match="num_classes: expected a whole number"):
            head.resized(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frequencies: expected a 1-D array of shape"):
        head.resized(V + 1, frequencies=[1, 2])
    with pytest.raises(ValueError, match="embedding: expected None, since the head is not tied"):
        head.resized(V, embedding=embedding())
    with pytest.raises(ValueError, match="resized: expected a whole weight with data"):
        make("softmax", "meta").resized(V + 1)
    prune.l1_unstructured(head, "weight", 0.3)
    head(torch.zeros(1, D), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected a whole weight.*computed from others.*remove"):
        head.resized(V + 1)
    prune.remove(head, "weight")
    assert head.resized(V + 1).n_classes == V + 1
    with pytest.raises(ValueError, match=r"expected a whole weight.*computed from others.*remove"):
        parametrizations.weight_norm(Softmax(D, V), "weight").resized(V + 1)


@pytest.mark.parametrize("kind", WITHOUT)
def test_heads_without_a_row_for_each_class_are_not_resized(kind: str) -> None:
    """The error says what to do in place of it."""
    head = make(kind)
    match = f"resized: {type(head).__name__} has no form.*build a new head.*hstree.ForestSoftmax"
    with pytest.raises(NotImplementedError, match=match):
        head.resized(V + 1)


def test_new_classes_join_the_smallest_clusters() -> None:
    trees = build_ensemble("huffman", V, 2, FREQUENCIES, clusters=5)
    head = ForestSoftmax(D, V, trees=trees)
    before = [np.bincount(column, minlength=5) for column in head.cluster.t()]
    made = head.resized(V + 9)
    assert torch.equal(made.cluster[:V], head.cluster)
    for t, sizes in enumerate(before):
        for cluster in made.cluster[V:, t].tolist():
            assert sizes[cluster] == sizes.min()
            sizes[cluster] += 1


def test_a_subclass_of_a_head_is_resized() -> None:
    class Mine(Softmax):
        name = "mine"

    made = Mine(D, V).resized(V + 1)
    assert type(made) is Mine
    assert made.weight.shape == (V + 1, D)


@pytest.mark.parametrize("kind", ["softmax", "mos", "forest"])
def test_new_classes_are_learned(kind: str) -> None:
    torch.manual_seed(0)
    made = make(kind).resized(V + 3)
    optimizer = hstree.optim.AdamW(made.parameter_groups(0.05))
    x, target = draw(12, D), V + draw_targets(12, n_classes=3)
    for _ in range(80):
        optimizer.zero_grad()
        loss = made(x, target).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.1
