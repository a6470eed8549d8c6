"""Draft heads of a softmax: how often their words are accepted, and how long a draw takes.

    hstree train --data ptb/ --run runs/softmax --head softmax --embedding-size 200 \\
        --hidden-size 200 --layers 1 --dropout 0.2 --dropout-input 0.2 --epochs 2 \\
        --optimizer adamw --learning-rate 0.002 --schedule cosine --head-learning-rate-factor 2
    python -m benchmarks.drafts runs/softmax --data ptb/ --output build

All drafts read the hidden states of the trained model: the softmax over a part of the vocabulary,
a softmax of lower rank, and trees whose leaves are the rows of the softmax. Low rank and trees are
fitted to the softmax on hidden states of the training text; acceptance is measured on those of the
validation text. Larger vocabularies have random weights, for time alone. As in speculative
decoding, every call is made several times in a row before another takes its turn.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pages import page_parser, publish, seconds
from benchmarks.study_figures import rows_scored
from hstree.decoding import expected_acceptance
from hstree.heads import Softmax, TreeEnsemble
from hstree.lab.report import Report, plain_data
from hstree.lm._pictures import line_style, new_figure
from hstree.lm.models.stream import read_stream
from hstree.lm.runs import load_run
from hstree.lm.table import Table, decimals, table
from hstree.lm.training import evaluate
from hstree.trees import ContextMeans, build_ensemble

FITTED, EVALUATED = 150_000, 10_000
"""Hidden states of the training and of the validation text."""
EPOCHS, BATCH = 3, 1024
RANDOM_SIZES = ((33_000, 512), (128_000, 512))
"""V and D of softmaxes with random weights."""
ROOTS = (64, 256, 1024)
WORDS = (1, 2, 3, 4, 5, 6, 8)
"""Words that are drafted before a verification."""
ROWS = (1, 8)
TURNS, ROUND = 20, 4
"""Turns of a call, and calls of a turn; also the drafted words of a round on the page."""
PLACES = ((5, 5, "left"), (5, -13, "left"), (-5, 5, "right"), (0, -16, "right"))
"""Where the numbers of each kind of draft stand beside its points, and their alignment."""
NOTES = (
    "A draft head draws the next words from the hidden states of a model; the softmax of the model "
    "then accepts or replaces them, so that the words have exactly the model's distribution "
    "(`hstree.lm.models.speculative`). Trees read the rows of the softmax itself at their leaves; "
    "only their roots were fitted to it.",
    f"Times are medians of {ROUND} calls in a row, as shares of the time of the softmax's product "
    "W h with as many contexts N in the same process: a draw includes the word's log-probability.",
    f"Words of a round are those expected from k = {ROUND} drafted words and one verification; "
    "gain is their number over the time of the round, beside a draw of the softmax for every word, "
    "for the best k. It counts the output layer alone.",
    "Random weights make all words about equally probable, and the search for the ten most "
    "probable as long as it can be.",
    "The product reads the rows of the softmax once for all N contexts. Trees read their roots "
    "once, and other rows of leaves for each context.",
    "Targets: trees accept more than every other draft whose draw takes as long, N = 1; at "
    "V = 128,000 a draw of trees takes at most 1/30 of the softmax's product.",
)


class Flat(nn.Module):
    """A softmax over some of the classes, with the queries of a head; ``down`` [r, D], if given,
    precedes it."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        n_classes: int,
        *,
        kept: Tensor | None = None,
        down: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.down = None if down is None else nn.Parameter(down.clone())
        self.kept, self.n_classes = kept, n_classes

    def scores(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.down is None else F.linear(hidden, self.down)
        return F.linear(hidden, self.weight, self.bias)

    def log_prob(self, hidden: Tensor) -> Tensor:
        log_prob = self.scores(hidden).log_softmax(1)
        if self.kept is None:
            return log_prob
        out = log_prob.new_full((len(hidden), self.n_classes), -torch.inf)
        return out.index_copy(1, self.kept, log_prob)

    def sample(self, hidden: Tensor, *, return_log_prob: bool) -> tuple[Tensor, Tensor]:
        log_prob = self.scores(hidden).log_softmax(1)
        drawn = torch.multinomial(log_prob.exp(), 1)
        classes = drawn if self.kept is None else self.kept[drawn]
        return classes, log_prob.gather(1, drawn)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, classes = self.scores(hidden).log_softmax(1).topk(k)
        return values, classes if self.kept is None else self.kept[classes]


@dataclass
class Figures:
    """Of a draft; times, by number of contexts, as shares of the softmax's product with as many."""

    name: str
    rows: float  # of D numbers that a draw scores, mean over the words of the text
    draw: dict[int, float] = field(default_factory=dict)  # with its log-probability
    top: dict[int, float] = field(default_factory=dict)  # of the ten most probable words
    acceptance: float | None = None  # mean over contexts of sum_y min(p, q)
    divergence: float | None = None  # mean KL(p || q), in nats; infinite for a part of the words
    words: int | None = None  # drafted words with the largest expected gain in time
    gain: float | None = None


Drafts = list[tuple[Figures, Flat | TreeEnsemble]]


@torch.no_grad()
def measure_times(softmax: Flat, drafts: Drafts, hidden: Tensor) -> dict[str, dict[int, float]]:
    """Fill in the times, medians of calls that take turns. Returns those of the softmax itself as
    shares of its product: of a draw, and of log-probabilities that verify n rows."""
    own: dict[str, dict[int, float]] = {"draw": {}, "top": {}, "verify": {}}
    for n in ROWS:
        rows = hidden[:n]
        calls: dict[str, Callable[[], object]] = {"product": partial(softmax.scores, rows)}
        heads = {"": softmax} | {str(place): head for place, (_, head) in enumerate(drafts)}
        for name, head in heads.items():
            calls[f"draw {name}"] = partial(head.sample, rows, return_log_prob=True)
            calls[f"top {name}"] = partial(head.topk, rows, 10)
        found = _medians(calls)
        own["draw"][n], own["top"][n] = found["draw "], found["top "]
        for place, (figures, _) in enumerate(drafts):
            figures.draw[n], figures.top[n] = found[f"draw {place}"], found[f"top {place}"]
    verify: dict[str, Callable[[], object]] = {"product": partial(softmax.scores, hidden[:1])}
    for n in {words + 1 for words in WORDS}:
        verify[str(n)] = lambda n=n: softmax.scores(hidden[:n]).log_softmax(1)
    own["verify"] = {int(n): t for n, t in _medians(verify).items() if n != "product"}
    return own


def _medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median times of a turn, ROUND calls in a row, as shares of that of ``product``."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            spent = sum(seconds(call) for _ in range(ROUND))
            if turn > 0:
                times[name].append(spent)
    product = statistics.median(times["product"])
    return {name: statistics.median(of) / product for name, of in times.items()}


def best_gain(figures: Figures, own: dict[str, dict[int, float]]) -> None:
    """Expected words of a round over its time, k draws of the draft and one pass of the softmax
    over k + 1 rows, beside one draw of the softmax for every word."""
    assert figures.acceptance is not None
    gains = {}
    for k in WORDS:
        words = words_of_a_round(figures.acceptance, k)
        gains[k] = words * own["draw"][1] / (k * figures.draw[1] + own["verify"][k + 1])
    figures.words = max(gains, key=gains.__getitem__)
    figures.gain = gains[figures.words]


def parts(softmax: Flat, order: Tensor, sizes: Sequence[int]) -> Drafts:
    """The softmax over the first classes of an order, [V]."""
    drafts: Drafts = []
    for size in sizes:
        kept = order[:size].sort().values
        part = Flat(softmax.weight[kept], softmax.bias[kept], softmax.n_classes, kept=kept)
        drafts.append((Figures(f"the {size:,} most frequent words", size), part))
    return drafts


def low_rank(softmax: Flat, hidden: Tensor, rank: int) -> Flat:
    """The best one of this rank for the scores of the hidden states, then fitted to the softmax's
    distribution by Adam."""
    weight, bias = softmax.weight.detach(), softmax.bias.detach()
    covariance = hidden.t() @ hidden / len(hidden)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=1e-8).sqrt()
    left, singular, right = torch.linalg.svd(weight @ root, full_matrices=False)
    down = right[:rank] @ torch.linalg.inv(root)
    draft = Flat(left[:, :rank] * singular[:rank], bias, len(weight), down=down)
    optimizer = torch.optim.Adam(draft.parameters(), 1e-3)
    steps = EPOCHS * -(-len(hidden) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(hidden)).split(BATCH):
            with torch.no_grad():
                target = softmax.scores(hidden[rows]).softmax(1)
            loss = -(target * draft.log_prob(hidden[rows])).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return draft


