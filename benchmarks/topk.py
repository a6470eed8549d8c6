"""The k most probable classes: best-first search against the log-probabilities of all classes.

python -m benchmarks.topk                              # random weights, V = 33,278
python -m benchmarks.topk --run RUN [RUN ...] --data D # trained trees, hidden states of its text

Times are shares of all classes' log-probabilities without their ranking, in one process, one
thread. *Search* has no limit; `topk` gives a long one up. *Must* is the share of classes that any
exact method must score which knows nothing of a group of classes but its probability: those in
groups that may, by their probability in all trees, hold one of the best k. *Oracle* is the share in
the groups of the best k themselves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.contest import Size
from benchmarks.decoding import decoding_head
from benchmarks.paths import WIKITEXT
from hstree.heads import Head, TreeEnsemble
from hstree.heads.trees.queries import pays_to_search, search_classes
from hstree.lm.data import load_corpus
from hstree.lm.models.stream import read_stream
from hstree.lm.runs import load_run

COUNTS = (1, 10, 100)
ROWS = (1, 8, 32)
ROUNDS = 7
MADE_UP = ("C = 256, T = 4 (default)", "C = 256, T = 1", "binary, T = 1")


@dataclass
class Line:
    """Times of one number of rows and of classes, in shares of all classes."""

    rows: int
    k: int
    search: float
    rank: float
    searched: bool
    must: float
    oracle: float


def seconds(way: Callable[[], object]) -> float:
    """Shortest processor time."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time()
        way()
        best = min(best, time.process_time() - start)
    return best


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
    return search_classes(blocks, head.layout, hidden, gate, k, limited=False)


def lines(head: TreeEnsemble, hidden: Tensor) -> Iterator[Line]:
    for rows in ROWS:
        x = hidden[:rows]
        everything = seconds(lambda x=x: head.class_log_prob(x))
        for k in COUNTS:
            search = seconds(lambda x=x, k=k: search_all(head, x, k)) / everything
            rank = seconds(lambda x=x, k=k: Head.topk_rows(head, x, k)) / everything
            searched = pays_to_search(head.layout, x, k)
            yield Line(rows, k, search, rank, searched, *shares(head, x, k))


def show(name: str, head: TreeEnsemble, hidden: Tensor) -> None:
    size = f"V = {head.n_classes:,}, D = {head.in_features}"
    print(f"\n{name}, C = {head.trees[0].root_width:,}, T = {head.n_trees}, {size}\n")
    print("| rows | k | search | all, ranked | topk takes | must | oracle |")
    print("| ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    for line in lines(head, hidden):
        taken = "search" if line.searched else "all"
        figures = f"{line.search:.2f} | {line.rank:.2f} | {taken}"
        print(
            f"| {line.rows} | {line.k} | {figures} | {line.must:.1%} | {line.oracle:.1%} |",
            flush=True,
        )


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", default=[], metavar="RUN")
    parser.add_argument("--data", help="the text of the runs")
    parser.add_argument("--size", type=int, nargs=2, metavar=("D", "V"), help="of random heads")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.run and arguments.data is None:
        parser.error("--run: expected --data, too")
    for run in arguments.run:
        model = load_run(run, torch.device("cpu")).model.eval()
        assert isinstance(model.head, TreeEnsemble)
        tokens = load_corpus(arguments.data).valid[: 50 * max(ROWS) + 1]
        hidden = torch.cat(list(read_stream(model, tokens)))[::50][: max(ROWS)]
        show("trained", model.head, hidden)
    if not arguments.run:
        size: Size = replace(WIKITEXT, rows=max(ROWS))
        if arguments.size:
            features, classes = arguments.size
            size = replace(size, features=features, classes=classes)
        for name in MADE_UP:
            head, hidden = decoding_head(name, size)
            assert isinstance(head, TreeEnsemble)
            show("random weights", head.eval(), hidden)


if __name__ == "__main__":
    main()
