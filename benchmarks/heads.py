"""The compared steps, by contest and name, so that any process can build them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import flat_loss, torch_mixture_loss, torch_plif
from benchmarks.contest import Build, Contestant, Size, batch, step
from hstree.heads import Head, MixtureOfSoftmaxes, TreeEnsemble, build_head
from hstree.ops import default_chunk_rows, plif

SIZE = Size(1400, 400, 10_000, 400)
"""Size of a batch of AWD-LSTM on Penn Treebank: 20 streams of 70 steps."""
MOS_SIZE = Size(1400, 620, 10_000, 280)
"""Size of a batch of AWD-LSTM-MoS."""
COMPONENTS = 15
INTERVALS, RADIUS = 100_000, 20.0
FLAT = "F.linear + F.cross_entropy"
OWN_CHUNKS = "F.linear_cross_entropy, its own chunks"
SMALL_CHUNKS = "F.linear_cross_entropy, chunks of 16 MiB"
LARGE_CHUNKS = "F.linear_cross_entropy, chunks of 512 rows"
LOGIT_DEVIATION = 3.0

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A loss of input [N, D], weight [V, D], bias [V] and targets [N]."""


def _flat(loss: Loss) -> Build:
    """A linear layer with a loss."""

    def build(size: Size, device: str) -> Contestant:
        linear = nn.Linear(size.features, size.classes, device=device)
        nn.init.uniform_(linear.weight, -0.1, 0.1)
        hidden, target = _batch(size, size.features, device)
        weight, bias = linear.weight, linear.bias
        return Contestant(
            step(lambda: loss(hidden, weight, bias, target), [hidden, weight, bias]),
            _count(linear),
        )

    return build


def chunked_loss(
    chunk_rows: Callable[[Tensor, int], int] | None = None,
) -> Loss:
    """torch's own chunked loss; ``chunk_rows``: function of (input, V), None for torch's choice."""

    def loss(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        rows = None if chunk_rows is None else min(len(input), chunk_rows(input, len(weight)))
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=rows, chunking_method="auto" if rows is None else None
        )
        return F.linear_cross_entropy(input, weight, target, linear_bias=bias, options=options)

    return loss


def _head(name: str, make: Callable[[Size], Mapping[str, Any]] = lambda size: {}) -> Build:
    """A registered head with options that depend on the size."""

    def build(size: Size, device: str) -> Contestant:
        options = dict(make(size))
        in_features = options.pop("in_features", size.features)
        return _step(build_head(name, in_features, size.classes, **options), size, device)

    return build


def _zipf(size: Size) -> dict[str, Any]:
    return {"frequencies": 1.0 / np.arange(1, size.classes + 1)}


def _mixture(size: Size) -> dict[str, Any]:
    return {"components": COMPONENTS, "latent_features": size.latent}


def _trees(size: Size, device: str) -> Contestant:
    """Binary trees with vectors of their own, for a text of independent words."""
    random = np.random.default_rng(0)
    frequencies = 1.0 / np.arange(1, size.classes + 1)
    text = random.choice(size.classes, 10 * size.classes, p=frequencies / frequencies.sum())
    head = TreeEnsemble.from_tokens(size.features, size.classes, text, binary=True)
    return _step(head, size, device)


def _all_log_probs(size: Size, device: str) -> Contestant:
    head = MixtureOfSoftmaxes(size.features, size.classes, **_mixture(size)).to(device)
    hidden, target = _batch(size, size.features, device)

    def loss() -> Tensor:
        latent, log_prior = head.components(head.encode(hidden))
        assert head.bias is not None
        return torch_mixture_loss(latent, log_prior, head.weight, head.bias, target)

    return Contestant(step(loss, [hidden, *head.parameters()]), _count(head))


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Build:
    """A contestant for a function of logits [N, V] and slopes [K], forward and backward."""

    def build(size: Size, device: str) -> Contestant:
        logits = torch.randn(size.rows, size.classes, device=device).mul_(LOGIT_DEVIATION)
        slopes = torch.rand(INTERVALS, device=device).add_(0.5).requires_grad_()
        grad = torch.randn_like(logits)
        logits.requires_grad_()

        def run() -> None:
            logits.grad = slopes.grad = None
            function(logits, slopes).backward(grad)

        return Contestant(run)

    return build


def _step(head: Head, size: Size, device: str) -> Contestant:
    head = head.to(device)
    hidden, target = _batch(size, head.in_features, device)
    return Contestant(
        step(lambda: head(hidden, target).loss, [hidden, *head.parameters()]), _count(head)
    )


def _batch(size: Size, features: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs that give logits a deviation of about LOGIT_DEVIATION, for weights uniform in [-0.1,
    0.1]."""
    hidden, target, _ = batch(size.rows, features, size.classes, device)
    deviation = 0.1 * (size.features / 3) ** 0.5
    return hidden.detach().mul_(LOGIT_DEVIATION / deviation).requires_grad_(), target


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


FLAT_LOSSES: dict[str, Build] = {FLAT: _flat(flat_loss)}
TORCH_CHUNKS = (
    hasattr(F, "linear_cross_entropy")
    and "options" in inspect.signature(F.linear_cross_entropy).parameters
)
"""Whether this torch has a chunked loss."""
if TORCH_CHUNKS:
    FLAT_LOSSES[OWN_CHUNKS] = _flat(chunked_loss())
    FLAT_LOSSES[SMALL_CHUNKS] = _flat(chunked_loss(default_chunk_rows))
    FLAT_LOSSES[LARGE_CHUNKS] = _flat(chunked_loss(lambda input, classes: 512))

HEAD_CONTESTS: dict[str, dict[str, Build]] = {
    "plif": {
        "log_softmax": _elementwise(lambda logits, slopes: logits.log_softmax(1)),
        "hstree.ops.plif": _elementwise(lambda logits, slopes: plif(logits, slopes, RADIUS)),
        "gather": _elementwise(lambda logits, slopes: torch_plif(logits, slopes, RADIUS)),
    },
    "heads": FLAT_LOSSES
    | {
        "softmax": _head("softmax"),
        "sigsoftmax": _head("sigsoftmax"),
        "gss": _head("gss"),
        "plif": _head("plif", lambda size: {"intervals": INTERVALS, "radius": RADIUS}),
        "monotonic": _head("monotonic", lambda size: {"units": 1000}),
        "moc": _head("moc", _mixture),
        "mixtape": _head("mixtape", lambda size: {"latent_features": size.latent}),
        "forest": _head("forest"),
        "adaptive": _head("adaptive", lambda size: {"cutoffs": [size.classes // 5]}),
        "sampled": _head("sampled", lambda size: _zipf(size) | {"negatives": 128}),
        "trees": _trees,
    },
    "default trees": {
        FLAT: _flat(flat_loss),
        "trees, two levels": lambda size, device: _step(
            TreeEnsemble.from_counts(size.features, _zipf(size)["frequencies"]), size, device
        ),
    },
    "mixtures": {
        FLAT: _flat(flat_loss),
        "mos": _head("mos", _mixture),
        "mos-plif": _head("mos-plif", _mixture),
    },
    "mos": {
        "mos": _head("mos", _mixture),
        "all log-probabilities": _all_log_probs,
    },
}
