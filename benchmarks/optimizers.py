"""Steps of optimizers with the row-sparse gradients of eight trees, and the forward and backward
passes that compute them; whole training steps of heads with dense and row-sparse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

from benchmarks.baselines import flat_loss
from benchmarks.contest import Build, Contestant, Size, batch, step
from benchmarks.paths import PATH_SIZES, draw_paths, mean_loss
from hstree.heads import AdaptiveSoftmax, Head, Softmax, TreeEnsemble
from hstree.optim import AdamW

OPTIMIZER_SIZES = PATH_SIZES[1:]
LOSS = "forward + backward"
TORCH_ADAM = "torch.optim.SparseAdam"
ADAM = "hstree.optim.AdamW"


def _loss(size: Size, device: str) -> Contestant:
    paths = draw_paths(size, 8)
    leaves = [paths.input, paths.weight, paths.bias]
    return Contestant(step(lambda: mean_loss(paths.log_prob()), leaves), leaves=leaves)


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


def _linear(size: Size, device: str) -> Contestant:
    hidden, target, _ = batch(size.rows, size.features, size.classes)
    linear = nn.Linear(size.features, size.classes)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    backward = step(
        lambda: flat_loss(hidden, linear.weight, linear.bias, target),
        [hidden, *linear.parameters()],
    )
    return Contestant(lambda: (backward(), optimizer.step()))


def _head(
    size: Size, device: str, make: Callable[..., Head], optimizer: Callable[..., Optimizer]
) -> Contestant:
    hidden, target, frequencies = batch(size.rows, size.features, size.classes)
    head = make(size.features, frequencies)
    steps = optimizer(head.parameter_groups(lr=1e-3), fused=True)
    backward = step(lambda: head(hidden, target).loss, [hidden, *head.parameters()])
    return Contestant(lambda: (backward(), steps.step()))


def _softmax(features: int, frequencies: Sequence[float]) -> Head:
    return Softmax(features, len(frequencies))


def _adaptive(features: int, frequencies: Sequence[float]) -> Head:
    return AdaptiveSoftmax(features, len(frequencies))  # the classes are in order


TRAINING_SIZES = [Size(512, 256, classes, 256) for classes in (10_000, 33_278, 100_000)]
TRAINING: dict[str, Build] = {
    "linear, torch.optim.AdamW": _linear,
    "softmax, torch.optim.AdamW": partial(_head, make=_softmax, optimizer=torch.optim.AdamW),
    "adaptive, torch.optim.AdamW": partial(_head, make=_adaptive, optimizer=torch.optim.AdamW),
    "trees, torch.optim.AdamW": partial(
        _head, make=TreeEnsemble.from_counts, optimizer=torch.optim.AdamW
    ),
    "one tree, sparse, hstree.optim.AdamW": partial(
        _head, make=partial(TreeEnsemble.from_counts, n_trees=1, sparse=True), optimizer=AdamW
    ),
    "binary trees, sparse, hstree.optim.AdamW": partial(
        _head, make=partial(TreeEnsemble.from_counts, leaf=1, sparse=True), optimizer=AdamW
    ),
    "trees of two levels, sparse, hstree.optim.AdamW": partial(
        _head, make=partial(TreeEnsemble.from_counts, levels=2, sparse=True), optimizer=AdamW
    ),
    "trees, sparse, hstree.optim.AdamW": partial(
        _head, make=partial(TreeEnsemble.from_counts, sparse=True), optimizer=AdamW
    ),
}
OPTIMIZER_CONTESTS: dict[str, dict[str, Build]] = {
    f"optimizers, V = {size.classes}": OPTIMIZERS for size in OPTIMIZER_SIZES
} | {f"training steps, V = {size.classes}": TRAINING for size in TRAINING_SIZES}