@torch.no_grad()
def agree(softmax: Flat, draft: Flat | TreeEnsemble, hidden: Tensor) -> tuple[float, float]:
    acceptance, divergence = [], []
    for rows in hidden.split(500):
        p, q = softmax.log_prob(rows), draft.log_prob(rows)
        acceptance.append(expected_acceptance(p, q))
        divergence.append((p.exp() * (p - q)).sum(1))
    return float(torch.cat(acceptance).mean()), float(torch.cat(divergence).mean())


def trained(run: str, data: str) -> dict[str, Any]:
    """The drafts of a trained softmax."""
    loaded = load_run(run)
    head = loaded.model.head
    if type(head) is not Softmax:
        raise SystemExit(f"{run}: expected a run with the head 'softmax', got {head.name!r}")
    corpus, model = loaded.corpus(data), loaded.model
    means = ContextMeans(head.n_classes, head.in_features)

    @torch.no_grad()
    def read(tokens: np.ndarray[Any, Any], n: int) -> Tensor:
        states = torch.cat(list(read_stream(model, tokens[: n + 1])))
        return states[:n]

    train, valid = read(corpus.train, FITTED), read(corpus.valid, EVALUATED)
    means.add(train, torch.from_numpy(corpus.train[1 : len(train) + 1].astype(np.int64)))
    counts = torch.from_numpy(np.asarray(corpus.vocabulary.frequencies)).double()
    order = counts.argsort(descending=True)
    softmax = Flat(head.weight.detach(), head.bias.detach(), head.n_classes)
    V, D = softmax.weight.shape
    drafts = parts(softmax, order, (V // 4, V // 10, 295))
    for part_of in (4, 8):
        torch.manual_seed(0)
        rank = D // part_of
        draft = low_rank(softmax, train, rank)
        drafts.append((Figures(f"rank D / {part_of}, distilled", rank + V / part_of), draft))
        print(drafts[-1][0].name, agree(softmax, draft, valid), flush=True)
    known = {"vectors": means.vectors(), "at": means.mean, "frequencies": counts.numpy()}
    for n_trees, root in [*((1, root) for root in ROOTS), (4, 256)]:
        tree = TreeEnsemble.from_linear(head, tied=True, n_trees=n_trees, root=root, **known)
        name = "tree" if n_trees == 1 else "trees"
        title = f"{n_trees} {name}, C = {root:,}"
        if n_trees == 1:
            first = agree(softmax, tree, valid)
            print(title, "first order", first, flush=True)
        tree.fit_nodes(train, head, epochs=EPOCHS, batch_size=BATCH)
        drafts.append((Figures(f"{title}, distilled", rows_scored(tree, counts.numpy())), tree))
        if n_trees == 1:
            drafts[-1][0].name += f" (first order {first[0]:.3f})"
        print(drafts[-1][0].name, agree(softmax, tree, valid), flush=True)
    own = measure_times(softmax, drafts, valid)
    for figures, draft in drafts:
        figures.acceptance, figures.divergence = agree(softmax, draft, valid)
        best_gain(figures, own)
    perplexity = math.exp(evaluate(model, corpus.valid))
    text = f"{corpus.name}, validation perplexity {perplexity:.1f}"
    return _section(text, V, D, own, drafts)


def random(n_classes: int, features: int) -> dict[str, Any]:
    """The same drafts of a softmax with random weights, for time alone."""
    torch.manual_seed(0)
    linear = nn.Linear(features, n_classes)
    softmax = Flat(linear.weight.detach(), linear.bias.detach(), n_classes)
    counts = 1 / torch.arange(1, n_classes + 1).double()
    drafts = parts(softmax, torch.arange(n_classes), (n_classes // 4, n_classes // 10))
    for part_of in (4, 8):
        rank = features // part_of
        draft = Flat(
            torch.randn(n_classes, rank), softmax.bias, n_classes, down=torch.randn(rank, features)
        )
        drafts.append((Figures(f"rank D / {part_of}", rank + n_classes / part_of), draft))
    for n_trees, root in ((1, 512), (1, 1024), (4, 512)):
        trees = build_ensemble("random", n_classes, n_trees, root=root, levels=2)
        head = TreeEnsemble.from_linear(linear, trees, tied=True)
        name = f"{n_trees} {'tree' if n_trees == 1 else 'trees'}, C = {root:,}"
        drafts.append((Figures(name, rows_scored(head, counts.numpy())), head))
    own = measure_times(softmax, drafts, torch.randn(16, features))
    return _section("random weights", n_classes, features, own, drafts)


def _section(
    text: str, n_classes: int, features: int, own: dict[str, dict[int, float]], drafts: Drafts
) -> dict[str, Any]:
    figures = [of for of, _ in drafts]
    found = {"text": text, "V": n_classes, "D": features, "softmax": own, "drafts": figures}
    plain: dict[str, Any] = plain_data(found)  # keys as text
    return plain


# ---- the page


def words_of_a_round(acceptance: float, k: int) -> float:
    """Expected words of k drafted ones and one of the model, (1 - a^(k + 1)) / (1 - a) for the
    acceptance a (Leviathan et al., ICML 2023): as if all words were accepted equally often."""
    a = min(acceptance, 1 - 1e-9)
    return (1 - a ** (k + 1)) / (1 - a)


def _share(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"1/{1 / value:.0f}"


def _compared(section: Mapping[str, Any]) -> Table:
    """The drafts below the softmax itself; only those of a trained one have an acceptance."""
    own = {"name": "the softmax itself", "rows": section["V"], **section["softmax"]}
    own |= {"acceptance": 1.0, "divergence": 0.0, "gain": 1.0, "words": None}

    def words(draft: Mapping[str, Any]) -> float | None:
        return None if draft is own else words_of_a_round(draft["acceptance"], ROUND)

    columns: list[Any] = [
        ("draft", lambda draft: draft["name"]),
        ("rows scored", lambda draft: draft["rows"], decimals(0)),
    ]
    if section["drafts"][0]["acceptance"] is not None:
        columns += [
            ("acceptance", lambda draft: draft["acceptance"], decimals(3)),
            ("KL, nats", lambda draft: draft["divergence"], _nats),
            (f"words of a round, k = {ROUND}", words, decimals(2)),
            ("gain", lambda draft: draft["gain"], decimals(2)),
            ("best k", lambda draft: draft["words"], lambda k: "-" if k is None else str(k)),
        ]
    for of, title in (("draw", "a draw"), ("top", "top 10")):
        for n in map(str, ROWS):
            columns.append((f"{title}, N = {n}", partial(_time, of, n), _share))
    title = f"V = {section['V']:,}, D = {section['D']}, {section['text']}"
    return table(title, [own, *section["drafts"]], columns)


def _time(of: str, n: str, draft: Mapping[str, Any]) -> float:
    time: float = draft[of][n]
    return time


def _nats(divergence: float | None) -> str:
    return "infinite" if divergence is None else f"{divergence:.3f}"


def picture(section: Mapping[str, Any]) -> Any:
    """Expected acceptance against the time of a draw."""
    figure = new_figure(6.5, 4)
    axes = figure.subplots()
    for number, kind in enumerate(("most frequent words", "rank", "1 tree", "4 trees")):
        points = sorted(
            (draft["draw"]["1"], draft["acceptance"], draft["rows"])
            for draft in section["drafts"]
            if kind in draft["name"]
        )
        x, y, _ = zip(*points, strict=True)
        axes.plot(x, y, marker="o", label=kind, **line_style(number))
        x_offset, y_offset, side = PLACES[number]
        offset: dict[str, Any] = {"xytext": (x_offset, y_offset), "textcoords": "offset points"}
        for *place, rows in points:
            axes.annotate(f"{rows:,.0f}", place, ha=side, **offset)
    axes.set(xscale="log", xlabel="time of a draw / time of the softmax's product, N = 1")
    axes.set_ylabel("expected acceptance")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, title="numbers: rows scored")
    return figure


def report(sections: Sequence[Mapping[str, Any]]) -> Report:
    return Report(
        "Draft heads of a softmax",
        list(map(_compared, sections)),
        NOTES,
        data={"sections": sections},
        pictures={"": picture(sections[0])},
    )


def measure(options: argparse.Namespace) -> Report:
    return report([trained(options.run, options.data), *(random(*size) for size in RANDOM_SIZES)])


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("run", help="folder of a run with the head softmax")
    parser.add_argument("--data", required=True, help="its text")
    publish("drafts", parser, measure)


if __name__ == "__main__":
    main()
