"""The default trees of two levels with and without the bound on their groups, over 49,152 subwords
of which a text lacks about half.

    python -m benchmarks.bounded_groups --data wikitext-2/ --output benchmarks/results

The subwords are those of SmolLM2 (benchmarks.smollm2 says what to install), the trees those that
the constructors build by default, from the counts of a text and from the text itself; without the
bound they are collapsed with max_group=V. Both kinds take turns in one process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.contest import step
from benchmarks.pages import page_parser, publish, seconds
from benchmarks.smollm2 import read_tokenizer
from hstree.heads import TreeEnsemble, TreeShape
from hstree.lab.report import Report
from hstree.lm.report import Table, decimals, table
from hstree.optim import AdamW, clip_grad_norm_
from hstree.trees import Tree, build_ensemble, word_vectors
from hstree.trees.vectors import Context

Tokens = npt.NDArray[np.int64]

CLASSES = 49_152
CONTEXTS: tuple[Context, ...] = ("left", "both")
WORST = "rare"
"""Targets drawn from the largest group of the first tree without a bound."""


@dataclass(frozen=True)
class Size:
    """Features; windows of a step and their tokens; rounds of times; steps of training, its seeds,
    and held-out tokens."""

    features: int = 128
    windows: int = 8
    window: int = 64
    rounds: int = 9
    steps: int = 300
    seeds: tuple[int, ...] = (1, 2)
    held_out: int = 32_768


def read(folder: Path) -> tuple[Tokens, Tokens]:
    """The validation and the test part in subwords: texts to train on and to measure the loss."""
    tokenizer = read_tokenizer()
    parts = ((folder / f"{part}.txt").read_text(encoding="utf-8") for part in ("valid", "test"))
    valid, test = (np.array(tokenizer(text).input_ids) for text in parts)
    return valid, test


def binary_trees(recipe: str, tokens: Tokens, n_classes: int) -> list[Tree]:
    """The trees of TreeEnsemble.from_counts or, of the recipe "cluster", from_tokens, with seed 0,
    before they are collapsed."""
    counts, n_trees = np.bincount(tokens, minlength=n_classes), 4
    if recipe != "cluster":
        return build_ensemble(recipe, n_classes, n_trees, counts)
    vectors = [word_vectors(tokens, n_classes, context=context) for context in CONTEXTS]
    return build_ensemble(recipe, n_classes, n_trees, counts, vectors, noise=0.3)


def collapsed(plain: Sequence[Tree], tokens: Tokens, max_group: int | None = None) -> list[Tree]:
    """Trees of two levels, with another bound than that of the constructors if one is given."""
    n_classes = plain[0].n_classes
    counts = np.bincount(tokens, minlength=n_classes)
    root = TreeShape.for_classes(n_classes).root
    return [t.collapse(root, levels=2, frequencies=counts, max_group=max_group) for t in plain]


def group_sizes(tree: Tree) -> npt.NDArray[np.int64]:
    """The number of classes in the group of each class, int64 [V]; 0 for a child of the root."""
    sizes = np.diff(tree.boundary[: tree.root_width + 1])
    found = np.empty(tree.n_classes, np.int64)
    found[tree.order] = np.repeat(np.where(sizes > 1, sizes, 0), sizes)
    return found


def batches(tokens: Tokens, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows and targets, drawn with replacement."""
    random = np.random.default_rng(seed)
    while True:
        first = random.integers(0, len(tokens) - size.window, size.windows)
        rows = torch.from_numpy(tokens[first[:, None] + np.arange(size.window + 1)])
        yield rows[:, :-1], rows[:, 1:]


def make_head(made: list[Tree], tokens: Tokens, size: Size) -> TreeEnsemble:
    """A head as the constructors build it."""
    n_classes = made[0].n_classes
    counts = np.bincount(tokens, minlength=n_classes)
    return TreeEnsemble(size.features, n_classes, made, node_vectors="leaves", frequencies=counts)


