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
    AdaptiveSoftmax,
    ForestSoftmax,
    Head,
    SampledSoftmax,
    Softmax,
    TreeEnsemble,
    load_head,
)
from hstree.heads.flat import FlatHead
from hstree.trees import Tree, build_ensemble

from .support import (
    FREQUENCIES,
    HEADS,
    D,
    V,
    draw,
    draw_targets,
    embedding,
    make,
    probabilities,
    randomise,
)

SIZES = (V - 9, V, V + 9)
COMPONENTS = ("mos", "mos, tied", "mos-plif", "doc")
MIXED = ("trees", "adaptive", "forest")
FLAT = [k for k in HEADS if not k.startswith(MIXED) and k not in COMPONENTS]
OF_TREES = [k for k in HEADS if k.startswith("trees")]
SHAPES: dict[str, dict[str, Any]] = {
    "flat": {"root": V},
    "binary": {},
    "binary, groups": {"leaf": 4},
    "two levels": {"root": 6, "levels": 2},
    "three levels": {"root": 3, "leaf": 4, "levels": 3},
    "root": {"root": 5},
    "root, groups": {"root": 5, "leaf": 4},
}
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-9}


def hidden() -> Tensor:
    return draw(6, D).double()


def ensemble(shape: str, node_vectors: str, n_trees: int = 2, n_classes: int = V) -> TreeEnsemble:
    counts = np.resize(FREQUENCIES, n_classes)
    options = SHAPES[shape] | ({"root": n_classes} if shape == "flat" else {})
    trees = build_ensemble("huffman", n_classes, n_trees, counts, None, 3, **options)
    head = TreeEnsemble(D, n_classes, trees, node_vectors=node_vectors, frequencies=counts)
    return randomise(head).double()  # type: ignore[return-value]


def by_tree(head: TreeEnsemble, x: Tensor) -> Tensor:
    """Log-probabilities [T, N, V] in each tree."""
    target = torch.arange(head.n_classes).repeat(len(x))
    rows = x.repeat_interleave(head.n_classes, 0)
    of_rows = head.log_prob_by_tree(rows, target).detach()
    return of_rows.t().reshape(head.n_trees, len(x), head.n_classes)


def renormalised(log_prob: Tensor, kept: int) -> Tensor:
    return log_prob[..., :kept].log_softmax(-1)


