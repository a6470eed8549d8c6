"""SmolLM2-135M with its own lm_head and with hstree's: loss, and time and memory of a step.

    python -m benchmarks.lm_head --data wikitext-2/valid.txt

benchmarks.smollm2 says what to install. Time and memory are those of a training step, forward and
backward, one window, one thread. Steps alternate; memory is measured in a process for each head.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import map_large_blocks, peak_extra_bytes
from benchmarks.pages import page_parser, publish
from benchmarks.smollm2 import TITLE, read_model
from hstree.lab.report import Report
from hstree.lm.report import decimals, table

WINDOW, WINDOWS, ROUNDS = 512, 8, 5


def windows(tokenizer: Any, text: Path) -> Tensor:
    """The first tokens of a text, [WINDOWS, WINDOW]."""
    begin = text.read_text(encoding="utf-8")[: 8 * WINDOW * WINDOWS]
    tokens = tokenizer(begin, return_tensors="pt").input_ids[0]
    return tokens[: WINDOW * WINDOWS].view(WINDOWS, WINDOW)


def replaced(model: Any, head: str | None = None, **options: Any) -> Any:
    from hstree.transformers import replace_lm_head

    return replace_lm_head(model, head, **options)


def sampled(model: Any, ids: Tensor) -> Any:
    counts = torch.bincount(ids.flatten(), minlength=model.lm_head.out_features)
    return replaced(model, "sampled", negatives=512, frequencies=counts)


MODELS: dict[str, Callable[[Any, Tensor], Any]] = {
    "its own `lm_head`": lambda model, ids: model,
    "`replace_lm_head(model)`": lambda model, ids: replaced(model),
    '`replace_lm_head(model, "sampled", negatives=512, frequencies=counts)`': sampled,
    '`replace_lm_head(model, "forest")`': lambda model, ids: replaced(model, "forest"),
}


def training_step(model: Any, ids: Tensor) -> Callable[[], None]:
    model.train()

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def extra_bytes(name: str, data: Path) -> int | None:
    """Peak memory that a first step adds, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lm_head", "--data", str(data), "--memory", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    peak: int | None = json.loads(done.stdout.splitlines()[-1])
    return peak


def measure(options: argparse.Namespace) -> Report:
    loaded = [read_model() for _ in MODELS]
    ids = windows(loaded[0][1], options.data)
    pairs = zip(MODELS.items(), loaded, strict=True)
    models = {name: make(model, ids) for (name, make), (model, _) in pairs}
    losses = {}
    for name, model in models.items():
        with torch.no_grad():
            loss = [float(model(input_ids=row[None], labels=row[None]).loss) for row in ids]
        losses[name] = sum(loss) / len(loss)
    steps = {name: training_step(model, ids[:1]) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for step in steps.values():
        step()
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            times[name].append(time.process_time() - begin)
    unit = next(iter(models))
    ratios = {
        name: median(a / b for a, b in zip(times[name], times[unit], strict=True))
        for name in models
    }
    memory = {name: extra_bytes(name, options.data) for name in models}
    columns: list[Any] = [
        ("", str),
        ("loss", losses.get, decimals(4)),
        ("time of a step", ratios.get, decimals(2)),
        ("its memory, MiB", lambda name: memory[name] and memory[name] / 2**20, decimals(0)),
    ]
    notes = (
        f"Loss: mean over the first {WINDOWS} windows of {WINDOW} tokens. Time: forward and "
        f"backward of the whole model, one window, as a multiple of the first row "
        f"({median(times[unit]):.2f} s). Memory: what a first step adds to the process, gradients "
        "of all parameters included.",
    )
    data = {"loss": losses, "seconds": times, "peak_bytes": memory}
    return Report("The lm_head of a language model", [table(TITLE, models, columns)], notes, data)


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a text")
    parser.add_argument("--memory", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is None:
        publish("lm_head", parser, measure)
        return
    torch.set_num_threads(1)
    map_large_blocks()
    model, tokenizer = read_model()
    ids = windows(tokenizer, options.data)[:1]
    step = training_step(MODELS[options.memory](model, ids), ids)
    print(json.dumps(peak_extra_bytes(step)))


if __name__ == "__main__":
    main()
