"""Steps of kernels and whole heads on a GPU, beside the flat losses that are installed.

    python -m benchmarks.gpu --out build/gpu --minutes 9     # repeat until it exits with 0 or 1
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --page benchmarks/results/gpu.json > benchmarks/results/gpu.md

Each contestant is measured in a process of its own with a time limit. results.json in the folder is
replaced after each, so that a crash, a hang or Ctrl-C loses only what was running; the next call
measures what is missing. The page is report.md.

The loss and the gradient of the input are first compared with float64: a wrong contestant is not
timed. Times are measured between events on the device. Before each step the device computes matrix
products. They hide the time of Python unless the step waits for the device, as in training, and
make the caches cold. A copy and a matrix product are timed before and after, so that contestants
can be compared. Clocks are read, never set.

Exit status: 0 all is measured, 1 a contestant of hstree failed, 2 there is no GPU or no CUDA build,
3 --minutes do not suffice for the next one. --device cpu measures tiny sizes, in seconds.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hstree
from benchmarks.baselines import torch_plif
from benchmarks.contest import batch
from benchmarks.memory import peak_extra_bytes
from hstree._files import write_atomic
from hstree.heads import TreeEnsemble, build_head
from hstree.heads.trees.layout import Layout
from hstree.lm.report import Column, Table, decimals, markdown, table
from hstree.ops import path_log_prob
from hstree.ops.forest_log_prob import forest_log_softmax
from hstree.trees import build_ensemble

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
Entry = Mapping[str, Any]
"""Figures of a contestant in a record."""

LIMIT = 120.0
"""Seconds for a contestant."""
WARM_UP = 3
PRODUCTS_AHEAD = 2
"""Number of reference products before each timed step: about 3 ms on an H100."""
CLOCKS = (
    "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu,"
    "clocks_event_reasons.active"
)
TOLERANCE = {"bfloat16": 0.05, "float32": 1e-3}
"""Largest allowed error of a gradient, relative to its largest value; for a loss, a fifth of it."""
RADIUS = 20.0
DRAWS = 0
"""Seed of the draws of a sampled head."""
CHECKED_ROWS = 32
CHUNK_BYTES = 2**29
"""Size of the float64 logits that a check computes at a time."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a step."""

    rows: int  # N
    features: int  # D
    classes: int  # V
    trees: int = 8  # T, binary ones
    wide_trees: int = 4  # T of the wide heads
    root: int = 1024  # C, of the wide heads
    dtype: str = "bfloat16"  # of input and weights
    intervals: int = 10_000  # K, of the piecewise linear function
    negatives: int = 512  # draws of the sampled heads
    elements: int = 2**27  # float32, of the copy that measures the bandwidth
    product: int = 8192  # rows and columns of the matrices of the reference product
    rounds: int = 20  # timed steps

    def __str__(self) -> str:
        return f"N = {self.rows}, D = {self.features}, V = {self.classes}, {self.dtype}"


TINY = "tiny"
"""Checks on a CPU, in seconds, that everything runs."""
SETTINGS = {
    "4096x128k": Setting(8192, 4096, 128_256),
    "2304x256k": Setting(8192, 2304, 256_000),
    "768x50k": Setting(16_384, 768, 50_257, root=256),
    TINY: Setting(40, 64, 300, 3, 2, 16, "float32", 100, 8, 2**12, 64, 3),
}


@dataclass(frozen=True)
class Contestant:
    """``kind``: the name in BUILDERS of the function that builds it with these options."""

    title: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.kind in ("paths", "trees", "head", "sampled")


def _paths_of(recipe: str, part: int, sparse: bool = True) -> Contestant:
    kind = "Huffman" if recipe == "huffman" else "balanced"
    title = f"{kind} trees, S = D/{part}" + ", dense gradients" * (not sparse)
    return Contestant(title, "paths", {"recipe": recipe, "part": part, "sparse": sparse})


def _flat_of(loss: str, title: str) -> Contestant:
    return Contestant(title, "flat", {"loss": loss})


