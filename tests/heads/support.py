"""Small heads of every kind, and probabilities of a TreeEnsemble by walking its trees."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.heads import (
    GSS,
    PLIF,
    AdaptiveSoftmax,
    ForestSoftmax,
    Head,
    Mixtape,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    MonotonicNetwork,
    SampledSoftmax,
    Softmax,
    TreeEnsemble,
)
from hstree.trees import Tree, build_ensemble

D, V = 10, 37
FREQUENCIES = np.random.default_rng(0).zipf(1.5, V).astype(np.int64)
REVERSED = torch.arange(V).flip(0)
ORDER = torch.randperm(V, generator=torch.Generator().manual_seed(2))


def vectors(n_classes: int = V) -> npt.NDArray[np.float64]:
    return np.random.default_rng(1).standard_normal((n_classes, 6))


def trees(
    recipe: str = "huffman",
    n_trees: int = 1,
    clusters: int | None = None,
    binary: bool = False,
    n_classes: int = V,
) -> list[Tree]:
    frequencies = np.resize(FREQUENCIES, n_classes)
    return build_ensemble(
        recipe, n_classes, n_trees, frequencies, vectors(n_classes), 3, clusters, binary
    )


def embedding() -> nn.Embedding:
    return nn.Embedding(V, D)


def _trees(
    n_trees: int, clusters: int | None, binary: bool, recipe: str = "huffman", **options: Any
) -> Callable[..., Head]:
    def build(**more: Any) -> Head:
        built = trees(recipe, n_trees, clusters, binary)
        return TreeEnsemble(D, V, built, frequencies=FREQUENCIES, **options, **more)

    return build


def _tied(**more: Any) -> Head:
    return TreeEnsemble(D, V, trees("cluster", 2, 8), embedding=embedding(), **more)


Formula: TypeAlias = Callable[[Any, Tensor], Tensor]
"""Log-probabilities [N, V] of a head: hidden [N, D]."""

# Few intervals of a radius that many logits leave.
PIECES: dict[str, Any] = {"intervals": 12, "radius": 3.0}
# Draws each class once, so that the loss in training mode is exact.
EVERY_CLASS: dict[str, Any] = {"negatives": V, "distribution": "uniform", "in_batch": False}

HEADS: dict[str, Callable[..., Head]] = {
    "softmax": lambda **more: Softmax(D, V, frequencies=FREQUENCIES, **more),
    "softmax, capped, no bias": lambda **more: Softmax(
        D, V, scale=0.7, soft_cap=40.0, bias=False, **more
    ),
    "gss": lambda **more: GSS(D, V, c=-0.5, k=2.5, **more),
    "plif": lambda **more: PLIF(D, V, frequencies=FREQUENCIES, **PIECES, **more),
    "plif, tied": lambda **more: PLIF(D, V, embedding=embedding(), **PIECES, **more),
    "monotonic": lambda **more: MonotonicNetwork(D, V, units=9, intervals=512, **more),
    "mos": lambda **more: MixtureOfSoftmaxes(
        D, V, components=3, latent_features=7, frequencies=FREQUENCIES, **more
    ),
    "mos, tied": lambda **more: MixtureOfSoftmaxes(
        D, V, components=2, embedding=embedding(), **more
    ),
    "moc": lambda **more: MixtureOfContexts(D, V, components=3, latent_features=7, **more),
    "mixtape": lambda **more: Mixtape(
        D, V, own_gates=15, order=ORDER, gate_features=4, latent_features=7, **more
    ),
    "adaptive": lambda **more: AdaptiveSoftmax(
        D, V, cutoffs=(5, 20), div_value=2.0, order=REVERSED, **more
    ),
    "forest": lambda **more: ForestSoftmax(
        D, V, n_trees=3, clusters=6, frequencies=FREQUENCIES, **more
    ),
    "forest, sampled, sparse, tied": lambda **more: ForestSoftmax(
        D,
        V,
        trees=trees("cluster", 2, 8),
        gate="constant",
        embedding=embedding(),
        sparse=True,
        **EVERY_CLASS,
        **more,
    ),
    "sampled": lambda **more: SampledSoftmax(D, V, frequencies=FREQUENCIES, **EVERY_CLASS, **more),
    "sampled, sparse, tied": lambda **more: SampledSoftmax(
        D, V, embedding=embedding(), sparse=True, **EVERY_CLASS, **more
    ),
    "trees": _trees(1, None, True),
    "trees, sparse": _trees(2, 8, True, sparse=True, gate="constant"),
    "trees, subset": _trees(3, 8, True, subset_size=4, gate="context", seed=5),
    "trees, groups": _trees(2, 8, False, subset_size=6, gate="context"),
    "trees, groups, sparse": _trees(3, 9, False, sparse=True, gate="uniform"),
    "trees, groups, tied": _tied,
}
"""One for each path through the code; by description, which begins with the registered name. Each
takes the options of Head."""

SOME = ("softmax", "mos, tied", "adaptive", "trees, groups")
"""Kinds for what :class:`Head` does for all of them."""


def randomise(head: Head, seed: int = 0, scale: float = 0.5) -> Head:
    """Fills every parameter with random numbers."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=random))
    return head


