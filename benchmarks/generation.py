"""Tokens a second of generate of transformers, before and after accelerate_lm_head.

    python -m benchmarks.generation --data wikitext-2/ --output build

The model of benchmarks.smollm2, which says what to install, and one of the shape of Gemma-3-270M
with random weights, whose output layer is most of a token. Models take turns; one thread.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.pages import WIKITEXT, in_turns, publish
from benchmarks.smollm2 import TITLE, read_model
from hstree.lab.report import Report
from hstree.lm.report import Table, table

PROMPT, NEW, CONTEXTS, LENGTH, PROMPTS = 16, 32, 2048, 512, 8
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "samples": {"do_sample": True}}
NOTES = (
    f"Tokens a second of `generate` in float32, {NEW} tokens after a prompt of {PROMPT}, as "
    f"multiples of the plain model's with the same prompt: median, and the least and most, of "
    f"{PROMPTS} prompts. Samples: temperature 1, all words.",
    "Same text: prompts whose greedy text is that of the plain model.",
    "Head: share of a token's time that the product with the lm_head takes. Without that product "
    "tokens would be 1 / (1 - share) times as fast, the bound.",
    f"Screens are fitted to {CONTEXTS:,} tokens, those of random weights to random tokens.",
)


def trained(data: Path) -> tuple[Any, Tensor, Tensor]:
    """The model, tokens to fit a screen to, and prompts."""
    model, tokenizer = read_model()

    def tokens(name: str, n: int) -> Tensor:
        text = (data / name).read_text(encoding="utf-8")[: 8 * n]
        ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[0, :n]
        return ids

    prompts = tokens("test.txt", PROMPTS * LENGTH).view(PROMPTS, LENGTH)[:, :PROMPT]
    return model, tokens("valid.txt", CONTEXTS).view(-1, LENGTH), prompts


def random_gemma(data: Path) -> tuple[Any, Tensor, Tensor]:
    """As :func:`trained`, with random weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    tokens = torch.randint(3, config.vocab_size, (CONTEXTS + PROMPTS * PROMPT,))
    return model, tokens[:CONTEXTS].view(-1, LENGTH), tokens[CONTEXTS:].view(PROMPTS, PROMPT)


MODELS: dict[str, Callable[[Path], tuple[Any, Tensor, Tensor]]] = {
    TITLE: trained,
    "Shape of Gemma-3-270M, random weights, V = 262,144, D = 640": random_gemma,
}


def variants(model: Any, tokens: Tensor) -> dict[str, Any]:
    from hstree.transformers import accelerate_lm_head

    screened = accelerate_lm_head(copy.deepcopy(model), tokens)
    return {"plain": model, "`accelerate_lm_head(model, tokens)`": screened}


def generated(model: Any, turn: int, prompts: Tensor, mode: str) -> Tensor:
    torch.manual_seed(turn)
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "top_k": 0} | MODES[mode]
    text: Tensor = model.generate(prompts[turn % len(prompts), None], **options)
    return text


def gain(plain: Sequence[float], seconds: Sequence[float]) -> str:
    """Tokens a second as multiples of the plain model's, for each prompt: median and range."""
    each = sorted(a / b for a, b in zip(plain, seconds, strict=True))
    return f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


@torch.no_grad()
def measured(title: str, data: Path) -> Table:
    model, tokens, prompts = MODELS[title](data)
    models = variants(model, tokens)
    texts: dict[str, list[Tensor]] = {name: [] for name in models}

    def speak(name: str, mode: str, turn: int) -> None:
        text = generated(models[name], turn, prompts, mode)
        if mode == "greedy":
            texts[name].append(text)

    columns: list[Any] = [("", str)]
    for mode in MODES if title == TITLE else ("greedy",):
        times = in_turns({name: partial(speak, name, mode) for name in models}, len(prompts))
        shown = {name: gain(times["plain"], seconds) for name, seconds in times.items()}
        columns.append((mode, shown.get, str))
        if mode == "greedy":
            token = median(times["plain"]) / NEW
    head = models["plain"].get_output_embeddings()
    hidden = torch.randn(1, 1, head.in_features)
    share = median(in_turns({"head": lambda _: head(hidden)}, 25)["head"]) / token

    def same(name: str) -> str:
        pairs = zip(texts[name][1:], texts["plain"][1:], strict=True)
        return f"{sum(a.equal(b) for a, b in pairs)} of {len(prompts)}"

    columns.append(("same text", same, str))
    bound = f"bound {1 / (1 - share):.2f}" if share < 1 else "no bound"
    return table(f"{title}; head {share:.0%}, {bound}", models, columns)


def measure(arguments: argparse.Namespace) -> Report:
    tables = [measured(title, arguments.data) for title in MODELS]
    return Report("Generation with a screened lm_head", tables, NOTES)


if __name__ == "__main__":
    publish("generation", __doc__, measure, data=WIKITEXT)