LEAVES = {"levels": 2, "node_vectors": "leaves"}
EAGER = "eager"
CONTESTANTS: dict[str, Contestant] = {
    "huffman-4": _paths_of("huffman", 4),
    "random-4": _paths_of("random", 4),
    "huffman-2": _paths_of("huffman", 2),
    "huffman-4-dense": _paths_of("huffman", 4, sparse=False),
    "wide-binary": Contestant("wide root over binary nodes", "trees", {"leaf": 1}),
    "leaves": Contestant(
        "trees of two levels, one output embedding for all leaves", "trees", LEAVES
    ),
    "leaves-dense": Contestant("the same, dense gradients", "trees", LEAVES | {"sparse": False}),
    "softmax": Contestant("head `softmax`", "head", {"head": "softmax"}),
    "forest": Contestant("head `forest`, 4 trees", "head", {"head": "forest"}),
    "sampled": Contestant("head `sampled`, 512 negatives", "sampled", {"head": "sampled"}),
    "forest-sampled": Contestant(
        "head `forest`, 4 trees, 512 negatives", "sampled", {"head": "forest"}
    ),
    "plif": Contestant("head `plif`", "head", {"head": "plif"}),
    "sigsoftmax": Contestant("head `sigsoftmax`", "head", {"head": "sigsoftmax"}),
    EAGER: _flat_of("eager", "F.linear + F.cross_entropy"),
    "compiled": _flat_of("compiled", "torch.compile of it"),
    "cut": _flat_of("cut", "cut-cross-entropy"),
    "liger": _flat_of("liger", "Liger"),
    "chunked": _flat_of("chunked", "F.linear_cross_entropy"),
    "adaptive": Contestant("AdaptiveLogSoftmaxWithLoss", "adaptive"),
}
"""The contestants in the order of the tables: first those of hstree, kernels before whole heads;
then the baselines."""


# ---- the contestants


class Missing(Exception):
    """The contestant is unavailable; the message says why."""


@dataclass(frozen=True)
class Step:
    """A built contestant. ``check`` computes the errors of the loss and the input's gradient after
    a step, relative to the largest true value. ``compulsory`` are the bytes of forward and backward
    for any implementation: every input row, visited weight row, score and gradient once."""

    loss: Callable[[], Tensor]
    leaves: Sequence[Tensor]  # whose gradients the backward pass computes; the first is the input
    check: Callable[[Tensor, Tensor], dict[str, float]]
    compulsory: Mapping[str, int] | None = None

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def run(self) -> None:
        self.clear()
        self.loss().backward()


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


def subsets(features: int, subset: int, trees: int) -> Tensor:
    """feature_index [T, S]: for each tree, S of the D features in increasing order."""
    random = torch.Generator().manual_seed(0)
    drawn = (torch.randperm(features, generator=random)[:subset] for _ in range(trees))
    return torch.stack([index.sort().values for index in drawn]).int()


def visited_rows(target: Tensor, path_offset: Tensor, path: Tensor) -> int:
    """Number of nodes on the paths [P] to the targets [N], in all trees: path_offset [T, V + 1]."""
    total = 0
    target = target.unique()
    for offset in path_offset.long():
        begin = offset[target]
        length = offset[target + 1] - begin
        first = length.cumsum(0) - length
        entry = torch.arange(int(length.sum())) + (begin - first).repeat_interleave(length)
        total += len((path[entry] >> 1).unique())
    return total


def true_log_prob(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, layout: Any, index: Tensor
) -> Tensor:
    """log_prob [rows, T] of a few rows in float64 on the CPU, one path after another."""
    rows = []
    for x, y in zip(input, target.tolist(), strict=True):
        of_row = []
        for t, offset in enumerate(layout.path_offset):
            entry = layout.path[int(offset[y]) : int(offset[y + 1])]
            node, sign = (entry >> 1).long().to(weight.device), 2 * (entry & 1) - 1
            own = weight.detach()[t, node].double().cpu()
            z = own @ x[index[t].long()] + bias.detach()[t, node].double().cpu()
            of_row.append(F.logsigmoid(sign * z).sum())
        rows.append(torch.stack(of_row))
    return torch.stack(rows)


