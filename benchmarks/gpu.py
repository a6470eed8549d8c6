"""Measure one contestant on a GPU, in this process, and write the results as JSON.

    python -m benchmarks.gpu 4096x128k huffman-4 --out huffman-4.json
    python -m benchmarks.gpu --list

benchmarks.gpu_proof runs all contestants, each in its own process, and makes the tables.

The loss and the gradient of the input are first compared with float64: a wrong contestant is not
timed. Times are measured between events on the device. Before each step the device computes matrix
products. They hide the time of Python unless the step waits for the device, as in training, and
make the caches cold. A copy and a matrix product are timed before and after, so that runs of
different processes can be compared. Clocks are read, never set. The file is written after each
part, so a killed process leaves its results so far. Exits with 2 if there is no GPU.

hstree is imported by the functions that need it: benchmarks.gpu_proof lists the contestants before
anything is built.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import torch_plif
from benchmarks.contest import batch
from benchmarks.memory import peak_extra_bytes

Figures = dict[str, Any]

WARM_UP = 3
PRODUCTS_AHEAD = 2
"""Number of reference products before each timed step: about 3 ms on an H100."""
CLOCKS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
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
class Entry:
    """A contestant: its title in tables, the name in BUILDERS and the arguments of the function
    that builds it, and the distribution that it needs."""

    title: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None

    @property
    def ours(self) -> bool:
        return self.kind in ("paths", "wide", "head", "sampled")


def _paths_entry(recipe: str, part: int, sparse: bool = True) -> Entry:
    kind = "Huffman" if recipe == "huffman" else "balanced"
    title = f"{kind} trees, S = D/{part}" + ("" if sparse else ", dense gradients")
    options = {"recipe": recipe, "part": part, "sparse": sparse}
    return Entry(title, "paths", options)


EAGER = "eager"
CONTESTANTS: dict[str, Entry] = {
    "huffman-4": _paths_entry("huffman", 4),
    "random-4": _paths_entry("random", 4),
    "huffman-2": _paths_entry("huffman", 2),
    "huffman-4-dense": _paths_entry("huffman", 4, sparse=False),
    "wide-32": Entry("wide trees, groups of 32 leaves", "wide", {"leaf": 32}),
    "wide-binary": Entry("wide root over binary nodes", "wide", {"leaf": 1}),
    "leaves": Entry(
        "trees of two levels, one output embedding for all leaves",
        "wide",
        {"levels": 2, "node_vectors": "leaves"},
    ),
    "leaves-dense": Entry(
        "the same, dense gradients",
        "wide",
        {"levels": 2, "node_vectors": "leaves", "sparse": False},
    ),
    "softmax": Entry("head `softmax`", "head", {"head": "softmax"}),
    "forest": Entry("head `forest`, 4 trees", "head", {"head": "forest"}),
    "sampled": Entry("head `sampled`, 512 negatives", "sampled", {"head": "sampled"}),
    "forest-sampled": Entry("head `forest`, 4 trees, 512 negatives", "sampled", {"head": "forest"}),
    "plif": Entry("head `plif`", "head", {"head": "plif"}),
    "sigsoftmax": Entry("head `sigsoftmax`", "head", {"head": "sigsoftmax"}),
    EAGER: Entry("F.linear + F.cross_entropy", "flat", {"loss": "eager"}),
    "compiled": Entry("torch.compile of it", "flat", {"loss": "compiled"}),
    "cut": Entry("cut-cross-entropy", "flat", {"loss": "cut"}, "cut-cross-entropy"),
    "liger": Entry("Liger", "flat", {"loss": "liger"}, "liger-kernel"),
    "quack": Entry("QuACK, not tuned", "flat", {"loss": "quack"}, "quack-kernels"),
    "chunked": Entry("F.linear_cross_entropy", "flat", {"loss": "chunked"}),
    "adaptive": Entry("AdaptiveLogSoftmaxWithLoss", "adaptive"),
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
    drawn = [torch.randperm(features, generator=random)[:subset] for _ in range(trees)]
    return torch.stack(drawn).sort(1).values.int()


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
    from hstree.heads.trees.layout import Layout
    from hstree.ops import path_log_prob
    from hstree.trees import build_ensemble

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


def _wide(
    setting: Setting, device: str, node_vectors: str = "free", sparse: bool = True, **shape: int
) -> Step:
    """A whole ensemble of Huffman trees over all features with a wide root."""
    from hstree.heads import TreeEnsemble
    from hstree.trees import build_ensemble

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
    from hstree.heads import build_head

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
    from hstree.ops.forest_log_prob import forest_log_softmax

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


def _quack() -> Loss:
    function = _library("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda input, weight, target: function(input, weight, target, tuned=False)


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
    "quack": _quack,
}


BUILDERS: dict[str, Callable[..., Step]] = {
    "paths": _paths,
    "wide": _wide,
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


def machine(device: str) -> Figures:
    import hstree

    gpu: Figures = {}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": query("driver_version").get("driver_version"),
        }
    built = hstree.build_info()
    return {
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hstree": built.version,
        "architectures": built.cuda_arch_list,
    }


def _query_command(*fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return command if uuid is None else [*command, f"--id=GPU-{str(uuid).removeprefix('GPU-')}"]


def query(*fields: str, while_waiting: Callable[[], object] = lambda: time.sleep(0.01)) -> Figures:
    """The output of nvidia-smi for the device; empty if it does not run or does not know the
    fields."""
    try:
        with subprocess.Popen(
            _query_command(*fields), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            while process.poll() is None:
                while_waiting()
            assert process.stdout is not None
            values = process.stdout.read().strip().splitlines()
    except OSError:
        return {}
    if process.returncode or not values:
        return {}
    return dict(zip(fields, (value.strip() for value in values[0].split(",")), strict=False))


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


def measure(
    entry: Entry,
    setting: Setting,
    device: str,
    write: Callable[[Figures], None] = lambda figures: None,
) -> Figures:
    """Measure errors, seconds and peak memory of a contestant, and the speed of the machine.

    Calls `write` with the results after each part. Their `outcome` is "unfinished" until the end,
    with the current part in `doing`; then "measured", "missing", "wrong" or "failed", with
    `detail`.
    """
    figures: Figures = {
        "title": entry.title,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "outcome": "unfinished",
    }

    def doing(what: str) -> None:
        figures["doing"] = what
        write(figures)
        print(f"{entry.title}: {what}", flush=True)

    def free() -> None:
        step.clear()
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def keep_busy() -> None:
        step.run()
        torch.cuda.synchronize()

    outcome, detail = "measured", ""
    try:
        doing("building")
        figures["machine"] = machine(device)
        reference = Reference(setting, device)
        figures["reference"] = [reference.measure()]
        step = BUILDERS[entry.kind](setting, device, **entry.options)
        figures["parameters"] = sum(leaf.numel() for leaf in step.leaves[1:])
        if step.compulsory is not None:
            figures["traffic"] = {"compulsory": step.compulsory}
        doing("checking")
        value = step.loss()
        value.backward()
        grad = step.leaves[0].grad
        figures["errors"] = step.check(value.detach(), grad)
        del value, grad
        free()
        detail = too_far(figures["errors"], setting.dtype) or ""
        if detail:
            outcome = "wrong"
        else:
            doing("measuring memory")
            figures["peak_bytes"] = peak_extra_bytes(step.run, device)
            doing("timing")
            figures["seconds"] = timed(step, reference)
            if device != "cpu":
                figures["clocks"] = query(*CLOCKS, while_waiting=keep_busy)
            free()
            figures["reference"].append(reference.measure())
            if device != "cpu":
                doing("profiling")
                figures["kernel_seconds"] = kernel_seconds(step.run, setting.rounds)
    except Missing as reason:
        outcome, detail = "missing", str(reason)
    except Exception as error:  # any error is a result for the file
        outcome, detail = "failed", f"{figures['doing']}: {type(error).__name__}: {error}"
    del figures["doing"]
    figures["outcome"] = outcome
    if detail:
        figures["detail"] = detail[:1000]
    write(figures)
    return figures


def save(path: Path, content: str | bytes) -> None:
    """Write a file at once: a killed process leaves the one that was there."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


def obstacle() -> str | None:
    """Why this machine cannot measure, or None."""
    if not torch.cuda.is_available():
        return "benchmarks.gpu needs a CUDA GPU, but torch finds none"
    import hstree

    if hstree.build_info().cuda is None:
        return "benchmarks.gpu needs a CUDA build of hstree, but this one is for the CPU only"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("setting", nargs="?", choices=list(SETTINGS))
    parser.add_argument("contestant", nargs="?", choices=list(CONTESTANTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--list", action="store_true", help="print settings and contestants")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {setting}" for name, setting in SETTINGS.items()))
        print("\n".join(f"    {name}: {entry.title}" for name, entry in CONTESTANTS.items()))
        return 0
    if options.contestant is None or options.out is None:
        parser.error("expected SETTING CONTESTANT --out FILE, or --list")
    if options.device == "cpu":
        torch.set_num_threads(1)
    reason = obstacle() if options.device == "cuda" else None
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2

    entry = CONTESTANTS[options.contestant]
    figures = measure(
        entry,
        SETTINGS[options.setting],
        options.device,
        lambda figures: save(options.out, json.dumps(figures, indent=1) + "\n"),
    )
    print(f"{entry.title}: {figures['outcome']} {figures.get('detail', '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