@pytest.mark.parametrize("size", [*SIZES, 3])
@pytest.mark.parametrize("kind", HEADS)
def test_every_head(kind: str, size: int, tmp_path: Path) -> None:
    """Its kind, options, dtype, mode and what is trained; it is on its own, and a good head."""
    if kind == "adaptive" and size < V:
        pytest.skip("its first cluster would be empty: test_clusters_without_classes")
    head = make(kind, reduction="sum", class_weight=range(1, V + 1)).double().eval()
    frozen = [name for name, _ in head.named_parameters()][1:]
    for name in frozen[:1]:
        head.get_parameter(name).requires_grad_(False)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    state = torch.random.get_rng_state()
    made = head.resized(size)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(made) is type(head)
    assert not made.training
    assert made.n_classes == size
    different = {"n_classes", "tied", "own_gates", "cutoffs"}
    different |= {"clusters"} if size == 3 else set()  # those without classes end
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
    if isinstance(made, TreeEnsemble):
        np.testing.assert_allclose(
            probabilities(made, x), log_prob.exp().detach().numpy(), atol=1e-12
        )
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


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind.startswith("forest")])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_forest_of_fewer_classes_than_clusters(kind: str, size: int, tmp_path: Path) -> None:
    """Every tree is renormalised, and the head is saved, resized again and reset as others."""
    head, x = make(kind).double().eval(), hidden()
    assert isinstance(head, ForestSoftmax)
    made = head.resized(size)
    log_gate, scores = head._of_trees(x)
    scores = scores.gather(2, head.cluster.t().long().expand(len(x), -1, -1))
    scores = scores + (x @ head.weight.T + (0 if head.bias is None else head.bias))[:, None]
    expected = (log_gate[:, :, None] + scores[..., :size].log_softmax(2)).logsumexp(1)
    torch.testing.assert_close(made.log_prob(x), expected, **CLOSE)
    made.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head").eval()
    assert isinstance(loaded, ForestSoftmax)
    assert torch.equal(loaded.log_prob(x), made.log_prob(x))
    assert loaded.clusters == made.clusters <= size
    more = loaded.resized(size + 30)
    assert sorted(set(more.cluster.flatten().tolist())) == list(range(made.clusters))
    torch.testing.assert_close(
        renormalised(more.log_prob(x), size).exp().sum(1), torch.ones(6).double(), **CLOSE
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", HEADS)
def test_rows_of_old_classes_are_copied(kind: str, dtype: torch.dtype) -> None:
    head = make(kind).to(dtype)
    made = head.resized(V + 5).resized(V)
    x = draw(6, D)
    assert torch.equal(made.eval().log_prob(x), head.eval().log_prob(x))
    for name, value in head.state_dict().items():
        copied = made.state_dict()[name]
        assert copied.shape == value.shape
        # The rows that fill up the smaller trees are of no use.
        assert torch.equal(copied, value) or (kind in OF_TREES and copied.dim() > 1), name


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
    assert isinstance(head, FlatHead)
    made, kept = head.resized(size), min(size, V)
    latent, log_prior = head.components(head.encode(x))
    assert torch.equal(made.components(made.encode(x))[1], log_prior)
    for k in range(latent.shape[1]):
        torch.testing.assert_close(
            renormalised(made.component_log_prob(latent[:, k]), kept),
            renormalised(head.component_log_prob(latent[:, k]), kept),
            **CLOSE,
        )


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [1, 2, 11])
def test_trees_with_more_classes(shape: str, node_vectors: str, added: int) -> None:
    """The old trees stay: each is renormalized; the tables of the new one are right."""
    head, x = ensemble(shape, node_vectors), hidden()
    made = head.resized(V + added)
    old, new = by_tree(head, x), by_tree(made, x)
    torch.testing.assert_close(renormalised(new, V), old, **CLOSE)
    of_new = new[..., V:].exp().sum(-1)
    assert (of_new < 0.9).all()
    if "binary" in shape:  # by the same factor: the mixture is renormalized too
        expected = renormalised(made.log_prob(x), V)
        torch.testing.assert_close(expected, head.log_prob(x), **CLOSE)
    np.testing.assert_allclose(probabilities(made, x), made.log_prob(x).exp().detach())
    for before, after in zip(head.trees, made.trees, strict=True):
        assert after.order[:V].tolist() == before.order.tolist()
        assert after.height <= max(before.height + 1, 2)
        if before.root_width > 2 and before.height > 1:
            assert after.height == before.height
            assert after.root_width <= before.root_width + 4


def conditional(tree: Tree, prob: Tensor, kept: int) -> Tensor:
    """Probabilities [N, kept] where each node of the tree is renormalized over the children that
    keep a class: prob [N, V]."""
    out = torch.zeros(len(prob), kept, dtype=prob.dtype)

    def visit(nested: Any, p: Tensor) -> None:
        if not isinstance(nested, tuple):
            out[:, nested] = p
            return
        alive = [child for child in nested if min(_classes(child)) < kept]
        masses = [prob[:, _classes(child)].sum(1) for child in alive]
        for child, mass in zip(alive, masses, strict=True):
            visit(child, p * mass / sum(masses))

    visit(tree.to_nested(), torch.ones(len(prob), dtype=prob.dtype))
    return out


