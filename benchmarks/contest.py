"""Timing of alternating steps, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Contestant:
    """A step, forward and backward, and facts about it; 0 or None if they do not apply."""

    step: Callable[[], object]
    parameters: int = 0
    threads: int = 1
    visits: int = 0  # nodes on the paths of the step's rows, in all trees
    idle: Callable[[], object] | None = None  # the step without its work; its time is subtracted
    calls: int = 1  # of what is timed, in a step


@dataclass(frozen=True)
class Size:
    """Sizes of a step: N rows, D features, V classes; E, the size of a mixture's latent vectors."""

    rows: int
    features: int
    classes: int
    latent: int

    def __str__(self) -> str:
        latent = f", E = {self.latent}" if self.latent != self.features else ""
        return f"N = {self.rows}, D = {self.features}, V = {self.classes}{latent}"


TINY = Size(35, 40, 1000, 40)
"""Size of a warm-up, and of all steps in a short run."""

TURN_SECONDS, TURN_STEPS = 0.1, 20
"""Limits of a turn, in seconds and steps. A turn has at least one step; its result is their
median."""
WARM_UP_SECONDS = 1.0
"""Seconds. A turn begins with a warm-up step, unless a step takes longer than this."""


Build = Callable[[Size, str], Contestant]


def batch(
    rows: int, features: int, classes: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """Inputs, targets drawn from Zipf's law, and its frequencies."""
    frequencies = 1.0 / np.arange(1, classes + 1)
    random = np.random.default_rng(0)
    target = torch.from_numpy(random.choice(classes, rows, p=frequencies / frequencies.sum()))
    input = torch.randn(rows, features, device=device).requires_grad_()
    return input, target.to(device), frequencies


def step(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Callable[[], None]:
    """A step: forward and backward, with gradients of all parameters."""
    parameters = list(parameters)

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss().backward()

    return run


def clock(device: str, threads: int = 1) -> float:
    """Seconds: CPU time of the process for one thread on a CPU, otherwise wall time."""
    if device == "cpu" and threads == 1:
        return time.process_time()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def contest(
    benchmark: Any, builds: Mapping[str, Build], size: Size, device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Give every step a turn in each round, in alternating order. pytest-benchmark times whole
    rounds. Returns for each name ``seconds``, one for each round, ``parameters`` and, if they
    apply, ``visits``."""
    for build in builds.values():
        build(TINY, device).step()
    contestants = {name: build(size, device) for name, build in builds.items()}
    if device != "cpu":
        for contestant in contestants.values():
            contestant.step()
    result: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "parameters": contestant.parameters}
        for name, contestant in contestants.items()
    }
    most_threads = max(contestant.threads for contestant in contestants.values())
    order = list(contestants)

    def timed(step: Callable[[], object]) -> float:
        begin = clock(device, most_threads)
        step()
        return clock(device, most_threads) - begin

    def turn(contestant: Contestant) -> float:
        torch.set_num_threads(contestant.threads)
        idle = timed(contestant.idle) if contestant.idle else 0.0
        first = timed(contestant.step)  # warms up caches, and pages in the first round
        steps = [] if first < WARM_UP_SECONDS else [first]
        while sum(steps) < TURN_SECONDS and len(steps) < TURN_STEPS:
            steps.append(timed(contestant.step))
        torch.set_num_threads(1)
        return (median(steps) - idle) / contestant.calls

    def one_round() -> None:
        for name in order:
            result[name]["seconds"].append(round(turn(contestants[name]), 7))
        order.reverse()

    benchmark.pedantic(one_round, rounds=rounds)
    for name, contestant in contestants.items():
        if contestant.visits:
            result[name]["visits"] = contestant.visits
    benchmark.extra_info.update(
        instructions=torch.ops.hstree.cpu_capability(),
        device=device,
        size=str(size),
        contest=result,
    )
    return result
