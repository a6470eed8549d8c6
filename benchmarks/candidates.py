"""Log-probabilities of K candidates of each row, against those of all classes and expanded rows.

python -m benchmarks.candidates
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.contest import Size, batch
from benchmarks.pages import page_parser, publish, seconds
from hstree.heads import TreeEnsemble
from hstree.heads.trees.queries import choose_way
from hstree.lab.report import Report, row_table
from hstree.lm.report import Table

SIZE = Size(rows=64, features=512, classes=32_000, latent=512)
ROWS = (1, 8, 64)
COUNTS = (1, 8, 64)
ROUNDS = 5
HEADS = {"four trees, shared leaves (default)": "leaves", "four trees, own vectors": "free"}
"""Kinds of node vectors."""
KINDS = ("random", "most probable")
WAYS = {
    "looked_up_candidates": "looked up",
    "composed_candidates": "training ops",
    "all_candidates": "all classes",
}
"""What the ways of hstree/heads/trees/candidates.py are called on the page."""
NOTES = (
    "Times are shares of those of all classes, `head.log_prob(hidden).gather(-1, candidates)`, in "
    "one process.",
    "Expanded: the loss of a training step over N K rows, each context with its K candidates.",
    "With gradients: forward and backward, with gradients of the contexts and of all parameters.",
    "Candidates are drawn at random, as for negative samples, or are the most probable classes of "
    "another head of the same trees, as from a teacher.",
    "Four Huffman trees of Zipf's law, C = 256. Taken: the way that `choose_way` in "
    "hstree/heads/trees/candidates.py chose.",
)


def expanded(head: TreeEnsemble, hidden: Tensor, candidates: Tensor) -> Tensor:
    rows = hidden.repeat_interleave(candidates.shape[1], 0)
    return head.target_log_prob(rows, candidates.flatten()).view_as(candidates)


STEPS: dict[str, Callable[[TreeEnsemble, Tensor, Tensor], Tensor]] = {
    "all": lambda head, hidden, c: head.log_prob(hidden).gather(1, c),
    "head": lambda head, hidden, c: head.candidate_log_prob(hidden, c),
    "expanded": expanded,
}


def compare(head: TreeEnsemble, hidden: Tensor, candidates: Tensor, gradients: bool) -> list[float]:
    """Median seconds of the steps, in alternating order."""

    def run(step: Callable[[TreeEnsemble, Tensor, Tensor], Tensor]) -> None:
        if not gradients:
            step(head, hidden, candidates)
            return
        for tensor in (hidden, *head.parameters()):
            tensor.grad = None
        step(head, hidden, candidates).sum().backward()

    times: list[list[float]] = [[] for _ in STEPS]
    with torch.set_grad_enabled(gradients):
        for _ in range(ROUNDS + 1):  # the first one is a warm-up
            for of, step in zip(times, STEPS.values(), strict=True):
                of.append(seconds(lambda step=step: run(step)))
    return [median(of[1:]) for of in times]


def build(node_vectors: str, size: Size, seed: int) -> TreeEnsemble:
    """Four Huffman trees of Zipf's law, C = 256, with vectors that change scores by about one."""
    frequencies = batch(1, 1, size.classes)[2]
    head = TreeEnsemble.from_counts(size.features, frequencies, node_vectors=node_vectors)
    torch.manual_seed(seed)
    for name, parameter in head.named_parameters():
        if name.endswith(("weight", "embedding")):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return head


HEADER = ("N", "K", "candidates", "all classes", "candidate_log_prob", "expanded", "taken")


def lines(node_vectors: str, size: Size, gradients: bool) -> Iterator[tuple[str, ...]]:
    """A row of the table for each number of contexts and of candidates, and each kind of these."""
    head, teacher = build(node_vectors, size, 0), build(node_vectors, size, 1)
    contexts = torch.randn(size.rows, size.features, generator=torch.Generator().manual_seed(2))
    for rows in ROWS:
        hidden = contexts[:rows].clone().requires_grad_(gradients)
        with torch.no_grad():
            probable = teacher.log_prob(hidden).topk(max(COUNTS)).indices
        drawn = torch.randint(size.classes, (rows, max(COUNTS)))
        for k in COUNTS:
            for kind, candidates in zip(KINDS, (drawn[:, :k], probable[:, :k]), strict=True):
                chosen = candidates.contiguous()
                with torch.set_grad_enabled(gradients):
                    gate = head.log_gate(hidden)
                    way = choose_way(head.nodes(head.layout), head.layout, hidden, gate, chosen)
                base, *others = compare(head, hidden, chosen, gradients)
                shares = (f"{seconds / base:,.2f}" for seconds in others)
                taken = WAYS[way.__name__]
                yield (str(rows), str(k), kind, f"{1000 * base:.1f} ms", *shares, taken)


def compared(name: str, node_vectors: str, size: Size, gradients: bool) -> Table:
    how = "with gradients" if gradients else "without gradients"
    title = f"{name}, {how}, V = {size.classes:,}, D = {size.features}"
    forms = (str, str, None, str, str, str, None)
    return row_table(title, HEADER, lines(node_vectors, size, gradients), *forms)


def measure(arguments: argparse.Namespace) -> Report:
    size = SIZE
    if arguments.size:
        features, classes = arguments.size
        size = replace(size, features=features, classes=classes)
    tables = [
        compared(name, node_vectors, size, gradients)
        for name, node_vectors in HEADS.items()
        for gradients in (False, True)
    ]
    return Report("Log-probabilities of K candidates of each row", tables, NOTES)


def main(argv: Sequence[str] | None = None) -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--size", type=int, nargs=2, metavar=("D", "V"))
    publish("candidates", parser, measure, argv)


if __name__ == "__main__":
    main()