def make(kind: str, device: torch.device | str = "cpu", **options: Any) -> Head:
    return randomise(HEADS[kind](**options)).to(device)


def draw(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_targets(*size: int, n_classes: int = V) -> Tensor:
    return torch.randint(n_classes, size, generator=torch.Generator().manual_seed(1))


def gradients(
    head: Head, hidden: Tensor, log_prob: Callable[[Head, Tensor], Tensor], weight: Tensor
) -> dict[str, Tensor]:
    """Of the sum of weighted log-probabilities [N] with respect to hidden and every parameter."""
    hidden = hidden.detach().requires_grad_()
    learned = {name: p for name, p in head.named_parameters() if p.requires_grad}
    total = (log_prob(head, hidden) * weight).sum()
    got = torch.autograd.grad(total, [hidden, *learned.values()])
    return dict(zip(["hidden", *learned], got, strict=True))


def target_log_prob(formula: Formula, target: Tensor) -> Callable[[Head, Tensor], Tensor]:
    """The formula at the targets; 0 where they are -100."""

    def log_prob(head: Head, hidden: Tensor) -> Tensor:
        chosen = formula(head, hidden).gather(1, target.clamp(min=0)[:, None])[:, 0]
        return chosen.masked_fill(target == -100, 0)

    return log_prob


def check_formula(head: Head, formula: Formula, rows: int = 20, atol: float = 1e-11) -> None:
    """Probabilities, losses and gradients in float64, within ``atol``; the same in float32."""
    head.reduction = "none"
    weight = torch.linspace(-1, 2, rows, dtype=torch.float64)
    target = draw_targets(rows, n_classes=head.n_classes)
    target[3] = -100
    expected: Any = None
    for dtype in (torch.float64, torch.float32):
        head = head.to(dtype)
        hidden = draw(rows, head.in_features).to(dtype)
        close: dict[str, Any] = {"rtol": 1e-9, "atol": atol}
        if dtype == torch.float32:
            close = {"rtol": 2e-4, "atol": 2e-5, "check_dtype": False}
        else:
            expected = (
                formula(head, hidden).detach(),
                gradients(head, hidden, target_log_prob(formula, target), weight),
            )
        log_prob, grads = expected
        torch.testing.assert_close(head.log_prob(hidden), log_prob, **close)
        chosen = log_prob.gather(1, target.clamp(min=0)[:, None])[:, 0]
        chosen = chosen.masked_fill(target == -100, 0)
        output, loss = head(hidden, target)
        torch.testing.assert_close(output, chosen, **close)
        torch.testing.assert_close(loss, -chosen, **close)
        for route in (
            lambda head, hidden: -head(hidden, target).loss,
            lambda head, hidden: head(hidden, target).output,
            target_log_prob(type(head).log_prob, target),
        ):
            got = gradients(head, hidden, route, weight)
            for name, grad in grads.items():
                torch.testing.assert_close(
                    got[name], grad, **close, msg=lambda text, name=name: f"{name}: {text}"
                )


def check_bfloat16(head: Head, formula: Formula, rows: int = 64) -> None:
    """A head in bfloat16 is not much further from the truth than the formula in bfloat16.

    The truth is the formula in float64 of the same bfloat16 parameters. Errors are norms of
    differences; the margin is 2e-3, half a unit in the last place, of the norm of the truth.
    """
    head = head.bfloat16()
    truth = copy.deepcopy(head).double()
    hidden = draw(rows, head.in_features).bfloat16()
    target = draw_targets(rows, n_classes=head.n_classes)
    chosen = target_log_prob(formula, target)

    def loss(head: Head, hidden: Tensor) -> Tensor:
        return head(hidden, target).loss

    for reduction in ("none", "mean"):
        head.reduction = reduction
        many = reduction == "none"
        weight = torch.linspace(-1, 2, rows) if many else torch.tensor(1.0)

        def eager(head: Head, hidden: Tensor, many: bool = many) -> Tensor:
            return -chosen(head, hidden) if many else -chosen(head, hidden).mean()

        tensors = []
        for some, x, route in (
            (truth, hidden.double(), eager),
            (head, hidden, eager),
            (head, hidden, loss),
        ):
            value = {"loss": route(some, x).detach()}
            tensors.append(value | gradients(some, x, route, weight.to(value["loss"].dtype)))
        for name, right in tensors[0].items():
            wrong = [(t[name].double() - right).norm().item() for t in tensors[1:]]
            limit = 1.1 * wrong[0] + 2e-3 * right.norm().item()
            assert wrong[1] <= limit, f"{name}: eager {wrong[0]:.2e}, got {wrong[1]:.2e}"


def check_unigram(head: Head, counts: npt.NDArray[np.float64], rtol: float = 1e-5) -> None:
    """Where the weights are zero, whatever the context."""
    mass = np.where(counts, counts, counts[counts > 0].min() / 2)
    mass /= mass.sum()
    with torch.no_grad():
        head.weight.zero_()
    hidden, target = 10 * draw(len(mass), head.in_features), torch.arange(len(mass))
    for log_prob in (head.log_prob(hidden), head(hidden, target).output.expand(1, -1)):
        prob = log_prob.detach().double().exp().numpy()
        np.testing.assert_allclose(prob, np.broadcast_to(mass, prob.shape), rtol=rtol)


def allocations(step: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of the largest tensor that ``step`` allocates on the CPU, and the most at one time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert sizes
    return max(sizes), int(np.cumsum(sizes).max())


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def _softmax(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def probabilities(head: TreeEnsemble, hidden: Tensor) -> Any:
    """P [N, V] in float64: every tree walked from its root, every node's vectors by definition."""
    h = _array(hidden)
    result = np.zeros((len(h), head.n_classes))
    if head.n_trees == 1 or head.gate.name == "uniform":
        gate = np.full((len(h), head.n_trees), 1 / head.n_trees)
    elif head.gate.name == "constant":
        gate = _softmax(_array(head.gate.logits))[None].repeat(len(h), 0)
    else:
        gate = _softmax(h @ _array(head.gate.linear.weight).T + _array(head.gate.linear.bias))
    weight, bias = _array(head.below.weight), _array(head.below.bias)
    of_root = (None, None)
    if head.roots is not None:
        of_root = _array(head.roots.weight), _array(head.roots.bias)
    for t, tree in enumerate(head.trees):
        index = head.below.feature_index
        features = slice(None) if index is None else index[t].tolist()
        x, nested, numbers = h[:, features], tree.to_nested(), itertools.count()

        def below(item: Any, p: Any, t: int = t, x: Any = x, numbers: Any = numbers) -> None:
            """A class, a group, or a binary node; the next one in preorder."""
            if not isinstance(item, tuple):
                result[:, item] += gate[:, t] * p
                return
            if head.groups:
                classes = list(item)
                share = _softmax(h @ weight[classes].T + bias[t, classes])
            else:
                node = next(numbers)
                z = x @ weight[t, node] + bias[t, node]
                share = _softmax(np.stack([z, 0 * z], 1))
            for k, child in enumerate(item):
                below(child, p * share[:, k])

        if head.roots is None:
            below(nested, np.ones(len(h)))
            continue
        assert isinstance(nested, tuple)
        own = np.zeros((len(nested), x.shape[1])) if of_root[0] is None else of_root[0][t].copy()
        if head.groups:  # a cluster of one class adds its row of E
            for k, child in enumerate(nested):
                own[k] += 0 if isinstance(child, tuple) else weight[child, features]
        share = _softmax(x @ own.T + of_root[1][t])
        for k, child in enumerate(nested):
            below(child, share[:, k])
    return result
