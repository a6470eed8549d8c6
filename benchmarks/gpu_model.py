"""A language model of the shape of SmolLM2-135M on a GPU: time and memory of a training step with
its own lm_head, with heads of hstree, and with the fused loss of Liger where it is installed.

    python -m benchmarks.gpu_model

The weights are random, since neither figure depends on them. Steps alternate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import peak_extra_bytes
from benchmarks.pages import page_parser, publish
from hstree.lab.report import Report
from hstree.lm.table import decimals, table

ROWS, WINDOW, ROUNDS = 16, 1024, 10


def own(model: Any) -> Any:
    return model


def softmax(model: Any) -> Any:
    from hstree.integrations.transformers import replace_lm_head

    return replace_lm_head(model)


def forest(model: Any) -> Any:
    from hstree.integrations.transformers import replace_lm_head

    return replace_lm_head(model, "forest")


def trees(model: Any) -> Any:
    from hstree.integrations.transformers import replace_lm_head

    return replace_lm_head(model, "trees", frequencies=range(model.config.vocab_size, 0, -1))


def liger(model: Any) -> Any:
    from liger_kernel.transformers.model.llama import lce_forward

    model.forward = lce_forward.__get__(model)
    return model


MODELS: dict[str, Callable[[Any], Any]] = {
    "its own `lm_head`": own,
    "`replace_lm_head(model)`": softmax,
    '`replace_lm_head(model, "forest")`': forest,
    '`replace_lm_head(model, "trees", frequencies=...)`': trees,
    "Liger's fused loss": liger,
}


def made(of: Callable[[Any], Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return of(LlamaForCausalLM(config).to("cuda", torch.bfloat16)).cuda().train()


def training_step(model: Any, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def seconds(step: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def measure(options: argparse.Namespace) -> Report:
    torch.manual_seed(1)
    ids = torch.randint(49_152, (ROWS, WINDOW), device="cuda")
    steps, memory = {}, {}
    for name, of in MODELS.items():
        try:
            step = training_step(made(of), ids)
            step()
        except (ImportError, TypeError, AttributeError) as error:  # of another library
            if of is not liger:
                raise
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        steps[name], memory[name] = step, peak_extra_bytes(step, "cuda")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(seconds(step))
    unit = times[next(iter(steps))]
    columns: list[Any] = [
        ("", str),
        ("ms", lambda name: 1000 * median(times[name]), decimals(1)),
        ("time of a step", lambda name: median(times[name]) / median(unit), decimals(2)),
        ("its memory, MiB", lambda name: (memory[name] or 0) / 2**20, decimals(0)),
    ]
    title = f"Llama of 30 layers, V = 49,152, D = 576, bfloat16, {ROWS} windows of {WINDOW} tokens"
    notes = (
        "Forward and backward of the whole model, medians. Memory: peak of what a step allocates, "
        "activations and gradients included.",
    )
    data = {"seconds": times, "peak_bytes": memory}
    return Report("A language model on a GPU", [table(title, steps, columns)], notes, data)


if __name__ == "__main__":
    publish("gpu_model", page_parser(__doc__), measure)
