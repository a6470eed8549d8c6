"""Steps of kernels, heads and whole models on a GPU, beside the flat losses that are installed.

    python -m benchmarks.gpu --out build/gpu --minutes 9     # repeat until it exits with 0 or 1
    python -m benchmarks.gpu --out build/gpu --settings 12-layers 4-layers penn  # models, 4 minutes
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --out build/gpu --settings autocast --contestants default compiled
    python -m benchmarks.gpu --page benchmarks/results/gpu.json > benchmarks/results/gpu.md

The loss and the gradient of the input are first compared with float64: a wrong contestant is not
timed. Times are measured between events on the device. Before each step the device computes matrix
products. They hide the time of Python unless the step waits for the device, as in training, and
make the caches cold.

Whole models train on --text or a made-up text with the frequencies of subwords, in bfloat16
autocast with fused AdamW; penn: the published models of Penn Treebank, on a text of its size.

Exit status: 0 all is measured, 1 a contestant of hstree failed, 2 there is no GPU or no CUDA build,
3 --minutes do not suffice for the next one. --device cpu measures tiny sizes, in seconds.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import json
import math
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from benchmarks import trainer
from benchmarks.baselines import gathered_dot
from benchmarks.contest import Size, batch
from benchmarks.memory import peak_extra_bytes
from benchmarks.paths import draw_paths
from hstree._files import write_atomic
from hstree.heads import Softmax, TreeEnsemble, build_head
from hstree.lm.report import Column, Table, decimals, markdown, table

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
Entry = Mapping[str, Any]
"""Figures of a contestant in a record."""

LIMIT = 120.0
"""Seconds that --minutes must leave for a contestant."""
WARM_UP = 3
PRODUCTS_AHEAD = 2
"""Number of matrix products before each timed step: about 3 ms on an H100."""
TOLERANCE = {"bfloat16": 0.05, "float32": 1e-3}
"""Largest allowed error of a gradient, relative to its largest value; for a loss, a fifth of it."""
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
    clusters: int = 1024  # C, of the wide heads
    dtype: str = "bfloat16"  # of input and weights
    intervals: int = 10_000  # K, of the piecewise linear function
    negatives: int = 512  # draws of the sampled heads
    product: int = 8192  # rows and columns of the matrices of the products ahead
    rounds: int = 20  # timed steps
    autocast: bool = False  # the weights are float32, and autocast casts them

    def __str__(self) -> str:
        how = " autocast of float32 weights" * self.autocast
        return f"N = {self.rows}, D = {self.features}, V = {self.classes}, {self.dtype}{how}"

    @property
    def tensors(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def weights(self) -> torch.dtype:
        return torch.float32 if self.autocast else self.tensors


TINY = "tiny"
"""Checks on a CPU, in seconds, that everything runs."""
SETTINGS = {
    "4096x128k": Setting(8192, 4096, 128_256),
    "2304x256k": Setting(8192, 2304, 256_000),
    "768x50k": Setting(16_384, 768, 50_257, clusters=256),
    "autocast": Setting(16_384, 768, 49_152, autocast=True),
    TINY: Setting(40, 64, 300, 3, 2, 16, "float32", 100, 8, 64, 3),
}


@dataclass(frozen=True)
class Contestant:
    """``kind``: the name in BUILDERS of the function that builds it with these options."""

    title: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.kind in ("paths", "trees", "default", "head", "sampled", "layer", "penn")


EAGER = "eager"
CONTESTANTS: dict[str, Contestant] = {
    "huffman-4": Contestant(
        "operator `path_log_prob`, 8 binary Huffman trees over D / 4 features", "paths"
    ),
    "wide-binary": Contestant(
        "`TreeEnsemble`, 4 trees, binary below the root", "trees", {"binary": True}
    ),
    "leaves": Contestant(
        "`TreeEnsemble`, 4 trees of two levels, `sparse=True`", "trees", {"binary": False}
    ),
    "leaves-dense": Contestant(
        "the same, dense gradients", "trees", {"binary": False, "sparse": False}
    ),
    "default": Contestant("`TreeEnsemble.from_counts`, default options", "default"),
    "softmax": Contestant("`hstree.Softmax`", "head", {"head": "softmax"}),
    "forest": Contestant("`hstree.ForestSoftmax`, 4 trees", "head", {"head": "forest"}),
    "sampled": Contestant(
        "`hstree.SampledSoftmax`, 512 negatives and the batch's targets",
        "sampled",
        {"head": "sampled"},
    ),
    "forest-sampled": Contestant(
        "`hstree.ForestSoftmax`, 4 trees, the same negatives", "sampled", {"head": "forest"}
    ),
    "plif": Contestant("`hstree.PLIF`, 10,000 intervals", "head", {"head": "plif"}),
    EAGER: Contestant("`F.linear` + `F.cross_entropy`", "flat", {"loss": "eager"}),
    "compiled": Contestant("`torch.compile` of it", "flat", {"loss": "compiled"}),
    "cut": Contestant("cut-cross-entropy", "flat", {"loss": "cut"}),
    "liger": Contestant("Liger", "flat", {"loss": "liger"}),
    "quack": Contestant("QuACK", "flat", {"loss": "quack"}),
    "adaptive": Contestant("`nn.AdaptiveLogSoftmaxWithLoss`", "adaptive"),
}
"""The contestants in the order of the tables: first those of hstree, kernels before whole heads;
then the baselines."""


# ---- the contestants


class Missing(Exception):
    """The contestant is unavailable; the message says why."""


Truth = Callable[[Tensor], tuple[Tensor, Tensor]]
"""In float64 the mean loss, and its gradient [rows, D] at some rows of the input, given [rows]."""


@dataclass(frozen=True)
class Step:
    """A built contestant."""

    loss: Callable[[], Tensor]
    leaves: Sequence[Tensor]  # whose gradients the backward pass computes; the first is the input
    truth: Truth

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def run(self) -> None:
        self.clear()
        self.loss().backward()

    def errors(self) -> dict[str, float]:
        """Of the loss and the input's gradient, relative to the largest true value."""
        self.clear()
        value = self.loss()
        value.backward()
        input = self.leaves[0]
        assert input.grad is not None
        some = torch.linspace(0, len(input) - 1, min(len(input), CHECKED_ROWS)).long()
        some = some.to(input.device)  # spread over the batch
        got = value.detach(), input.grad[some]
        errors = (
            float((mine.double() - true).abs().max() / true.abs().max())
            for mine, true in zip(got, self.truth(some), strict=True)
        )
        return dict(zip(("loss", "grad_input"), errors, strict=True))


