"""The page and the picture of benchmarks.drafts, from its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hstree.lm._pictures import line_style, new_figure
from hstree.lm._pictures import picture as rendered

TARGET, ROUND = 30, 4
"""The softmax's product takes at least so many times as long as a draw; words that are drafted."""
PLACES = ((5, 5, "left"), (5, -13, "left"), (-5, 5, "right"), (0, -16, "right"))
"""Where the numbers of each kind of draft stand beside its points, and their alignment."""
INTRODUCTION = """\
# Draft heads of a softmax

A draft head draws the next words from the hidden states of a model; the softmax of the model then
accepts or replaces them, so that the words have exactly the model's distribution
(`hstree.lm.models.speculative`). Trees read the rows of the softmax itself at their leaves; only
their roots were fitted to it. Times are medians of four calls in a row, as shares of the time of
the softmax's product W h with as many contexts N in the same process: *a draw* includes the word's
log-probability. *Words of a round* are those expected from k drafted words and one verification;
*gain* is their number over the time of the round, beside a draw of the softmax for every word, for
the best k. It counts the output layer alone.
"""


def page(record: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    lines = [INTRODUCTION]
    for section in record["sections"]:
        lines += _section(section)
    lines += [
        "## Made by",
        "",
        "    python -m benchmarks.drafts RUN --data ptb/",
        "",
        f"{record['made']}. All figures: [drafts.json](drafts.json).",
    ]
    return "\n".join(lines) + "\n"


def _section(section: Mapping[str, Any]) -> list[str]:
    trained = section["drafts"][0]["acceptance"] is not None
    lines = [f"## V = {section['V']:,}, D = {section['D']}, {section['text']}", ""]
    columns = ["draft", "rows scored"]
    if trained:
        columns += ["acceptance", "KL, nats", f"words of a round, k = {ROUND}", "gain", "best k"]
    columns += ["a draw, N = 1", "N = 8", "top 10, N = 1", "N = 8"]
    own, rows = section["softmax"], []
    times = [own["draw"]["1"], own["draw"]["8"], own["top"]["1"], own["top"]["8"]]
    first = [
        "the softmax itself",
        f"{section['V']:,}",
        *(["1", "0", "", "1", ""] if trained else []),
    ]
    rows.append(row([*first, *map(_share, times)]))
    for draft in section["drafts"]:
        cells = [draft["name"], f"{draft['rows']:,.0f}"]
        if trained:
            finite = draft["divergence"] < 100
            cells += [
                f"{draft['acceptance']:.3f}",
                f"{draft['divergence']:.3f}" if finite else "infinite",
                f"{words_of_a_round(draft['acceptance'], ROUND):.2f}",
                f"{draft['gain']:.2f}",
                str(draft["words"]),
            ]
        times = [draft[of][n] for of in ("draw", "top") for n in ("1", "8")]
        rows.append(row([*cells, *map(_share, times)]))
    lines += table(columns, rows)
    if trained:
        lines += ["![Expected acceptance against the time of a draw](drafts.png)", ""]
    else:
        lines += [
            "Random weights make all words about equally probable, and the search for the ten most "
            "probable as long as it can be.",
            "",
        ]
    if trained:
        lines += _beaten(section["drafts"])
    if section["V"] >= 128_000:
        lines += _target(section["drafts"])
    return lines


def words_of_a_round(acceptance: float, k: int) -> float:
    """Expected words of k drafted ones and one of the model, (1 - a^(k + 1)) / (1 - a) for the
    acceptance a (Leviathan et al., ICML 2023): as if all words were accepted equally often."""
    a = min(acceptance, 1 - 1e-9)
    return (1 - a ** (k + 1)) / (1 - a)


def table(columns: Sequence[str], rows: Iterable[str]) -> list[str]:
    """A Markdown table; the first column is aligned to the left."""
    dashes = ["---"] + ["---:"] * (len(columns) - 1)
    return [row(columns), row(dashes), *rows, ""]


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"1/{1 / value:.0f}"


def _beaten(drafts: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each part of the vocabulary and each low rank the trees that cost no more."""
    trees = [draft for draft in drafts if "tree" in draft["name"]]
    rows = []
    for other in (draft for draft in drafts if "tree" not in draft["name"]):
        within = [tree for tree in trees if tree["draw"]["1"] <= other["draw"]["1"]]
        best = max(within, key=lambda tree: tree["acceptance"], default=None)
        found = ["none", "", ""]
        if best is not None:
            above = "yes" if best["acceptance"] > other["acceptance"] else "no"
            found = [
                best["name"].partition(",")[0] + _root(best),
                f"{best['acceptance']:.3f}",
                above,
            ]
        rows.append(row([other["name"], f"{other['acceptance']:.3f}", *found]))
    columns = [
        "draft",
        "acceptance",
        "best trees whose draw takes no longer",
        "acceptance",
        "above",
    ]
    return [
        "Target: trees above every other draft whose draw takes as long, N = 1.",
        "",
        *table(columns, rows),
    ]


def _root(draft: Mapping[str, Any]) -> str:
    """Of its name, the number of clusters."""
    return ", C = " + draft["name"].split("C = ")[1].partition(", d")[0]


def _target(drafts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether a draw of trees takes at most 1/30 of the product."""
    lines = [f"Target: a draw of trees takes at most 1/{TARGET} of the softmax's product.", ""]
    for draft in drafts:
        if "tree" in draft["name"]:
            worst = max(draft["draw"].values())
            met = "met" if worst <= 1 / TARGET else "not met"
            shares = " and ".join(map(_share, draft["draw"].values()))
            lines.append(f"- {draft['name']}: {shares} at N = 1 and 8, {met}")
    return [
        *lines,
        "",
        "The product reads the rows of the softmax once for all N contexts. Four trees read their "
        "roots once, 4 * 512 rows, and about 1,000 rows of leaves for each context: for N = 8 up "
        "to 10,000 rows, 1/13 of the 128,000.",
        "",
    ]


def picture(record: Mapping[str, Any]) -> bytes:
    """Expected acceptance against the time of a draw, as PNG."""
    figure = new_figure(6.5, 4)
    axes = figure.subplots()
    kinds = {"most frequent words": [], "rank": [], "1 tree": [], "4 trees": []}  # type: ignore[var-annotated]
    for draft in record["sections"][0]["drafts"]:
        kind = next(kind for kind in kinds if kind in draft["name"])
        kinds[kind].append((draft["draw"]["1"], draft["acceptance"], draft["rows"]))
    for number, (kind, points) in enumerate(kinds.items()):
        points.sort()
        x, y, rows = zip(*points, strict=True)
        axes.plot(x, y, marker="o", label=kind, **line_style(number))
        for place in zip(x, y, rows, strict=True):
            x_offset, y_offset, side = PLACES[number]
            offset: dict[str, Any] = {"xytext": (x_offset, y_offset), "textcoords": "offset points"}
            axes.annotate(f"{place[2]:,.0f}", place[:2], ha=side, **offset)
    axes.set(xscale="log", xlabel="time of a draw / time of the softmax's product, N = 1")
    axes.set_ylabel("expected acceptance")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, title="numbers: rows scored")
    return rendered(figure)
