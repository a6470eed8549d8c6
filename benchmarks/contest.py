"""Steps that take turns, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Contestant:
    """A step, forward and backward, and how many parameters it has; 0 where that says nothing."""

    step: Callable[[], object]
    parameters: int = 0


@dataclass(frozen=True)
class Size:
    """N, D and V; E, the size of a mixture's latent vectors."""

    rows: int
    features: int
    classes: int
    latent: int

    def __str__(self) -> str:
        latent = f", E = {self.latent}" if self.latent != self.features else ""
        return f"N = {self.rows}, D = {self.features}, V = {self.classes}{latent}"


TINY = Size(35, 40, 1000, 40)
"""Size of a warm-up, and of everything in a short run."""

Build = Callable[[Size, str], Contestant]


def batch(
    rows: int, features: int, classes: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """Inputs, targets drawn from Zipf's law, and the frequencies of that law."""
    frequencies = 1.0 / np.arange(1, classes + 1)
    random = np.random.default_rng(0)
    target = torch.from_numpy(random.choice(classes, rows, p=frequencies / frequencies.sum()))
    input = torch.randn(rows, features, device=device).requires_grad_()
    return input, target.to(device), frequencies


def step(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Forward and backward, to gradients of all parameters."""
    parameters = list(parameters)

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss().backward()

    return run


def clock(device: str) -> float:
    """Seconds: on a CPU those that this process, with its one thread, was running; wall time on a
    GPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def contest(
    benchmark: Any, builds: Mapping[str, Build], size: Size, device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Run every step once a round, in turn and back in the next round; pytest-benchmark times whole
    rounds.

    Returns:
        For each name ``seconds``, a list of one for each round, and ``parameters``.
    """
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
    order = list(contestants)

    def one_round() -> None:
        for name in order:
            begin = clock(device)
            contestants[name].step()
            result[name]["seconds"].append(round(clock(device) - begin, 6))
        order.reverse()

    benchmark.pedantic(one_round, rounds=rounds)
    benchmark.extra_info.update(device=device, size=str(size), contest=result)
    return result