def by_rows(
    input: Tensor, target: Tensor, classes: int, make: Callable[[], Callable[..., Tensor]]
) -> Truth:
    """The truth from a function that computes losses [rows] of float64 inputs [rows, D] and their
    targets [rows], a few rows at a time."""

    def truth(some: Tensor) -> tuple[Tensor, Tensor]:
        losses, x = make(), input.detach().double()
        size = max(1, CHUNK_BYTES // (8 * classes))
        with torch.no_grad():
            parts = zip(x.split(size), target.split(size), strict=True)
            total = torch.stack([losses(*part).sum() for part in parts]).sum()
        few = x[some].requires_grad_()
        (grad,) = torch.autograd.grad(losses(few, target[some]).sum(), few)
        return total / len(x), grad / len(x)

    return truth


def _inputs(setting: Setting, device: str) -> tuple[Tensor, Tensor, Any]:
    """Input [N, D] with gradient, targets [N] drawn from Zipf's law, and its frequencies."""
    torch.manual_seed(0)
    input, target, frequencies = batch(setting.rows, setting.features, setting.classes, device)
    return input.detach().to(setting.tensors).requires_grad_(), target, frequencies


def _paths(setting: Setting, device: str) -> Step:
    """The path op over T binary trees and their mixture with equal weights."""
    size = Size(setting.rows, setting.features, setting.classes, setting.features)
    torch.manual_seed(0)
    paths = draw_paths(size, setting.trees, setting.tensors, part=4, device=device)
    draw_paths.cache_clear()  # so that the memory is free after the step

    def mixture(log_prob: Tensor) -> Tensor:
        return -torch.logsumexp(log_prob, 1)

    def losses() -> Callable[..., Tensor]:
        weights = paths.flat_leaves(torch.float64)[1:]
        return lambda x, target: mixture(
            replace(paths, target=target).torch_log_prob([x, *weights], gathered_dot)
        )

    return Step(
        lambda: mixture(paths.log_prob(True)).mean(),
        [paths.input, paths.weight, paths.bias],
        by_rows(paths.input, paths.target, setting.classes, losses),
    )


def _of_head(
    head: nn.Module, input: Tensor, target: Tensor, loss: Callable[[], Tensor] | None = None
) -> Step:
    """The step of a head, whose truth are the log-probabilities of all classes of a copy."""

    def losses() -> Callable[..., Tensor]:
        true: Any = copy.deepcopy(head).double()
        return lambda x, of: -true.log_prob(x).gather(1, of[:, None]).squeeze(1)

    classes: Any = getattr(head, "n_classes", target.max() + 1)
    truth = by_rows(input, target, int(classes), losses)
    return Step(loss or (lambda: head(input, target).loss), [input, *head.parameters()], truth)


def _drawn(head: nn.Module, setting: Setting, device: str) -> Any:
    """The head on the device, with weights that give scores of about one."""
    head.to(device, setting.weights)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("weight", "embedding")) and "gate" not in name:
                parameter.normal_(std=setting.features**-0.5)
    return head


