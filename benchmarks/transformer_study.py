"""Output layers of a small transformer with the subwords of SmolLM2, tied to its embeddings.

    python -m benchmarks.large_text --save FOLDER
    python -m benchmarks.transformer_study --data FOLDER

makes the runs that are missing in benchmarks/results/transformer-study.json, and the page beside
it. The backbone is transformers' LlamaModel. Each run has a cosine schedule of its own, with one
learning rate for all heads. A run has one thread, or with --device cuda a GPU. On an idle machine,
--times measures training steps of all heads on the CPU, in turns. benchmarks.smollm2 says what to
install.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import hstree
from benchmarks import step_times
from benchmarks.memory import peak_extra_bytes
from benchmarks.planned import Contender, PlannedRun, PlannedStudy, Records, Result, results
from benchmarks.smollm2 import read_tokenizer
from hstree.heads import Head
from hstree.lab.report import Report, made_on
from hstree.lm.data import Corpus, CorpusStatistics, Subwords, load_corpus
from hstree.lm.report import Column, Table, decimals, line_style, new_figure, table

CLASSES = 49_152
"""Subwords of SmolLM2. Those that do not occur in the text come last."""
WIDTH, LAYERS, WINDOW, WINDOWS = 256, 2, 64, 8
"""Features and layers of the transformer; tokens of a window, and windows of a step."""
VALID_TOKENS = 32_768
STEPS, LONG = 1600, 10_000
WARM_UP, LAST = 0.05, 0.1
"""Share of the steps in which the rate rises, and the last rate as a share of the highest."""
RATE = 0.001
"""The best of 0.0005, 0.001 and 0.002 for a softmax, a sampled one and forests of one tree and of
four, in runs of STEPS on another text: the others were 4 to 13% worse."""
LONGER = ("softmax", "sampled-in-batch", "forest-4", "forest-4-all")
"""Contenders that also make a run of LONG steps."""
TAIL = 0.1
TAILS = {"sampled-in-batch": "softmax", "forest-4": "forest-4-all"}
"""Contenders that make another such run, whose last TAIL of the steps score all classes; and the
contender that has these steps."""


def _contender(name: str, title: str, *, seeds: int = 3, **head: Any) -> Contender:
    settings = {"head": name.split("-")[0], **head, "learning_rate": RATE, "steps": STEPS}
    return Contender(name, title, settings, seeds=seeds)


def _long(contender: Contender, tail: bool = False) -> Contender:
    name, title, settings = contender.name, contender.title, {"steps": LONG}
    if tail:
        name, title = f"{name}-tail", f"{title}, all classes in the last tenth"
        settings |= {"tail": TAIL}
    own = contender.settings | settings
    return replace(contender, name=f"{name}-long", title=title, settings=own, seeds=1, group=1)


def _all() -> Iterator[Contender]:
    yield _contender("softmax", "softmax")
    title = "sampled softmax, 512 negatives and the batch's targets"
    yield _contender("sampled-in-batch", title, negatives=512)
    for trees in (4, 1):
        title = f"forest of {trees} trees" if trees > 1 else "forest of one tree"
        title += ", C = 256, 512 negatives"
        yield _contender(f"forest-{trees}", title, n_trees=trees, negatives=512)
    title = "forest of 4 trees, C = 256, all classes"
    yield _contender("forest-4-all", title, seeds=1, n_trees=4, negatives=None)


SHORT: Sequence[Contender] = tuple(_all())
CONTENDERS = (
    *SHORT,
    *(_long(contender) for contender in SHORT if contender.name in LONGER),
    *(_long(contender, tail=True) for contender in SHORT if contender.name in TAILS),
)


def load(data: Path) -> Corpus:
    """The text in subwords of SmolLM2."""
    return load_corpus(data, tokenizer=Subwords(read_tokenizer().backend_tokenizer))


class Transformer(nn.Module):
    """A LlamaModel and a head on its embeddings."""

    def __init__(self, settings: Mapping[str, Any], corpus: Corpus) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=WIDTH,
            intermediate_size=8 * WIDTH // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 64,
            max_position_embeddings=WINDOW,
            use_cache=False,
        )
        self.backbone = LlamaModel(config)
        of_training = ("head", "learning_rate", "steps", "tail")
        own = {k: v for k, v in settings.items() if k not in of_training}
        self.head = make_head(settings["head"], self.backbone.embed_tokens, corpus, own)

    def forward(self, window: Tensor, target: Tensor) -> hstree.HeadOutput:
        return self.head(self.backbone(input_ids=window).last_hidden_state, target)


def make_head(name: str, embedding: nn.Embedding, corpus: Corpus, options: Any) -> Head:
    """A head tied to an embedding. Trees are learned from the text."""
    statistics = CorpusStatistics.from_tokens(corpus.train, CLASSES)
    size = embedding.embedding_dim, embedding.num_embeddings
    counts = {"frequencies": statistics.frequencies, "embedding": embedding}
    if name == "softmax":
        return hstree.Softmax(*size, **counts, **options)
    if name == "sampled":
        return hstree.SampledSoftmax(*size, **counts, **options)
    return hstree.ForestSoftmax.from_tokens(*size, statistics.tokens, **counts, **options)


def batches(tokens: npt.NDArray[Any], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows and targets [WINDOWS, WINDOW], in a random order for every pass over the text."""
    first = np.arange(0, len(tokens) - WINDOW, WINDOW)
    generator = np.random.default_rng(seed)
    for _ in count():
        order = generator.permutation(first)
        for place in range(0, len(order) - WINDOWS + 1, WINDOWS):
            chosen = order[place : place + WINDOWS, None] + np.arange(WINDOW + 1)
            rows = torch.from_numpy(tokens[chosen].astype(np.int64))
            yield rows[:, :-1], rows[:, 1:]