def head_step(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> Callable[[], None]:
    """A forward and a backward pass."""
    return step(lambda: head(hidden, target).loss, [hidden, *head.parameters()])


def step_times(
    heads: Mapping[str, TreeEnsemble], tokens: Tokens, size: Size
) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step of each head, forward and backward, by the kind of targets:
    those of windows of the text and WORST ones. Heads take turns."""
    rare = group_sizes(next(iter(heads.values())).trees[0])
    unlucky = torch.from_numpy((rare == rare.max()).nonzero()[0])
    stream = batches(tokens, size, 0)
    spent: dict[tuple[str, str], list[float]] = {}
    for turn in range(size.rounds + 1):
        _, target = next(stream)
        drawn = unlucky[torch.randint(len(unlucky), target.shape)]
        hidden = torch.randn(*target.shape, size.features, requires_grad=True)
        for kind, wanted in (("text", target), (WORST, drawn)):
            for name in sorted(heads, reverse=turn % 2 == 1):
                run = head_step(heads[name], hidden, wanted)
                spent.setdefault((name, kind), []).append(1000 * seconds(run))
    return {
        name: {kind: median(spent[name, kind][1:]) for kind in ("text", WORST)} for name in heads
    }


class Model(nn.Module):
    """An LSTM under a head."""

    def __init__(self, head: TreeEnsemble, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(head.n_classes, size.features)
        self.lstm = nn.LSTM(size.features, size.features, batch_first=True)
        self.head = head

    def loss(self, window: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.head(self.lstm(self.embedding(window))[0], target).loss
        return loss


def trained(made: list[Tree], text: tuple[Tokens, Tokens], size: Size, seed: int) -> float:
    """The loss on held-out text after some steps of training."""
    torch.manual_seed(seed)
    model = Model(make_head(made, text[0], size), size)
    rate = 0.002
    below = [p for part in (model.embedding, model.lstm) for p in part.parameters()]
    optimizer = AdamW([{"params": below, "lr": rate}, *model.head.parameter_groups(rate)])
    stream = batches(text[0], size, seed)
    for _ in range(size.steps):
        optimizer.zero_grad()
        model.loss(*next(stream)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    rows = torch.from_numpy(text[1][: size.held_out + 1])
    pairs = zip(rows[:-1].split(size.window), rows[1:].split(size.window), strict=True)
    with torch.no_grad():
        return fmean(model.loss(window[None], target[None]).item() for window, target in pairs)


def compared(recipe: str, text: tuple[Tokens, Tokens], n_classes: int, size: Size) -> Table:
    """The two kinds of trees of a recipe, side by side."""
    counts = np.bincount(text[0], minlength=n_classes)
    plain = binary_trees(recipe, text[0], n_classes)
    made = {
        "no bound": collapsed(plain, text[0], n_classes),
        "bound": collapsed(plain, text[0]),
    }
    heads = {name: make_head(of, text[0], size) for name, of in made.items()}
    times = step_times(heads, text[0], size)
    base = times["no bound"]
    columns: list[Any] = [
        ("groups", str),
        ("root", lambda name: made[name][0].root_width, str),
        ("largest group", lambda n: max(group_sizes(t).max() for t in made[n]), "{:,}".format),
        ("mean", lambda n: fmean(counts @ group_sizes(t) / counts.sum() for t in made[n]),
         decimals(1)),
        ("step", lambda name: times[name]["text"] / base["text"], decimals(2)),
        ("ms", lambda name: times[name]["text"], decimals(0)),
        ("step, rare", lambda name: times[name][WORST] / base[WORST], decimals(2)),
        ("ms", lambda name: times[name][WORST], decimals(0)),
        *((f"loss, seed {seed}", lambda name, seed=seed: trained(made[name], text, size, seed),
           decimals(3)) for seed in size.seeds),
    ]  # fmt: skip
    title = {"huffman": "Trees of counts", "cluster": "Trees of a text"}[recipe]
    return table(title, made, columns)


def report(text: tuple[Tokens, Tokens], n_classes: int, size: Size) -> Report:
    unseen = n_classes - len(np.unique(text[0]))
    rows = size.windows * size.window
    tables = [compared(recipe, text, n_classes, size) for recipe in ("huffman", "cluster")]
    load = f"{os.getloadavg()[2]:.1f} processes at work on {os.cpu_count()} cores"
    notes = (
        f"V = {n_classes:,}; D = {size.features}; four trees, root of 256. The text has "
        f"{len(text[0]):,} tokens, and {unseen:,} classes do not occur in it.",
        "The bound is 4 max(sqrt(V), V / C). Mean: number of classes in the group of a token of "
        "the text, 0 for a child of the root.",
        f"Step: forward and backward pass of the head alone over {rows} tokens of the text; rare: "
        "with targets of the largest group without a bound. Shares of the first row and "
        f"milliseconds of processor time, medians of {size.rounds} rounds in turns, one thread; "
        f"{load}.",
        f"Loss: nats for each of {size.held_out:,} held-out tokens, after {size.steps} steps of an "
        f"LSTM of {size.features} features on {rows} tokens each.",
    )
    return Report("A bound on the groups of trees of two levels", tables, notes)


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="WikiText-2: valid.txt, test.txt"
    )

    def measure(options: argparse.Namespace) -> Report:
        return report(read(options.data), CLASSES, Size())

    publish("bounded_groups", parser, measure)


if __name__ == "__main__":
    main()
