"""The contestants of benchmarks.gpu: each is one step, with a check of its results against
float64."""

from __future__ import annotations

import copy
import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import torch_plif
from benchmarks.contest import batch
from benchmarks.gpu_settings import Entry, Setting
from benchmarks.gpu_traffic import PATH_TABLES, traffic
from hstree.heads import TreeEnsemble, head_class
from hstree.heads.functions import PLIF
from hstree.heads.trees.layout import Layout
from hstree.ops import path_log_prob, piecewise, plif_table
from hstree.trees import build_ensemble

RADIUS = 20.0
CHECKED_ROWS = 32
CHUNK_BYTES = 2**29
"""Size of the float64 logits that a check computes at a time."""


class Missing(Exception):
    """The contestant is unavailable; the message says why."""


@dataclass(frozen=True)
class Step:
    """One contestant.

    Attributes:
        loss: the forward pass.
        leaves: tensors whose gradients the backward pass computes; the first is the input.
        check: computes the errors of the loss and the input's gradient after a step, relative to
            the largest true value.
        parameters: number of parameters.
        grad: gradient of the result, if it is not a scalar.
        traffic: bytes by part, and other known counts.
    """

    loss: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    check: Callable[[Tensor, Tensor], dict[str, float]]
    parameters: int = 0
    grad: Tensor | None = None
    traffic: Mapping[str, Any] | None = None

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def build(entry: Entry, setting: Setting, device: str) -> Step:
    """Build the step of a contestant. Raises Missing if a library does not have it."""
    return BUILDERS[entry.kind](setting, device, **entry.options)


def relative(got: Tensor, true: Tensor) -> float:
    """Largest difference, relative to the largest true value."""
    return float((got.detach().double() - true).abs().max() / true.abs().max())


def _checked(rows: int, device: str) -> Tensor:
    """The rows to check, spread over the batch."""
    return torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS), device=device).long()


def _inputs(setting: Setting, device: str) -> tuple[Tensor, Tensor, Any]:
    """Input [N, D] with gradient, targets [N] drawn from Zipf's law, and its frequencies."""
    torch.manual_seed(0)
    input, target, frequencies = batch(setting.rows, setting.features, setting.classes, device)
    dtype = getattr(torch, setting.dtype)
    return input.detach().to(dtype).requires_grad_(), target, frequencies


def _normal(shape: tuple[int, ...], setting: Setting, device: str) -> Tensor:
    """Weights that give scores of about one."""
    weight = torch.empty(shape, dtype=getattr(torch, setting.dtype), device=device)
    return weight.normal_(std=shape[-1] ** -0.5).requires_grad_()