def rate_at(step: int, steps: int) -> float:
    """Share of the highest rate: a linear rise, then half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))


def training(
    settings: Mapping[str, Any], corpus: Corpus, seed: int, device: str = "cpu"
) -> Iterator[Transformer]:
    """The model before every step. After the last one it goes on at the last rate."""
    torch.manual_seed(seed)
    model = Transformer(settings, corpus).to(device)
    optimizer = hstree.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    steps, stream = settings["steps"], batches(corpus.train, seed)
    tail = round((1 - settings["tail"]) * steps) if "tail" in settings else None
    for step in count():
        yield model
        if step == tail:
            model.head.samples_in_training = False
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * rate_at(min(step, steps), steps)
        optimizer.zero_grad()
        model(*(part.to(device) for part in next(stream))).loss.backward()
        hstree.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def perplexity(model: Transformer, tokens: npt.NDArray[Any]) -> float:
    """Of the first VALID_TOKENS of a text, in windows."""
    model.eval()
    rows = torch.from_numpy(tokens[: VALID_TOKENS + 1].astype(np.int64))
    rows = rows.to(model.backbone.device)
    pairs = zip(rows[:-1].split(8 * WINDOW), rows[1:].split(8 * WINDOW), strict=True)
    losses = [
        float(model(window.view(-1, WINDOW), target.view(-1, WINDOW)).loss)
        for window, target in pairs
    ]
    model.train()
    return math.exp(sum(losses) / len(losses))


def measure(run: PlannedRun, corpus: Corpus, given: argparse.Namespace) -> dict[str, Any]:
    """Train.

    Returns ``valid``: perplexity, None if training diverged; ``head_parameters`` beside the
    embeddings; on the CPU ``bytes``, what a first step adds to the process, and ``seconds`` of its
    time.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    steps = training(run.settings, corpus, run.seed, given.device)
    model, on_cpu = next(steps), given.device == "cpu"
    tied = {id(parameter) for parameter in model.backbone.parameters()}
    own = [p for p in model.head.parameters() if id(p) not in tied]
    figures: dict[str, Any] = {
        "head_parameters": sum(parameter.numel() for parameter in own),
        "bytes": peak_extra_bytes(lambda: next(steps)) if on_cpu else None,
    }
    for _ in range(run.settings["steps"] - on_cpu):  # one step has been taken for the memory
        next(steps)
    valid = perplexity(model, corpus.valid)
    finite = math.isfinite(valid)
    seconds = time.process_time() - begin if on_cpu else 0.0
    return figures | {"valid": valid if finite else None, "seconds": seconds}