def _paths(setting: Setting, device: str, recipe: str, part: int, sparse: bool) -> Step:
    """The path op over T binary trees and their mixture with equal weights."""
    input, target, frequencies = _inputs(setting, device)
    options = {"frequencies": frequencies} if recipe == "huffman" else {}
    trees = build_ensemble(recipe, setting.classes, setting.trees, **options)
    layout = Layout(trees)
    rows, subset = setting.rows, setting.features // part
    cpu_index = subsets(setting.features, subset, setting.trees)
    weight = _normal((setting.trees, setting.classes - 1, subset), setting, device)
    bias = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=device, requires_grad=True)
    tables = [layout.path_offset, layout.path, layout.leaf_position, cpu_index]
    tables = [table.to(device) for table in tables]

    def log_prob(sparse: bool) -> Tensor:
        arguments = (input, weight, bias, target, *tables)
        return path_log_prob(*arguments, max_depth=layout.max_depth, sparse=sparse)

    def mixture(log_prob: Tensor) -> Tensor:
        return -torch.logsumexp(log_prob, 1)

    def check(value: Tensor, grad: Tensor) -> dict[str, float]:
        some = _checked(rows, device)
        x = input.detach()[some].double().cpu().requires_grad_()
        true = true_log_prob(x, weight, bias, target[some].cpu(), layout, cpu_index)
        (true_grad,) = torch.autograd.grad(mixture(true).sum() / rows, x)
        with torch.no_grad():
            got = log_prob(False)
        return {
            "log_prob": relative(got[some].cpu(), true.detach()),
            "loss": relative(value, mixture(got.double()).mean()),
            "grad_input": relative(grad[some].cpu(), true_grad),
        }

    visited = visited_rows(target.cpu(), layout.path_offset, layout.path)
    size = input.element_size()
    inputs, weights = rows * setting.features * size, visited * subset * size
    scores = 4 * rows * setting.trees * (layout.max_depth + 1)  # and log-probabilities
    gradient = visited * (subset + 1) * size + 16 * visited  # and two indices of each row
    return Step(
        lambda: mixture(log_prob(sparse)).mean(),
        [input, weight, bias],
        check,
        compulsory={
            "forward": inputs + weights + scores,
            "backward": 2 * inputs + weights + scores + gradient,
        },
    )


def _of_head(
    head: nn.Module,
    setting: Setting,
    input: Tensor,
    target: Tensor,
    row_losses: Callable[[Any, Tensor, Tensor], Tensor],
    loss: Callable[[], Tensor] | None = None,
) -> Step:
    """The step of a head, whose check compares loss and gradient with those of a float64 copy, a
    few rows at a time."""

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

    return Step(loss or (lambda: head(input, target).loss), [input, *head.parameters()], check)


def _of_all_classes(head: Any, x: Tensor, target: Tensor) -> Tensor:
    """Losses of rows from the log-probabilities of all classes, which do not depend on targets."""
    log_prob: Tensor = head.log_prob(x)
    return -log_prob.gather(1, target[:, None]).squeeze(1)