@pytest.mark.parametrize(("n_trees", "size"), [(1, V - 4), (2, V - 1), (2, 20), (2, 5), (1, 3)])
@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_with_fewer_classes(shape: str, node_vectors: str, n_trees: int, size: int) -> None:
    """Each node is renormalized, but for what the docstring says."""
    head, x = ensemble(shape, node_vectors, n_trees), hidden()
    made = head.resized(size)
    np.testing.assert_allclose(probabilities(made, x), made.log_prob(x).exp().detach())
    of_head, of_made = by_tree(head, x).exp(), by_tree(made, x).exp()
    exact = 0
    for t, tree in enumerate(head.trees):
        expected = conditional(tree, of_head[t], size)
        pruned = of_made[t]
        nodes = _nodes(tree, size)
        divided = made.trees[t].to_nested() != nodes
        lost = node_vectors == "leaves" and _lost(tree, size)
        if not divided and not lost:
            exact += 1
            torch.testing.assert_close(pruned, expected, **CLOSE)
        elif divided and not lost:  # what is divided keeps its probability in all
            assert made.trees[t].root_width > (len(nodes) if isinstance(nodes, tuple) else 0)
            whole = [_classes(child) for child in nodes]
            for of_child in whole:
                torch.testing.assert_close(
                    pruned[:, of_child].sum(1), expected[:, of_child].sum(1), **CLOSE
                )
    assert exact or size <= 5 or node_vectors == "leaves"


def _classes(nested: Any) -> list[int]:
    return (
        [c for child in nested for c in _classes(child)] if isinstance(nested, tuple) else [nested]
    )


def _nodes(tree: Tree, size: int) -> Any:
    """The nested tree of the classes below ``size``."""

    def cut(nested: Any) -> Any:
        if not isinstance(nested, tuple):
            return nested if nested < size else None
        left = [child for child in map(cut, nested) if child is not None]
        return None if not left else left[0] if len(left) == 1 else tuple(left)

    return cut(tree.to_nested())


def _lost(tree: Tree, size: int) -> bool:
    """Whether a node that has more than classes below it keeps only classes."""

    def cut(nested: Any) -> tuple[Any, bool]:
        if not isinstance(nested, tuple):
            return (nested if nested < size else None), False
        parts = [cut(child) for child in nested]
        left = [child for child, _ in parts if child is not None]
        lost = any(bad for _, bad in parts)
        inner = any(isinstance(child, tuple) for child in nested)
        if len(left) > 1 and inner and not any(isinstance(child, tuple) for child in left):
            lost = True
        return (None if not left else left[0] if len(left) == 1 else tuple(left)), lost

    return cut(tree.to_nested())[1]


@pytest.mark.parametrize("node_vectors", ["free", "leaves"])
def test_trees_of_one_and_two_classes(node_vectors: str) -> None:
    x = hidden()
    for n_classes in (1, 2):
        head = ensemble("binary", node_vectors, 2, n_classes)
        for size in (1, 2, 3, 7):
            made = head.resized(size).double()  # one of free vectors has no dtype
            log_prob = made.log_prob(x)
            assert log_prob.shape == (6, size)
            if size >= n_classes:
                of_old = renormalised(by_tree(made, x).double(), n_classes)
                torch.testing.assert_close(of_old, by_tree(head, x).double(), **CLOSE)
            if made.n_classes > 1:
                made(x, torch.zeros(6, dtype=torch.int64)).loss.backward()


@pytest.mark.parametrize(
    "kind",
    [
        k
        for k in HEADS
        if k not in ("adaptive", "softmax, no bias", "sampled, sparse, tied")
        and not k.startswith("forest")  # in test_forest.py
    ],
)
def test_frequencies_are_the_share_of_new_classes(kind: str) -> None:
    """Where the vectors are zero."""
    head = make(kind).double().eval()
    counts = np.arange(V + 3) + 1.0
    made = head.resized(V + 3, frequencies=counts)
    if isinstance(head, TreeEnsemble):
        new = by_tree(made, torch.zeros(1, D).double())[:, :, V:].exp()
    else:
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