def _count(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# ---- binary trees


def subsets(features: int, subset: int, trees: int, block: int) -> Tensor:
    """feature_index [T, S]: for each tree, S of the D features in increasing order, drawn in
    aligned blocks."""
    random = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(trees):
        blocks = torch.randperm(features // block, generator=random)[: subset // block]
        within = blocks.sort().values[:, None] * block + torch.arange(block)
        drawn.append(within.flatten())
    return torch.stack(drawn).int()


def _paths(
    setting: Setting, device: str, recipe: str, part: int, block: int, sparse: bool = True
) -> Step:
    """The path op over T binary trees and their mixture with equal weights."""
    input, target, frequencies = _inputs(setting, device)
    options = {"frequencies": frequencies} if recipe == "huffman" else {}
    trees = build_ensemble(recipe, setting.classes, setting.trees, **options)
    layout = Layout(trees, setting.classes)
    cpu, max_depth = layout.tables(), layout.max_depth
    subset = setting.features // part
    cpu_index = subsets(setting.features, subset, setting.trees, block)
    weight = _normal((setting.trees, setting.classes - 1, subset), setting, device)
    bias = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=device, requires_grad=True)
    tables = [cpu[name].to(device) for name in PATH_TABLES]
    index = cpu_index.to(device)

    def loss() -> Tensor:
        arguments = (input, weight, bias, target, *tables, index)
        log_prob = path_log_prob(*arguments, max_depth=max_depth, sparse=sparse)
        return -torch.logsumexp(log_prob, 1).mean()

    def check(value: Tensor, grad: Tensor) -> dict[str, float]:
        some = _checked(setting.rows, device)
        x = input.detach()[some].double().cpu().requires_grad_()
        arguments = (input.detach(), weight.detach(), bias.detach(), target, *tables, index)
        log_prob = path_log_prob(*arguments, max_depth=max_depth)
        true = _true_log_prob(x, weight, bias, target[some].cpu(), cpu, cpu_index)
        row_losses = -torch.logsumexp(true, 1)
        (true_grad,) = torch.autograd.grad(row_losses.sum() / setting.rows, x)
        return {
            "log_prob": relative(log_prob[some].cpu(), true.detach()),
            "loss": relative(value, -torch.logsumexp(log_prob.double(), 1).mean()),
            "grad_input": relative(grad[some].cpu(), true_grad),
        }

    counted = traffic(
        target.cpu().numpy(),
        {name: cpu[name].numpy() for name in PATH_TABLES},
        cpu_index.numpy(),
        setting.features,
        subset,
        max_depth,
        input.element_size(),
    )
    leaves = [input, weight, bias]
    return Step(loss, leaves, check, _count(leaves[1:]), traffic=asdict(counted))


def _true_log_prob(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, tables: Mapping[str, Tensor],
    index: Tensor,
) -> Tensor:  # fmt: skip
    """log_prob of a few rows in float64 on the CPU, path by path."""
    log_probs = []
    for x, y in zip(input, target.tolist(), strict=True):
        for t, offset in enumerate(tables["path_offset"]):
            entry = tables["path"][offset[y] : offset[y + 1]]
            node = (entry >> 1).long().to(weight.device)
            w, b = weight.detach()[t, node].double().cpu(), bias.detach()[t, node].double().cpu()
            z = w @ x[index[t].long()] + b
            log_probs.append(F.logsigmoid(torch.where(entry & 1 == 1, z, -z)).sum())
    return torch.stack(log_probs).view(len(input), -1)


# ---- whole heads


def _against_copy(
    head: nn.Module, setting: Setting, input: Tensor, target: Tensor,
    row_losses: Callable[[Any, Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], dict[str, float]]:  # fmt: skip
    """Check loss and gradient against a float64 copy of the head, a few rows at a time."""

    def check(value: Tensor, grad: Tensor) -> dict[str, float]:
        true = copy.deepcopy(head).double()
        x = input.detach().double()
        rows = torch.arange(setting.rows, device=input.device)
        size = max(1, CHUNK_BYTES // (8 * setting.classes))
        with torch.no_grad():
            losses = [row_losses(true, x[part], target[part]).sum() for part in rows.split(size)]
        some = _checked(setting.rows, input.device.type)
        few = x[some].requires_grad_()
        (true_grad,) = torch.autograd.grad(
            row_losses(true, few, target[some]).sum() / setting.rows, few
        )
        return {
            "loss": relative(value, torch.stack(losses).sum() / setting.rows),
            "grad_input": relative(grad[some], true_grad),
        }

    return check


def _of_head(
    head: nn.Module, setting: Setting, input: Tensor, target: Tensor,
    row_losses: Callable[[Any, Tensor, Tensor], Tensor],
) -> Step:  # fmt: skip
    check = _against_copy(head, setting, input, target, row_losses)
    leaves = [input, *head.parameters()]
    return Step(lambda: head(input, target).loss, leaves, check, _count(leaves[1:]))


def _of_all_classes(head: TreeEnsemble, x: Tensor, target: Tensor) -> Tensor:
    """Losses of rows from the log-probabilities of all classes, which do not depend on targets."""
    return -head.log_prob(x).gather(1, target[:, None]).squeeze(1)


def _wide(
    setting: Setting, device: str, node_vectors: str = "free", sparse: bool = True, **shape: int
) -> Step:
    """A whole ensemble of Huffman trees over all features with a wide root."""
    input, target, frequencies = _inputs(setting, device)
    size, root = setting.classes, setting.root
    trees = build_ensemble("huffman", size, setting.wide_trees, frequencies, root=root, **shape)
    options = {"frequencies": frequencies, "sparse": sparse, "node_vectors": node_vectors}
    with torch.device(device):
        head = TreeEnsemble(setting.features, size, trees, **options)
    head.to(device, input.dtype)
    weights = [head.weight, head.wide_weight, head.root_weight]
    if node_vectors == "leaves":
        weights.append(head.output_embedding)
    with torch.no_grad():
        for weight in weights:
            if weight is not None:
                weight.normal_(std=setting.features**-0.5)
    return _of_head(head, setting, input, target, _of_all_classes)


def _flat_row_losses(head: Any, x: Tensor, target: Tensor) -> Tensor:
    """Losses of rows for a flat head, by torch's own ops."""
    logits = F.linear(x, head.weight, head.bias)
    if isinstance(head.function, PLIF):
        logits = torch_plif(logits, head.function.slopes(), head.function.radius)
    elif head.function.name == "sigsoftmax":
        logits = logits + F.logsigmoid(logits)
    return F.cross_entropy(logits, target, reduction="none")


def _head(setting: Setting, device: str, head: str) -> Step:
    """A flat head of hstree."""
    input, target, _ = _inputs(setting, device)
    options = {"intervals": setting.intervals, "radius": RADIUS} if head == "plif" else {}
    with torch.device(device):
        module = head_class(head)(setting.features, setting.classes, **options)
    module.to(device, input.dtype)
    with torch.no_grad():
        module.get_parameter("weight").normal_(std=setting.features**-0.5)
    return _of_head(module, setting, input, target, _flat_row_losses)


def _adaptive(setting: Setting, device: str) -> Step:
    """torch's adaptive softmax, with the cutoffs of its documentation as shares of the classes."""
    input, target, _ = _inputs(setting, device)
    cutoffs = [setting.classes // 15, 3 * setting.classes // 15]
    head = nn.AdaptiveLogSoftmaxWithLoss(
        setting.features, setting.classes, cutoffs, device=device, dtype=input.dtype
    )
    return _of_head(head, setting, input, target, _of_all_classes)


# ---- flat losses


def _flat(setting: Setting, device: str, loss: str) -> Step:
    """A flat loss without bias."""
    input, target, _ = _inputs(setting, device)
    layer = nn.Linear(setting.features, 1, bias=False, device=device, dtype=input.dtype)
    layer.weight = nn.Parameter(_normal((setting.classes, setting.features), setting, device))
    weight = layer.weight

    def row_losses(head: Any, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(head(x), target, reduction="none")

    check = _against_copy(layer, setting, input, target, row_losses)
    return Step(FLAT[loss](input, weight, target), [input, weight], check, weight.numel())


Loss = Callable[[], Tensor]


def _eager(input: Tensor, weight: Tensor, target: Tensor) -> Loss:
    return lambda: F.cross_entropy(F.linear(input, weight), target)


def _compiled(input: Tensor, weight: Tensor, target: Tensor) -> Loss:
    function = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w), y))
    return lambda: function(input, weight, target)


def _chunked(input: Tensor, weight: Tensor, target: Tensor) -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Missing(f"torch {torch.__version__} does not have it; it needs torch 2.13")
    return lambda: F.linear_cross_entropy(input, weight, target)


def _liger(input: Tensor, weight: Tensor, target: Tensor) -> Loss:
    loss = _library("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda: loss(weight, input, target)


def _cut(input: Tensor, weight: Tensor, target: Tensor) -> Loss:
    function = _library("cut_cross_entropy").linear_cross_entropy
    return lambda: function(input, weight, target)


def _quack(input: Tensor, weight: Tensor, target: Tensor) -> Loss:
    function = _library("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda: function(input, weight, target, tuned=False)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{type(error).__name__}: {error}") from error


FLAT: dict[str, Callable[[Tensor, Tensor, Tensor], Loss]] = {
    "eager": _eager,
    "compiled": _compiled,
    "chunked": _chunked,
    "liger": _liger,
    "cut": _cut,
    "quack": _quack,
}


# ---- the piecewise linear function alone


def _function(setting: Setting, device: str) -> Step:
    """Forward reads and writes each element once; backward reads two and writes one."""
    torch.manual_seed(0)
    input = (4 * torch.randn(setting.elements, device=device)).requires_grad_()
    grad = torch.randn(setting.elements, device=device)
    slopes = F.softplus(torch.randn(setting.intervals, device=device))
    table = plif_table(slopes, RADIUS).requires_grad_()

    def check(value: Tensor, got: Tensor) -> dict[str, float]:
        some = slice(0, 10_000)
        x = input.detach()[some].double().requires_grad_()
        true = torch_plif(x, slopes.double(), RADIUS) - torch_plif(
            x.new_zeros(1), slopes.double(), RADIUS
        )
        zero = piecewise(input.new_zeros(1), table, RADIUS)
        (true_grad,) = torch.autograd.grad(true, x, grad[some].double())
        return {
            "output": relative(value[some] - zero, true.detach()),
            "grad_input": relative(got[some], true_grad),
        }

    size = 4 * setting.elements
    return Step(
        lambda: piecewise(input, table, RADIUS),
        [input, table],
        check,
        table.numel(),
        grad,
        {"compulsory": {"forward": 2 * size, "backward": 3 * size}},
    )


# ---- contestants that fail


def _crash(setting: Setting, device: str) -> Step:
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError("SIGABRT is blocked")


def _hang(setting: Setting, device: str) -> Step:
    while True:
        time.sleep(60)


BUILDERS: dict[str, Callable[..., Step]] = {
    "paths": _paths,
    "wide": _wide,
    "head": _head,
    "adaptive": _adaptive,
    "flat": _flat,
    "function": _function,
    "crash": _crash,
    "hang": _hang,
}
