"""The output layer of a real model, screened: what is found, and how long it takes.

    python -m benchmarks.screened --data wikitext-2/ --output build

The model of benchmarks.smollm2, which says what to install (also faiss-cpu, torchao), reads
valid.txt and test.txt of the folder. Screens and cuts of the vocabulary are fitted to the contexts
of the former; all are measured on those of the latter. A layer of random weights is for time alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pages import WIKITEXT, in_turns, publish
from benchmarks.smollm2 import TITLE, read_model
from hstree.heads import ScreenedSoftmax
from hstree.lab.report import Report
from hstree.lm.report import table

FITTED, EVALUATED, LENGTH = 8192, 1536, 512
"""Contexts of either text, and of a sequence."""
RANDOM = (262_144, 640)
ROWS = (1, 8)
TURNS = 30
SHAPES = ((72, 8, 1024), (144, 4, 1024), (144, 8, 1024), (288, 4, 1024), (288, 8, 256),
          (576, 4, 1024))  # fmt: skip
PRODUCTS = {"product, float32": torch.float32, "product, bfloat16": torch.bfloat16}
NOTES = (
    "Best word: share of the contexts whose most probable word is found. Overlap: mean over the "
    "contexts of the sum of min(p, q), for the probabilities p of the layer and q of the row.",
    "Bytes: those of the preview and of the exact rows as a share of the float32 weight.",
    "Times are medians of calls that take turns in random order, on other contexts in each turn: "
    "of the best word (of a product, without its argmax), as shares of the product with as many "
    "contexts N. Screens have the weight in the dtype of the product.",
    "A cut vocabulary has the words with the most probability on the contexts of the first text. "
    "FAISS has no log-probabilities, and computes in float32.",
    "Targets: at most 1/8 of the float32 product and 1/5 of the bfloat16 one, with 0.998 of the "
    "best words.",
)
Call = Callable[[Tensor], Any]
"""Of contexts [N, D]."""


@dataclass
class Contestant:
    """A way to the best word. ``calls``: of contexts in the dtype, by that of the product."""

    name: str
    calls: Mapping[str, Call]
    bytes: float  # share of those of the float32 weight
    found: float | None = None
    overlap: float | None = None
    times: dict[tuple[int, str], float] = field(default_factory=dict)


def read_layer() -> tuple[nn.Linear, Callable[[Path, int], Tensor]]:
    """The lm_head of the model, and a function that gives contexts of a text."""
    model, tokenizer = read_model()

    @torch.inference_mode()
    def contexts(path: Path, count: int) -> Tensor:
        text = path.read_text(encoding="utf-8")[: 8 * count]
        tokens = tokenizer(text, return_tensors="pt").input_ids[0, :count].view(-1, LENGTH)
        rows = [model.model(some[None]).last_hidden_state[0] for some in tokens]
        return torch.cat(rows).clone()

    return model.lm_head, contexts


def screen(linear: nn.Linear, head: ScreenedSoftmax, name: str = "") -> Contestant:
    """The screen with the weight in both dtypes."""
    weight, low = linear.weight, nn.Linear(1, 1, bias=False)
    low.weight = nn.Parameter(weight.detach().bfloat16())
    half = ScreenedSoftmax.from_config(head.config(), head.state_dict(), low)
    size = (head.rank * head.bits / 8 * len(weight) + head.exact * weight[0].nbytes) / weight.nbytes
    shape = f"R = {head.rank}, int{head.bits}, n = {head.exact:,}"
    calls = dict(zip(PRODUCTS, (head.predict, half.predict), strict=True))
    return Contestant(f"{name}{shape}", calls, size)


@torch.inference_mode()
def judge(linear: nn.Linear, log_q: Call, hidden: Tensor) -> tuple[float, float]:
    """Share of best words found, and overlap."""
    found, overlap = 0.0, 0.0
    for rows in torch.split(hidden, 128):
        log_p, of_rows = linear(rows).log_softmax(1), log_q(rows)
        found += float((log_p.argmax(1) == of_rows.argmax(1)).sum())
        overlap += float(torch.minimum(log_p, of_rows).exp().sum())
    return found / len(hidden), overlap / len(hidden)


@torch.inference_mode()
def measure_times(contestants: list[Contestant], hidden: Tensor) -> None:
    """Fill in the times as shares of the product's."""
    inputs = {name: hidden.to(dtype) for name, dtype in PRODUCTS.items()}

    def run(call: Call, name: str, n: int, turn: int) -> None:
        call(inputs[name][turn * n : (turn + 1) * n])

    for n in ROWS:
        steps = {
            (place, name): partial(run, call, name, n)
            for place, one in enumerate(contestants)
            for name, call in one.calls.items()
        }
        medians = {key: median(times) for key, times in in_turns(steps, TURNS).items()}
        unit = {name: medians[place, name] for place, name in enumerate(PRODUCTS)}
        for (place, name), time in medians.items():
            contestants[place].times[n, name] = time / unit[name]


def product_of(weight: Tensor, name: str) -> Call:
    low = weight.to(PRODUCTS[name])
    return lambda hidden: F.linear(hidden, low)


def products(linear: nn.Linear) -> list[Contestant]:
    """The units of the times, in the order of ``PRODUCTS``."""
    calls = {name: product_of(linear.weight.detach(), name) for name in PRODUCTS}
    return [Contestant(n, {n: call}, 0.5 if "16" in n else 1.0) for n, call in calls.items()]


