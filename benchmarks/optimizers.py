"""Steps of optimisers with the row-sparse gradients of eight trees, and the forward and
backward passes that make these."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch.optim import SGD, Adagrad, Optimizer

from benchmarks.contest import Build, Contestant, Size, step
from benchmarks.paths import PATH_SIZES, draw_paths, mean_loss
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
    """An optimiser's step with the gradients of one batch, which are not counted."""
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
OPTIMIZER_CONTESTS: dict[str, dict[str, Build]] = {
    f"optimizers, V = {size.classes}": OPTIMIZERS for size in OPTIMIZER_SIZES
}