def _trees(setting: Setting, device: str, sparse: bool = True, **shape: bool) -> Step:
    """A whole ensemble of Huffman trees over all features with wide roots."""
    input, target, frequencies = _inputs(setting, device)
    options = {
        "n_trees": setting.wide_trees,
        "clusters": setting.clusters,
        "gate": "uniform",
        **shape,
    }
    head = TreeEnsemble.from_counts(setting.features, frequencies, sparse=sparse, **options)
    return _of_head(_drawn(head, setting, device), input, target)


OCCUR = 0.6
"""Share of the classes that occur in the text of default trees. Zipf's law cut off there gives
their groups the work of SmolLM2's subwords: 10 GFLOP a product for 9.4."""


def _default(setting: Setting, device: str) -> Step:
    """A default ensemble for a text that lacks many of the classes."""
    input, _, frequencies = _inputs(setting, device)
    frequencies[int(OCCUR * setting.classes) :] = 0
    weights = torch.from_numpy(frequencies).to(device)
    target = weights.multinomial(setting.rows, replacement=True)
    head = TreeEnsemble.from_counts(setting.features, frequencies)
    return _of_head(_drawn(head, setting, device), input, target)


def _built(name: str, setting: Setting, device: str, **options: Any) -> Any:
    with torch.device(device):
        head = build_head(name, setting.features, setting.classes, **options)
    return _drawn(head, setting, device)


def _head(setting: Setting, device: str, head: str) -> Step:
    """A flat head of hstree over all classes."""
    input, target, _ = _inputs(setting, device)
    options = {"intervals": setting.intervals, "radius": 20.0} if head == "plif" else {}
    return _of_head(_built(head, setting, device, **options), input, target)


