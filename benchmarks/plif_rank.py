"""What decides the rank of log P of a PLIF: fresh slopes on the logits of a trained softmax, beside
PLIF that were trained.

    hstree study benchmarks/laboratory/plif-rank.toml
    python -m benchmarks.plif_rank studies/plif-rank --save benchmarks/results/laboratory/plif-rank

--larger RUN puts fresh slopes on the logits of another softmax as well, such as that of

    hstree train --data ptb/ --run teacher --head softmax --embedding-size 200 --hidden-size 200 \\
        --layers 1 --dropout 0.2 --epochs 2 --optimizer adamw --learning-rate 0.002 \\
        --schedule cosine --head-learning-rate-factor 2 --threads 1
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hstree.heads import PLIF, Softmax
from hstree.lab import log_prob_rank
from hstree.lab.report import machine
from hstree.lm.model import LanguageModel, read_stream
from hstree.lm.report import COLOURS, new_figure, picture
from hstree.lm.run import load_run
from hstree.lm.train import build_model

INTERVALS = (100, 1_000, 10_000, 100_000, 1_000_000)
ROWS = 20_000
LARGER_INTERVALS, LARGER_ROWS = (10_000, 100_000, 1_000_000), 2_000
FRESH = "fresh slopes on the softmax's logits"


def fresh_slopes(
    folder: Path, numbers: Sequence[int] = INTERVALS, rows: int = ROWS
) -> Iterator[dict[str, Any]]:
    """For each number of intervals: the root mean square of what is left of f on the logits after
    the best line, and the rank of log P in the first ``rows`` contexts of the test text."""
    run = load_run(folder)
    model, tokens = run.model.eval(), run.corpus().test
    softmax = model.head
    assert isinstance(softmax, Softmax)
    hidden = next(read_stream(model, tokens[:200], length=200))
    with torch.no_grad():
        logits = hidden @ softmax.weight.t()
        logits = (logits if softmax.bias is None else logits + softmax.bias).double().flatten()
    x = logits.numpy()
    for intervals in numbers:
        torch.manual_seed(0)
        head = PLIF(softmax.in_features, softmax.n_classes, intervals=intervals, frozen=True)
        head.load_state_dict(softmax.state_dict(), strict=False)
        y = head.function(torch.float64)(logits).detach().numpy()
        left = y - np.polyval(np.polyfit(x, y, 1), x)
        found = log_prob_rank(LanguageModel(model.backbone, head).eval(), tokens, rows)
        yield {
            "intervals": intervals,
            "deviation": float(np.sqrt(np.mean(left**2))),
            "press_rank": found.press_rank,
        }


def trained(table: Path) -> tuple[int, int, dict[str, dict[int, int]]]:
    """The rank of the softmax of the study, the number of classes, and for each kind of slopes the
    ranks by the number of intervals."""
    ranks: dict[str, dict[int, int]] = defaultdict(dict)
    flat = 0
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["head"] == "softmax":
                flat = int(row["press_rank"])
            elif row["press_rank"]:
                name = row["model"].rpartition(", intervals=")[0]
                ranks[name][int(row["intervals"])] = int(row["press_rank"])
    return flat, max(max(series.values()) for series in ranks.values()), dict(ranks)


def moved(folder: Path) -> float:
    """How far training has moved the parameters v of the slopes: root mean square."""
    run = load_run(folder)
    corpus = run.corpus()
    fresh = build_model(run.config, len(corpus.vocabulary), corpus.statistics())
    before, after = (
        dict(model.head.named_parameters())["function.v"].detach() for model in (fresh, run.model)
    )
    return float((after - before).square().mean().sqrt())


def larger(folder: Path) -> dict[str, Any]:
    """Fresh slopes on the logits of the softmax of another run: its size, its rank, and theirs."""
    run = load_run(folder)
    model, head = run.model.eval(), run.model.head
    found = log_prob_rank(model, run.corpus().test, LARGER_ROWS)
    return {
        "features": head.in_features,
        "classes": head.n_classes,
        "rows": LARGER_ROWS,
        "softmax": found.press_rank,
        "fresh": list(fresh_slopes(folder, LARGER_INTERVALS, LARGER_ROWS)),
    }


def rank_picture(series: Mapping[str, Mapping[int, int]], flat: int) -> Any:
    """The ranks against K, with open markers of decreasing size: equal ranks stay visible."""
    figure = new_figure(6.5, 3.9)
    axes = figure.subplots()
    for number, (name, values) in enumerate(series.items()):
        axes.plot(
            values.keys(),
            values.values(),
            label=name,
            color=COLOURS[number % len(COLOURS)],
            linewidth=1.2,
            marker="osD^vP"[number % 6],
            markersize=14 - 2 * number,
            markerfacecolor="none",
            markeredgewidth=1.4,
        )
    axes.axhline(flat, color="black", linestyle=":", label="softmax")
    axes.set(xscale="log", yscale="log", xlabel="intervals K", ylabel="Press rank")
    axes.legend(fontsize=8, markerscale=0.6)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, help="folder of the study")
    parser.add_argument(
        "--save", type=Path, required=True, help="path of the files, without suffix"
    )
    parser.add_argument("--larger", type=Path, help="run with another softmax")
    options = parser.parse_args()
    flat, most, ranks = trained(options.study / "study.csv")
    fresh = list(fresh_slopes(options.study / "runs" / "softmax-seed=1"))
    series = {FRESH: {row["intervals"]: row["press_rank"] for row in fresh}, **ranks}
    runs = sorted((options.study / "runs").glob("*intervals=*"))
    change = {folder.name: moved(folder) for folder in runs}
    result = {
        "softmax": flat,
        "classes": most,
        "rows": ROWS,
        "fresh": fresh,
        "trained": ranks,
        "moved": change,
        "larger": options.larger and larger(options.larger),
        "made": machine(),
    }
    options.save.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.save.with_suffix(".png").write_bytes(picture(rank_picture(series, flat)))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