def _trees(
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
    weights = [head.nodes.binary_weight, head.nodes.wide_weight, head.nodes.root_weight]
    if node_vectors == "leaves":
        weights.append(head.nodes.output_embedding)
    with torch.no_grad():
        for weight in weights:
            if weight is not None:
                weight.normal_(std=setting.features**-0.5)
    return _of_head(head, setting, input, target, _of_all_classes)


def _flat_row_losses(head: Any, x: Tensor, target: Tensor) -> Tensor:
    """Losses of rows for a flat head, by torch's own ops."""
    logits = F.linear(x, head.weight, head.bias)
    function = getattr(head, "function", None)  # none: a linear layer
    if hasattr(function, "slopes"):
        logits = torch_plif(logits, function.slopes(), function.radius)
    elif function is not None and function.name == "sigsoftmax":
        logits = logits + F.logsigmoid(logits)
    return F.cross_entropy(logits, target, reduction="none")


def _built(head: str, setting: Setting, input: Tensor, **options: Any) -> Any:
    """A flat head of hstree whose scores are about one."""
    if head == "plif":
        options |= {"intervals": setting.intervals, "radius": RADIUS}
    with torch.device(input.device):
        module = build_head(head, setting.features, setting.classes, **options)
    module.to(input.device, input.dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in ("weight", "cluster_weight"):
                parameter.normal_(std=setting.features**-0.5)
    return module


def _head(setting: Setting, device: str, head: str) -> Step:
    """A flat head of hstree over all classes."""
    input, target, _ = _inputs(setting, device)
    row_losses = _of_all_classes if head == "forest" else _flat_row_losses
    return _of_head(_built(head, setting, input), setting, input, target, row_losses)


def _sampled(setting: Setting, device: str, head: str) -> Step:
    """A flat head of hstree over a sample of the classes, the same one in each step."""
    input, target, frequencies = _inputs(setting, device)
    module = _built(head, setting, input, negatives=setting.negatives, frequencies=frequencies)

    def row_losses(true: Any, x: Tensor, of_rows: Tensor) -> Tensor:
        torch.manual_seed(DRAWS)
        classes, log_weight = true.draw_classes(target)
        is_target = classes == of_rows[:, None]
        score = F.linear(x, true.weight[classes], true.bias[classes])
        score = torch.where(is_target, score, score + log_weight)
        if head == "forest":
            log_prior, cluster_score = true._of_trees(x)
            score = forest_log_softmax(score, log_prior, cluster_score, true.cluster[classes])
        return -score.log_softmax(1)[is_target]

    def loss() -> Tensor:
        torch.manual_seed(DRAWS)
        return module(input, target).loss

    return _of_head(module, setting, input, target, row_losses, loss)


def _adaptive(setting: Setting, device: str) -> Step:
    """torch's adaptive softmax, with the cutoffs of its documentation as shares of the classes."""
    input, target, _ = _inputs(setting, device)
    cutoffs = [setting.classes // 15, 3 * setting.classes // 15]
    head = nn.AdaptiveLogSoftmaxWithLoss(
        setting.features, setting.classes, cutoffs, device=device, dtype=input.dtype
    )
    return _of_head(head, setting, input, target, _of_all_classes)


def _flat(setting: Setting, device: str, loss: str) -> Step:
    """A flat loss without bias."""
    input, target, _ = _inputs(setting, device)
    layer = nn.Linear(setting.features, 1, bias=False, device=device, dtype=input.dtype)
    layer.weight = nn.Parameter(_normal((setting.classes, setting.features), setting, device))
    of_tensors, weight = FLAT[loss](), layer.weight
    return _of_head(
        layer, setting, input, target, _flat_row_losses, lambda: of_tensors(input, weight, target)
    )


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss of input [N, D], weight [V, D] and targets [N]."""


def _eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight), target)


def _chunked() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Missing(f"torch {torch.__version__} does not have it; it needs torch 2.13")
    return F.linear_cross_entropy


def _liger() -> Loss:
    loss = _library("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda input, weight, target: loss(weight, input, target)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{type(error).__name__}: {error}") from error


FLAT: dict[str, Callable[[], Loss]] = {
    "eager": lambda: _eager,
    "compiled": lambda: torch.compile(_eager),
    "chunked": _chunked,
    "liger": _liger,
    "cut": lambda: _library("cut_cross_entropy").linear_cross_entropy,
}


BUILDERS: dict[str, Callable[..., Step]] = {
    "paths": _paths,
    "trees": _trees,
    "head": _head,
    "sampled": _sampled,
    "adaptive": _adaptive,
    "flat": _flat,
}


# ---- measuring


class Stopwatch:
    """A timer of seconds between marks: events on a GPU, wall time on a CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device != "cpu"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between each mark and the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


class Reference:
    """A copy and a matrix product of fixed size."""

    def __init__(self, setting: Setting, device: str) -> None:
        self.setting, self.device = setting, device
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.matrix = torch.randn(setting.product, setting.product, device=device).to(dtype)
        self.result = torch.empty_like(self.matrix)

    def product(self) -> None:
        torch.mm(self.matrix, self.matrix, out=self.result)

    def measure(self) -> dict[str, float]:
        """Bytes per second of the copy, read and written, and operations per second of the
        product."""
        source = torch.randn(self.setting.elements, device=self.device)
        target = torch.empty_like(source)
        copied = self._seconds(lambda: target.copy_(source))
        return {
            "copy_bytes_per_second": 8 * self.setting.elements / copied,
            "product_flops": 2 * self.setting.product**3 / self._seconds(self.product),
        }

    def _seconds(self, run: Callable[[], object]) -> float:
        watch = Stopwatch(self.device)
        for _ in range(WARM_UP):
            run()
        watch.mark()
        for _ in range(self.setting.rounds):
            run()
            watch.mark()
        return median(watch.seconds())


def nvidia_smi(fields: str, while_waiting: Callable[[], object] = lambda: None) -> Figures:
    """Its answer for the device; empty where it does not run."""
    identity = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    command += [] if identity is None else [f"--id=GPU-{str(identity).removeprefix('GPU-')}"]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                while_waiting()
            values = process.communicate()[0].strip().split(", ")
    except OSError:
        return {}
    return {} if process.returncode else dict(zip(fields.split(","), values, strict=False))


def machine(device: str) -> Figures:
    gpu: Figures = {}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "driver": nvidia_smi("driver_version").get("driver_version"),
        }
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"gpu": gpu, "cuda": torch.version.cuda, **versions}


def kernel_name(key: str) -> str:
    """The short name of a kernel: `path_log_prob_kernel` for those of hstree, `sort and the rest`
    for others."""
    found = re.search(r"hstree::.*?(\w+_kernel)\b", key)
    return found.group(1) if found else "sort and the rest"


def kernel_seconds(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Mean seconds of a step in each kernel by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in recorded.key_averages():
        spent = event.self_device_time_total * 1e-6 / repeats
        if spent > 0:
            name = kernel_name(event.key)
            total[name] = total.get(name, 0.0) + spent
    return total


def timed(step: Step, reference: Reference) -> dict[str, list[float]]:
    """Seconds of forward, backward and both, for each round."""
    watch = Stopwatch(reference.device)
    for _ in range(WARM_UP + reference.setting.rounds):
        watch.mark()
        step.clear()
        for _ in range(PRODUCTS_AHEAD if watch.cuda else 0):
            reference.product()
        watch.mark()
        value = step.loss()
        watch.mark()
        value.backward()
        del value
    watch.mark()
    step.clear()
    taken = watch.seconds()[3 * WARM_UP :]
    forward, backward = taken[1::3], taken[2::3]
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return {"forward": forward, "backward": backward, "both": both}


def too_far(errors: Mapping[str, float], dtype: str) -> str | None:
    """Why a contestant is wrong, or None. An error of nan is too large."""
    for name, error in errors.items():
        most = TOLERANCE[dtype] / (1 if name.startswith("grad") else 5)
        if not error <= most:
            return f"error of {name}: expected at most {most:g}, got {error:.3g}"
    return None


def measure(contestant: Contestant, setting: Setting, device: str) -> Figures:
    """Errors, seconds and peak memory of a contestant, and the speed of the machine. The outcome is
    "measured", or with a ``detail`` "missing", "wrong" or "failed"."""
    figures: Figures = {
        "title": contestant.title,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "machine": machine(device),
    }
    try:
        reference = Reference(setting, device)
        figures["reference"] = [reference.measure()]
        step = BUILDERS[contestant.kind](setting, device, **contestant.options)
        figures["parameters"] = sum(leaf.numel() for leaf in step.leaves[1:])
        if step.compulsory is not None:
            figures["traffic"] = {"compulsory": step.compulsory}
        value = step.loss()
        value.backward()
        figures["errors"] = step.check(value.detach(), step.leaves[0].grad)
        del value
        if wrong := too_far(figures["errors"], setting.dtype):
            return figures | {"outcome": "wrong", "detail": wrong}
        step.clear()
        figures["peak_bytes"] = peak_extra_bytes(step.run, device)
        figures["seconds"] = timed(step, reference)
        if device != "cpu":
            figures["clocks"] = nvidia_smi(CLOCKS, lambda: (step.run(), torch.cuda.synchronize()))
            figures["kernel_seconds"] = kernel_seconds(step.run, setting.rounds)
        step.clear()
        figures["reference"].append(reference.measure())
    except Missing as reason:
        return figures | {"outcome": "missing", "detail": str(reason)}
    except Exception as error:  # any error is a result
        return figures | {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:1000]}
    return figures | {"outcome": "measured"}


# ---- all contestants


def lines(results: Mapping[str, Any]) -> str:
    """A record as JSON, with a line for each entry."""
    head = {name: value for name, value in results.items() if name != "entries"}
    entries = ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(e)}" for k, e in results["entries"].items()
    )
    return f'{json.dumps(head)[:-1]},\n "entries": {{\n{entries}}}}}\n'


