"""SmolLM2-135M with its own lm_head and with hstree's: loss, and time and memory of a step.

    python -m benchmarks.lm_head --data wikitext-2/valid.txt

benchmarks.smollm2 says what to install. Time and memory are those of a training step, forward and
backward, one window, one thread. Steps take turns; memory is measured in a process for each head.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import of_process
from benchmarks.pages import in_turns, publish, ratios
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


def train(model: Any, ids: Tensor, _: int = 0) -> None:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()


def first_step(name: str, data: Path) -> tuple[Callable[[], object], str]:
    model, tokenizer = read_model()
    ids = windows(tokenizer, data)[:1]
    return partial(train, MODELS[name](model, ids).train(), ids), "cpu"


def measure(options: argparse.Namespace) -> Report:
    models, losses = {}, {}
    for name, make in MODELS.items():
        model, tokenizer = read_model()
        ids = windows(tokenizer, options.data)
        models[name] = make(model, ids)
        with torch.no_grad():
            loss = [float(models[name](input_ids=row[None], labels=row[None]).loss) for row in ids]
        losses[name] = sum(loss) / len(loss)
    steps = {name: partial(train, model.train(), ids[:1]) for name, model in models.items()}
    times = in_turns(steps, ROUNDS)
    unit = next(iter(models))
    memory = {name: of_process(first_step, name, options.data) for name in models}
    columns: list[Any] = [
        ("", str),
        ("loss", losses.get, decimals(4)),
        ("time of a step", ratios(times).get, decimals(2)),
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


if __name__ == "__main__":
    text = {"type": Path, "required": True, "metavar": "FILE", "help": "a text"}
    publish("lm_head", __doc__, measure, data=text)
