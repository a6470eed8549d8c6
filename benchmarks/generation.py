"""Tokens a second of generate of transformers, before and after accelerate_lm_head.

    python -m benchmarks.generation --data wikitext-2/ --output build

The model of benchmarks.smollm2, which says what to install, and one of the shape of Gemma-3-270M
with random weights, whose output layer is most of a token. Models take turns; one thread.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.pages import WIKITEXT, in_turns, publish, ratios
from benchmarks.smollm2 import TITLE, read_model
from hstree.lab.report import Report
from hstree.lm.report import Table, decimals, table

PROMPT, NEW, CONTEXTS, LENGTH, ROUNDS = 16, 32, 2048, 512, 2
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "samples": {"do_sample": True}}
NOTES = (
    f"Tokens a second of `generate` in float32, {NEW} tokens after a prompt of {PROMPT}, as "
    f"multiples of the plain model's: medians over {ROUNDS} turns. Samples: temperature 1, all "
    "words.",
    "Same text: whether the greedy text is that of the plain model.",
    "Head: share of a token's time that the product with the lm_head takes, which bounds the gain.",
    f"Screens are fitted to {CONTEXTS:,} tokens, those of random weights to random tokens.",
)


def trained(data: Path) -> tuple[Any, Tensor, Tensor]:
    """The model, tokens to fit a screen to, and a prompt."""
    model, tokenizer = read_model()

    def tokens(name: str, n: int) -> Tensor:
        text = (data / name).read_text(encoding="utf-8")[: 8 * n]
        ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[0, :n]
        return ids

    return model, tokens("valid.txt", CONTEXTS).view(-1, LENGTH), tokens("test.txt", PROMPT)[None]


def random_gemma(data: Path) -> tuple[Any, Tensor, Tensor]:
    """As :func:`trained`, with random weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    tokens = torch.randint(3, config.vocab_size, (CONTEXTS + PROMPT,))
    return model, tokens[:CONTEXTS].view(-1, LENGTH), tokens[None, CONTEXTS:]


MODELS: dict[str, Callable[[Path], tuple[Any, Tensor, Tensor]]] = {
    TITLE: trained,
    "Shape of Gemma-3-270M, random weights, V = 262,144, D = 640": random_gemma,
}


def variants(model: Any, tokens: Tensor) -> dict[str, Any]:
    from hstree.transformers import accelerate_lm_head

    screened = accelerate_lm_head(copy.deepcopy(model), tokens)
    return {"plain": model, "`accelerate_lm_head(model, tokens)`": screened}


def generated(model: Any, seed: int, prompt: Tensor, mode: str) -> Tensor:
    torch.manual_seed(seed)
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "top_k": 0} | MODES[mode]
    text: Tensor = model.generate(prompt, **options)
    return text


@torch.no_grad()
def measured(title: str, data: Path) -> Table:
    model, tokens, prompt = MODELS[title](data)
    models = variants(model, tokens)
    texts = {name: generated(each, 0, prompt, "greedy") for name, each in models.items()}
    columns: list[Any] = [("", str)]
    for mode in MODES if title == TITLE else ("greedy",):
        speak = partial(generated, prompt=prompt, mode=mode)
        times = in_turns({name: partial(speak, each) for name, each in models.items()}, ROUNDS)
        speed = {name: 1 / share for name, share in ratios(times).items()}
        columns.append((mode, speed.get, decimals(2)))
        if mode == "greedy":
            token = median(times["plain"]) / NEW
    head = models["plain"].get_output_embeddings()
    hidden = torch.randn(1, 1, head.in_features)
    share = median(in_turns({"head": lambda _: head(hidden)}, 9)["head"]) / token
    columns.append(("same text", lambda name: "yes" if texts[name].equal(texts["plain"]) else "no"))
    return table(f"{title}; head {share:.0%}", models, columns)


def measure(arguments: argparse.Namespace) -> Report:
    tables = [measured(title, arguments.data) for title in MODELS]
    return Report("Generation with a screened lm_head", tables, NOTES)


if __name__ == "__main__":
    publish("generation", __doc__, measure, data=WIKITEXT)
