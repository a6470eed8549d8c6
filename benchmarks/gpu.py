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
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_settings import SETTINGS, Entry, Setting, contestants

Figures = dict[str, Any]

WARM_UP = 3
PRODUCTS_AHEAD = 2
"""Number of reference products before each timed step: about 3 ms on an H100."""
PARTS = ("forward", "backward", "both")
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
TOLERANCE = {"bfloat16": 0.05, "float16": 0.05, "float32": 1e-3}
"""Largest allowed error of a gradient, relative to its largest value; for a loss, a fifth of it."""


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
        self.device, self.elements = device, setting.elements
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        shape = (setting.product, setting.product)
        self.matrix = torch.randn(shape, device=device).to(dtype)
        self.result = torch.empty_like(self.matrix)

    def product(self) -> None:
        torch.mm(self.matrix, self.matrix, out=self.result)

    def measure(self, rounds: int) -> dict[str, float]:
        """Bytes per second of the copy, read and written, and operations per second of the
        product."""
        source = torch.randn(self.elements, device=self.device)
        target = torch.empty_like(source)
        copy = self._seconds(lambda: target.copy_(source), rounds)
        product = self._seconds(self.product, rounds)
        return {
            "copy_bytes_per_second": 8 * self.elements / copy,
            "product_flops": 2 * len(self.matrix) ** 3 / product,
        }

    def _seconds(self, run: Callable[[], object], rounds: int) -> float:
        watch = Stopwatch(self.device)
        for _ in range(WARM_UP):
            run()
        watch.mark()
        for _ in range(rounds):
            run()
            watch.mark()
        return median(watch.seconds())


def free(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


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

    def end(outcome: str, detail: str = "") -> Figures:
        del figures["doing"]
        figures["outcome"] = outcome
        if detail:
            figures["detail"] = detail[:1000]
        write(figures)
        return figures

    doing("importing")
    from benchmarks.gpu_contestants import Missing, Step, build

    def run(step: Step) -> None:
        step.clear()
        step.loss().backward(step.grad)

    try:
        figures["machine"] = machine(device)
        reference = Reference(setting, device)
        figures["reference"] = [reference.measure(setting.rounds)]
        doing("building")
        step = build(entry, setting, device)
        figures["parameters"] = step.parameters
        if step.traffic is not None:
            figures["traffic"] = step.traffic

        doing("checking")
        value = step.loss()
        value.backward(step.grad)
        grad = step.leaves[0].grad
        if grad is None:
            return end("wrong", "no gradient of the input")
        figures["errors"] = step.check(value.detach(), grad)
        del value, grad
        step.clear()
        free(device)
        wrong = too_far(figures["errors"], setting.dtype)
        if wrong is not None:
            return end("wrong", wrong)

        doing("measuring memory")
        from benchmarks.memory import peak_extra_bytes

        figures["peak_bytes"] = peak_extra_bytes(lambda: run(step), device)
        doing("timing")
        figures["seconds"] = timed(step, reference, setting.rounds, device)
        if device != "cpu":

            def keep_busy() -> None:
                run(step)
                torch.cuda.synchronize()

            figures["clocks"] = query(*CLOCKS, while_waiting=keep_busy)
        step.clear()
        free(device)
        figures["reference"].append(reference.measure(setting.rounds))
        if device != "cpu":
            doing("profiling")
            figures["kernel_seconds"] = kernel_seconds(lambda: run(step), setting.rounds)
        return end("measured")
    except Missing as reason:
        return end("missing", str(reason))
    except Exception as error:  # any error is a result for the file
        return end("failed", f"{figures['doing']}: {type(error).__name__}: {error}")


def timed(step: Any, reference: Reference, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of forward, backward and both, for each round."""
    watch = Stopwatch(device)
    for _ in range(WARM_UP + rounds):
        watch.mark()
        step.clear()
        for _ in range(PRODUCTS_AHEAD if device != "cpu" else 0):
            reference.product()
        watch.mark()
        value = step.loss()
        watch.mark()
        value.backward(step.grad)
        del value
    watch.mark()
    step.clear()
    taken = watch.seconds()[3 * WARM_UP :]
    forward, backward = taken[1::3], taken[2::3]
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    return dict(zip(PARTS, (forward, backward, both), strict=True))


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
    parser.add_argument("contestant", nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--list", action="store_true", help="print settings and contestants")
    options = parser.parse_args(arguments)
    if options.list:
        for name, setting in SETTINGS.items():
            print(f"{name}: {setting}")
            print("".join(f"    {name}: {e.title}\n" for name, e in contestants(name).items()))
        return 0
    if options.contestant is None or options.out is None:
        parser.error("expected SETTING CONTESTANT --out FILE, or --list")
    if options.contestant not in contestants(options.setting):
        parser.error(
            f"contestant: expected one of {', '.join(contestants(options.setting))}, "
            f"got {options.contestant!r}"
        )
    if options.device == "cpu":
        torch.set_num_threads(1)
    reason = obstacle() if options.device == "cuda" else None
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2

    def write(figures: Figures) -> None:
        part = options.out.with_name(f".{options.out.name}.part")
        part.write_text(json.dumps(figures, indent=1) + "\n")
        os.replace(part, options.out)

    entry = contestants(options.setting)[options.contestant]
    figures = measure(entry, SETTINGS[options.setting], options.device, write)
    print(f"{entry.title}: {figures['outcome']} {figures.get('detail', '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
