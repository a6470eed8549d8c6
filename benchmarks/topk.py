"""The k most probable classes: best-first search against the log-probabilities of all classes.

python -m benchmarks.topk                              # random weights, V = 33,278
python -m benchmarks.topk --run RUN [RUN ...] --data D # trained trees, hidden states of its text
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.contest import Size
from benchmarks.decoding import decoding_head
from benchmarks.pages import page_parser, publish, seconds
from benchmarks.paths import WIKITEXT
from hstree.heads import Head, TreeEnsemble
from hstree.heads.trees.queries import pays_to_search, search_classes
from hstree.lab.report import Report, row_table
from hstree.lm.data import load_corpus
from hstree.lm.model import read_stream
from hstree.lm.report import Table
from hstree.lm.run import load_run

COUNTS = (1, 10, 100)
ROWS = (1, 8, 32)
ROUNDS = 7
MADE_UP = ("C = 256, T = 4 (default)", "C = 256, T = 1", "binary, T = 1")


NOTES = (
    "Times are shares of all classes' log-probabilities without their ranking, in one process.",
    "Search has no limit; `topk` gives a long one up.",
    "Must: the share of classes that any exact method must score which knows nothing of a group of "
    "classes but its probability: those in groups that may, by their probability in all trees, "
    "hold one of the best k. Oracle: the share in the groups of the best k themselves.",
)


def shares(head: TreeEnsemble, hidden: Tensor, k: int) -> tuple[float, float]:
    """*Must* and *oracle* (above), mean over the rows."""
    log_prob, gate = head.class_log_prob(hidden), head.log_gate(hidden).exp()
    rows, classes = log_prob.shape
    best = log_prob.topk(k)
    worst = best.values[:, -1:].exp()
    at_most = torch.zeros_like(log_prob)
    groups = []
    for t in range(head.n_trees):
        alone = torch.full_like(gate, -torch.inf)
        alone[:, t] = 0.0
        of_tree = head.mixed_log_prob(hidden, alone).exp()
        group = head.layout.edge[t, head.layout.leaf_edge[t].long(), 0].long()
        group = torch.where(group == 0, group.max() + 1 + torch.arange(classes), group)
        mass = torch.zeros(rows, int(group.max()) + 1).index_add_(1, group, of_tree)
        at_most += gate[:, t : t + 1] * mass[:, group]
        groups.append(group)

    def scored(wanted: Tensor) -> float:
        """Share of the classes that share a group with one that is wanted [rows, V], in a tree."""
        some = torch.zeros_like(wanted)
        for group in groups:
            opened = torch.zeros(rows, int(group.max()) + 1)
            opened.index_add_(1, group, wanted.float())
            some |= opened[:, group] > 0
        return some.float().mean().item()

    of_best = torch.zeros_like(log_prob, dtype=torch.bool).scatter_(1, best.indices, True)
    return scored(at_most >= worst), scored(of_best)


def search_all(head: TreeEnsemble, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A search that is not given up."""
    blocks, gate = head.nodes(head.layout), head.log_gate(hidden)
    return search_classes(blocks, head.layout, hidden, gate, k)


def lines(head: TreeEnsemble, hidden: Tensor) -> Iterator[tuple[str, ...]]:
    """A row of the table for each number of contexts and of classes."""
    for rows in ROWS:
        x = hidden[:rows]
        everything = min(seconds(lambda x=x: head.class_log_prob(x)) for _ in range(ROUNDS))
        for k in COUNTS:
            ways = (
                lambda x=x, k=k: search_all(head, x, k),
                lambda x=x, k=k: Head.topk_rows(head, x, k),
            )
            best = (min(seconds(way) for _ in range(ROUNDS)) for way in ways)
            times = (f"{time / everything:,.2f}" for time in best)
            taken = "search" if pays_to_search(head.layout, x, k) else "all"
            scored = (f"{share:.1%}" for share in shares(head, x, k))
            yield (str(rows), str(k), *times, taken, *scored)


def compared(name: str, head: TreeEnsemble, hidden: Tensor) -> Table:
    size = f"V = {head.n_classes:,}, D = {head.in_features}"
    title = f"{name}, C = {head.trees[0].root_width:,}, T = {head.n_trees}, {size}"
    header = ("rows", "k", "search", "all, ranked", "topk takes", "must", "oracle")
    forms = (str, str, str, str, None, str)
    return row_table(title, header, lines(head, hidden), *forms)


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> Report:
    if arguments.run and arguments.data is None:
        raise SystemExit("--run: expected --data, too")
    tables = []
    for run in arguments.run:
        model = load_run(run, torch.device("cpu")).model.eval()
        assert isinstance(model.head, TreeEnsemble)
        tokens = load_corpus(arguments.data).valid[: 50 * max(ROWS) + 1]
        hidden = torch.cat(list(read_stream(model, tokens)))[::50][: max(ROWS)]
        tables.append(compared("trained", model.head, hidden))
    if not arguments.run:
        size: Size = replace(WIKITEXT, rows=max(ROWS))
        if arguments.size:
            features, classes = arguments.size
            size = replace(size, features=features, classes=classes)
        for name in MADE_UP:
            head, hidden = decoding_head(name, size)
            assert isinstance(head, TreeEnsemble)
            tables.append(compared("random weights", head.eval(), hidden))
    title = "The k most probable classes: best-first search against all classes"
    return Report(title, tables, NOTES)


def main(argv: Sequence[str] | None = None) -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--run", nargs="+", default=[], metavar="RUN")
    parser.add_argument("--data", help="the text of the runs")
    parser.add_argument("--size", type=int, nargs=2, metavar=("D", "V"), help="of random heads")
    publish("topk", parser, measure, argv)


if __name__ == "__main__":
    main()