def others(linear: nn.Linear, fit: Tensor, test: Tensor) -> list[Contestant]:
    """Cuts of the vocabulary and, where they are installed, torchao and FAISS."""
    weight = linear.weight.detach()
    made = [int8_product(linear, test)] if importlib.util.find_spec("torchao") else []
    mass = sum(linear(x).softmax(1).sum(0) for x in torch.split(fit[::4], 128))
    for part in (4, 16):
        kept = mass.argsort(descending=True)[: len(weight) // part]

        def log_q(x: Tensor, kept: Tensor = kept) -> Tensor:
            out = torch.full((len(x), len(weight)), -torch.inf)
            return out.index_copy(1, kept, F.linear(x, weight[kept]).log_softmax(1))

        calls = {name: product_of(weight[kept], name) for name in PRODUCTS}
        quality = judge(linear, log_q, test)
        made.append(Contestant(f"{len(kept):,} words", calls, 1 / part, *quality))
    return made + (indices(linear, test) if importlib.util.find_spec("faiss") else [])


def int8_product(linear: nn.Linear, test: Tensor) -> Contestant:
    quantization: Any = importlib.import_module("torchao.quantization")
    half = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=torch.bfloat16)
    half.weight = nn.Parameter(linear.weight.detach().bfloat16())
    quantization.quantize_(half, quantization.Int8WeightOnlyConfig())
    quality = judge(linear, lambda x: half(x.bfloat16()).float().log_softmax(1), test)
    calls = {"product, bfloat16": torch.compile(half, dynamic=False)}
    return Contestant("product, int8 (torchao, compiled)", calls, 0.25, *quality)


def indices(linear: nn.Linear, test: Tensor) -> list[Contestant]:
    faiss: Any = importlib.import_module("faiss")
    made, best = [], linear(test).argmax(1)
    for kind, option, values in (
        ("IVF1024,Flat", "nprobe", (16, 128)),
        ("HNSW32", "efSearch", (64, 512)),
    ):
        index = faiss.index_factory(linear.in_features, kind, faiss.METRIC_INNER_PRODUCT)
        rows = linear.weight.detach().numpy()
        index.train(rows)
        index.add(rows)

        def search(index: Any, option: str, value: int, x: Tensor) -> Tensor:
            faiss.ParameterSpace().set_index_parameter(index, option, value)
            return torch.from_numpy(index.search(x.numpy(), 1)[1][:, 0])

        for value in values:
            call = partial(search, index, option, value)
            found = float((call(test) == best).float().mean())
            name = f"FAISS {kind}, {option} = {value}"
            made.append(Contestant(name, {"product, float32": call}, float("nan"), found))
    return made


def share(value: float | None) -> str:
    if value is None or value != value:
        return ""
    return f"1/{1 / value:.1f}" if 0 < value < 0.2 else f"{value:.2f}"


def times_table(title: str, contestants: list[Contestant], quality: bool) -> Any:
    def decimals(places: int) -> Callable[[float | None], str]:
        return lambda value: "" if value is None else f"{value:.{places}f}"

    columns: list[Any] = [("", lambda one: one.name), ("bytes", lambda one: one.bytes, share)]
    if quality:
        columns.append(("best word", lambda one: one.found, decimals(4)))
        columns.append(("overlap", lambda one: one.overlap, decimals(3)))
    for n in ROWS:
        for name in PRODUCTS:
            get = partial(lambda key, one: one.times.get(key), (n, name))
            columns.append((f"time / {name.rpartition(' ')[2]}, N = {n}", get, share))
    return table(title, contestants, columns)


def measure(arguments: argparse.Namespace) -> Report:
    linear, contexts = read_layer()
    fit = contexts(arguments.data / "valid.txt", FITTED)
    test = contexts(arguments.data / "test.txt", EVALUATED)
    contestants = products(linear)
    for one, (name, dtype) in zip(contestants, PRODUCTS.items(), strict=True):

        def log_q(x: Tensor, scores: Call = one.calls[name], dtype: Any = dtype) -> Tensor:
            return scores(x.to(dtype)).float().log_softmax(1)

        one.found, one.overlap = judge(linear, log_q, test)
    with torch.no_grad():
        contestants += others(linear, fit, test)
    named = [("chosen: ", ScreenedSoftmax.from_linear(linear, fit))]
    named.append(("no contexts: ", ScreenedSoftmax.from_linear(linear)))
    for rank, bits, exact in SHAPES:
        options = {"rank": rank, "bits": bits, "exact": exact}
        named.append(("", ScreenedSoftmax.from_linear(linear, fit, **options)))
    for name, head in named:
        one = screen(linear, head, name)
        one.found, one.overlap = judge(linear, head.log_prob, test)
        contestants.append(one)
    measure_times(contestants, test)
    classes, features = RANDOM
    layer = nn.Linear(features, classes, bias=False).requires_grad_(False)
    some = torch.randn(max(ROWS) * (TURNS + 2), features)
    drawn = products(layer)
    for exact in (256, 1024):
        options = {"rank": features // 2, "bits": 4, "exact": exact}
        drawn.append(screen(layer, ScreenedSoftmax.from_linear(layer, some, **options)))
    measure_times(drawn, some)
    tables = [
        times_table(f"{TITLE}, {EVALUATED:,} contexts", contestants, True),
        times_table(f"Random weights, V = {classes:,}, D = {features}", drawn, False),
    ]
    return Report("A screened softmax", tables, NOTES)


if __name__ == "__main__":
    publish("screened", __doc__, measure, data=WIKITEXT)