def test_new_classes_of_an_adaptive_softmax() -> None:
    """They share the last cluster; nothing else changes."""
    head, x = make("adaptive").double().eval(), hidden()
    made = head.resized(V + 4)
    assert made.cutoffs == head.cutoffs
    old, new = head.log_prob(x), made.log_prob(x)
    last = head.order[20:]
    first = head.order[:20]
    assert torch.equal(new[:, first], old[:, first])
    torch.testing.assert_close(new[:, last].log_softmax(1), old[:, last].log_softmax(1), **CLOSE)
    with pytest.raises(ValueError, match="frequencies: expected None for an adaptive"):
        head.resized(V + 4, frequencies=range(V + 4))


def test_clusters_without_classes() -> None:
    head = randomise(AdaptiveSoftmax(D, V, cutoffs=(5, 20), div_value=2.0)).double().eval()
    x = hidden()
    made = head.resized(12)  # the last cluster ends
    assert made.cutoffs == [5]
    old, new = head.log_prob(x).exp(), made.log_prob(x).exp()
    without = 1 - old[:, 20:].sum(1, keepdim=True)
    torch.testing.assert_close(new[:, :5], old[:, :5] / without, **CLOSE)
    cluster = old[:, 5:20].sum(1, keepdim=True) / without
    in_cluster = old[:, 5:12] / old[:, 5:12].sum(1, keepdim=True)
    torch.testing.assert_close(new[:, 5:], cluster * in_cluster, **CLOSE)
    for size in (5, 2):
        with pytest.raises(ValueError, match="num_classes: expected at least 3 classes, some in"):
            head.resized(size)
    with pytest.raises(ValueError, match=r"got 28, of which the clusters have \[0, 11, 17\]"):
        make("adaptive").resized(28)


@pytest.mark.parametrize("kind", [k for k in HEADS if k.endswith("tied")])
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
    with pytest.raises(ValueError, match="resized: expected a head with data, got one on the meta"):
        make("trees, leaves", "meta").resized(V + 1)
    prune.l1_unstructured(head, "weight", 0.3)
    head(torch.zeros(1, D), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="got a 'weight' that is computed"):
        head.resized(V + 1)
    prune.remove(head, "weight")
    assert head.resized(V + 1).n_classes == V + 1
    with pytest.raises(ValueError, match="got a 'weight' that is computed"):
        parametrizations.weight_norm(Softmax(D, V), "weight").resized(V + 1)

    class Own(Head):
        name = "own"
        target_log_prob = class_log_prob = reset_parameters = None
        from_config = None

    with pytest.raises(NotImplementedError, match="resized: Own does not say"):
        Own(D, V).resized(V + 1)


def test_a_subclass_of_a_head_is_resized() -> None:
    class Mine(Softmax):
        name = "mine"

    made = Mine(D, V).resized(V + 1)
    assert type(made) is Mine
    assert made.weight.shape == (V + 1, D)


@pytest.mark.parametrize("kind", ["softmax", "trees, leaves", "trees, leaves, sparse", "adaptive"])
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


def test_default_trees_keep_their_shape() -> None:
    """Two levels over 1,500 classes: new classes are one cluster more, of at most the size of the
    present ones."""
    head = TreeEnsemble.from_counts(8, range(1500, 0, -1), root=64)
    widest = max(int(tree.n_children[1:].max()) for tree in head.trees)
    for added in (1, 5, 3 * widest):
        made = head.resized(1500 + added)
        for before, after in zip(head.trees, made.trees, strict=True):
            assert after.height == 2
            assert after.root_width == before.root_width + max(1, -(-added // widest))
            assert int(after.n_children[1:].max()) <= max(widest, added)
        x = draw(3, 8)
        torch.testing.assert_close(
            renormalised(by_tree(made, x), 1500), by_tree(head, x), rtol=0, atol=1e-4
        )
