"""What hstree reaches on a GPU, in one command and one JSON file.

    python -m benchmarks.gpu --out gpu.json
    python -m benchmarks.gpu --table gpu.json

Huffman and random balanced trees against every flat loss that can be imported, the piecewise linear
function against the device's copy bandwidth, wide nodes against a flat softmax and
AdaptiveLogSoftmaxWithLoss. Steps take turns; figures are medians over rounds, seconds between
events on the device. The loss of every contestant is compared first, and one whose loss is wrong is
not timed. Options set other sizes;
--quick shows in seconds that everything runs. Exits with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hstree
from benchmarks.contest import batch
from benchmarks.memory import peak_extra_bytes
from hstree.heads import TreeEnsemble
from hstree.heads.tree_layout import stack_tables
from hstree.ops import path_log_prob, plif, plif_table
from hstree.ops.plif import piecewise
from hstree.reference.path import path_log_prob_reference
from hstree.trees import build_ensemble

Array = np.ndarray[Any, Any]
Loss = Callable[[], Tensor]
Figures = dict[str, Any]

DTYPES = ("bfloat16", "float16", "float32")
TILE_ROWS = 16
"""Rows of a tile and of a group of the kernels (csrc/kernels/tile.cuh, row_group.cuh)."""
SECTOR = 32
"""Bytes that a GPU reads at a time."""
EAGER = "F.linear + F.cross_entropy"
COMPILED = "torch.compile of it"
CHUNKED = "F.linear_cross_entropy"
OURS = "hstree"
PATH_TABLES = ("path_offset", "path", "leaf_position")
RADIUS = 20.0
CHECKED_ROWS = 32


@dataclass(frozen=True)
class Setting:
    """Sizes of a run: those of issue and README by default."""

    rows: int = 8192
    features: int = 4096
    classes: int = 128_256
    trees: int = 8
    subset: int = 1024
    dtype: str = "bfloat16"
    intervals: int = 10_000
    elements: int = 2**27
    wide_trees: int = 4
    root: int = 256
    leaf: int = 32
    rounds: int = 20


QUICK = Setting(512, 256, 2000, 4, 128, "bfloat16", 100, 2**18, 2, 16, 8, 3)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step over binary trees.

    `compulsory`: every input row, visited weight row, score, and gradient once, however the work is
    done. `kernels`: what the kernels ask of the caches: a weight row for each tile or group that
    needs it, and of an input row the sectors in which a tree has features; without the workspace.
    """

    visits: int  # nodes on the paths of all rows
    visited: int  # weight rows
    tile_nodes: int  # nodes of all tiles of 16 rows in leaf order
    group_nodes: int  # the same of tiles that are in the first tree's leaf order in all trees
    compulsory: Mapping[str, int]
    kernels: Mapping[str, int]


