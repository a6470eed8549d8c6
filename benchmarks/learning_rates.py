"""The best factor on the learning rate of a head, by the size of the hidden states.

    python -m benchmarks.learning_rates --output benchmarks/results

Hidden states are made up: a cluster, a class and noise, with a hundredth of the features 20 times
as large and off centre, as behind the final norm of a transformer; scaled to a root mean square.
With --data TEXT those of SmolLM2-135M are read too (benchmarks.smollm2 says what to install). Heads
start at the class frequencies and take a few steps of AdamW with the rate 0.001 times a factor.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.pages import publish
from hstree.heads import ForestSoftmax, Head, SampledSoftmax, Softmax, TreeEnsemble
from hstree.lab.report import Report
from hstree.lm.report import table
from hstree.optim import AdamW
from hstree.optim.groups import FACTOR_TIMES_NORM, LARGEST_FACTOR

CLASSES, ROWS, HELD_OUT, RATE = 1200, 128, 2048, 1e-3
SIZES = {64: 100, 256: 100, 576: 100, 1024: 100, 4096: 50}
"""Steps by the number of features."""
SPREADS = (0.1, 0.5, 2.0)
FACTORS = [2.0**power for power in range(5, -4, -1)]


class States(NamedTuple):
    """Hidden states [N, D] in training order and the class of each [N]; the first HELD_OUT rows are
    those that are measured."""

    name: str
    hidden: Tensor
    target: Tensor
    steps: int


def made_up(features: int, steps: int) -> States:
    """With root mean square 1."""
    random = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=random)
    mass = 1 / torch.arange(10.0, CLASSES + 10)
    target = torch.multinomial(mass, HELD_OUT + steps * ROWS, True, generator=random)
    center = normal(40, features)[torch.arange(CLASSES) % 40] + 0.7 * normal(CLASSES, features)
    hidden = center[target] + 2 * normal(len(target), features)
    target[torch.rand(len(target), generator=random) < 0.5] = -1
    target[target < 0] = torch.multinomial(mass, int((target < 0).sum()), True, generator=random)
    outliers = torch.randperm(features, generator=random)[: max(1, features // 100)]
    hidden[:, outliers] = 20 * (hidden[:, outliers] + 2 * normal(len(outliers)))
    hidden /= hidden.square().mean().sqrt()
    return States(f"made up, D = {features:,}", hidden, target, steps)


@torch.no_grad()
def of_smollm2(text: Path, steps: int = 100) -> States:
    """Its final hidden states before each of the CLASSES most frequent tokens, as they are."""
    from benchmarks.smollm2 import read_model

    model, tokenizer = read_model()
    begin = text.read_text(encoding="utf-8")[: 10 * (HELD_OUT + steps * ROWS)]
    ids = tokenizer(begin, return_tensors="pt").input_ids[0]
    ids = ids[: len(ids) // 512 * 512].view(-1, 512)
    hidden = torch.cat([model.model(some).last_hidden_state[:, :-1] for some in ids.split(4)])
    hidden, target = hidden.flatten(0, 1), ids[:, 1:].flatten()
    kept, place = target.bincount().topk(CLASSES)[1], torch.full((49_152,), -1)
    place[kept] = torch.arange(CLASSES)
    rows = (place[target] >= 0).nonzero().squeeze(1)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    rows = rows[: HELD_OUT + steps * ROWS]
    return States("SmolLM2-135M, D = 576", hidden[rows], place[target[rows]], steps)


HEADS: dict[str, Callable[[int, Tensor], Head]] = {
    "softmax": lambda d, counts: Softmax(d, CLASSES, frequencies=counts),
    "sampled": lambda d, counts: SampledSoftmax(d, CLASSES, negatives=128, frequencies=counts),
    "forest": lambda d, counts: ForestSoftmax(d, CLASSES, clusters=64, frequencies=counts),
    "trees": TreeEnsemble.from_counts,
}


def trained(states: States, head: str, factor: float) -> float:
    """Loss on the held-out rows after training with a factor."""
    torch.manual_seed(0)
    counts = states.target.bincount(minlength=CLASSES)
    made = HEADS[head](states.hidden.shape[1], counts)
    optimizer = AdamW(made.parameter_groups(RATE, factor=factor))
    hidden, target = states.hidden[HELD_OUT:], states.target[HELD_OUT:]
    for x, y in zip(hidden.split(ROWS), target.split(ROWS), strict=True):
        optimizer.zero_grad()
        made(x, y).loss.backward()
        optimizer.step()
    made.eval()
    with torch.no_grad():
        return made(states.hidden[:HELD_OUT], states.target[:HELD_OUT]).loss.item()


def losses(states: States, head: str) -> dict[float, float]:
    """By factor, from the largest down to three factors after the best."""
    found: dict[float, float] = {}
    for factor in FACTORS:
        found[factor] = trained(states, head, factor)
        best = min(found, key=found.__getitem__)
        if FACTORS.index(factor) - FACTORS.index(best) >= 3:
            break
    return found


def entropy(states: States) -> float:
    """Loss of the class frequencies on the held-out rows."""
    counts = states.target.bincount(minlength=CLASSES).double() + 1e-9
    return -(counts / counts.sum()).log()[states.target[:HELD_OUT]].mean().item()


def measure(options: argparse.Namespace) -> Report:
    cases = [] if options.data is None else [of_smollm2(options.data)]
    cases += [
        states._replace(name=f"{states.name}, {spread:g}", hidden=states.hidden * spread)
        for states in (made_up(features, steps) for features, steps in SIZES.items())
        for spread in SPREADS
    ]
    rows: list[dict[str, Any]] = []
    for states in cases:
        norm = states.hidden.norm(dim=1).mean().item()
        row = {"states": states.name, "norm": norm, "frequencies": entropy(states)}
        rows.append(row | {head: losses(states, head) for head in HEADS})
        print(rows[-1], flush=True)
    return page(rows)


def rule(row: dict[str, Any]) -> float:
    """The factor of Head.parameter_groups(lr, hidden=...)."""
    return min(LARGEST_FACTOR, FACTOR_TIMES_NORM / row["norm"])


def best(row: dict[str, Any], head: str) -> float:
    return min(row[head], key=row[head].__getitem__)


def worse(row: dict[str, Any], factor: float) -> float:
    """How far the loss is above the best, in the worst of the heads, with the nearest factor."""

    def distance(other: float) -> float:
        return abs(math.log(other / factor))

    return max(row[h][min(row[h], key=distance)] - row[h][best(row, h)] for h in HEADS)


def page(rows: list[dict[str, Any]]) -> Report:
    columns: list[Any] = [
        ("hidden states, root mean square", lambda row: row["states"]),
        ("norm", lambda row: row["norm"], "{:.1f}".format),
        *((head, partial(best, head=head), "{:g}".format) for head in HEADS),
        ("rule", rule, "{:.1f}".format),
        ("rule: worse by", lambda row: worse(row, rule(row)), "{:.2f}".format),
        ("8: worse by", lambda row: worse(row, 8.0), "{:.2f}".format),
    ]
    notes = (
        f"Factors {FACTORS[-1]:g} to {FACTORS[0]:g}, powers of two, on a rate of {RATE:g}; "
        f"{ROWS} rows a step, 100 steps, 50 for D = 4,096; V = {CLASSES:,}. The best is that of "
        "the lowest loss on held-out rows. Where the states are small the largest factor is best "
        "because so few steps with so small states are far from the end.",
        f"Rule: min({LARGEST_FACTOR:g}, {FACTOR_TIMES_NORM:g} / norm), the default of "
        "`Head.parameter_groups(lr, hidden=...)`, norm the mean norm of a hidden vector. Worse by: "
        "nats above the best factor, in the worst of the four heads, at the nearest factor tried.",
    )
    return Report("The learning rate of a head", [table("Best factor", rows, columns)], notes, rows)


if __name__ == "__main__":
    text = {"type": Path, "metavar": "TEXT", "help": "read by SmolLM2-135M"}
    publish("learning_rates", __doc__, measure, data=text)