def sources() -> str:
    """Digest of what hstree is built from."""
    found = hashlib.sha256()
    files = (*ROOT.glob("csrc/**/*"), *ROOT.glob("hstree/**/*.py"))
    for path in sorted(p for p in files if p.is_file() and p.name != "_build_info.py"):
        found.update(f"{path.relative_to(ROOT)}".encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def of_process(setting: str, name: str, device: str, seconds: float, file: Path) -> Figures:
    """The figures of a contestant, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", setting, name, str(file)]
    begin, title = time.monotonic(), CONTESTANTS[name].title
    file.unlink(missing_ok=True)
    figures: Figures = {"title": title, "outcome": "timed out", "detail": f"after {seconds:.0f} s"}
    try:
        done = subprocess.run(
            [*command, "--device", device], cwd=ROOT, timeout=seconds, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        last = "\n".join([f"exit status {done.returncode}", *done.stdout.splitlines()[-8:]])
        figures |= {"outcome": "crashed", "detail": last}
    except subprocess.TimeoutExpired:
        pass
    if file.exists():
        figures = json.loads(file.read_text())
        file.unlink()
    return figures | {"seconds_taken": round(time.monotonic() - begin, 1)}


def measure_all(options: argparse.Namespace) -> int:
    """Measure what is missing in the folder, and write the page. Returns the exit status."""
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    file, now, here = options.out / "results.json", sources(), machine(options.device)
    about = {"name": "cpu", **here["gpu"], "torch": here["torch"], "cuda": here["cuda"]}
    results: Figures = {"device": about, "calls": [], "entries": {}}
    if file.exists():
        results = json.loads(file.read_text())
        if results["device"]["name"] != about["name"]:
            there = results["device"]["name"]
            raise SystemExit(f"--out: {file} is of {there}, this device is {about['name']}")
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    results["calls"].append({"date": date, "sources": now})
    chosen = [
        (setting, name)
        for setting in options.settings
        for name in CONTESTANTS
        if any(fnmatch(name, pattern) for pattern in options.contestants)
    ]
    status, failed = 0, False
    for setting, name in sorted(chosen, key=lambda one: not CONTESTANTS[one[1]].ours):
        key, ours = f"benchmarks/{setting}/{name}", CONTESTANTS[name].ours
        entry = results["entries"].get(key, {"outcome": "missing"})
        if entry["outcome"] == "missing" or (ours and entry["sources"] != now):
            left = deadline - time.monotonic()
            if left < LIMIT:
                status = 3
                break
            entry = of_process(setting, name, options.device, LIMIT, options.out / "one.json")
            entry["sources"] = now
            results["entries"][key] = entry
            print(f"{key}: {entry['outcome']} {entry.get('detail', '')}", flush=True)
            write_atomic(file, lines(results).encode())
        failed |= ours and entry["outcome"] != "measured"
    write_atomic(options.out / "report.md", page(results).encode())
    return status or int(failed)


# ---- the page


TARGETS = (
    "Targets of binary trees: time of a step / copy of its compulsory bytes at most 2, fastest "
    "flat loss / this at least 20, extra memory at most 5% of that of F.linear + F.cross_entropy."
)
MOST_DRIFT = 0.05
"""Processes whose reference copy or product differs by more than this are listed."""
LEAST_SHARE = 0.02
"""Kernels with less of a step's time are left out."""


def spread(seconds: Sequence[float]) -> float:
    """Half the interquartile range."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2


def middle(entry: Entry, part: str = "both") -> float | None:
    """Median seconds of a part of a step, or None."""
    return median(entry["seconds"][part]) if entry.get("seconds") else None


def moved(entry: Entry, part: str) -> int:
    """Compulsory bytes of a part of a step."""
    compulsory: Mapping[str, int] = entry["traffic"]["compulsory"]
    return sum(compulsory.values()) if part == "both" else compulsory[part]


def traffic_ratio(entry: Entry, part: str) -> float | None:
    """Time of a part of a step, relative to a copy of its compulsory bytes in the same process."""
    seconds = middle(entry, part)
    if seconds is None or "traffic" not in entry:
        return None
    copied = median(r["copy_bytes_per_second"] for r in entry["reference"])
    return seconds * copied / moved(entry, part)


def of_setting(results: Mapping[str, Any], setting: str) -> dict[str, Entry]:
    """Entries of the contestants of a setting, in the order of the record."""
    start = f"benchmarks/{setting}/"
    found = results["entries"].items()
    return {key.removeprefix(start): entry for key, entry in found if key.startswith(start)}


def fastest_flat(there: Mapping[str, Entry]) -> float | None:
    """Median seconds of the fastest flat loss."""
    flat = (middle(entry) for name, entry in there.items() if name in FLAT)
    return min((seconds for seconds in flat if seconds is not None), default=None)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _stages(entries: Mapping[str, Entry]) -> str:
    """What else is in the record: tests and runs of compute-sanitizer."""

    def counts(entry: Entry) -> str:
        counted = ", ".join(f"{count} {what}" for what, count in entry.get("counts", {}).items())
        return "; ".join(filter(None, (counted, entry.get("detail"))))

    rows = [one for one in entries.items() if not one[0].startswith("benchmarks/")]
    columns: list[Column] = [
        ("stage", lambda row: row[0]),
        ("outcome", lambda row: row[1]["outcome"]),
        ("", lambda row: counts(row[1])),
        ("seconds", lambda row: row[1]["seconds_taken"], decimals(0)),
    ]
    return markdown([table("Stages", rows, columns)]) if rows else ""


def _times(there: Mapping[str, Entry]) -> Table:
    eager, fastest = middle(there.get(EAGER, {})), fastest_flat(there)

    def title(entry: Entry) -> str:
        detail = entry.get("detail", "").partition("\n")[0]
        failed = "" if entry["outcome"] == "measured" else f": {entry['outcome']}, {detail}"
        return entry["title"] + failed

    def cell(seconds: Sequence[float]) -> str:
        return f"{1000 * median(seconds):,.3f} ± {1000 * spread(seconds):.3f}" if seconds else ""

    columns: list[Column] = [("", title)]
    for part in ("forward", "backward", "both"):
        get = partial(lambda part, entry: entry.get("seconds", {}).get(part), part)
        columns.append((f"{part}, ms", get, cell))
    columns += [
        (
            "extra memory, MiB",
            lambda entry: entry.get("peak_bytes"),
            lambda peak: "" if peak is None else f"{peak / 2**20:,.0f}",
        ),
        ("eager / this", lambda entry: ratio(eager, middle(entry)), decimals(2)),
        ("fastest flat loss / this", lambda entry: ratio(fastest, middle(entry)), decimals(2)),
    ]
    return table("Steps", there.values(), columns)


def _traffic(there: Mapping[str, Entry]) -> Table:
    rows = [
        (entry, part)
        for entry in there.values()
        if "traffic" in entry
        for part in entry.get("seconds", ())
    ]
    return table(
        "Compulsory bytes",
        rows,
        [
            ("", lambda row: row[0]["title"]),
            ("part", lambda row: row[1]),
            ("ms", lambda row: 1000 * middle(*row), decimals(3)),
            ("MiB", lambda row: moved(*row) / 2**20, decimals(0)),
            ("GB/s of these", lambda row: moved(*row) / middle(*row) / 1e9, decimals(0)),
            ("time / copy of these", lambda row: traffic_ratio(*row), decimals(2)),
        ],
    )


def _kernels(there: Mapping[str, Entry]) -> Table:
    rows = []
    for entry in there.values():
        kernels = entry.get("kernel_seconds", {})
        if any(name.endswith("_kernel") for name in kernels):
            least = LEAST_SHARE * sum(kernels.values())
            shown = sorted(kernels.items(), key=lambda item: -item[1])
            rows += [(entry, name, seconds) for name, seconds in shown if seconds >= least]
    return table(
        f"Kernels with at least {LEAST_SHARE:.0%} of a step",
        rows,
        [
            ("", lambda row: row[0]["title"]),
            ("kernel", lambda row: row[1]),
            ("ms of a step", lambda row: 1000 * row[2], decimals(3)),
        ],
    )


def _range(values: Sequence[str]) -> str:
    """The range of the numbers, or all different texts."""
    try:
        numbers = sorted(float(value) for value in values)
    except ValueError:
        return ", ".join(sorted(set(values)))
    return f"{numbers[0]:g} to {numbers[-1]:g}" if numbers[0] < numbers[-1] else f"{numbers[0]:g}"


def _machine(there: Mapping[str, Entry]) -> Iterator[str]:
    """How much the speed of the machine differed between processes."""
    measured = {n: e for n, e in there.items() if len(e.get("reference", ())) == 2}
    if not measured:
        return
    for figure, unit, what in (
        ("copy_bytes_per_second", 1e9, "GB/s of a copy"),
        ("product_flops", 1e12, "TFLOP/s of a matrix product"),
    ):
        of = {name: [r[figure] for r in entry["reference"]] for name, entry in measured.items()}
        values = [value for own in of.values() for value in own]
        usual = median(values)
        far = [n for n, own in of.items() if any(abs(v / usual - 1) > MOST_DRIFT for v in own)]
        yield (
            f"{what}, before and after each contestant: median {usual / unit:,.1f}, from "
            f"{min(values) / unit:,.1f} to {max(values) / unit:,.1f}"
            + (f"; more than {MOST_DRIFT:.0%} off: {', '.join(far)}" if far else "")
            + "."
        )
    clocks = [e["clocks"] for e in measured.values() if e.get("clocks")]
    for name in clocks[0] if clocks else ():
        yield f"{name} while the contestants ran: {_range([c[name] for c in clocks])}."
    sources = sorted({e["sources"] for e in measured.values()})
    if len(sources) > 1:
        yield f"Sources of hstree differ between contestants: {', '.join(sources)}."


def page(results: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    entries, device = results["entries"], results["device"]
    dates = sorted({call["date"][:10] for call in results["calls"]})
    gpus = [e["machine"]["gpu"] for e in entries.values() if e.get("machine", {}).get("gpu")]
    drivers = sorted({gpu.get("driver") or "unknown" for gpu in gpus}) or ["unknown"]
    parts = [
        f"# hstree on {device['name']}",
        f"torch {device['torch']}, CUDA {device['cuda']}, driver {', '.join(drivers)}, "
        f"{', '.join(dates)}.",
        TARGETS,
        _stages(entries),
    ]
    for name, setting in SETTINGS.items():
        there = of_setting(results, name)
        if not there:
            continue
        shown = [_times(there), _traffic(there), _kernels(there)]
        parts += [
            f"## {name}",
            f"{setting}; binary trees T = {setting.trees}, wide heads T = {setting.wide_trees}, "
            f"C = {setting.root}; {setting.rounds} rounds, median ± half the interquartile "
            "range; extra memory includes the gradients.",
            markdown([one for one in shown if one.rows], _machine(there)),
        ]
    if text := entries.get("decoding", {}).get("table"):
        parts += ["## Decoding", text]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder of the results")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes only")
    add("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    add("--settings", nargs="+", choices=SETTINGS, help="default: all; tiny on a CPU")
    add("--contestants", nargs="+", default=["*"], metavar="NAME", help="names, or patterns with *")
    add("--list", action="store_true", help="print settings and contestants")
    add("--page", type=Path, metavar="FILE", help="print the page of a record")
    add("--one", nargs=3, metavar=("SETTING", "CONTESTANT", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.settings is None:
        options.settings = [
            name for name in SETTINGS if (name == TINY) == (options.device == "cpu")
        ]
    if options.list:
        print("\n".join(f"{name}: {setting}" for name, setting in SETTINGS.items()))
        print("\n".join(f"    {name}: {entry.title}" for name, entry in CONTESTANTS.items()))
        return 0
    if options.page is not None:
        print(page(json.loads(options.page.read_text())), end="")
        return 0
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("benchmarks.gpu needs a CUDA GPU, but torch finds none", file=sys.stderr)
            return 2
        if hstree.build_info().cuda is None:
            print("benchmarks.gpu needs a CUDA build of hstree", file=sys.stderr)
            return 2
    else:
        torch.set_num_threads(1)
    if options.one is not None:
        setting, name, file = options.one
        figures = measure(CONTESTANTS[name], SETTINGS[setting], options.device)
        write_atomic(Path(file), json.dumps(figures).encode())
        return 0
    if options.out is None:
        parser.error("expected --out DIR, --page FILE or --list")
    return measure_all(options)


if __name__ == "__main__":
    sys.exit(main())