def traffic(
    target: Array,
    tables: Mapping[str, Array],
    feature_index: Array | None,
    in_features: int,
    features: int,
    max_depth: int,
    itemsize: int,
) -> Traffic:
    """Counts the bytes of a batch, forward and backward with row-sparse gradients.

    Args:
        target: [N] classes, all used.
        tables: path_offset [T, V + 1], path [P], leaf_position [T, V].
        feature_index: [T, S], or None: every tree reads all features.
        itemsize: bytes of an element of input and weight.
    """
    offset, path, position = (tables[name] for name in PATH_TABLES)
    n_trees, rows = len(offset), len(target)
    visits = visited = tile_nodes = group_nodes = sectors = 0

    def paths(tree: int, order: Array) -> tuple[Array, int]:
        """Nodes on the paths of the rows in an order, and how many there are in all its tiles."""
        ordered = target[order]
        length = offset[tree, ordered + 1] - offset[tree, ordered]
        row = np.repeat(np.arange(rows), length)
        entry = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        node = path[offset[tree, ordered][row] + entry] >> 1
        return node, np.unique(np.stack([row // TILE_ROWS, node]), axis=1).shape[1]

    orders = [np.argsort(position[t, target], kind="stable") for t in range(n_trees)]
    for t in range(n_trees):
        node, in_tiles = paths(t, orders[t])
        visits += len(node)
        visited += len(np.unique(node))
        tile_nodes += in_tiles
        group_nodes += paths(t, orders[0])[1]
        index = np.arange(in_features) if feature_index is None else feature_index[t]
        sectors += len(np.unique(index.astype(np.int64) * itemsize // SECTOR))
    inputs = rows * in_features * itemsize
    weights = visited * features * itemsize
    gathered = rows * sectors * SECTOR
    scores = 4 * rows * n_trees * (max_depth + 1)  # and log-probabilities
    place = 16 * visited  # the two indices of a row of the gradient
    gradient = visited * (features + 1) * itemsize + place
    return Traffic(
        visits,
        visited,
        tile_nodes,
        group_nodes,
        compulsory={
            "forward": inputs + weights + scores,
            "backward": 2 * inputs + weights + scores + gradient,
        },
        kernels={
            "path_forward_kernel": gathered + tile_nodes * features * itemsize + scores,
            "path_backward_input_kernel": group_nodes * features * itemsize + inputs + scores,
            "path_backward_weight_kernel": gathered + scores + gradient - place,
        },
    )


# ---- measuring


class Stopwatch:
    """Seconds between marks: events on a GPU, wall time on a CPU."""

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
        """Between each mark and the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def clear(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def take_turns(
    losses: Mapping[str, tuple[Loss, list[Tensor]]], rounds: int, device: str
) -> dict[str, dict[str, list[float]]]:
    """Seconds of forward, backward and both by name, one entry a round, after one round of
    warming up."""
    result = {name: {"forward": [], "backward": [], "both": []} for name in losses}
    order = list(losses)
    for number in range(rounds + 1):
        for name in order:
            loss, parameters = losses[name]
            clear(parameters)
            watch = Stopwatch(device)
            watch.mark()
            value = loss()
            watch.mark()
            value.backward()
            watch.mark()
            forward, backward = watch.seconds()
            del value
            clear(parameters)
            if number:
                for part, took in zip(
                    ("forward", "backward", "both"),
                    (forward, backward, forward + backward),
                    strict=True,
                ):
                    result[name][part].append(took)
        order.reverse()
    return result


def seconds_of(run: Callable[[], object], rounds: int, device: str) -> float:
    """Median seconds of a function."""
    took = []
    for _ in range(rounds + 2):
        watch = Stopwatch(device)
        watch.mark()
        run()
        watch.mark()
        took += watch.seconds()
    return median(took[2:])


def copy_bandwidth(elements: int, rounds: int, device: str) -> float:
    """Bytes read and written per second by a copy of float32 elements on the device."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 8 * elements / seconds_of(lambda: target.copy_(source), rounds, device)


def kernel_name(key: str) -> str:
    """`path_forward_kernel` for the kernels of hstree, `sort and the rest` for others."""
    found = re.search(r"hstree::.*?(\w+_kernel)\b", key)
    return found.group(1) if found else "sort and the rest"


def kernel_seconds(step: Callable[[], object], repeats: int, device: str) -> dict[str, float]:
    """Mean seconds of a step in each kernel by torch's profiler; empty where it sees none."""
    if device == "cpu":
        return {}
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


# ---- contestants


def flat_losses(
    input: Tensor, weight: Tensor, target: Tensor
) -> tuple[dict[str, Loss], dict[str, str]]:
    """The flat losses that can be imported here, and why each of the others cannot be."""
    losses: dict[str, Loss] = {
        EAGER: lambda: F.cross_entropy(F.linear(input, weight), target),
    }
    missing: dict[str, str] = {}
    compiled = torch.compile(lambda: F.cross_entropy(F.linear(input, weight), target))
    losses[COMPILED] = compiled
    if hasattr(F, "linear_cross_entropy"):
        losses[CHUNKED] = lambda: F.linear_cross_entropy(input, weight, target)
    else:
        missing[CHUNKED] = f"torch {torch.__version__} does not have it"

    def add(name: str, module: str, make: Callable[[Any], Loss]) -> None:
        try:
            losses[name] = make(importlib.import_module(module))
        except Exception as error:  # of whatever kind: the others can still be measured
            missing[name] = f"{type(error).__name__}: {error}"

    def liger(module: Any) -> Loss:
        loss = module.LigerFusedLinearCrossEntropyLoss()
        return lambda: loss(weight, input, target)

    def cut(module: Any) -> Loss:
        return lambda: module.linear_cross_entropy(input, weight, target)

    def quack(module: Any) -> Loss:
        return lambda: module.chunked_linear_cross_entropy(input, weight, target)

    add("Liger", "liger_kernel.transformers", liger)
    add("cut-cross-entropy", "cut_cross_entropy", cut)
    add("quack-kernels", "quack.linear_cross_entropy", quack)
    return losses, missing


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference of two ways to compute a mean loss in a dtype."""
    return 1e-4 if dtype == torch.float32 else 1e-2


def sound(losses: dict[str, tuple[Loss, list[Tensor]]], truths: Mapping[str, float], dtype: Any,
          result: Figures) -> dict[str, tuple[Loss, list[Tensor]]]:  # fmt: skip
    """The contestants whose loss is that of `truths`; writes losses and errors into the result."""
    kept = {}
    for name, (loss, parameters) in losses.items():
        entry = result.setdefault(name, {})
        try:
            value = loss()
            value.backward()
            entry["loss"] = value.item()
        except Exception as error:  # of whatever kind: the others can still be measured
            entry["error"] = f"{type(error).__name__}: {error}"[:500]
            continue
        finally:
            clear(parameters)
        truth = truths[name]
        if abs(entry["loss"] - truth) <= tolerance(dtype) * abs(truth):
            kept[name] = (loss, parameters)
        else:
            entry["error"] = f"loss {entry['loss']:.6g}, expected {truth:.6g}"
    return kept


def measure(
    losses: dict[str, tuple[Loss, list[Tensor]]], truths: Mapping[str, float], setting: Setting,
    device: str,
) -> Figures:  # fmt: skip
    """Loss, seconds and peak extra bytes of every contestant."""
    result: Figures = {}
    kept = sound(losses, truths, getattr(torch, setting.dtype), result)
    for name, (loss, parameters) in kept.items():
        clear(parameters)
        result[name]["peak_bytes"] = peak_extra_bytes(lambda loss=loss: loss().backward(), device)  # type: ignore[misc]
        clear(parameters)
    for name, seconds in take_turns(kept, setting.rounds, device).items():
        result[name]["seconds"] = seconds
    return result


# ---- parts


def path_part(setting: Setting, recipe: str, device: str) -> Figures:
    """Binary trees against the flat losses."""
    dtype = getattr(torch, setting.dtype)
    input, target, frequencies = batch(setting.rows, setting.features, setting.classes, device)
    input = input.detach().to(dtype).requires_grad_()
    options = {"frequencies": frequencies} if recipe == "huffman" else {}
    cpu_tables, max_depth, _ = stack_tables(
        build_ensemble(recipe, setting.classes, setting.trees, **options)
    )
    tables = {name: table.to(device) for name, table in cpu_tables.items()}
    index = None
    if setting.subset < setting.features:
        random = torch.Generator().manual_seed(0)
        orders = [torch.randperm(setting.features, generator=random) for _ in range(setting.trees)]
        index = torch.stack([o[: setting.subset].sort().values for o in orders]).int()
    shape = (setting.trees, setting.classes - 1)
    weight = torch.empty(*shape, setting.subset, dtype=dtype, device=device)
    weight.normal_(std=setting.subset**-0.5).requires_grad_()
    bias = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    device_index = None if index is None else index.to(device)

    def log_prob(rows: slice = slice(None), sparse: bool = True) -> Tensor:
        return path_log_prob(
            input[rows],
            weight,
            bias,
            target[rows],
            tables["path_offset"],
            tables["path"],
            tables["leaf_position"],
            device_index,
            max_depth=max_depth,
            sparse=sparse,
        )

    def loss(sparse: bool) -> Loss:
        return lambda: -torch.logsumexp(log_prob(sparse=sparse), 1).mean()

    with torch.no_grad():
        some = slice(0, CHECKED_ROWS)
        chosen = target[some].cpu()
        nodes = [
            torch.cat([cpu_tables["path"][b:e] >> 1 for b, e in _spans(cpu_tables, t, chosen)])
            for t in range(setting.trees)
        ]
        truth = _reference(input[some], weight, bias, chosen, cpu_tables, index, max_depth, nodes)
        got = log_prob(some).double().cpu()
    error = float((got - truth).abs().max() / truth.abs().max())
    ours = [input, weight, bias]
    value = float(loss(True)().detach()) if error <= tolerance(dtype) else float("nan")
    flat_weight = torch.empty(setting.classes, setting.features, dtype=dtype, device=device)
    flat_weight.normal_(std=setting.features**-0.5).requires_grad_()
    flat, missing = flat_losses(input, flat_weight, target)
    contestants = {name: (f, [input, flat_weight]) for name, f in flat.items()}
    with torch.no_grad():
        truths = dict.fromkeys(contestants, float(flat[EAGER]()))
    contestants |= {OURS: (loss(True), ours), f"{OURS}, dense gradients": (loss(False), ours)}
    truths |= {OURS: value, f"{OURS}, dense gradients": value}
    result = measure(contestants, truths, setting, device)
    result[OURS]["relative_error"] = error

    def step() -> None:
        clear(ours)
        loss(True)().backward()

    kernels = kernel_seconds(step, setting.rounds, device)
    clear(ours)
    counted = traffic(
        target.cpu().numpy(),
        {name: cpu_tables[name].numpy() for name in PATH_TABLES},
        None if index is None else index.numpy(),
        setting.features,
        setting.subset,
        max_depth,
        dtype.itemsize,
    )
    return {
        "recipe": recipe,
        "max_depth": max_depth,
        "contestants": result,
        "missing": missing,
        "kernel_seconds": kernels,
        "traffic": asdict(counted),
    }


def _spans(tables: Mapping[str, Tensor], tree: int, target: Tensor) -> list[tuple[int, int]]:
    offset = tables["path_offset"][tree]
    return [(int(offset[y]), int(offset[y + 1])) for y in target]


def _reference(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, tables: Mapping[str, Tensor],
    index: Tensor | None, max_depth: int, nodes: list[Tensor],
) -> Tensor:  # fmt: skip
    """log_prob of a few rows in float64 on the CPU, with the weight rows that they visit alone."""
    path = tables["path"].clone()
    most = max(len(n.unique()) for n in nodes)
    rows = torch.zeros(len(weight), most, weight.shape[2], dtype=torch.float64)
    offsets = torch.zeros(len(weight), most, dtype=torch.float64)
    for t, visited in enumerate(nodes):
        unique = visited.unique().long()
        rows[t, : len(unique)] = weight[t, unique.to(weight.device)].double().cpu()
        offsets[t, : len(unique)] = bias[t, unique.to(weight.device)].double().cpu()
        for begin, end in set(_spans(tables, t, target)):
            entry = tables["path"][begin:end]
            path[begin:end] = (
                torch.searchsorted(unique, (entry >> 1).long()) << 1 | entry & 1
            ).int()
    return path_log_prob_reference(
        input.double().cpu(), rows, offsets, target, tables["path_offset"], path,
        tables["leaf_position"], index, max_depth,
    )[0]  # fmt: skip


def plif_part(setting: Setting, device: str) -> Figures:
    """The piecewise linear function by itself: forward reads and writes each element once, backward
    reads two and writes one."""
    input = 4 * torch.randn(setting.elements, device=device)
    slopes = torch.nn.functional.softplus(torch.randn(setting.intervals, device=device))
    grad = torch.randn(setting.elements, device=device)
    table = plif_table(slopes, RADIUS)
    some = slice(0, 10_000)
    truth = plif(input[some].double().cpu(), slopes.double().cpu(), RADIUS)
    got = piecewise(input[some], table, RADIUS).double().cpu()
    backward = torch.ops.hstree.plif_backward
    return {
        "relative_error": float((got - truth).abs().max() / truth.abs().max()),
        "bytes": {"forward": 8 * setting.elements, "backward": 12 * setting.elements},
        "seconds": {
            "forward": seconds_of(lambda: piecewise(input, table, RADIUS), setting.rounds, device),
            "backward": seconds_of(
                lambda: backward(grad, input, table, RADIUS), setting.rounds, device
            ),
        },
    }


def wide_part(setting: Setting, device: str) -> Figures:
    """Trees with a wide root and wide leaf groups as a whole head, against flat and adaptive
    softmax."""
    dtype = getattr(torch, setting.dtype)
    hidden, target, frequencies = batch(setting.rows, setting.features, setting.classes, device)
    hidden = hidden.detach().to(dtype).requires_grad_()
    trees = build_ensemble(
        "huffman", setting.classes, setting.wide_trees, frequencies,
        root=setting.root, leaf=setting.leaf,
    )  # fmt: skip
    head = TreeEnsemble(
        setting.features, setting.classes, trees, frequencies=frequencies, sparse=True
    ).to(device, dtype)
    cutoffs = [setting.classes // 50, setting.classes // 5]
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(setting.features, setting.classes, cutoffs)
    adaptive.to(device, dtype)
    linear = nn.Linear(setting.features, setting.classes, device=device, dtype=dtype)
    contestants: dict[str, tuple[Loss, list[Tensor]]] = {
        "TreeEnsemble": (lambda: head(hidden, target).loss, [hidden, *head.parameters()]),
        EAGER: (
            lambda: F.cross_entropy(linear(hidden), target),
            [hidden, *linear.parameters()],
        ),
        "AdaptiveLogSoftmaxWithLoss": (
            lambda: adaptive(hidden, target).loss,
            [hidden, *adaptive.parameters()],
        ),
    }
    with torch.no_grad():
        some = slice(0, CHECKED_ROWS)
        log_prob = head.log_prob(hidden[some]).float()
        truth = -log_prob.gather(1, target[some, None]).mean()
        error = float((head(hidden[some], target[some]).loss - truth).abs() / truth)
        truths = {name: float(loss()) for name, (loss, _) in contestants.items()}
    if error > tolerance(dtype):
        truths["TreeEnsemble"] = float("nan")
    result = measure(contestants, truths, setting, device)
    result["TreeEnsemble"]["relative_error"] = error
    loss, parameters = contestants["TreeEnsemble"]

    def step() -> None:
        clear(parameters)
        loss().backward()

    return {
        "contestants": result,
        "kernel_seconds": kernel_seconds(step, setting.rounds, device),
    }


def machine(device: str) -> Figures:
    packages = {}
    for name in ("liger-kernel", "cut-cross-entropy", "quack-kernels", "triton"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    gpu: Figures = {}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hstree": hstree.__version__,
        "packages": packages,
    }


def run(setting: Setting, device: str) -> Figures:
    """Everything, as it goes to the JSON file."""
    results: Figures = {
        "machine": machine(device),
        "setting": asdict(setting),
        "copy_bytes_per_second": copy_bandwidth(setting.elements, setting.rounds, device),
        "path": [path_part(setting, recipe, device) for recipe in ("huffman", "random")],
        "plif": plif_part(setting, device),
        "wide": wide_part(setting, device),
    }
    results["targets"] = targets(results)
    return results


# ---- reading the results


def _median(entry: Figures, part: str = "both") -> float | None:
    return median(entry["seconds"][part]) if entry.get("seconds") else None


def targets(results: Figures) -> list[Figures]:
    """What was to be reached, and what was; None where a figure is missing."""
    rows: list[Figures] = []

    def add(title: str, wanted: str, reached: float | None) -> None:
        rows.append({"title": title, "wanted": wanted, "reached": reached})

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    bandwidth = results["copy_bytes_per_second"]
    for part in results["path"]:
        contestants, name = part["contestants"], part["recipe"]
        ours = contestants[OURS]
        flat = [
            seconds
            for key, entry in contestants.items()
            if not key.startswith(OURS) and (seconds := _median(entry)) is not None
        ]
        fastest = min(flat) if flat else None
        add(
            f"{name}: fastest flat loss / hstree",
            "at least 20",
            ratio(fastest, _median(ours)),
        )
        add(
            f"{name}: peak extra memory of hstree / {EAGER}",
            "at most 0.05",
            ratio(ours.get("peak_bytes"), contestants[EAGER].get("peak_bytes")),
        )
        floor = sum(part["traffic"]["compulsory"].values()) / bandwidth
        add(f"{name}: hstree / compulsory traffic", "", ratio(_median(ours), floor))
        dense = contestants.get(f"{OURS}, dense gradients", {})
        add(f"{name}: dense / row-sparse gradients", "", ratio(_median(dense), _median(ours)))
    for part, bytes_moved in results["plif"]["bytes"].items():
        seconds = results["plif"]["seconds"][part]
        add(f"PLIF {part} / streaming", "at most 1.2", seconds * bandwidth / bytes_moved)
    wide = results["wide"]["contestants"]
    for other in (EAGER, "AdaptiveLogSoftmaxWithLoss"):
        add(f"wide nodes: {other} / TreeEnsemble", "",
            ratio(_median(wide[other]), _median(wide["TreeEnsemble"])))  # fmt: skip
    return rows


def table(results: Figures) -> str:
    """The results as Markdown."""

    def number(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
        return "not measured" if value is None else f"{value / unit:,.{digits}f}"

    made, setting = results["machine"], results["setting"]
    lines = [
        f"N = {setting['rows']}, D = {setting['features']}, V = {setting['classes']}, "
        f"T = {setting['trees']}, S = {setting['subset']}, {setting['dtype']}, "
        f"{made['gpu'].get('name', 'no GPU')}, torch {made['torch']}, CUDA {made['cuda']}, "
        f"{made['date']}. Copy: {results['copy_bytes_per_second'] / 1e9:,.0f} GB/s.",
    ]
    contests = [(f"{part['recipe']} trees", part) for part in results["path"]]
    for title, part in [*contests, ("wide nodes", results["wide"])]:
        lines += [
            "",
            f"| {title} | forward, ms | backward, ms | both, ms | peak extra memory, MiB |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, entry in part["contestants"].items():
            times = [number(_median(entry, p), 1e-3, 3) for p in ("forward", "backward", "both")]
            peak = number(entry.get("peak_bytes"), 2**20, 0)
            note = f" ({entry['error']})" if "error" in entry else ""
            lines.append(f"| {name}{note} | {' | '.join(times)} | {peak} |")
        lines += [f"| {name}: {why} | | | | |" for name, why in part.get("missing", {}).items()]
        if not part["kernel_seconds"]:
            continue
        moved = part.get("traffic", {}).get("kernels", {})
        lines += ["", f"| kernels, {title} | ms | GB/s |", "| --- | ---: | ---: |"]
        for name, seconds in sorted(part["kernel_seconds"].items(), key=lambda item: -item[1]):
            rate = f"{moved[name] / seconds / 1e9:,.0f}" if name in moved else ""
            lines.append(f"| {name} | {number(seconds, 1e-3, 3)} | {rate} |")
    lines += ["", "| | wanted | reached |", "| --- | --- | ---: |"]
    lines += [
        f"| {row['title']} | {row['wanted']} | {number(row['reached'])} |"
        for row in results["targets"]
    ]
    return "\n".join(lines)


def obstacle() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "benchmarks.gpu needs a CUDA GPU, and torch sees none here"
    if hstree.build_info().cuda is None:
        return "benchmarks.gpu needs a CUDA build of hstree; this one is for the CPU only"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--table", type=Path, help="print the tables of such a file and measure nothing"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, three rounds")
    parser.add_argument("--dtype", choices=DTYPES)
    for name in ("rows", "features", "classes", "trees", "subset", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return 0
    setting = QUICK if options.quick else Setting()
    given = {
        name: value
        for name, value in vars(options).items()
        if name in asdict(setting) and value is not None
    }
    setting = replace(setting, **given)
    for name, value in given.items():
        if name != "dtype" and value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    if setting.subset > setting.features:
        parser.error(f"--subset: expected at most {setting.features}, got {setting.subset}")
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    if options.out is None:
        parser.error("--out: expected a file to write")
    results = run(setting, "cuda")
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
