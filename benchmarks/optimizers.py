"""Steps of optimizers with the row-sparse gradients of eight trees, and the forward and backward
passes that compute them; whole training steps of heads with dense and row-sparse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

import hstree
from benchmarks.baselines import flat_loss, sampled_loss
from benchmarks.contest import Build, Contestant, Size, batch, step
from benchmarks.heads import TORCH_CHUNKS, Loss, chunked_loss
from benchmarks.paths import PATH_SIZES, draw_paths, mean_loss
from benchmarks.trainer import made_up_text
from hstree.heads import TreeEnsemble, build_head
from hstree.optim import AdamW

OPTIMIZER_SIZES = PATH_SIZES[1:]
LOSS = "forward + backward"
TORCH_ADAM = "torch.optim.SparseAdam"
ADAM = "hstree.optim.AdamW"


def _loss(size: Size, device: str) -> Contestant:
    paths = draw_paths(size, 8)
    leaves = [paths.input, paths.weight, paths.bias]
    return Contestant(step(lambda: mean_loss(paths.log_prob()), leaves))


def _optimizer(size: Size, device: str, make: Callable[..., Optimizer]) -> Contestant:
    """A contestant for an optimizer step with the gradients of one batch, whose time is
    excluded."""
    paths = draw_paths(size, 8)
    parameters = [paths.weight.detach().requires_grad_(), paths.bias.detach().requires_grad_()]
    grads = torch.autograd.grad(mean_loss(paths.log_prob()), [paths.weight, paths.bias])
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    optimizer = make(parameters, lr=1e-3)

    def run() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse invariant checks")  # in torch's Adagrad
            optimizer.step()

    return Contestant(run)


OPTIMIZERS: dict[str, Build] = {
    LOSS: _loss,
    "SGD": partial(_optimizer, make=SGD),
    "Adagrad": partial(_optimizer, make=Adagrad),
    TORCH_ADAM: partial(_optimizer, make=torch.optim.SparseAdam),
    ADAM: partial(_optimizer, make=AdamW),
}


def _step(
    module: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[], Tensor],
    hidden: Tensor,
) -> Contestant:
    backward = step(loss, [hidden, *module.parameters()])
    return Contestant(lambda: (backward(), optimizer.step()))


def subwords(rows: int, features: int, classes: int) -> tuple[Tensor, Tensor, Any]:
    """Inputs, and targets of a made-up text with the frequencies of subwords, and their counts: as
    in a real text, more than half of the classes do not occur."""
    text = made_up_text(classes)
    hidden = torch.randn(rows, features).requires_grad_()
    return hidden, text[:rows], torch.bincount(text, minlength=classes).numpy()


def _layer(
    size: Size, device: str, loss: Loss, compiled: bool = False, data: Any = batch
) -> Contestant:
    """A linear layer; the classes are numbered by decreasing frequency."""
    hidden, target, _ = data(size.rows, size.features, size.classes)
    linear = nn.Linear(size.features, size.classes)
    call = torch.compile(loss, dynamic=False) if compiled else loss
    return _step(
        linear,
        torch.optim.AdamW(linear.parameters(), fused=True),
        lambda: call(hidden, linear.weight, linear.bias, target),
        hidden,
    )


def _deferred(size: Size, device: str) -> Contestant:
    """The linear layer and its cross-entropy, with the line of README."""
    hidden, target, _ = batch(size.rows, size.features, size.classes)
    linear = hstree.defer_logits(nn.Linear(size.features, size.classes))
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    return _step(linear, optimizer, lambda: F.cross_entropy(linear(hidden), target), hidden)


def _head(size: Size, device: str, name: str, data: Any = batch, **options: Any) -> Contestant:
    """A registered head, or trees."""
    hidden, target, frequencies = data(size.rows, size.features, size.classes)
    if name == "trees":
        head: Any = TreeEnsemble.from_counts(size.features, frequencies, **options)
    else:
        known = {} if name == "adaptive" else {"frequencies": frequencies}
        head = build_head(name, size.features, size.classes, **known, **options)
    optimizer = AdamW(head.parameter_groups(lr=1e-3))
    return _step(head, optimizer, lambda: head(hidden, target).loss, hidden)


TRAINING_SIZES = [Size(512, 256, classes, 256) for classes in (10_000, 33_278, 100_000)]
_CHUNKED = {
    "F.linear_cross_entropy, its own chunks": chunked_loss(),
    "F.linear_cross_entropy, chunks of 128 rows": chunked_loss(lambda input, classes: 128),
}
_trees = partial(_head, name="trees")
TRAINING: dict[str, Build] = {
    "linear": partial(_layer, loss=flat_loss),
    "linear, compiled": partial(_layer, loss=flat_loss, compiled=True),
    "linear, deferred": _deferred,
    **{name: partial(_layer, loss=loss) for name, loss in _CHUNKED.items() if TORCH_CHUNKS},
    "sampled softmax in plain torch": partial(_layer, loss=sampled_loss),
    "adaptive": partial(_head, name="adaptive"),
    "softmax": partial(_head, name="softmax"),
    "sampled": partial(_head, name="sampled", negatives=128),
    "forest": partial(_head, name="forest"),
    "forest, sampled": partial(_head, name="forest", negatives=512),
    "trees": _trees,
    "one tree": partial(_trees, n_trees=1),
    "trees, two levels, sparse": partial(_trees, binary=False, sparse=True),
    "trees, binary, sparse": partial(_trees, binary=True, sparse=True),
}
"""Layers with ``torch.optim.AdamW(fused=True)``, heads with ``hstree.optim.AdamW``."""
SUBWORDS = "training steps, subwords"
SUBWORD_SIZE = Size(512, 256, 49_152, 256)
OPTIMIZER_CONTESTS: dict[str, dict[str, Build]] = {
    **{f"optimizers, V = {size.classes}": OPTIMIZERS for size in OPTIMIZER_SIZES},
    **{f"training steps, V = {size.classes}": TRAINING for size in TRAINING_SIZES},
    SUBWORDS: {
        name: partial(TRAINING[name], data=subwords)
        for name in ("linear", "softmax", "sampled", "forest, sampled", "trees")
    },
}