def _sampled(setting: Setting, device: str, head: str) -> Step:
    """A flat head of hstree over a sample of the classes, the same one in each step."""
    input, target, frequencies = _inputs(setting, device)
    options = {"negatives": setting.negatives, "frequencies": frequencies}
    module = _built(head, setting, device, **options)

    def loss(of: Any, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        value: Tensor = of(x, target).loss
        return value

    def truth(some: Tensor) -> tuple[Tensor, Tensor]:
        x = input.detach().double().requires_grad_()
        value = loss(copy.deepcopy(module).double(), x)
        (grad,) = torch.autograd.grad(value, x)
        return value.detach(), grad[some]

    return Step(lambda: loss(module, input), [input, *module.parameters()], truth)


def _adaptive(setting: Setting, device: str) -> Step:
    """torch's adaptive softmax, with the cutoffs of its documentation as shares of the classes."""
    input, target, _ = _inputs(setting, device)
    cutoffs = [setting.classes // 15, 3 * setting.classes // 15]
    head = nn.AdaptiveLogSoftmaxWithLoss(
        setting.features, setting.classes, cutoffs, device=device, dtype=input.dtype
    )
    return _of_head(head, input, target)


def _flat(setting: Setting, device: str, loss: str) -> Step:
    """A flat loss without bias."""
    input, target, _ = _inputs(setting, device)
    of_tensors = FLAT[loss]()
    head = _drawn(Softmax(setting.features, setting.classes, bias=False), setting, device)
    return _of_head(head, input, target, lambda: of_tensors(input, head.weight, target))


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss of input [N, D], weight [V, D] and targets [N]."""


def _eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight), target)


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
    "liger": _liger,
    "cut": lambda: _library("cut_cross_entropy").linear_cross_entropy,
    "quack": lambda: _library("quack.linear_cross_entropy").chunked_linear_cross_entropy,
}
BUILDERS: dict[str, Callable[..., Step]] = {
    "paths": _paths,
    "trees": _trees,
    "default": _default,
    "head": _head,
    "sampled": _sampled,
    "adaptive": _adaptive,
    "flat": _flat,
}


# ---- whole models


def _layer(title: str, head: str, **options: Any) -> Contestant:
    return Contestant(f"`hstree.{head}`{title}", "layer", {"head": head, **options})


LAYERS = {
    **{name: CONTESTANTS[name] for name in (EAGER, "compiled", "liger", "quack")},
    "softmax": _layer("", "Softmax"),
    "sampled": _layer(", 512 negatives", "SampledSoftmax", negatives=512),
    "sampled-half": _layer(", negatives: half of the batch", "SampledSoftmax", share=0.5),
    "forest-sampled": _layer(", 512 negatives", "ForestSoftmax", negatives=512),
    "forest": _layer("", "ForestSoftmax"),
    "trees": _layer("", "TreeEnsemble"),
}
"""Output layers of a model, tied to its embedding."""
PENN = "penn"
GROUPS = {
    **dict.fromkeys(SETTINGS, CONTESTANTS),
    **dict.fromkeys(trainer.MODELS, LAYERS),
    PENN: {
        name: Contestant(f"`--preset ptb-{name}`", "penn", {"name": name})
        for name in ("softmax", "plif", "mos", "mos-plif", "trees")
    },
}


def measure_steps(
    contestant: Contestant, sizes: trainer.Model | None, device: str, text: Path | None
) -> Figures:
    """Training steps of a whole model; without sizes, of a published one."""

    def work() -> Figures:
        options: dict[str, Any] = dict(contestant.options)
        if sizes is None:
            steps = trainer.penn_steps(device=device, **options)
        else:
            layer = partial(trainer.tied_head, **options)
            if contestant.kind == "flat":
                layer = partial(trainer.tied_loss, FLAT[options["loss"]]())
            steps = trainer.model_steps(sizes, layer, text, device)
        return trainer.timed_steps(steps, WARM_UP, device)

    return outcome(contestant, work)


# ---- measuring


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


def timed(step: Step, setting: Setting, device: str) -> dict[str, list[float]]:
    """Seconds of forward, backward and both, for each round: between events on a GPU."""
    cuda = device != "cpu"
    matrix = torch.randn(setting.product, setting.product, device=device).to(setting.tensors)

    def mark() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(before: Any, after: Any) -> float:
        return before.elapsed_time(after) / 1000 if cuda else after - before

    marks = []
    for _ in range(WARM_UP + setting.rounds):
        step.clear()
        for _ in range(PRODUCTS_AHEAD if cuda else 0):
            matrix @ matrix
        begin = mark()
        value = step.loss()
        middle = mark()
        value.backward()
        marks.append((begin, middle, mark()))
        del value
    step.clear()
    if cuda:
        torch.cuda.synchronize()
    marks = marks[WARM_UP:]
    return {
        "forward": [seconds(begin, middle) for begin, middle, _ in marks],
        "backward": [seconds(middle, end) for _, middle, end in marks],
        "both": [seconds(begin, end) for begin, _, end in marks],
    }


def too_far(errors: Mapping[str, float], dtype: str) -> str | None:
    """Why a contestant is wrong, or None. An error of nan is too large."""
    for name, error in errors.items():
        most = TOLERANCE[dtype] / (1 if name.startswith("grad") else 5)
        if not error <= most:
            return f"error of {name}: expected at most {most:g}, got {error:.3g}"
    return None


def measure(contestant: Contestant, setting: Setting, device: str) -> Figures:
    """Errors, seconds and peak memory of a contestant."""

    def work() -> Figures:
        step = BUILDERS[contestant.kind](setting, device, **contestant.options)
        if setting.autocast:
            step = replace(step, loss=torch.autocast(device, setting.tensors)(step.loss))
        figures: Figures = {"parameters": sum(leaf.numel() for leaf in step.leaves[1:])}
        figures["errors"] = step.errors()
        if wrong := too_far(figures["errors"], setting.dtype):
            return figures | {"outcome": "wrong", "detail": wrong}
        step.clear()
        figures["peak_bytes"] = peak_extra_bytes(step.run, device)
        figures["seconds"] = timed(step, setting, device)
        if device != "cpu":
            figures["kernel_seconds"] = kernel_seconds(step.run, setting.rounds)
        step.clear()
        return figures

    return outcome(contestant, work)


def outcome(contestant: Contestant, work: Callable[[], Figures]) -> Figures:
    """The figures, and their outcome: "measured", or with a ``detail`` "missing", "wrong" or
    "failed"."""
    figures: Figures = {"title": contestant.title, "date": now()}
    try:
        return figures | {"outcome": "measured"} | work()
    except Missing as reason:
        return figures | {"outcome": "missing", "detail": str(reason)}
    except Exception as error:  # any error is a result
        return figures | {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:1000]}


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


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")


def device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def measure_all(options: argparse.Namespace) -> int:
    """Measure what is missing in the folder, and write the page. Returns the exit status."""
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    file, built_from, name = options.out / "results.json", sources(), device_name(options.device)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    about = {"name": name, **versions, "python": platform.python_version()}
    results: Figures = {"device": about, "calls": [], "entries": {}}
    if file.exists():
        results = json.loads(file.read_text())
        if results["device"]["name"] != name:
            there = results["device"]["name"]
            raise SystemExit(f"--out: {file} is of {there}, this device is {name}")
    results["calls"].append({"date": now(), "sources": built_from})
    chosen = [
        (setting, name, contestant)
        for setting in options.settings
        for name, contestant in GROUPS[setting].items()
        if any(fnmatch(name, pattern) for pattern in options.contestants)
    ]
    status, failed = 0, False
    for setting, name, contestant in sorted(chosen, key=lambda one: not one[2].ours):
        key = f"benchmarks/{setting}/{name}"
        entry = results["entries"].get(key, {"outcome": "missing"})
        changed = contestant.ours and entry.get("sources") != built_from
        if entry["outcome"] == "missing" or changed:
            if deadline - time.monotonic() < LIMIT:
                status = 3
                break
            # What a crash leaves, so that the next call goes on with the next contestant.
            entry = {"title": contestant.title, "outcome": "not finished", "sources": built_from}
            results["entries"][key] = entry
            write_atomic(file, lines(results).encode())
            if setting in SETTINGS:
                measured = measure(contestant, SETTINGS[setting], options.device)
            else:
                sizes = trainer.MODELS.get(setting)
                measured = measure_steps(contestant, sizes, options.device, options.text)
            if options.device != "cpu":
                torch.cuda.synchronize()  # raises where a kernel has broken the device's state
            entry = results["entries"][key] = measured | {"sources": built_from}
            print(f"{key}: {entry['outcome']} {entry.get('detail', '')}", flush=True)
            write_atomic(file, lines(results).encode())
        failed |= contestant.ours and entry["outcome"] != "measured"
    write_atomic(options.out / "report.md", page(results).encode())
    return status or int(failed)


# ---- the page


LEAST_SHARE = 0.02
"""Kernels with less of a step's time are left out."""


def spread(seconds: Sequence[float]) -> float:
    """Half the interquartile range."""
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2


def middle(entry: Entry) -> float | None:
    """Median seconds of a step, or None."""
    return median(entry["seconds"]["both"]) if entry.get("seconds") else None


def of_setting(results: Mapping[str, Any], setting: str) -> dict[str, Entry]:
    """Entries of the contestants of a setting, in the order of the record."""
    start = f"benchmarks/{setting}/"
    found = results["entries"].items()
    return {key.removeprefix(start): entry for key, entry in found if key.startswith(start)}


def _times(there: Mapping[str, Entry]) -> Table:
    flat = {name: seconds for name in FLAT if (seconds := middle(there.get(name, {})))}

    def title(entry: Entry) -> str:
        detail = ", ".join(filter(None, [entry["outcome"], entry.get("detail")]))
        return entry["title"] + f": {detail}".partition("\n")[0] * (entry["outcome"] != "measured")

    def cell(seconds: Sequence[float]) -> str:
        return f"{1000 * median(seconds):,.3f} ± {1000 * spread(seconds):.3f}" if seconds else ""

    def ratio(unit: float | None, entry: Entry) -> float | None:
        seconds = middle(entry)
        return unit / seconds if unit and seconds else None

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
        ("eager / this", partial(ratio, flat.get(EAGER)), decimals(2)),
        ("fastest flat loss / this", partial(ratio, min(flat.values(), default=None)), decimals(2)),
    ]
    if any("token" in entry for entry in there.values()):
        epoch = lambda entry: entry.get("token", math.nan) * trainer.PENN_WORDS  # noqa: E731
        columns.append((f"s for {trainer.PENN_WORDS:,} tokens", epoch, decimals(1)))
    return table("Steps", there.values(), columns)


def _kernels(there: Mapping[str, Entry]) -> Table:
    rows = []
    for entry in there.values():
        kernels = entry.get("kernel_seconds", {})
        if any(name.endswith("_kernel") for name in kernels):
            least = LEAST_SHARE * sum(kernels.values())
            shown = sorted(kernels.items(), key=lambda item: -item[1])
            rows += [(entry, name, seconds) for name, seconds in shown if seconds >= least]
    columns: list[Column] = [
        ("", lambda row: row[0]["title"]),
        ("kernel", lambda row: row[1]),
        ("ms of a step", lambda row: 1000 * row[2], decimals(3)),
    ]
    return table(f"Kernels with at least {LEAST_SHARE:.0%} of a step", rows, columns)


def page(results: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    entries, device = results["entries"], results["device"]
    dates = sorted({call["date"][:10] for call in results["calls"]})
    parts = [
        f"# hstree on {device['name']}",
        f"torch {device['torch']}, CUDA {device['cuda']}, {', '.join(dates)}.",
    ]
    for name, setting in SETTINGS.items():
        there = of_setting(results, name)
        if not there:
            continue
        shown = [_times(there), _kernels(there)]
        parts += [
            f"## {name}",
            f"{setting}; binary trees T = {setting.trees}, wide heads T = {setting.wide_trees}, "
            f"C = {setting.clusters}; {setting.rounds} rounds, median ± half the interquartile "
            "range; extra memory includes the gradients.",
            markdown([one for one in shown if one.rows]),
        ]
    for name in (*trainer.MODELS, PENN):
        if there := of_setting(results, name):
            sizes = f"Whole models, all memory. {trainer.MODELS.get(name, '')}"
            parts += [f"## {name}", sizes, markdown([_times(there)])]
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
    add("--settings", nargs="+", choices=GROUPS, help="default: all; tiny ones on a CPU")
    add("--text", type=Path, metavar="FILE", help="classes of a text for whole models, .npy")
    add("--contestants", nargs="+", default=["*"], metavar="NAME", help="names, or patterns with *")
    add("--list", action="store_true", help="print settings and contestants")
    add("--page", type=Path, metavar="FILE", help="print the page of a record")
    options = parser.parse_args(arguments)
    cpu = options.device == "cpu"
    options.settings = options.settings or [
        name for name in GROUPS if name == PENN or (TINY in name) == cpu
    ]
    if options.list:
        for name, group in GROUPS.items():
            print(f"{name}: {(SETTINGS | trainer.MODELS).get(name, '')}")
            print("\n".join(f"    {key}: {one.title}" for key, one in group.items()))
        return 0
    if options.page is not None:
        print(page(json.loads(options.page.read_text())), end="")
        return 0
    if options.out is None:
        parser.error("expected --out DIR, --page FILE or --list")
    if cpu:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA GPU, but torch finds none", file=sys.stderr)
        return 2
    elif hstree.build_info().cuda is None:
        print("benchmarks.gpu needs a CUDA build of hstree", file=sys.stderr)
        return 2
    return measure_all(options)


if __name__ == "__main__":
    sys.exit(main())