INTRODUCTION = f"""\
A Llama of {LAYERS} layers and {WIDTH} features (RMSNorm), its embeddings tied to the output layer;
AdamW, a warmed-up cosine for each run, steps of {WINDOWS} windows of {WINDOW} subwords. The
learning rate is {RATE}. On another text, {STEPS:,} steps with 0.0005 and 0.002 had perplexities 4
to 13% higher for the softmax, the sampled one and the forests of one tree and of four; for
{LONG:,} steps no other rate was tried. ± is the standard deviation over seeds. *Valid* is the
perplexity of the first {VALID_TOKENS:,} tokens. *Step* and *memory* are of a CPU: memory is what a
first step adds to the process, gradients, optimizer state and workspaces, those of the backbone
included. *Parameters* are those beside the embeddings. In the picture, triangles are the runs of
{LONG:,} steps, those upside down with all classes in the last tenth of them, of which *step* is
then the mean.
"""


def report(contenders: Sequence[Contender], records: Records) -> Report:
    """The page."""
    title = "Output layers of a small transformer"
    found = results(contenders, records)
    if not found:
        return Report(title, [], ["No run has finished yet."])
    times = step_times.load(records.path)
    shares = {} if times is None else times["shares"]
    tables = [_table(found, shares, long) for long in (False, True)]
    timed = [r for r in found if _share(r, shares) and r.mean("valid") is not None]
    return Report(
        title,
        [table for table in tables if table.rows],
        [f"the text: {records.all()[0]['text']}; the other subwords of {CLASSES:,} do not occur"],
        pictures={"": _picture(timed, shares)} if timed else {},
        introduction=INTRODUCTION,
        appendix="Records of all runs: [transformer-study.json](transformer-study.json).",
        made=made_on(records.all()),
    )


def _of_head(result: Result) -> str:
    """The name of a head, under which its steps are timed."""
    return result.contender.name.removesuffix("-long").removesuffix("-tail")


def _share(result: Result, shares: Mapping[str, float]) -> float | None:
    """The mean time of a step over that with a softmax."""
    name, tail = _of_head(result), result.settings.get("tail", 0.0)
    last = TAILS[name] if tail else name
    if not {name, last} <= shares.keys():
        return None
    return (1 - tail) * shares[name] + tail * shares[last]


def _is_long(result: Result) -> bool:
    return int(result.settings["steps"]) == LONG


def _table(found: Sequence[Result], shares: Mapping[str, float], long: bool) -> Table:
    shown = [result for result in found if _is_long(result) == long]
    columns: list[Column] = [
        ("head", lambda r: r.title),
        ("valid", lambda r: r.spread("valid"), str),
        ("seeds", lambda r: len(r.runs), str),
        ("step / softmax", lambda r: _share(r, shares), decimals(2)),
        ("parameters", lambda r: r.mean("head_parameters"), "{:,.0f}".format),
        ("memory, MiB", _mebibytes, decimals(0)),
    ]
    return table(f"After {LONG if long else STEPS:,} steps", shown, columns)


def _mebibytes(result: Result) -> float | None:
    """Mean of the runs on a CPU."""
    known = [bytes for run in result.runs if (bytes := run["bytes"]) is not None]
    return fmean(known) / 2**20 if known else None


def _picture(found: Sequence[Result], shares: Mapping[str, float]) -> Any:
    """Validation perplexity against the time of a run."""
    figure = new_figure(6, 4)
    axes = figure.subplots()
    heads = list(dict.fromkeys(map(_of_head, found)))
    for result in found:
        time, short = _share(result, shares), not _is_long(result)
        assert time is not None
        time *= result.settings["steps"]
        marker = "o" if short else "v" if "tail" in result.settings else "^"
        style = line_style(heads.index(_of_head(result))) | {"linestyle": "", "marker": marker}
        label = result.title if short else None
        axes.plot([time], [result.mean("valid")], label=label, **style)
    axes.set(xlim=(0, None), xlabel="time of the run, in steps with a softmax")
    axes.set_ylabel("validation perplexity")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    return figure


def _time_steps(corpus: Corpus, records: Records) -> None:
    turns = {c.name: training(c.settings, corpus, 1) for c in SHORT}
    step_times.save(step_times.in_turns(turns), records.path)


STUDY = PlannedStudy(
    "transformer-study",
    CONTENDERS,
    measure,
    report,
    [
        "python -m benchmarks.large_text --save FOLDER",
        "python -m benchmarks.transformer_study --data FOLDER",
    ],
    load=load,
    time_steps=_time_steps,
    devices=("cpu", "cuda"),
)

if __name__ == "__main__":
    STUDY.main(__doc__, Path(__file__).parent / "results")
